"""True certificates are proved again; forged ones are refused, each with a sentence."""

import copy
import itertools
import json
import math
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


@pytest.mark.parametrize("name", ["mlp", "attention", "convolutions", "mixing", "potential gpt"])
def test_no_bound_may_be_lowered_in_any_row(name: str) -> None:
    document, tensors = made(name)
    for row in document["rows"]:
        for key in ("radius", "gain", "largest"):
            if row[key] is None or float(row[key]["values"][0]) == 0:
                continue
            kept = row[key]["values"][0]
            row[key]["values"][0] = str(float(kept) * (1 - 1e-6))
            with pytest.raises(CheckError, match=key):
                check(document, tensors)
            row[key]["values"][0] = kept


@pytest.mark.parametrize("name", ["mlp", "attention", "convolutions", "mixing", "potential gpt"])
def test_no_claim_may_be_lowered(name: str) -> None:
    document, tensors = made(name)
    for row in document["rows"]:
        for claim in row["claims"]:
            kept = claim["values"][0]
            claim["values"][0] = kept * (1 - 1e-7)
            if kept:
                with pytest.raises(CheckError, match="could not be proved"):
                    check(document, tensors)
            claim["values"][0] = kept


def test_claims_about_other_tensors_are_refused() -> None:
    document, tensors = made("mlp")
    first, second = rows(document, "linear")
    first["claims"][0]["tensors"] = second["claims"][0]["tensors"]
    with pytest.raises(CheckError, match="columns"):
        check(document, tensors)
    document, tensors = made("mlp")
    rows(document, "linear")[0]["claims"][1]["tensors"] = ["2.bias"]
    with pytest.raises(CheckError, match="bias has not 8"):
        check(document, tensors)
    document, tensors = made("mlp")
    rows(document, "linear")[0]["claims"][0]["constants"]["transposed"] = True
    with pytest.raises(CheckError, match="columns"):
        check(document, tensors)


def test_a_changed_weight_is_refused() -> None:
    document, tensors = made("mlp")
    tensors["0.weight"] = tensors["0.weight"] * np.float32(0.5)
    with pytest.raises(CheckError, match="SHA-256"):
        check(document, tensors)
    document["tensors"] = {}
    check(document, tensors)
    tensors["0.weight"] = tensors["0.weight"] * np.float32(4)
    with pytest.raises(CheckError, match="could not be proved"):
        check(document, tensors)
    tensors["0.weight"] = tensors["0.weight"] * np.float32(np.nan)
    with pytest.raises(CheckError, match="finite"):
        check(document, tensors)


def test_heads_cannot_be_regrouped() -> None:
    for change in ("claims", "heads"):
        document, tensors = made("attention")
        (row,) = rows(document, "attention")
        if change == "claims":
            row["claims"][2]["constants"]["pairs"].reverse()
        else:  # another part of the fused weight for the keys of one head
            (source,) = [r for r in document["rows"] if r["name"] == row["inputs"][1]]
            step = source["constants"]["tables"][1]
            source["constants"]["tables"][1] = [0, step, 2 * step, 2 * step]
        with pytest.raises(CheckError, match=r"pairs|its key is not"):
            check(document, tensors)


def test_keys_and_values_must_be_of_the_same_tokens() -> None:
    document, tensors = made("attention")
    (row,) = rows(document, "attention")
    (values,) = [r for r in document["rows"] if r["name"] == row["inputs"][2]]
    step = values["constants"]["tables"][2]
    values["constants"]["offset"] += 2 * step
    values["constants"]["tables"][2] = -step
    with pytest.raises(CheckError, match="same tokens"):
        check(document, tensors)
    row["inputs"], row["reads"], row["claims"] = row["inputs"][:3], row["reads"][:3], []
    with pytest.raises(CheckError, match="gain"):
        check(document, tensors)


def test_a_product_needs_queries_without_a_bias() -> None:
    document, tensors = made("attention with biases")
    (row,) = rows(document, "attention")
    plain = rows(made("attention")[0], "attention")[0]
    row["claims"].append(copy.deepcopy(plain["claims"][2]))
    with pytest.raises(CheckError, match="bias"):
        check(document, tensors)


