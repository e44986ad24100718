"""True certificates are proved again; forged ones are refused, each with a sentence."""

import copy
import json
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.proof.documents import document_of
from tests.proof.models import NAMES, constraints_of, small
from wellnormed.proof import CheckError, check
from wellnormed.proof.moves import MOVES
from wellnormed.proof.rules import RULES


@cache
def _made(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    model, example = small(name)
    return document_of(model, example, within=constraints_of(name, model), joint=name == "network")


def made(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A model's document, to be forged."""
    document, tensors = _made(name)
    return copy.deepcopy(document), dict(tensors)


def rows(document: Any, operation: str) -> list[Any]:
    return [row for row in document["rows"] if row["operation"] == operation]


@pytest.mark.parametrize("name", NAMES)
def test_certificates_are_proved(name: str) -> None:
    document, tensors = made(name)
    report = check(document, tensors)
    assert report.rows == len(document["rows"])
    assert float(report.lipschitz) == pytest.approx(float(document["lipschitz"]), abs=0)
    assert "RMS <= 1.0" in str(report)


def test_the_models_use_every_rule_and_every_move() -> None:
    used = {row["operation"] for name in NAMES for row in made(name)[0]["rows"]}
    assert used == {*RULES, *MOVES} - {"margin"}  # which is asked for, and has tests of its own


def test_a_folder_is_proved_by_a_command_without_torch(tmp_path: Any) -> None:
    document, tensors = made("convolutions")
    (tmp_path / "certificate.json").write_text(json.dumps(document))
    names = document["tensors"].keys()
    save_file({n: tensors[n] for n in names}, tmp_path / "weights.safetensors")
    save_file(
        {n: np.ascontiguousarray(t) for n, t in tensors.items() if n not in names}, tmp_path / "certificate.safetensors"
    )
    run = "import runpy; runpy.run_module('wellnormed.proof', run_name='__main__')"
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = [{!r}]; " + run
    command = [sys.executable, "-O", "-c", code.format(str(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Lipschitz" in done.stdout
    forged = (tmp_path / "weights.safetensors").read_bytes()
    (tmp_path / "weights.safetensors").write_bytes(forged[:-1] + bytes([forged[-1] ^ 1]))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "SHA-256" in done.stderr


def test_damaged_files_end_in_a_sentence(tmp_path: Any) -> None:
    document, tensors = made("mlp")
    good = json.dumps(document).encode()
    save_file(tensors, tmp_path / "weights.safetensors")
    weights = (tmp_path / "weights.safetensors").read_bytes()
    other = {**tensors, "0.weight": tensors["0.weight"] + 1}
    for content in (
        b"",
        b"{",
        b"[1, NaN]",
        b'{"a": 1, "a": 2}',
        good.replace(b'"format": 7', b'"format": 6'),
        good[:-1],
        b"[" * 100000,
    ):
        (tmp_path / "certificate.json").write_bytes(content)
        with pytest.raises(CheckError):
            check(tmp_path)
    (tmp_path / "certificate.json").write_bytes(good)
    check(tmp_path)
    for content in (b"", weights[:-1], weights + b"0", b"\xff" * 20, weights[:8] + b"[" + weights[9:]):
        (tmp_path / "weights.safetensors").write_bytes(content)
        with pytest.raises(CheckError):
            check(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(weights)
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(CheckError, match="another tensor"):
        check(tmp_path)
    with pytest.raises(CheckError, match="cannot be read"):
        check(tmp_path / "nowhere")
