"""The file and its verifier: what was tampered with does not pass."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wellnormed.certificates import Certificate, Row, VerificationError, certify, verify
from wellnormed.models import GPT, GPTConfig
from wellnormed.nn import BallProjection


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = GPTConfig(vocabulary_size=5, length=4, width=4, heads=2, blocks=1, expansion=2, key_radius=0.3)
    model = GPT(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model = small_model()
    certify(model, radius=2.0).save(tmp_path / "certificate.json")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "certificate.json", tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_certificate_passes_with_its_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    certificate = certify(model, radius=2.0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    report = verify(certificate, tmp_path / "model.safetensors")
    assert report.lipschitz == certificate.lipschitz
    assert report == verify(certificate, model.state_dict())


def test_numpy_weights_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU("tanh"), nn.LayerNorm(5), nn.Linear(5, 2), nn.SiLU())
    assert verify(certify(model), {name: w.numpy() for name, w in model.state_dict().items()}).rows == 6


def test_save_and_load(tmp_path: Path) -> None:
    certificate = certify(small_model(), radius=2.0).with_lower_bound(0.01)
    certificate.save(tmp_path / "certificate.json")
    assert Certificate.load(tmp_path / "certificate.json") == certificate
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.json"]


def test_every_changed_byte_of_the_weights_fails(files: tuple[Path, Path]) -> None:
    certificate, weights = Certificate.load(files[0]), files[1]
    content = weights.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for index in [*range(header), *range(header, len(content), 7)]:
        weights.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        with pytest.raises(VerificationError):
            verify(certificate, weights)
    weights.write_bytes(content + b"\0")
    with pytest.raises(VerificationError):
        verify(certificate, weights)


def test_every_changed_byte_of_the_certificate_fails(files: tuple[Path, Path]) -> None:
    path, _ = files
    content = path.read_bytes()
    for index in range(0, len(content), 11):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        with pytest.raises(ValueError, match="not an intact certificate"):
            Certificate.load(path)
    for changed in (content + b"\n", content[:-1], b"\xef\xbb\xbf" + content, b"", b"{}", b"[" * 100000):
        path.write_bytes(changed)
        with pytest.raises(VerificationError):
            verify(path, files[1])


def changed(certificate: Certificate, rule: str, change: Callable[[Row], Row]) -> Certificate:
    """The certificate with one row rewritten; whoever does that also writes a fitting digest."""
    index = next(i for i, row in enumerate(certificate.layers) if row.rule == rule)
    rows = list(certificate.layers)
    rows[index] = change(rows[index])
    return dataclasses.replace(certificate, layers=tuple(rows))


def _half(numbers: tuple[Decimal, ...]) -> tuple[Decimal, ...]:
    return tuple(number / 2 for number in numbers)


FORGERIES: dict[str, tuple[str, Callable[[Row], Row], str]] = {
    "scale": ("attention", lambda r: dataclasses.replace(r, constants={"scale": 9.0}), "lipschitz"),
    "no balls": ("ball_projection", lambda r: dataclasses.replace(r, constants={"radius": 99.0}), "radius"),
    "slope": ("scaled_gelu", lambda r: dataclasses.replace(r, lipschitz=_half(r.lipschitz)), "lipschitz"),
    "radius": ("linear", lambda r: dataclasses.replace(r, radius=_half(r.radius)), "radius"),
    "result": ("scale", lambda r: dataclasses.replace(r, lipschitz=_half(r.lipschitz)), "lipschitz"),
    "rule": ("linear", lambda r: dataclasses.replace(r, rule="identity"), "less than"),
    "unknown rule": ("linear", lambda r: dataclasses.replace(r, rule="magic"), "magic"),
    "input": ("linear", lambda r: dataclasses.replace(r, inputs=("nowhere",)), "nowhere"),
    "weights": (
        "linear",
        lambda r: dataclasses.replace(
            r, weights=(dataclasses.replace(r.weights[0], values=(r.weights[0].values[0] * (1 - 1e-7),)),)
        ),
        "could not be proved",
    ),
    "not a number": (
        "scale",
        lambda r: dataclasses.replace(r, constants={"factor": float("nan")}),
        "cannot be derived",
    ),
    "infinite": ("scale", lambda r: dataclasses.replace(r, lipschitz=(Decimal("NaN"),)), "lipschitz"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_rows_fail(name: str) -> None:
    rule, change, reason = FORGERIES[name]
    model = small_model()
    certificate = certify(model, radius=2.0)
    verify(certificate, model.state_dict())
    with pytest.raises(VerificationError, match=reason):
        verify(changed(certificate, rule, change), model.state_dict())


@pytest.mark.parametrize("field", ["domain", "norms", "arithmetic", "input_radius"])
def test_a_larger_promise_fails(field: str) -> None:
    model = nn.Linear(3, 3)
    promise = {field: 9.0 if field == "input_radius" else "everything"}
    with pytest.raises(VerificationError):
        verify(dataclasses.replace(certify(model), **promise), model.state_dict())


def test_wider_numbers_pass_for_they_are_bounds_too() -> None:
    model = nn.Linear(3, 3)
    wider = changed(certify(model), "linear", lambda r: dataclasses.replace(r, lipschitz=(2 * r.lipschitz[0],)))
    assert verify(wider, model.state_dict()).lipschitz == wider.lipschitz


def test_missing_and_added_tensors_fail() -> None:
    model = nn.Linear(3, 3)
    certificate = certify(model)
    with pytest.raises(VerificationError, match="lack bias"):
        verify(certificate, {"weight": model.weight})
    with pytest.raises(VerificationError, match="add more"):
        verify(certificate, dict(model.state_dict()) | {"more": np.zeros(1)})


def test_active_projections_may_not_use_the_theorem_for_linear_heads() -> None:
    """Widening an active ball would give attention a smaller constant; its radius then fails."""
    model = small_model()
    certificate = certify(model, radius=2.0)
    name = next(row.name for row in certificate.layers if row.name.endswith("key.1"))
    rows = tuple(
        dataclasses.replace(row, constants={"radius": 50.0}) if row.name == name else row for row in certificate.layers
    )
    with pytest.raises(VerificationError, match="radius"):
        verify(dataclasses.replace(certificate, layers=rows), model.state_dict())


def test_the_verifier_needs_no_torch() -> None:
    code = "import sys, wellnormed.certificates.verification; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_verifier_refuses_without_assertions() -> None:
    """Python's -O switches assertions off; a ball of negative radius must be refused all the same."""
    code = (
        "from decimal import Decimal\n"
        "from wellnormed.certificates.certificate import Certificate, Row\n"
        "from wellnormed.certificates.verification import VerificationError, verify\n"
        "one, none = (Decimal(1),), (Decimal(0),)\n"
        "rows = (Row('input', 'input', (), {'radius': 1.0}, (), one, one),\n"
        "        Row('ball', 'ball_projection', ('input',), {'radius': -1.0}, (), none, one))\n"
        "try:\n"
        "    verify(Certificate(rows, {}, 'all inputs whose tokens have RMS <= 1.0', 1.0), {})\n"
        "except VerificationError as error:\n"
        "    print(error)\n"
    )
    found = subprocess.run([sys.executable, "-O", "-c", code], check=True, capture_output=True, text=True)
    assert "row ball (ball_projection) cannot be derived" in found.stdout


def test_projection_row_counts() -> None:
    assert verify(certify(BallProjection(0.5)), {}).rows == 2


def test_the_verifier_knows_rotary_attention() -> None:
    config = GPTConfig(vocabulary_size=5, length=4, width=4, heads=2, blocks=1, rotary=True, key_radius=0.3)
    model = GPT(config, torch.Generator().manual_seed(0)).eval()
    model.head.weight.data.fill_(0.5)
    certificate = certify(model)
    assert "rotary" in {row.rule for row in certificate.layers}
    assert verify(certificate, model.state_dict()).lipschitz == certificate.lipschitz > 0
