"""Conversions: steps are refused, what rounds is listed and part of no pattern, what widens is looked through."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.certificates import Certificate, CheckError, UncertifiableError, certify, require_same_model, verify
from wellnormed.proof import check

from .adversary import Net, bounds_of, walked

HALF, EIGHT = torch.bfloat16, torch.float8_e4m3fn
ONE = pytest.approx(1, rel=1e-12)  # roots and quotients of the RMS, rounded up
TOKENS = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
_W = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
MATRIX = _W / torch.linalg.matrix_norm(_W, 2)


def of(function: Callable[..., Tensor], **stored: Tensor) -> nn.Module:
    """A model made of a function of the input and of buffers."""
    return Net(lambda s, x: function(x, **dict(s.named_buffers())), **stored)


def certified(model: nn.Module, example: Any = TOKENS) -> Certificate:
    """A certificate that the checker accepts."""
    certificate = certify(model, example)
    report = verify(certificate, model.state_dict())
    assert report.rounds == certificate.rounds
    return certificate


Convert = Callable[[Tensor], Tensor]


def through(dtype: torch.dtype) -> Convert:
    """To a dtype and back."""
    return lambda t: t.to(dtype).to(t.dtype)


def _rms(x: Tensor, statistic: Convert = lambda t: t, root: Convert = lambda t: t, numerator: Convert = lambda t: t):
    return numerator(x) * root(torch.rsqrt(statistic(x.square().mean(-1, keepdim=True)) + 1e-2))


def _attention(x: Tensor, logits: Convert = lambda t: t, weights: Convert = lambda t: t) -> Tensor:
    q = x[:, None]
    return (weights(torch.softmax(logits(q @ q.mT), -1)) @ q)[:, 0]


def _taken_off(x: Tensor, r: Convert, w: Tensor) -> Tensor:
    return x - r(F.relu(F.linear(x, w))) @ w


PATTERNS: dict[str, Callable[[Tensor, Convert], Tensor]] = {
    "the statistic of an RMS norm": lambda x, r: _rms(x, statistic=r),
    "the root of an RMS norm": lambda x, r: _rms(x, root=r),
    "the numerator of an RMS norm": lambda x, r: _rms(x, numerator=r),
    "the gate of a SiLU": lambda x, r: x * r(torch.sigmoid(x)),
    "the input of a SiLU's gate": lambda x, r: x * torch.sigmoid(r(x)),
    "the input of a GELU's gate": lambda x, r: 0.5 * x * (1 + torch.erf(r(x) / math.sqrt(2))),
    "the cube of a GELU": lambda x, r: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * r(x**3)))),
    "the floor of a ball": lambda x, r: x * torch.rsqrt(r(4 * x.square().mean(-1, keepdim=True)).clamp(min=1)),
    "the length of a unit vector": lambda x, r: x / r(x.norm(dim=-1, keepdim=True).clamp(min=0.2)),
    "the logits of attention": lambda x, r: _attention(x, logits=r),
    "the weights of attention": lambda x, r: _attention(x, weights=r),
    "what a potential takes off": lambda x, r: _taken_off(x, r, MATRIX.to(x)),
}
MATCHED = {"normalization", "ball", "unit", "attention", "convex_potential"}
"""Rows that come of a pattern alone; of entries, the functions `silu`, `gelu` and `gelu_tanh`."""


def matched(certificate: Certificate) -> int:
    """The number of patterns that were found."""
    return sum(
        row.operation in MATCHED or row.constants.get("function") in ("silu", "gelu", "gelu_tanh")
        for row in certificate.rows
    )


def all_patterns(x: Tensor) -> Tensor:
    return sum(pattern(x, lambda t: t) for pattern in PATTERNS.values())


def test_every_pattern_matches_without_a_conversion_and_across_one_that_widens() -> None:
    assert matched(certified(of(all_patterns))) == len(PATTERNS)
    half = TOKENS.to(HALF)  # to more digits and never back: the same function
    wide = certified(of(lambda x: all_patterns(x.float())), half)
    assert matched(wide) == len(PATTERNS)
    assert not wide.rounds


REFUSED = {
    "the statistic of an RMS norm", "the root of an RMS norm", "the numerator of an RMS norm", "the floor of a ball",
    "the length of a unit vector",
}  # fmt: skip
"""Patterns whose root or quotient has no bound of its own."""


def test_no_pattern_matches_across_a_conversion_that_rounds() -> None:
    for name in REFUSED:
        with pytest.raises(UncertifiableError, match=r"has no bound|may come near 0"):
            walked(of(lambda x, name=name: PATTERNS[name](x, through(HALF))), TOKENS)
    left = [PATTERNS[name] for name in PATTERNS.keys() - REFUSED]
    certificate = certified(of(lambda x: sum(each(x, through(HALF)) for each in left)))
    assert not matched(certificate)
    assert certificate.rounds.keys() == {"bfloat16"}
    for function in PATTERNS.values():
        with pytest.raises(UncertifiableError, match=r"not continuous|has no bound"):  # as are all of `STEPS`
            walked(of(lambda x, function=function: function(x, through(EIGHT))), TOKENS)


def _potential(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    return x - F.relu(F.linear(x, other)) @ w


@pytest.mark.parametrize("dtype", [EIGHT, torch.float8_e5m2, HALF, torch.float16])
def test_a_rounded_copy_of_a_weight_is_another_weight(dtype: torch.dtype) -> None:
    """At 1 these were false: 1.056, 1.123 and 1.0034 were found for e4m3, e5m2 and bfloat16."""
    models = [
        of(lambda x, w: _potential(x, w, w.to(dtype).to(w.dtype)), w=MATRIX.clone()),
        of(_potential, w=MATRIX.clone(), other=MATRIX.to(dtype).float()),
    ]
    if dtype.itemsize == 2:
        models.append(of(lambda x, w, other: _potential(x, w, other.float()), w=MATRIX.clone(), other=MATRIX.to(dtype)))
    first, *others = (certified(model) for model in models)
    assert "convex_potential" not in {row.operation for row in first.rows}
    assert not first.rounds  # nothing that depends on the input is converted
    assert first.lipschitz > 1.9
    assert all(other.lipschitz == first.lipschitz for other in others)
    (rounded,) = first.computed.values()
    assert torch.equal(rounded, MATRIX.to(dtype).float())


def test_a_weight_that_is_widened_is_the_same_weight() -> None:
    stored = MATRIX.to(HALF)
    model = of(lambda x, w: _potential(x, w.float(), w.float()), w=stored)
    certificate = certified(model)
    assert "convex_potential" in {row.operation for row in certificate.rows}
    assert certificate.lipschitz == ONE
    half = of(lambda x, w: _potential(x, w.float(), w.to(HALF).float()), w=MATRIX.clone())
    assert certified(half).lipschitz > 1.9
    both = of(lambda x, w: _potential(x, w.to(HALF).float(), w.to(HALF).float()), w=MATRIX.clone())
    assert certified(both).lipschitz == ONE  # the converted copy on both sides


SILENT: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(HALF), "half": lambda x: x.half().float(),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=HALF)), "to another": lambda x: x.to(torch.ones(1, dtype=HALF)),
    "mean": lambda x: x.mean(-1, keepdim=True, dtype=HALF), "sum": lambda x: x.sum(1, dtype=HALF),
    "softmax": lambda x: torch.softmax(x, -1, dtype=HALF),
    "written": lambda x: torch.zeros_like(x, dtype=HALF).copy_(x), "a slice that is written": lambda x: _written(x),
    "added in place": lambda x: torch.zeros_like(x, dtype=HALF).add_(x), "autocast": lambda x: _multiplied(x),
}  # fmt: skip


def _written(x: Tensor) -> Tensor:
    result = torch.zeros(x.shape, dtype=HALF)
    result[:, 1:] = x[:, 1:]
    return result


def _multiplied(x: Tensor) -> Tensor:
    with torch.autocast("cpu", HALF):
        return F.linear(x, torch.eye(4))


def test_every_conversion_that_rounds_is_listed() -> None:
    def all_of(x: Tensor) -> Tensor:  # of a multiple each, for the same tensor is listed once
        found = [convert(number * x) for number, convert in enumerate(SILENT.values(), 2)]
        return sum(each.float().flatten(1).sum(1, keepdim=True) for each in found)

    certificate = certified(of(all_of))
    assert {kind: len(rows) for kind, rows in certificate.rounds.items()} == {"bfloat16": len(SILENT) - 1, "float16": 1}
    for dtype, rows in certificate.rounds.items():
        count = f"{len(rows)} conversion{'s' * (len(rows) > 1)} to {dtype}"
        assert f"rounds: {count}, counted as the identity (" in str(certificate)
        assert f"conversions to {dtype} count as the identity: {len(rows)}" in str(verify(certificate, {}))


def test_double_inputs_are_rounded_to_floats() -> None:
    certificate = certified(of(lambda x: F.relu(x.float()).double()), TOKENS.double())
    assert certificate.rounds == {"float32": ("to",)}
    assert certificate.lipschitz == ONE


def test_what_is_written_into_fewer_digits_is_converted_before() -> None:
    """The certificate bounded the tensor, and the model adds its rounded copy, which is larger."""
    vector = torch.full((4,), 1 + 3 * 2.0**-9)  # rounds up

    def function(x: Tensor, v: Tensor) -> Tensor:
        result = x.clone()
        result[:, 0] = v
        return result

    model = of(function, v=vector)
    certificate = certified(model, TOKENS.to(HALF))
    largest = max(row.bounds.radius.max() for row in certificate.rows if row.operation == "output")
    assert float(largest) >= float(model(torch.zeros(1, 3, 4, dtype=HALF)).float().norm(dim=-1).max()) > 2.01


FEW = 9e-8
"""A number that float16 holds as 1.19e-7."""
CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "type_as": lambda x: x[:, :1].float() * torch.full((1,), FEW).type_as(x).float() * 1e7,
    "masked_fill": lambda x: _product(x.masked_fill(torch.tensor([False, True]), FEW)),
    "masked_fill by a tensor": lambda x: _product(x.masked_fill(torch.tensor([False, True]), torch.tensor(FEW))),
    "where": lambda x: _product(torch.where(torch.tensor([True, False]), x, FEW)),
    "pad": lambda x: _product(F.pad(x[:, :1], (0, 1), value=FEW)),
    "assignment": lambda x: _product(_assigned(x)),
    "clamp": lambda x: _product(torch.cat([x[:, :1], x[:, 1:].clamp(FEW, FEW)], 1)),
    "clamp_min": lambda x: _product(torch.cat([x[:, :1], (x[:, 1:] * 0 - 1).clamp_min(FEW)], 1)),
}


def _product(pair: Tensor) -> Tensor:
    first, second = (pair.float() * torch.tensor([1.0, 1e7])).split(1, 1)
    return first * second


def _assigned(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[:, 0], result[:, 1] = x[:, 0], FEW
    return result


def test_a_constant_is_bounded_in_the_digits_that_it_is_stored_in() -> None:
    """Bounds of the number itself were a quarter too small."""
    model = of(lambda x: torch.cat([function(x) for function in CONSTANTS.values()]))
    start, end = torch.tensor([[0.0, 0.0], [0.5, 0.0]], dtype=torch.float16).split(1)
    changes = (model(end) - model(start)).double().abs() / (end - start).double().square().mean().sqrt()
    for name, change, bound in zip(CONSTANTS, changes.flatten(), bounds_of(model, start).gain.flat, strict=True):
        assert bound >= float(change) > 1.1, name


def test_a_single_number_of_the_input_that_is_rounded_is_listed() -> None:
    """Beside a tensor, torch converts a single number as it does a constant."""
    model = of(lambda x: torch.maximum(x.to(HALF), x.sum()))
    assert any("maximum" in row for row in certified(model).rounds["bfloat16"])


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "8 bits": lambda x: x.to(EIGHT).float(),
    "8 bits, softly": lambda x: x + (x.to(torch.float8_e5m2).float() - x).detach(),
    "8 bits without a sign of zero": lambda x: x.to(torch.float8_e4m3fnuz).float(),
    "8 bits of exponent": lambda x: x.abs().to(torch.float8_e8m0fnu).float(),
    "8 bits as the result": lambda x: x.to(EIGHT), "integers": lambda x: x.to(torch.int32).float(),
    "bytes": lambda x: x.byte().float(), "truth": lambda x: x.bool().float(),
    "a sum of integers": lambda x: x.sum(-1, keepdim=True, dtype=torch.int64).float(),
    "written into integers": lambda x: torch.zeros_like(x, dtype=torch.int32).copy_(x).float(),
    "rounded": lambda x: torch.round(x * 8) / 8, "bits": lambda x: x.view(torch.int32).view(torch.float32),
    "a sign": lambda x: x.sign() * x, "a threshold": lambda x: (x > 0).float(),
    "a quotient": lambda x: x / x.flip(-1),
    "fake quantization": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    "quantization": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
    "complex": lambda x: x.to(torch.complex64).real,
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore")  # of torch, about its own quantization
def test_steps_are_refused(name: str) -> None:
    with pytest.raises(UncertifiableError):
        walked(of(STEPS[name]), TOKENS)


def attending(x: Tensor, s: Any, convert: Convert = lambda t: t) -> Tensor:
    heads = [convert(each(x)).unflatten(-1, (2, 4)).transpose(1, 2) for each in (s.q, s.k, s.v)]
    return convert(F.scaled_dot_product_attention(*heads)).transpose(1, 2).flatten(2)


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    maps = {name: nn.Linear(8, 8, bias=False) for name in "qkv"}
    return {"norm": nn.RMSNorm(8, eps=1e-2), **maps, "out": nn.Linear(8, 8)}


def residual(s: Any, x: Tensor) -> Tensor:
    return x + s.out(attending(s.norm(x), s))


def inside(s: Any, x: Tensor) -> Tensor:
    """The same with the autocast in its own code."""
    with torch.autocast("cpu", HALF):
        return residual(s, x)


def test_autocast_is_listed_and_uses_the_weights_that_it_converts() -> None:
    plain, example = Net(residual, **layers()), torch.randn(1, 3, 8)
    certificate = certified(Net(inside, **layers()), example)
    assert certificate.rounds == {"bfloat16": ("_to_copy",)}  # the norm's result, once for all three maps
    with torch.autocast("cpu", HALF):
        around = certified(plain, example)
    assert around.document()["rows"] == certificate.document()["rows"]
    weights = {n for row in certificate.rows for c in row.claims for n in c.tensors} & plain.state_dict().keys()
    assert not weights  # all are converted, and stored as such
    # the bound is that of the converted weights, with their heads and with what keys and values share
    rounded = Net(residual, **layers())
    rounded.load_state_dict({n: t if n == "norm.weight" else t.to(HALF).float() for n, t in plain.state_dict().items()})
    assert certificate.lipschitz == pytest.approx(certified(rounded, example).lipschitz, rel=1e-9)


def test_no_rule_looks_through_a_rounding_row() -> None:
    """Between a linear map and attention it hides where keys and values come from, and keeps the bounds of heads."""
    narrow = lambda t: t.to(HALF) if t.dtype == torch.float32 else t.float()  # noqa: E731
    model = Net(lambda s, x: attending(x, s, narrow), **layers())
    plain, example = Net(lambda s, x: attending(x, s), **layers()), torch.randn(1, 3, 8)
    certificate, exact = certified(model, example), certified(plain, example)
    ours, theirs = (next(r for r in c.rows if r.operation == "attention") for c in (certificate, exact))
    assert len(ours.inputs) == 3
    assert len(theirs.inputs) == 4
    assert (ours.bounds.radius == theirs.bounds.radius).all()  # by heads
    assert certificate.lipschitz > exact.lipschitz
    # who leaves the rounding out describes another model
    with pytest.raises(CheckError, match="differ in the"):
        require_same_model(exact, model, example)


def test_a_difference_from_the_rounded_value_is_not_zero() -> None:
    assert certified(of(lambda x: 1e3 * (x - through(HALF)(x)))).lipschitz >= 1e3


def test_margins_end_at_a_rounding() -> None:
    with pytest.raises(UncertifiableError, match="or is rounded after it"):
        certify(Net(lambda s, x: s.last(x).to(HALF), last=nn.Linear(4, 3)), TOKENS, margins=True)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int8", None, 3, ["float32"]])
def test_a_forged_rounding_to_anything_else_is_refused(dtype: Any) -> None:
    certificate = certified(of(through(HALF)))
    document = copy.deepcopy(certificate.document())
    (row,) = (row for row in document["rows"] if row["operation"] == "rounding")
    row["constants"] = {"dtype": dtype}
    with pytest.raises(CheckError, match="dtype of its constants must be 'float32'"):
        check(document, {})


def test_what_is_taken_apart_without_autocast_is_refused_under_it():
    """The cell was captured in float32, and the last rounding hid its difference from the model, in bfloat16."""

    def rounded(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(self.cell(x))

    with pytest.raises(UncertifiableError, match=r"under autocast aten\.gru_cell\.default cannot be captured"):
        certify(Net(rounded, cell=nn.GRUCell(6, 5), last=nn.Linear(5, 3)), torch.randn(2, 6))
