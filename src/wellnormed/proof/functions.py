"""The one table of functions that are applied to every entry, with their slopes and sizes, rounded up."""

from decimal import Decimal
from typing import NamedTuple

import numpy as np

from wellnormed.proof.decimals import ONE, ZERO
from wellnormed.proof.reading import require


class Shape(NamedTuple):
    """Bounds of a function f of one number."""

    slopes: tuple[Decimal, Decimal]
    """The least and the largest slope."""
    growth: Decimal
    """`|f(x)| <= growth |x| + |f(0)|`."""
    at_zero: Decimal
    """`|f(0)|`."""
    ceiling: Decimal | None
    """Largest `|f(x)|`; None for an unbounded function."""

    @property
    def slope(self) -> Decimal:
        """Largest absolute slope."""
        return max(map(abs, self.slopes))


FUNCTIONS: dict[str, tuple[str, str, str, str, str | None]] = {
    **dict.fromkeys(("relu", "asinh", "tanhshrink", "softshrink"), ("0", "1", "1", "0", None)),
    "abs": ("-1", "1", "1", "0", None),
    **dict.fromkeys(("tanh", "softsign"), ("0", "1", "1", "0", "1")),
    "sin": ("-1", "1", "1", "0", "1"),
    "relu6": ("0", "1", "1", "0", "6"),
    "cos": ("-1", "1", "1", "1", "1"),
    "atan": ("0", "1", "1", "0", "1.570796326794896619231322"),
    "log_sigmoid": ("0", "1", "1", "0.6931471805599453094172322", None),
    "sigmoid": ("0", "0.25", "0.25", "0.5", "1"),
    # torch multiplies by 1/6 rounded to float32, which is larger
    "hardsigmoid": ("0", "0.1666666716337203979492188", "0.1666666716337203979492188", "0.5", "1"),
    "hardswish": ("-0.5", "1.5", "1", "0", None),
    # 2 / sqrt(pi)
    "erf": ("0", "1.128379167095512573896159", "1.128379167095512573896159", "0", "1"),
    # Phi(sqrt 2) + sqrt 2 phi(sqrt 2), and 1 less that; LT's 1.1289 is rounded down
    "gelu": ("-0.128904145185154786340745", "1.128904145185154786340745", "1", "0", None),
    "gelu_tanh": ("-0.128993068658771765455905", "1.128993068658771765455905", "1", "0", None),
    "silu": ("-0.099839320128866916958185", "1.099839320128866916958185", "1", "0", None),
    "mish": ("-0.112526122389462556407328", "1.088498161251727861228294", "1", "0", None),
}
"""Name -> least and largest slope, growth, value at zero and ceiling of the functions without settings."""
ERRORS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(("relu", "abs", "clamp", "clamp_min", "clamp_max", "relu6"), (0, 0, 0)),
    "leaky_relu": (3, 0, 0), "softsign": (6, 0, 0), "elu": (10, 2, 4), "silu": (14, 1, 0),
    "softshrink": (3, 0, 0), "tanhshrink": (4, 12, 0),
    **dict.fromkeys(("tanh", "atan", "sigmoid"), (10, 0, 0)), "erf": (10, 0, 8), "asinh": (16, 0, 0),
    **dict.fromkeys(("sin", "cos"), (4, 0, 4)), "hardsigmoid": (3, 3, 3), "hardswish": (6, 6, 0),
    "gelu": (6, 12, 0), "gelu_tanh": (8, 16, 0), "log_sigmoid": (16, 0, 4), "mish": (16, 8, 0), "exp": (8, 0, 0),
}  # fmt: skip
"""Name -> a, b and c of the error of the executed `f(x)`: at most `u (a |f(x)| + b |x| + c)`, if one operation errs by
u, and `UNDERFLOW` times the least normal number. For `elu`, c is that of each unit of its scale and its alpha.

`results/ulps.json` has the shares of it that `campaigns/ulps.py` measured. Nothing is said where `8 |x|` overflows."""
UNDERFLOW = 256
STEEPEST = 700
"""The largest argument of an exponential; float64 overflows little beyond it."""
SHORT = ("hardsigmoid", "hardswish")
"""Functions that some kernels compute with constants of float32, in float64, too."""
COUPLINGS = {"tanh": ONE, "sin": ONE, "cos": ONE, "sigmoid": Decimal("1.442719099991587856366947")}
"""Name -> the least k with `f(x)^2 + (f'(x) / slope)^2 / k <= 1` for all x: where f is large, it is flat. For sigmoid,
with `s = f(x)` it is the largest `16 s^2 (1 - s) / (1 + s)`, which is `8 (5 sqrt(5) - 11)`, at the golden section."""
SETTINGS = {"leaky_relu": 1, "elu": 3, "clamp": 2, "clamp_min": 1, "clamp_max": 1, "exp": 1}
"""Name -> number of settings of the others."""


