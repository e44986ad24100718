"""The one table of functions that are applied to every entry, with their slopes and sizes, rounded up."""

from decimal import Decimal
from typing import NamedTuple

from wellnormed.proof.decimals import ONE, ZERO
from wellnormed.proof.reading import require


class Shape(NamedTuple):
    """Bounds of a function f of one number."""

    slope: Decimal
    """Largest absolute slope."""
    growth: Decimal
    """`|f(x)| <= growth |x| + |f(0)|`."""
    at_zero: Decimal
    """`|f(0)|`."""
    ceiling: Decimal | None
    """Largest `|f(x)|`; None for an unbounded function."""


FUNCTIONS: dict[str, tuple[str, str, str, str | None]] = {
    **dict.fromkeys(("relu", "abs", "asinh", "tanhshrink", "softshrink"), ("1", "1", "0", None)),
    **dict.fromkeys(("tanh", "sin", "softsign"), ("1", "1", "0", "1")),
    "relu6": ("1", "1", "0", "6"),
    "cos": ("1", "1", "1", "1"),
    "atan": ("1", "1", "0", "1.570796326794896619231322"),
    "log_sigmoid": ("1", "1", "0.6931471805599453094172322", None),
    "sigmoid": ("0.25", "0.25", "0.5", "1"),
    # torch multiplies by 1/6 rounded to float32, which is larger
    "hardsigmoid": ("0.1666666716337203979492188", "0.1666666716337203979492188", "0.5", "1"),
    "hardswish": ("1.5", "1", "0", None),
    # 2 / sqrt(pi)
    "erf": ("1.128379167095512573896159", "1.128379167095512573896159", "0", "1"),
    # Phi(sqrt 2) + sqrt 2 phi(sqrt 2); LT's 1.1289 is rounded down
    "gelu": ("1.128904145185154786340745", "1", "0", None),
    "gelu_tanh": ("1.128993068658771765455905", "1", "0", None),
    "silu": ("1.099839320128866916958185", "1", "0", None),
    "mish": ("1.088498161251727861228294", "1", "0", None),
}
"""Name -> slope, growth, value at zero and ceiling of the functions without settings."""
SETTINGS = {"leaky_relu": 1, "elu": 3, "clamp": 2, "clamp_min": 1, "clamp_max": 1}
"""Name -> number of settings of the others."""


def shape_of(name: str, *numbers: float) -> Shape:
    """Look up the bounds of a function.

    Args:
        name: Name of the function, such as `gelu_tanh`.
        numbers: The settings that the executed operation passes: the slope of `leaky_relu`; alpha, scale and inner of
            `elu`, which is `scale alpha (exp(inner x) - 1)` below zero; the limits of the clamps.

    Raises:
        CheckError: The name is unknown, or the function has no bounds with these settings.

    Example:
        >>> shape_of("leaky_relu", 0.01).slope
        Decimal('1')
    """
    known = name in {*SETTINGS, *FUNCTIONS} and len(numbers) == SETTINGS.get(name, 0)
    require(known, f"nothing is known of {name[:60]!r} of {len(numbers)} numbers")
    settings = [Decimal(each) for each in numbers]
    if name in ("leaky_relu", "elu"):  # slopes between 1 and the setting, or so times the scale
        alpha, scale, inner = settings if name == "elu" else (settings[0], ONE, ONE)
        require(inner >= 0, f"its exponential grows without bound for input_scale={inner}; let it be positive")
        slope = abs(scale) * max(ONE, abs(alpha) * inner)
        return Shape(slope, slope, ZERO, None)
    if name == "clamp":
        low, high = settings
        require(low <= high, f"its limits {low} and {high} stand in the wrong order")
        return Shape(ONE, ONE, max(ZERO, low, -high), max(abs(low), abs(high)))
    if name in ("clamp_min", "clamp_max"):
        return Shape(ONE, ONE, max(ZERO, settings[0] if name == "clamp_min" else -settings[0]), None)
    slope, growth, at_zero, ceiling = FUNCTIONS[name]
    return Shape(Decimal(slope), Decimal(growth), Decimal(at_zero), None if ceiling is None else Decimal(ceiling))
