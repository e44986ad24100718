"""Functions applied to every entry: their largest slopes, rounded up."""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import torch

from wellnormed.propagation.decimals import ONE, ZERO, least, sqrt_up
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.moves import pick
from wellnormed.propagation.operations.elementwise import multiply
from wellnormed.propagation.registry import Read, operation, primitive, refusal
from wellnormed.propagation.rows import Claim
from wellnormed.propagation.value import Bounds, Value


class Shape(NamedTuple):
    """What is known of a function f of one number."""

    slope: Decimal
    """Largest absolute slope."""
    growth: Decimal | None = None
    """`|f(x)| <= growth |x| + at_zero`; the slope if None."""
    at_zero: Decimal = ZERO
    """`|f(0)|`."""
    ceiling: Decimal | None = None
    """Largest `|f(x)|`."""


def _d(x: float | str) -> Decimal:
    return Decimal(x)


FUNCTIONS: dict[str, Callable[..., Shape]] = {
    "relu": lambda: Shape(ONE),
    "abs": lambda: Shape(ONE),
    "relu6": lambda: Shape(ONE, ceiling=_d(6)),
    "tanh": lambda: Shape(ONE, ceiling=ONE),
    "sin": lambda: Shape(ONE, ceiling=ONE),
    "cos": lambda: Shape(ONE, at_zero=ONE, ceiling=ONE),
    "atan": lambda: Shape(ONE, ceiling=_d("1.5707963267948967")),
    "asinh": lambda: Shape(ONE),
    "softsign": lambda: Shape(ONE, ceiling=ONE),
    "tanhshrink": lambda: Shape(ONE),
    "softshrink": lambda: Shape(ONE),
    "log_sigmoid": lambda: Shape(ONE, at_zero=_d("0.69314718055994531")),
    "sigmoid": lambda: Shape(_d("0.25"), at_zero=_d("0.5"), ceiling=ONE),
    # torch multiplies by 1/6 rounded to float32, which is larger
    "hardsigmoid": lambda: Shape(_d("0.16666667163372041"), at_zero=_d("0.5"), ceiling=ONE),
    "hardswish": lambda: Shape(_d("1.5"), growth=ONE),
    "erf": lambda: Shape(_d("1.1283791670955126"), ceiling=ONE),  # 2 / sqrt pi
    # Phi(sqrt 2) + sqrt 2 phi(sqrt 2); LT's 1.1289 is rounded down
    "gelu": lambda: Shape(_d("1.12890414518516"), growth=ONE),
    "gelu_tanh": lambda: Shape(_d("1.12899306865878"), growth=ONE),
    "silu": lambda: Shape(_d("1.09983932012887"), growth=ONE),
    "mish": lambda: Shape(_d("1.08849836"), growth=ONE),
    "leaky_relu": lambda slope: Shape(max(ONE, abs(_d(slope)))),
    # alpha (exp(x) - 1) below zero
    "elu": lambda alpha, scale, inner: Shape(abs(_d(scale)) * max(ONE, abs(_d(alpha) * _d(inner)))),
    "clamp_min": lambda low: Shape(ONE, at_zero=max(ZERO, _d(low))),
    "clamp_max": lambda high: Shape(ONE, at_zero=max(ZERO, -_d(high))),
    "clamp": lambda low, high: Shape(
        ONE, at_zero=max(ZERO, _d(low), -_d(high)), ceiling=max(abs(_d(low)), abs(_d(high)))
    ),
}
"""Name -> its shape, for the numbers that the executed operation passes. The checker has a table of its own."""


def apply(step: Ledger, function: str, x: Value, *numbers: float) -> Value:
    """A function of the table, entry by entry; the numbers are its settings."""
    return step.derive(
        "elementwise", [(x, x.inner_axes())], shape=x.shape,
        constants={"function": function, "numbers": [float(each) for each in numbers]},
    )  # fmt: skip