def sizes_at(name: str, x: np.ndarray) -> np.ndarray | None:
    """Upper bounds of `|f(x)|` for every entry, of functions that vanish far below 0; None for all others.

    No positive x is increased. At `x = -t`, a ReLU is 0, the others are at most t times a bound of the distribution
    function that they multiply x with: `exp(-t^2 / 2) / 2` of the normal one, and of the logistic one `exp(-t)`, which
    a tanh of t makes steeper. From t = 1 on these fall, so that no larger t than 30 needs to be looked at.

    Example:
        >>> sizes_at("silu", np.array([-20.0, 3.0]))
        array([4.12230725e-08, 3.00000000e+00])
    """
    if name == "relu":
        return np.maximum(x, 0)
    t = np.clip(-x, 0, 30)
    below = {"gelu": (0.5, t / 2), "gelu_tanh": (1.0, 1.59), "silu": (1.0, 1.0), "mish": (1.0, 1.0)}
    if name not in below:
        return None
    factor, rate = below[name]
    return np.where(x > 0, x, np.nextafter(factor * t * np.exp(-rate * t) * (1 + 1e-9), np.inf))


def shape_of(name: str, *numbers: float) -> Shape:
    """Look up the bounds of a function.

    Args:
        name: Name of the function, such as `gelu_tanh`.
        numbers: The settings that the executed operation passes: the slope of `leaky_relu`; alpha, scale and inner of
            `elu`, which is `scale alpha (exp(inner x) - 1)` below zero; the limits of the clamps; the largest
            argument of `exp`, which is bounded up to there.

    Raises:
        CheckError: The name is unknown, or the function has no bounds with these settings.

    Example:
        >>> shape_of("leaky_relu", 0.25).slopes
        (Decimal('0.25'), Decimal('1'))
    """
    known = name in {*SETTINGS, *FUNCTIONS} and len(numbers) == SETTINGS.get(name, 0)
    require(known, f"nothing is known of {name[:60]!r} of {len(numbers)} numbers")
    settings = [Decimal(each) for each in numbers]
    if name in ("leaky_relu", "elu"):
        slopes = [settings[0], ONE]
        if name == "elu":
            alpha, scale, inner = settings
            require(inner >= 0, f"its exponential grows without bound for input_scale={inner}; let it be positive")
            slopes = [ZERO, scale, (abs(scale) * abs(alpha) * inner).copy_sign(scale * alpha)]  # rounded outward
        shape = Shape((min(slopes), max(slopes)), ZERO, ZERO, None)
        return shape._replace(growth=shape.slope)
    if name == "clamp":
        low, high = settings
        require(low <= high, f"its limits {low} and {high} stand in the wrong order")
        return Shape((ZERO, ONE), ONE, max(ZERO, low, -high), max(-low, high))
    if name in ("clamp_min", "clamp_max"):
        return Shape((ZERO, ONE), ONE, max(ZERO, settings[0] if name == "clamp_min" else -settings[0]), None)
    if name == "exp":
        (limit,) = settings
        require(limit <= STEEPEST, f"its arguments may exceed {STEEPEST}")
        most = limit.exp().next_plus()  # which is the nearest decimal, whatever the context
        return Shape((ZERO, most), most, ONE, most)
    *known, ceiling = FUNCTIONS[name]
    low, high, growth, at_zero = map(Decimal, known)
    return Shape((low, high), growth, at_zero, None if ceiling is None else Decimal(ceiling))
