"""Bounds of entrywise functions. Their slopes and sizes are in `proof.functions`."""

import math
from fractions import Fraction

import torch

from wellnormed.lowering import moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.operations.elementwise import multiply
from wellnormed.lowering.rounding import rounded
from wellnormed.program.errors import DRAWS
from wellnormed.program.operation import operation
from wellnormed.proof.decimals import shown
from wellnormed.proof.functions import STEEPEST
from wellnormed.proof.value import Value


def apply(ledger: Ledger, function: str, x: Value, *numbers: float, stored: bool = False) -> Value:
    """Apply a function of the table `proof.functions` to every entry; the numbers are its settings.

    Of a formula that is executed operation by operation, results in between are `stored`.
    """
    return ledger.derive(
        "elementwise", [(x, inner_axes(x))], shape=x.shape,
        constants={"function": function, "numbers": [float(each) for each in numbers]}, roundings=1 if stored else None,
    )  # fmt: skip


_OF_ONE_NAME = "relu abs relu6 tanh sin cos atan asinh sigmoid hardsigmoid hardswish erf silu mish log_sigmoid"
for _name in _OF_ONE_NAME.split():
    operation(f"aten.{_name}.default", executed=True)(lambda ledger, x, name=_name: apply(ledger, name, x))


@operation("aten.gelu.default", executed=True)
def gelu(ledger: Ledger, x: Value, approximate: str = "none") -> Value:
    """GELU, in its exact form or in the approximation by tanh. The two have different largest slopes."""
    return apply(ledger, "gelu_tanh" if approximate == "tanh" else "gelu", x)


@operation("aten.leaky_relu.default", executed=True)
def leaky_relu(ledger: Ledger, x: Value, negative_slope: float = 0.01) -> Value:
    """The leaky ReLU, which has the slopes 1 and `negative_slope`."""
    return apply(ledger, "leaky_relu", x, negative_slope)


