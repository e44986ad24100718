"""Coefficient sets for the matrix sign that are optimal for a stated interval, number of steps and precision.

Among compositions of `n` odd polynomials of degree `d`, the least largest error `|1 - p(x)|` on `[lower, 1]` is
reached greedily: each step is the best odd approximation of 1 on the interval that the steps before it have left
(Amsel, Persson, Musco and Gower, The Polar Express: Optimal Matrix Sign Methods, 2025). The best approximation on
`[l, u]` equioscillates between `1 - E` and `1 + E` and maps `[l, u]` onto that interval: in closed form for degree 3,
by the Remez exchange for degree 5.

The exact optimum cannot be run in low precision, for two reasons. `dtype` decides how much is given up for each:

- Just above its interval a best approximation climbs steeply (26 to 1 at the first step), so one rounding upwards
  is magnified at every further step. So every interval is fitted with a margin at its upper end.
- If the interval is long, the polynomial dips to `1 - E` in its middle, as close to zero as at `l`, where a rounding
  can change the sign of large singular values. So no interval begins below a cushion of some roundings.

In float64 the error agrees with the theorem to five digits; in float32 it is a few percent larger. The published table
does the same for bfloat16 with a safety factor of 1.01 and a cushion of 0.024.
"""

import functools
import math

import numpy as np
import torch

from wellnormed._inputs import require_choice, require_numbers
from wellnormed._ranges import POSITIVE, Range
from wellnormed.matrix.coefficients import CoefficientSet, Step, critical_points, image, stretched

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUSHION = 4  # in units of eps: the dip, 8 times as high, then stays clear of the roundings of one step
_LARGEST_MARGIN = 1 / 64  # two eps of bfloat16
_NEAR_ONE = 1e-5  # for 1 - l/u below it, Newton-Schulz is within 3e-16 of the best, and Remez fails by rounding
_NEWTON_SCHULZ = (1.875, -1.25, 0.375)


def optimal_coefficients(
    lower: float, steps: int, degree: int = 5, dtype: torch.dtype = torch.float32
) -> CoefficientSet:
    """The composition of odd polynomials nearest to the sign function on `[lower, 1]` that `dtype` can run.

    Args:
        lower: Low end of the interval, in (0, 1): the smallest singular value, as a fraction of the Frobenius
            norm, that is to become 1.
        steps: Number of polynomials, at least 1. Steps beyond the precision of `dtype` do no harm.
        degree: The degree of each polynomial: 5 (three matrix products a step) or 3 (two).
        dtype: The lowest precision in which the set must be safe; wider ones are then safe too.

    Returns:
        A set for `msign`. Its `maximum` and `minimum` hold in exact arithmetic on `[0, upper]` and `[lower, upper]`;
        `upper` exceeds 1 by the margin of `dtype`, so that a rounded Frobenius norm cannot leave the interval. In its
        `safe_dtypes` the composition stays positive and below its maximum on `[max(lower, 4 eps), upper]`, even if the
        input of every step is moved by one eps of its largest value.

    Example:
        >>> chosen = optimal_coefficients(0.01, 5)
        >>> chosen.maximum - chosen.minimum < 3e-6
        True
        >>> chosen.name, chosen.upper
        ('minimax(lower=0.01, steps=5, degree=5, dtype=float32)', 1.000345...)
    """
    inside = Range(lambda x: 0 < x < 1, "lie strictly between 0 and 1: a part of the Frobenius norm, usually 0.001")
    require_numbers("", {"lower": lower}, inside)
    require_numbers("", {"steps": steps}, POSITIVE, "5 to 8 are usual", whole=True)
    require_choice("degree", degree, (3, 5), "3 has cheaper steps")
    require_choice("dtype", dtype, _DTYPES, "msign runs in these")
    return _compose(float(lower), steps, degree, dtype)


@functools.lru_cache(maxsize=256)
def _compose(lower: float, count: int, degree: int, dtype: torch.dtype) -> CoefficientSet:
    eps = torch.finfo(dtype).eps
    margin = min(math.sqrt(eps), _LARGEST_MARGIN)
    best = best_quintic if degree == 5 else best_cubic
    low, high, steps = lower, 1 + margin, []
    for _ in range(count):
        step = best(max(low, _CUSHION * eps * high), high)
        # Where the cushion was used, [low, cushion] falls below 1 - E: bring the image back around 1.
        factor = 2 / sum(image([step], low, high))
        step = step[0] * factor, step[1] * factor, step[2] * factor
        low, high = image([step], low, high)
        high *= 1 + margin * (1 - low)  # near 1 the steps are flat and damp a rounding by themselves
        steps.append(step)
    steps, upper = tuple(steps), 1 + margin
    maximum = image(steps, 0.0, upper)[1]
    return CoefficientSet(
        name=f"minimax(lower={lower!r}, steps={count}, degree={degree}, dtype={str(dtype).removeprefix('torch.')})",
        source="The Polar Express (Amsel et al., 2025), theorem on greedy compositions",
        steps=steps,
        maximum=maximum,
        minimum=image(steps, lower, upper)[0],
        lower=lower,
        upper=upper,
        safe_dtypes=frozenset(d for d in _DTYPES if _survives(steps, lower, maximum, torch.finfo(d).eps)),
    )


def best_cubic(low: float, high: float) -> Step:
    """The odd cubic nearest to 1 on `[low, high]`: `p(low) = p(high) = 1 - E`, `p = 1 + E` at the maximum between.

    Example:
        >>> best_cubic(1.0, 1.0)
        (1.5, -0.5, 0.0)
    """
    square = (low * low + low * high + high * high) / 3  # the maximum is at its square root
    scale = 2 / (low * high * (low + high) + 2 * square**1.5)
    return 3 * square * scale, -scale, 0.0


def best_quintic(low: float, high: float) -> Step:
    """The odd quintic nearest to 1 on `[low, high]`: `1 - E, 1 + E, 1 - E, 1 + E` at four points, by Remez.

    Example:
        >>> a, b, c = best_quintic(1e-9, 1.0)
        >>> round(a, 4)  # no quintic bounded by 2 on [0, 1] can have a larger slope at zero
        8.5143
    """
    ratio = low / high
    if 1 - ratio < _NEAR_ONE:
        return stretched(_NEWTON_SCHULZ, (low + high) / 2)
    points = np.array([ratio, (3 * ratio + 1) / 4, (ratio + 3) / 4, 1.0])
    a = b = c = 0.0
    for _ in range(8):  # quadratic convergence: 5 suffice from 1e-16 to 1 - 1e-5
        a, b, c, _ = np.linalg.solve(np.stack([points, points**3, points**5, [1, -1, 1, -1]], 1), np.ones(4)).tolist()
        points[1:3] = critical_points((a, b, c))
    return stretched((a, b, c), high)


def _survives(steps: tuple[Step, ...], lower: float, maximum: float, eps: float) -> bool:
    """Whether the bounds hold even if one eps of the largest value is added or subtracted before every step."""
    low, high = max(lower, _CUSHION * eps), 1 + eps
    for step in steps:
        low, high = image([step], low, high)
        low, high = low - eps * high, high * (1 + eps)
        if not (low > 0 and high < 4):  # far outside, numbers grow without bound
            return False
    return high <= maximum * (1 + 2 * eps)
