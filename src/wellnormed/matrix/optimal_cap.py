"""The odd polynomial that caps singular values and otherwise leaves a weight alone, as far as its degree allows.

A cap is applied after every step, so what counts is not one application but thousands: a value below the cap
that no gradient holds up is multiplied by `p(x)/x` each time. The smallest largest `|p(x) - x|` on `[0, 1]` (units of
the cap) is therefore the wrong aim: at a step of 0.01 (degree 9) its optimum takes 0.2 to 0.002 in 100 applications.
Nor is it enough to ask for `|p| <= 1` above the cap: a value pushed there by every step of 0.3 would come out anywhere
between 0.65 and 1. We ask for the least `M` such that, with `c(x) = min(x, 1)` the exact clip and `k = 1 + step`,

    0 <= c(x) - p(x) <= M c(x)^5 on [0, k].

No value grows, small ones are kept to fifth order, and `M` bounds the departure from the clip everywhere. The
soft cap of LT (Training Transformers with Enforced Lipschitz Bounds) has the same order of contact and costs the
same four products as degree 9; up to a step of 0.5 it is a candidate of this problem, so it never has a smaller `M`.

Let `h = (x - p)/x^5`, of degree `m` in `t = x^2`, and `S(t) = (1 + T_m(2 t - 1))/2`. No polynomial of that degree
with `0 <= h <= M` on `[0, 1]` exceeds `M S(t)` at any `t > 1` (Chebyshev). So `M >= (x - 1)/(x^5 S(x^2))` for
every `x` in `[1, k]`, and `p = x - M x^5 S(x^2)` with the largest of these is optimal while it stays above
`1 - M`: at degree 9, `p = x - M x^5 (2 x^2 - 1)^2` up to a step of 0.16. Beyond, an exchange (the dual simplex
method on a semi-infinite linear program) goes on from the extrema of `S`; below, it stops there.
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from wellnormed.matrix._checks import Matrices, check_matrix
from wellnormed.matrix.soft_cap import odd_polynomial, reached_norm

# Largest reach, in units of the cap and rounded down, at which M is at most 1/2: further off, it is no cap.
REACH_LIMIT = dict(
    zip(range(3, 22, 2), (2.298, 1.714, 2.417, 3.115, 3.812, 4.508, 5.204, 5.900, 6.595, 7.290), strict=True)
)
_TOLERANCE = 1e-11  # of the exchange, in units of the step; what is left is repaired before the proof
_SLACK = Fraction(1, 2**60)  # covers what lies between a true extremum and its float64 place: half p'' times 1e-20


@dataclass(frozen=True)
class CapPolynomial:
    """An odd polynomial that brings every matrix of spectral norm at most `reach` to at most `cap`.

    Args:
        cap: Cap, in spectral units.
        reach: Largest spectral norm it is proved for; beyond it, values may exceed the cap.
        coefficients: `c_0 = 1, c_1, ...` of `x (c_0 + c_1 x^2 + c_2 x^4 + ...)`, with `x` in units of the cap.
        departure: Upper bound of `|p(x) - min(x, cap)|` on `[0, reach]`, in units of the cap.
        drift: Upper bound of `(x - p(x)) / x^5` (`x^3` for degree 3) on `[0, cap]`, in units of the cap.

    Example:
        >>> import torch
        >>> cap = optimal_cap(2.0, 0.2)
        >>> cap(torch.diag(torch.tensor([2.2, 1.0]))).diagonal().round(decimals=4)
        tensor([1.9994, 0.9995])
    """

    cap: float
    reach: float
    coefficients: tuple[float, ...]
    departure: float
    drift: float

    def __call__(self, w: Matrices) -> Matrices:
        """Apply the polynomial to the singular values, through the Gram matrix of the smaller side.

        Degree 9 takes four matrix products, two of them small; every further 4 degrees one more small one. Bfloat16 and
        float16 are computed in float32, and degrees above 9 in float64. The norm of the result is at most `cap`
        within rounding (1e-6 in float32, 1% in bfloat16). Differentiable in `w` by plain autograd, to any order.
        """
        check_matrix(w, "w")
        # squares of 1e-30 and 1e30 leave the range of float32
        return odd_polynomial(w, lambda w: w / self.cap, self.coefficients)


def optimal_cap(cap: float, update_norm: float, degree: int = 9) -> CapPolynomial:
    """The odd polynomial of that degree that holds the cap after an update and is nearest to the exact clip.

    Nearest means the least `M` with `0 <= min(x, 1) - p(x) <= M min(x, 1)^5` in units of the cap: see the module for
    the reasons and the proof. It holds for every matrix of norm at most `cap + update_norm`.

    Args:
        cap: Cap, in spectral units.
        update_norm: True norm of the step in the same units: learning rate x overshoot of the coefficient set, and
            a margin for the rounding of the weight in a low precision (0.8% of the cap in bfloat16).
        degree: Odd, from 3 to 21. 9 costs what LT's soft cap costs; higher degrees come nearer.

    Example:
        >>> cap = optimal_cap(1.0, 0.01)
        >>> cap.departure < 0.0088 < optimal_cap(1.0, 0.01, degree=5).departure
        True
        >>> [round(c / cap.drift, 9) for c in cap.coefficients[2:]]
        [-1.0, 4.0, -4.0]
    """
    if not isinstance(degree, int) or degree not in REACH_LIMIT:
        raise ValueError(f"degree={degree} must be an odd integer from 3 to {max(REACH_LIMIT)}; 9 is usual")
    reach = reached_norm(cap, update_norm)
    # The sum and the quotient were rounded; two units of the last place cover both.
    ratio = 1.0 if update_norm == 0 else reach / cap * (1 + 2.0**-51)
    if ratio > REACH_LIMIT[degree]:
        raise ValueError(
            f"update_norm={update_norm} with cap={cap} reaches {ratio:.4g} times the cap; a polynomial of "
            f"degree={degree} holds up to {REACH_LIMIT[degree]} times without losing half of some singular value: "
            f"lower the learning rate, raise the degree, or use spectral_hardcap"
        )
    coefficients, departure, drift = _solve(ratio, degree)
    return CapPolynomial(cap, reach, coefficients, departure, drift)


@functools.lru_cache(maxsize=4096)
def _solve(ratio: float, degree: int) -> tuple[tuple[float, ...], float, float]:
    """Coefficients, departure and drift in units of the cap."""
    power = min(5, degree)
    if ratio == 1:
        return (1.0,) + (0.0,) * ((degree - 1) // 2), 0.0, 0.0
    return _prove(_exchange(ratio, power, (degree - power) // 2), ratio, power)


def _exchange(ratio: float, power: int, m: int) -> Polynomial:
    """The `h` of the module: minimise `M` over polynomials of degree `m` in `t`, by the dual simplex method.

    Unknowns are the Chebyshev coefficients of `h` on `[0, k^2]` and `M`, both in units of the step. A basis is a
    set of `m + 2` active constraints with multipliers of one sign; the most violated constraint, found at the
    critical points of `h` and `p`, enters it and the ratio test says which one leaves.
    """
    step, domain = ratio - 1, [0.0, ratio**2]

    def below(x: float, sign: int) -> tuple[np.ndarray, float]:  # 0 <= h(x^2) (-1), h(x^2) <= M (+1)
        return np.append(sign * basis(x), -(sign > 0)), 0.0

    def above(x: float, sign: int) -> tuple[np.ndarray, float]:  # p(x) <= 1 (-1), p(x) >= 1 - M (+1)
        return np.append(sign * x**power * basis(x), -(sign > 0)), sign * (x - 1) / step

    def basis(x: float) -> np.ndarray:
        return np.cos(np.arange(m + 1) * math.acos(min(1.0, max(-1.0, 2 * (x / ratio) ** 2 - 1))))

    extrema = (math.sqrt((1 + math.cos(math.pi * j / m)) / 2) if m else 1.0 for j in range(m + 1))
    active = [below(x, 1 if j % 2 == 0 else -1) for j, x in enumerate(extrema)] + [above(ratio, -1)]
    objective = np.append(np.zeros(m + 1), 1.0)
    for _ in range(100 + 20 * m):
        rows = np.stack([row for row, _ in active])
        unknowns = np.linalg.solve(rows, np.array([bound for _, bound in active]))
        h = Chebyshev(unknowns[:-1], domain)
        inside = [0.0, 1.0, *(x for x in _roots(h.deriv()) if x < 1)]
        outside = [ratio, *(x for x in _roots(_slope(h, step, power)) if 1 < x < ratio)]
        candidates = [
            f(x, sign) for f, points in ((below, inside), (above, outside)) for x in points for sign in (-1, 1)
        ]
        excess = [row @ unknowns - bound for row, bound in candidates]
        worst = int(np.argmax(excess))
        if excess[worst] <= _TOLERANCE * max(1.0, unknowns[-1]):
            return (step * h).convert(kind=Polynomial, domain=[-1, 1], window=[-1, 1])
        multipliers, direction = np.linalg.solve(rows.T, np.stack([-objective, candidates[worst][0]], 1)).T
        usable = direction > 1e-12 * np.abs(direction).max()
        quotients = np.where(usable, multipliers / np.where(usable, direction, 1.0), math.inf)
        active[int(np.argmin(quotients))] = candidates[worst]
    raise ArithmeticError(f"the exchange did not settle at reach {ratio} of the cap, degree {power + 2 * m}")


def _prove(h: Polynomial, ratio: float, power: int) -> tuple[tuple[float, ...], float, float]:
    """Round the coefficients, then check `|p| <= 1` on `[0, k]` in rational arithmetic; lift `h` until it holds.

    Extrema lie at critical points, which are found in floating point; the values there are exact.
    """
    lift, lead = 0.0, (1.0,) + (0.0,) * ((power - 3) // 2)
    while lift < 1:
        lifted = Polynomial([float(c) * (1 + lift) for c in h.coef])
        p = (*lead, *(-float(c) for c in lifted.coef))
        points = [ratio, 1.0, *(x for x in _roots(_slope(lifted, 1.0, power)) if x < ratio)]
        if max(abs(_exact(p, 1, x)) for x in points) <= 1 - _SLACK:
            touch = [1.0, *(x for x in _roots(power * lifted + 2 * Polynomial([0, 1]) * lifted.deriv()) if x < 1)]
            bend = [0.0, 1.0, *(x for x in _roots(lifted.deriv()) if x < 1)]
            departure = max(
                *(_exact(lifted.coef, power, x) for x in touch), *(1 - _exact(p, 1, x) for x in points if x >= 1)
            )
            drift = max(_exact(lifted.coef, 0, x) for x in bend)
            return p, float(departure) * (1 + 2.0**-50), float(drift) * (1 + 2.0**-50)
        lift = max(2.0**-52, 4 * lift)
    raise ArithmeticError(f"the cap was not proved at reach {ratio} of the cap, degree {power + 2 * h.degree()}")


def _exact(coefficients, power: int, x: float) -> Fraction:
    """`x^power (c_0 + c_1 x^2 + ...)` without rounding."""
    t, out = Fraction(x) ** 2, Fraction(0)
    for c in reversed(coefficients):
        out = out * t + Fraction(float(c))
    return out * Fraction(x) ** power


def _slope(h, step: float, power: int):
    """`p'(x) / step` as a series in `t = x^2`, for `p = x - step x^power h(t)`."""
    t = type(h).identity(domain=h.domain) if isinstance(h, Chebyshev) else Polynomial([0, 1])
    return 1 / step - t ** ((power - 1) // 2) * (power * h + 2 * t * h.deriv())


def _roots(polynomial) -> list[float]:
    """Where in `x > 0` the series in `x^2` may vanish: complex pairs give their real part, a harmless extra point."""
    roots = polynomial.roots().real if polynomial.degree() > 0 else ()
    return [math.sqrt(r) for r in roots if r > 0]
