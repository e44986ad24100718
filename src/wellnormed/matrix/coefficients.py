"""Coefficient sets of the odd polynomials that approximate the matrix sign: a table and its facts.

A set is a composition of steps `p(x) = a x + b x^3 + c x^5`; its facts (largest and smallest value, slope at
zero) are those of the whole composition, checked by a test on a dense grid. `msign` runs it.
"""

import difflib
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch

Step = tuple[float, float, float]
HALF_ROUNDING = 1 / 64
"""Two eps of bfloat16: a bound on the relative error that its roundings cause in the singular values of two steps."""
BFLOAT16_ERROR = 0.02
"""The relative excess over the overshoot that products in 16 bits may cause; tests hold every set to it."""
OUTWARD = 2.0**-50
"""The relative amount by which the image of an interval under a step is widened. Extrema are located in float64; an
error in their location changes the values by far less."""
_ALL = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class CoefficientSet:
    """One composition of odd quintics, with the facts needed to use it safely.

    Args:
        name: Key in the registry.
        source: The publication of the numbers.
        steps: `(a, b, c)` of `a x + b x^3 + c x^5`, in the order of application.
        maximum: Upper bound, rounded up, of the composition over `[0, upper]`. The norm of every step depends on it, so
            a false one is refused.
        minimum: Lower bound, rounded down, over `[lower, upper]`.
        scale: A matrix enters the interval as `x / (scale * |x|_F + epsilon)`; at least 1 divided by `upper`.
        epsilon: The matrix is first divided by its largest entry, so that epsilon acts alike on inputs of any size
            (published codes add it to the norm of the raw gradient, which damps gradients near 1e-7).
        lower: Low end of the interval on which `minimum` holds.
        upper: High end of the interval on which the composition is bounded.
        safe_dtypes: Dtypes in which measurements found the iteration to keep its bounds.

    Example:
        >>> get("jordan-5").overshoot
        1.20237
    """

    name: str
    source: str
    steps: tuple[Step, ...]
    maximum: float
    minimum: float
    scale: float = 1.0
    epsilon: float = 0.0
    lower: float = 0.01
    upper: float = 1.0
    safe_dtypes: frozenset[torch.dtype] = _ALL

    def __post_init__(self) -> None:
        if not self.steps or not all(math.isfinite(number) for step in self.steps for number in step):
            raise ValueError(f"steps={self.steps} of set {self.name!r}: give at least one, of finite numbers")
        if self.scale * self.upper < 1:
            raise ValueError(
                f"scale={self.scale} of coefficient set {self.name!r} may put a singular value at "
                f"{1 / self.scale:.4g}, above its interval's end {self.upper}, where the iteration can diverge; use a "
                f"scale of at least {1 / self.upper:.4g}"
            )
        highest, lowest = image(self.steps, 0.0, self.upper)[1], image(self.steps, self.lower, self.upper)[0]
        rounded = OUTWARD * max(1.0, abs(self.slope))  # the steps magnify a rounding by their slopes
        if not self.maximum >= highest - rounded:
            raise ValueError(
                f"maximum={self.maximum} of coefficient set {self.name!r} is false: on [0, {self.upper}] it reaches "
                f"{highest:.9g}; state at least that"
            )
        if not self.minimum <= lowest + rounded:
            raise ValueError(
                f"minimum={self.minimum} of coefficient set {self.name!r} is false: on [{self.lower}, {self.upper}] it "
                f"falls to {lowest:.9g}; state at most that"
            )

    @property
    def slope(self) -> float:
        """Slope of the composition at zero."""
        return math.prod(a for a, _, _ in self.steps)

    @property
    def overshoot(self) -> float:
        """Upper bound of the composition on `[0, upper]`, at least 1: the largest spectral norm of a step."""
        return max(1.0, self.maximum)

    @functools.cached_property
    def bears_half_rounding(self) -> bool:
        """Whether `maximum` still holds when bfloat16 rounding inflates the input of each step by 1/64."""
        high = self.upper
        for step in self.steps:
            high = image([step], 0.0, high * (1 + HALF_ROUNDING))[1]
            if high > 4:  # far outside, numbers grow without bound
                return False
        return high <= self.overshoot

    @property
    def coarser_than_bfloat16(self) -> bool:
        """Whether products in bfloat16 are safe, with errors below the error of the set itself."""
        return torch.bfloat16 in self.safe_dtypes and self.maximum - self.minimum > 2 * BFLOAT16_ERROR


def critical_points(step: Step) -> list[float]:
    """The points `x > 0` at which `a x + b x^3 + c x^5` may have an extremum, in ascending order.

    Example:
        >>> critical_points((1.5, -0.5, 0.0))
        [1.0]
    """
    a, b, c = step
    discriminant = 9 * b * b - 20 * a * c
    if discriminant < 0:
        return []
    larger = -3 * b + math.copysign(math.sqrt(discriminant), -b)  # no cancellation in either root of x^2
    squares = [2 * a / larger if larger else 0.0, larger / (10 * c) if c else 0.0]
    return sorted(math.sqrt(square) for square in squares if square > 0)


