"""The kernel needs NumPy and the standard library alone: everything else is kept from being imported."""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import nn

import wellnormed as wn

ALONE = """
import sys
from importlib.abc import MetaPathFinder

ALLOWED = {*sys.stdlib_module_names, "numpy", "wellnormed"}

class Nothing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is kept out", name=name)

sys.meta_path.insert(0, Nothing())
"""


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", ALONE + code, *map(str, arguments)], capture_output=True, text=True)


def test_nothing_else_can_be_imported_there():
    for name in ("torch", "safetensors", "jaxtyping"):
        assert f"{name} is kept out" in run(f"import {name}").stderr
    assert numpy.__version__ in run("import numpy; print(numpy.__version__)").stdout


def test_the_package_and_the_kernel_import_and_prove(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    wn.certify(model, torch.zeros(1, 3)).save(tmp_path / "certificate.json")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    done = run("from wellnormed.proof.__main__ import main; sys.exit(main(sys.argv[1:]))", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "L-Lipschitz" in done.stdout
    assert "torch is kept out" in run("import wellnormed; wellnormed.Scion").stderr  # which shows that it is lazy


def test_the_command_imports_nothing_from_the_folder_that_it_checks(tmp_path):
    """`python -m` alone would: it looks for modules where it is run first."""
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, function = scripts["project"]["scripts"]["wellnormed-proof"].partition(":")
    folder, script = tmp_path / "hostile", tmp_path / "bin" / "wellnormed-proof"
    for each in (folder, script.parent):
        each.mkdir()
    (folder / "numpy.py").write_text("print('L = 0'); raise SystemExit(0)")
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())")
    for command in ([script], ["-P", "-m", "wellnormed.proof"]):
        done = subprocess.run([sys.executable, *command, "."], capture_output=True, text=True, cwd=folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert "not proved: certificate.json cannot be read" in done.stderr
        assert "pass a folder with certificate.json, which Certificate.save wrote" in done.stderr
    (folder / "certificate.json").write_text("{}")
    for path, said in (("certificate.json", "pass the folder of this file with certificate.json"), (".", "not proved")):
        done = subprocess.run([sys.executable, script, path], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 1
        assert said in done.stderr
        assert ("pass" in done.stderr) == (path != ".")