@primitive("elementwise")
def _elementwise(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    ((shape, axes, x),), known = reads, FUNCTIONS[c["function"]](*c["numbers"])
    root = sqrt_up(math.prod(shape[axis] for axis in axes))
    growth = known.slope if known.growth is None else known.growth
    radius, largest = growth * x.radius + known.at_zero * root, growth * x.largest + known.at_zero
    if known.ceiling is not None:
        radius = least(radius, known.ceiling * root)
        largest = least(largest, known.ceiling)
    return Bounds(radius, known.slope * x.gain, largest)


for _name in ("relu", "abs", "relu6", "tanh", "sin", "cos", "atan", "asinh", "sigmoid", "hardsigmoid", "hardswish"):
    operation(f"aten.{_name}.default")(lambda step, x, name=_name: apply(step, name, x))
for _name in ("erf", "silu", "mish", "log_sigmoid"):
    operation(f"aten.{_name}.default")(lambda step, x, name=_name: apply(step, name, x))


@operation("aten.gelu.default")
def gelu(step: Ledger, x: Value, approximate: str = "none") -> Value:
    """Exact or by tanh, with a slope of its own each."""
    return apply(step, "gelu_tanh" if approximate == "tanh" else "gelu", x)


@operation("aten.leaky_relu.default")
def leaky_relu(step: Ledger, x: Value, negative_slope: float = 0.01) -> Value:
    """Slopes 1 and another."""
    return apply(step, "leaky_relu", x, negative_slope)


@operation("aten.prelu.default", "aten._prelu_kernel.default")
def prelu(step: Ledger, x: Value, weight: Stored) -> Value:
    """Slopes 1 and learned ones: the difference of two monotone parts, each times a constant."""
    (claim,) = [step.prove("max_abs", weight)]
    return step.derive(
        "elementwise", [(x, x.inner_axes())], shape=x.shape, claims=[claim],
        constants={"function": "leaky_relu", "numbers": [claim.values[0]]},
    )  # fmt: skip


@operation("aten.elu.default")
def elu(step: Ledger, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    """Exponential below zero."""
    if input_scale < 0:
        raise step.refuse(f"input_scale={input_scale} makes it grow without bound; let it be positive")
    return apply(step, "elu", x, alpha, scale, input_scale)


@operation("aten.celu.default")
def celu(step: Ledger, x: Value, alpha: float = 1.0) -> Value:
    """`alpha (exp(x / alpha) - 1)` below zero, of slope at most 1."""
    if not alpha > 0:
        raise step.refuse(f"alpha={alpha} makes it grow without bound; let it be positive")
    return apply(step, "elu", x, 1.0, 1.0, 1.0)


@operation("aten.selu.default")
def selu(step: Ledger, x: Value) -> Value:
    """The constants of Klambauer et al., rounded up."""
    return apply(step, "elu", x, 1.6732632423543775, 1.0507009873554807, 1.0)


@operation("aten.hardtanh.default")
def clamp(step: Ledger, x: Value, min: float | None = -1.0, max: float | None = 1.0) -> Value:
    """Cut off at two numbers, or at one."""
    if min is None or max is None:
        limits = {"clamp_min": min, "clamp_max": max}
        return next((apply(step, name, x, float(limit)) for name, limit in limits.items() if limit is not None), x)
    if min > max:
        raise step.refuse(f"min={min} exceeds max={max}")
    return apply(step, "clamp", x, min, max)


@operation("aten.clamp.default")
def clamp_open(step: Ledger, x: Value, min: float | None = None, max: float | None = None) -> Value:
    """As `clamp`, without defaults."""
    return clamp(step, x, min, max)


operation("aten.clamp_min.default")(lambda step, x, min: clamp(step, x, min, None))
operation("aten.clamp_max.default")(lambda step, x, max: clamp(step, x, None, max))
operation("aten.softshrink.default")(lambda step, x, lambd=0.5: apply(step, "softshrink", x))
operation("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")(
    lambda step, x, p, train: _dropout(step, x, p, train)
)


def _dropout(step: Ledger, x: Value, p: float, train: bool) -> Value:
    if train and p > 0:
        raise step.refuse("dropout is active in training mode; call `model.eval()` first")
    return x


@refusal("aten.softplus.default")
def softplus(step: Ledger, x: Value, *arguments: Any) -> Value:
    """Refused: above its threshold torch leaves out the logarithm, which is a jump."""
    raise step.refuse("torch's softplus jumps by 2e-9 at its threshold; write `-torch.nn.functional.logsigmoid(-x)`")


@operation("aten.glu.default")
def glu(step: Ledger, x: Value, dim: int = -1) -> Value:
    """One half times the sigmoid of the other."""
    a, b = (pick(step, x, lambda t, i=i: torch.chunk(t, 2, dim)[i]) for i in range(2))
    return multiply(step, a, apply(step, "sigmoid", b))
