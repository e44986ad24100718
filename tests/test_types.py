"""Type checkers know the public names that load on first use, and no others."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_name_that_loads_on_first_use_has_a_type(tmp_path):
    files = [file for file in ROOT.glob("src/wellnormed/**/__init__.py") if "lazy_namespace" in file.read_text("utf-8")]
    packages = [".".join(file.parent.relative_to(ROOT / "src").parts) for file in files]
    names = [f"{package}.{name}" for package in packages for name in dir(importlib.import_module(package))]
    assert len(names) > 75
    assert "wellnormed.certify" in names
    imports = ["from typing import reveal_type", *(f"import {package}" for package in packages)]
    script = tmp_path / "script.py"
    lines = [*imports, *(f"reveal_type({name})" for name in names), "wellnormed.certfy", ""]
    script.write_text("\n".join(lines), encoding="utf-8")
    options = "--config", ROOT / "pyproject.toml", "--output-format", "min-text", "--min-severity", "info"
    output = subprocess.run(
        [sys.executable, "-m", "pyrefly", "check", script, *options], capture_output=True, text=True
    ).stdout
    types = re.findall(r"(?m)revealed type: (.*) \[reveal-type\]$", output)
    assert len(types) == len(names)
    assert not {"Any", "Unknown"} & set(types)
    errors = [line for line in output.splitlines() if "ERROR" in line]
    assert len(errors) == 1
    assert "No attribute `certfy`" in errors[0]
