"""What the library needs is installed by itself; the command says which line installs the rest."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements):
    return [re.match(r"[\w-]+", each)[0] for each in requirements]


def run(code, without=()):
    """Run code where these packages are not installed, for imports and for `find_spec` alike."""
    lacking = f"import sys; sys.modules.update(dict.fromkeys({sorted(without)!r}))\n"
    return subprocess.run([sys.executable, "-c", lacking + code], capture_output=True, text=True)


def test_the_library_needs_three_packages():
    assert names(PROJECT["dependencies"]) == ["torch", "numpy", "safetensors"]


def test_the_library_works_without_the_command_s_packages():
    code = """
import torch, wellnormed as wn
for name in dir(wn):
    getattr(wn, name)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
wn.constrain(wn.Scion(model, lr=0.1), {"0": wn.HardCap(2.0)})
print(wn.certify(model, torch.zeros(1, 3)).lipschitz)
"""
    optional = {name for extra in PROJECT["optional-dependencies"].values() for name in names(extra)} - {"wellnormed"}
    done = run(code, (optional | {"PIL"}) - {"filelock", "mpmath"})  # torch needs these two
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) > 0


@pytest.mark.parametrize("lacking", names(PROJECT["optional-dependencies"]["train"]))
def test_without_the_extra_the_command_says_which_line_to_type(lacking):
    done = run("from wellnormed.__main__ import main; sys.exit(main())", [lacking])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert lacking in done.stderr
    assert 'pip install ".[train]"' in done.stderr


def test_the_command_and_the_module_are_one():
    assert PROJECT["scripts"]["wellnormed"] == "wellnormed.__main__:main"
    shown = subprocess.run([sys.executable, "-m", "wellnormed", "--version"], capture_output=True, text=True)
    assert shown.stdout == f"wellnormed {PROJECT['version']}\n"