def image(steps: Iterable[Step], low: float, high: float) -> tuple[float, float]:
    """The interval onto which a composition maps `[low, high]`, rounded outwards from exact arithmetic at every step.

    Example:
        >>> image([(1.5, -0.5, 0.0)], 0.0, 1.0)
        (0.0, 1.0...)
    """
    for step in steps:
        a, b, c = map(Fraction, step)
        points = map(Fraction, (low, high, *(x for x in critical_points(step) if low < x < high)))
        values = [x * (a + x * x * (b + x * x * c)) for x in points]
        if max(map(abs, values)) > 1e100:
            return -math.inf, math.inf  # the composition diverges, and leaves the range of floats
        smallest, largest = float(min(values)), float(max(values))
        low, high = smallest - OUTWARD * abs(smallest), largest + OUTWARD * abs(largest)
    return low, high


def stretched(step: Step, factor: float) -> Step:
    """`p(x / factor)`."""
    a, b, c = step
    return a / factor, b / factor**3, c / factor**5


_PE = "The Polar Express (Amsel et al., 2025), algorithm 1"
_LT = "Training Transformers with Enforced Lipschitz Bounds (LT)"
_BB = "Björck and Bowie (1971)"
_MD = "Modular Duality in Deep Learning (MD)"
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_DAMPED = tuple(stretched(step, 1.01) for step in _POLAR_EXPRESS)
_MODDED = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
_YOU_6 = tuple(
    (a / 1024, b / 1024, c / 1024)
    for a, b, c in (
        (3955, -8306, 5008),
        (3735, -6681, 3463),
        (3799, -6499, 3211),
        (4019, -6385, 2906),
        (2677, -3029, 1162),
        (2172, -1833, 682),
    )
)
_YOU_5 = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_CLIPPING = (
    (3.5318, -4.7911, 1.9388),
    (3.3274, -4.0557, 1.5782),
    (3.0809, -3.5160, 1.3464),
    (2.7476, -2.8484, 1.0775),
    (2.2948, -2.0951, 0.7895),
    (2.1535, -1.8338, 0.6869),
)
_TABLE = (
    CoefficientSet("jordan-5", "Muon (Jordan, 2024); torch.optim.Muon; Scion", _JORDAN, 1.20237, 0.6818),
    CoefficientSet("you-6", f"J. You, used by Modula and {_LT}", _YOU_6, 0.999335, 0.9955),
    CoefficientSet("you-5-nanogpt", f"J. You, used in the NanoGPT runs of {_LT}", _YOU_5, 1.145021, 0.9777),
    CoefficientSet("polar-express-8", _PE, (*_DAMPED, (1.875, -1.25, 0.375)), 1.0 + 1e-9, 0.99999),
    CoefficientSet("polar-express-5", f"{_PE}, stopped at 5 steps", _DAMPED[:5], 1.12356, 0.8702),
    CoefficientSet("polar-express-5-modded", "modded-nanogpt", _MODDED, 1.141128, 0.8588, scale=1.02, epsilon=1e-6),
    CoefficientSet("spectral-clipping-6", "Spectral clipping (SC), code", _CLIPPING, 1.009634, 1.0058),
    CoefficientSet("cubic", f"{_BB}, 15 steps", ((1.5, -0.5, 0.0),) * 15, 1.0 + 1e-9, 0.99999),
    CoefficientSet("quintic", f"{_BB}, order 2, 10 steps", ((1.875, -1.25, 0.375),) * 10, 1.0 + 1e-9, 0.99999),
    CoefficientSet("modula-5", f"{_MD}, learning-rate transfer", ((2.0, -1.5, 0.5),) * 5, 1.001759, 0.3119),
    CoefficientSet("watermark-10", f"{_MD}, watermark", ((3.0, -3.2, 1.2),) * 10, 1.210455, 0.9962),
)
REGISTRY: dict[str, CoefficientSet] = {entry.name: entry for entry in _TABLE}


def get(name_or_set: str | CoefficientSet) -> CoefficientSet:
    """The set of that name in `REGISTRY`, or the set itself.

    Example:
        >>> len(get("polar-express-8").steps)
        8
    """
    if isinstance(name_or_set, CoefficientSet):
        return name_or_set
    if isinstance(name_or_set, str) and name_or_set in REGISTRY:
        return REGISTRY[name_or_set]
    nearest = difflib.get_close_matches(str(name_or_set), REGISTRY, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"coefficients={name_or_set!r} is not a registered set; did you mean {nearest!r}? Known: {', '.join(REGISTRY)}"
    )


def check_dtype(chosen: CoefficientSet, dtype: torch.dtype) -> None:
    """Refuse a set that is not safe in this dtype."""
    if dtype not in chosen.safe_dtypes:
        safe = ", ".join(sorted(str(d).removeprefix("torch.") for d in chosen.safe_dtypes))
        raise ValueError(
            f"coefficients={chosen.name!r} is not safe in {dtype}: rounding carries singular values out of its "
            f"interval (safe: {safe}); convert the matrix to float32 or choose another set"
        )