def test_logits_and_results_cannot_be_lowered() -> None:
    for key in ("lipschitz", "rms_lipschitz"):
        document, tensors = made("attention")
        for factor in (1 - 1e-9, 1 + 1e-9):
            forged = {**document, key: str(float(document[key]) * factor)}
            with pytest.raises(CheckError, match=key):
                check(forged, tensors)
    document, tensors = made("attention")
    (name,) = document["attention_logits"]
    document["attention_logits"][name][1] = "0.001"
    with pytest.raises(CheckError, match="attention_logits"):
        check(document, tensors)


@pytest.mark.parametrize("name", ["mlp", "attention", "gates", "mixing", "convolutions"])
def test_reads_axes_and_shapes_cannot_be_changed(name: str) -> None:
    document, tensors = made(name)
    for row in document["rows"]:
        for key, each in itertools.product(("reads", "axes", "shape"), range(3)):
            forged = copy.deepcopy(row)
            if key == "reads" and row["reads"]:
                forged["reads"][0] = [[], [0], [0, 1]][each]
            elif key == "axes" and row["axes"]:
                forged["axes"] = [[], [0], [0, 1]][each]
            elif key == "shape":
                forged["shape"] = [row["shape"][::-1], [*row["shape"], 1], row["shape"][1:]][each]
            if forged == row or (row["operation"] == "constant" and "number" in row["constants"]):
                continue
            changed = {**document, "rows": [forged if r is row else r for r in document["rows"]]}
            with pytest.raises(CheckError):
                check(changed, tensors)


def test_rows_cannot_be_left_out_doubled_or_exchanged() -> None:
    document, tensors = made("mlp")
    for i in range(len(document["rows"])):
        without = [row for j, row in enumerate(document["rows"]) if j != i]
        twice = [*document["rows"][: i + 1], *document["rows"][i:]]
        later = [*without, document["rows"][i]]
        for forged in (without, twice, *([later] if i < len(without) else [])):
            with pytest.raises(CheckError):
                check({**document, "rows": forged}, tensors)


def test_constants_enter_the_bound() -> None:
    positive = "of its constants must be a positive number, got"
    for name, operation, key, value, reason in (
        ("gates", "ball", "scale", 2.0, "less than"),
        ("gates", "ball", "scale", -1.0, f"scale {positive} -1.0"),
        ("gates", "unit", "eps", 0.05, "less than"),
        ("encoder", "normalization", "eps", 1e-6, "less than"),
        ("moves", "times", "factor", 0.9, "less than"),
        ("moves", "times", "factor", math.nan, "factor"),
        ("potential gpt", "convex_potential", "factor", -2.0, "less than"),
        ("mlp", "elementwise", "function", "gelu_tanh", "less than"),
        ("attention", "attention", "scale", 0.6, "less than"),
        ("convolutions", "convolution", "stride", [1, 1], "claim 0 must be"),
        ("mlp", "input", "radius", 2.0, "radius .* less than"),
        ("mlp", "input", "radius", 0.0, f"radius {positive} 0.0"),
        ("mlp", "input", "radius", math.inf, "radius of its constants must be .*, got inf"),
        ("mlp", "input", "low", -1.0, "neither a ball nor a box"),
        ("mlp", "input", "dtype", "float8", "dtype of its constants must be 'float64' or .*, got 'float8'"),
    ):
        document, tensors = made(name)
        for row in rows(document, operation):
            if key in row["constants"] or key == "low":
                row["constants"][key] = value
        with pytest.raises(CheckError, match=reason):
            check(document, tensors)


def test_a_row_that_reads_or_claims_something_else_is_refused() -> None:
    for change, reason in (
        ({"operation": "contraction"}, "of its constants is unknown"),
        ({"operation": "magic"}, "magic"),
        ({"inputs": ["nowhere"]}, "nowhere"),
        ({"claims": []}, "claim"),
        ({"gain": {"shape": [1, 1], "values": ["NaN"]}}, "must be the digits of a number, got 'NaN'"),
    ):
        document, tensors = made("mlp")
        rows(document, "linear")[0].update(change)
        with pytest.raises(CheckError, match=reason):
            check(document, tensors)


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