@operation("aten.rrelu.default", executed=True)
def rrelu(ledger: Ledger, x: Value, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Value:
    """The leaky ReLU with the mean of two slopes; refused in training mode, where the slopes are random."""
    if training:
        raise ledger.refuse(DRAWS)
    return leaky_relu(ledger, x, (lower + upper) / 2)


@operation("aten.prelu.default", "aten._prelu_kernel.default", executed=True)
def prelu(ledger: Ledger, x: Value, weight: Stored) -> Value:
    """PReLU, `relu(x) - w relu(-x)` with learned slopes w: bounded as a leaky ReLU with the largest `|w|`."""
    claim = ledger.prove("max_abs", weight)
    return ledger.derive(
        "elementwise", [(x, inner_axes(x))], shape=x.shape, claims=[claim],
        constants={"function": "leaky_relu", "numbers": [ledger.value_of(claim)]},
    )  # fmt: skip


@operation("aten.elu.default", executed=True)
def elu(ledger: Ledger, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    """ELU, which is `scale alpha (exp(input_scale x) - 1)` below zero and `scale x` above."""
    return apply(ledger, "elu", x, alpha, scale, input_scale)


@operation("aten.exp.default", executed=True)
def exp(ledger: Ledger, x: Value) -> Value:
    """The exponential of entries of bounded size, where it is as steep as it is large."""
    if (most := ledger.bounds(x, inner_axes(x)).largest.max()) > STEEPEST:
        raise ledger.refuse(
            f"it grows without bound, and entries may be as large as {shown(most, '.3g')}; bound them, as by "
            "`s * torch.tanh(x / s)` or a clamp, or certify for a smaller domain"
        )
    return apply(ledger, "exp", x)


@operation("aten.celu.default", executed=True)
def celu(ledger: Ledger, x: Value, alpha: float = 1.0) -> Value:
    """CELU, which is `alpha (exp(x / alpha) - 1)` below zero and x above. Its slope is at most 1."""
    if not alpha > 0:
        raise ledger.refuse(f"alpha={alpha} makes it grow without bound; pass a positive alpha")
    inner = 1 / alpha if alpha * Fraction(1 / alpha) <= 1 else math.nextafter(1 / alpha, 0.0)
    return apply(ledger, "elu", x, alpha, 1.0, inner)


@operation("aten.selu.default", executed=True)
def selu(ledger: Ledger, x: Value) -> Value:
    """SELU, which is an ELU with the constants of Klambauer et al. (2017), rounded up."""
    return apply(ledger, "elu", x, 1.6732632423543775, 1.0507009873554807, 1.0)


@operation("aten.hardtanh.default", executed=True)
def clamp(ledger: Ledger, x: Value, min: float | None = -1.0, max: float | None = 1.0) -> Value:
    """Every entry is limited to the interval from `min` to `max`, or at one side if the other limit is None."""
    min, max = None if min == -math.inf else min, None if max == math.inf else max
    if min is None or max is None:
        limits = {"clamp_min": min, "clamp_max": max}
        return next((apply(ledger, name, x, ledger.in_dtype(to)) for name, to in limits.items() if to is not None), x)
    return apply(ledger, "clamp", x, ledger.in_dtype(min), ledger.in_dtype(max))


operation("aten.clamp.default", executed=True)(lambda ledger, x, min=None, max=None: clamp(ledger, x, min, max))
operation("aten.clamp_min.default", executed=True)(lambda ledger, x, min: clamp(ledger, x, min, None))
operation("aten.clamp_max.default", executed=True)(lambda ledger, x, max: clamp(ledger, x, None, max))


@operation("aten.threshold.default", executed=True)
def threshold(ledger: Ledger, x: Value, threshold: float, value: float) -> Value:
    """`max(x, threshold)`; refused unless the replacement `value` is the threshold. ReLU is `Threshold(0, 0)`."""
    if threshold != value:
        raise ledger.refuse(f"it jumps from {value} to {threshold}; pass the threshold as the value, too")
    return clamp(ledger, x, threshold, None)


@operation("aten.softshrink.default", executed=True)
def softshrink(ledger: Ledger, x: Value, lambd: float = 0.5) -> Value:
    """`x - lambd` above lambd, `x + lambd` below `-lambd`, and 0 between."""
    ledger.in_dtype(lambd)
    return apply(ledger, "softshrink", x)


@operation("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default", kind="random")
def dropout(ledger: Ledger, x: Value, p: float, train: bool) -> Value:
    """The identity; refused in training mode."""
    if train and p > 0:
        raise ledger.refuse("dropout is active in training mode; call `model.eval()` first")
    return x


@operation("aten.softplus.default", executed=True)
def softplus(ledger: Ledger, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """`log(1 + exp(beta x)) / beta`, which is `-log_sigmoid(-beta x) / beta`, rounded to float32.

    Where `beta x` exceeds the threshold t, torch returns x, so the result jumps there by `log(1 + exp(-t)) / beta`, and
    has no Lipschitz constant. Relative to x = `t / beta`, the jump is less than `2^-24`, the rounding error of float32,
    if t is at least 14. So in any dtype the jump counts, and is listed, as a conversion to float32.

    Executed are `exp(beta x)`, `log(1 + .)`, and a quotient, which err no more than a `log_sigmoid` between a product
    and a quotient.
    """
    if not threshold >= 14:
        raise ledger.refuse(f"it jumps at threshold={threshold} by more than float32 rounds; leave the threshold at 20")
    smooth = apply(ledger, "log_sigmoid", moves.times(ledger, x, -float(beta)))
    return rounded(ledger, moves.times(ledger, smooth, -float(beta), divide=True), torch.float32)


@operation("aten.glu.default", executed=True)
def glu(ledger: Ledger, x: Value, dim: int = -1) -> Value:
    """The first half of the entries along an axis times the sigmoid of the second half."""
    a, b = (moves.pick(ledger, x, lambda t, i=i: torch.chunk(t, 2, dim)[i]) for i in range(2))
    return multiply(ledger, a, apply(ledger, "sigmoid", b))
