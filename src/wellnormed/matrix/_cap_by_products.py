"""Caps of the singular values by matrix products alone, for devices whose decompositions are slow.

With `H = W^T W / cap^2` and the larger of an eigenvalue and 1 written as `(1 + h + |h - 1|) / 2`,

    min(W, cap) = W M^(-1/2),   M = (I + H + |H - I|) / 2,   |H - I| = (H - I) sign(H - I).

The sign is computed by cubic polynomials. Those of degree 5 cost as many products for as much progress, but their
coefficients alternate and are ten times as large: after them float32 misses a capped matrix by 1e-5, after cubic ones
by 1e-6. The eigenvalues of M lie in `[1, |H|]`, close to 1 for a weight that was below its cap before the last step, so
that the inverse root takes few steps.

**Error.** The sign of an eigenvalue of `H - I` below `low` times its bound is not resolved. This leaves an error of at
most `low / 2` in M and `low / 4` in the capped value; `low` is chosen so that this is a quarter of the error that clips
state.

**Blur.** If values near the cap may end up to a share `b` below it, `low = 4 b / 3` is enough, with an aim of
`1 / (1 + low / 4)` caps. In units of the aim, a value whose square is at most `1 - low` stays; this limit is at least
`1 - b` caps. Every other value ends between that limit and the cap: its eigenvalue of M lies between `(1 + h) / 2` and
the larger of h and 1. So a value below the aim is not lowered, a value above the aim does not end below it, and neither
ends more than `low / 4` above it.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix._symmetric import full_product, symmetric_product, times_symmetric
from wellnormed.matrix.coefficients import Step
from wellnormed.matrix.minimax import optimal_coefficients

FARTHEST = 8.0
"""Largest bound on `|H|`: a norm of 1.9 caps at 768 columns. Beyond it float32 is not accurate enough."""
_WIDEST = 0.25
"""Largest blur that is used: more saves no step."""
_MARGIN = 1 + 2**-10
"""A factor for the roundings of a bound on `|H|`."""


def is_near(most: float) -> bool:
    """Whether products are accurate for norms of at most `most` caps, whatever the blur is."""
    return (most * (1 + _WIDEST / 3)) ** 2 * _MARGIN < FARTHEST


def cap_by_products(
    w: Tensor, decay: Tensor, accuracy: float, most: float = math.inf, blur: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`W (I - decay (I - M^(-1/2)))` for tall `(*batch, m, n)` in units of the cap.

    `decay`, which broadcasts to the batch, is 1 for a cap, and less for a clipped weight decay, which has no blur.
    `most` is a known bound on the norms. The other two results are booleans `(*batch,)`: whether the matrix was below
    the cap within the accuracy, and whether it was so far above the cap that its result is not accurate.
    """
    low = 4 / 3 * min(blur, _WIDEST)
    aim = 1 / (1 + low / 4)
    w = w / aim
    gram = symmetric_product(w.mT, w)
    bound, farthest = _bound(gram, (most / aim) ** 2)
    apart = _shifted(gram, -1.0)  # H - I
    sign = apart / (bound - 1).clamp_min(1)
    for a, b, _ in _steps(_few(max(low, accuracy) / max(1, farthest - 1), math.floor), 3, accuracy):
        sign = _symmetric(symmetric_product(sign, symmetric_product(sign, sign), sign, beta=a, alpha=b))
    larger = _shifted(_symmetric(symmetric_product(apart, sign)).add_(apart).div_(2), 1.0)  # M
    near = bound[..., 0, 0] <= FARTHEST
    near &= _below_identity(sign)
    del gram, apart, sign  # each as large as a square of the shorter side
    root = _inverse_root(larger, bound, farthest, accuracy)
    near &= _below_identity(root)
    inside = torch.linalg.matrix_norm(_shifted(larger, -1.0)) <= accuracy
    removed = _shifted(root, -1.0).mul_(-decay[..., None, None].to(w.dtype))
    return aim * times_symmetric(w, removed, w, alpha=-1), inside, ~near


def _shifted(x: Tensor, by: float) -> Tensor:
    """`X + by I`, in place, for `(*batch, n, n)`."""
    x.diagonal(dim1=-2, dim2=-1).add_(by)
    return x


def _below_identity(x: Tensor) -> Tensor:
    """Whether all eigenvalues of `(*batch, n, n)` can lie in [-1, 1]; they do unless a norm exceeds its bound."""
    return torch.linalg.matrix_norm(x) <= 1.01 * x.shape[-1] ** 0.5


def _bound(gram: Tensor, known: float) -> tuple[Tensor, float]:
    """A bound on `|H|`, at least 1, for each matrix, `(*batch, 1, 1)`; and one for all matrices that are capped.

    If no bound is known, it is computed: `|H| <= |H^4|_F^(1/4)`, which exceeds `|H|` by at most a factor of `n^(1/8)`.
    """
    if known * _MARGIN < FARTHEST:
        known = _few(max(1, known) * _MARGIN, math.ceil)  # FARTHEST is such a power
        return gram.new_full((*gram.shape[:-2], 1, 1), known), known
    squared = symmetric_product(gram, gram)
    fourth = symmetric_product(squared, squared)
    return (torch.linalg.matrix_norm(fourth, keepdim=True) ** 0.25 * _MARGIN).clamp_min(1), FARTHEST


def _few(x: float, to: Callable[[float], int]) -> float:
    """A power of `2^(1/4)` near x, so that few different polynomials are computed while norms change."""
    return 2 ** (to(4 * math.log2(x)) / 4)


def _inverse_root(x: Tensor, bound: Tensor, farthest: float, accuracy: float) -> Tensor:
    """`X^(-1/2)` of symmetric matrices with eigenvalues from 1 to the bound, which is at most `farthest`."""
    scaled, root = x / bound, None
    steps = _steps(farthest**-0.5, 5, accuracy)
    for left, (a, b, c) in zip(reversed(range(len(steps))), steps, strict=True):
        step = _shifted(symmetric_product(scaled, scaled, scaled, beta=b, alpha=c), a)
        root = bound**-0.5 * step if root is None else _symmetric(symmetric_product(root, step))
        if left:
            scaled = _symmetric(full_product(full_product(step, scaled), step))
    assert root is not None
    return root


def _symmetric(x: Tensor) -> Tensor:
    """The symmetric part: rounding makes the two halves differ, and the iteration would enlarge the difference."""
    return (x + x.mT).div_(2)


@functools.cache
def _steps(lower: float, degree: int, accuracy: float) -> tuple[Step, ...]:
    """The fewest steps that bring all of `[lower, 1]` to 1 within `accuracy / (2 FARTHEST)`.

    The steps for float16 serve every dtype. The best steps for float32 send eigenvalues near 1 as close to zero as
    `lower`; rounding then causes errors of up to 9e-6 in the capped value, where the steps for float16 cause 1.5e-6.
    """
    candidates = (optimal_coefficients(lower, count, degree, torch.float16) for count in itertools.count(1))
    return next(chosen.steps for chosen in candidates if 1 - chosen.minimum <= accuracy / (2 * FARTHEST))


def cap_reference(w: Tensor, cap: float, steps: int = 40) -> Tensor:
    """A cap by products in a few lines: the formula of this module with plain Newton-Schulz iterations.

    Example:
        >>> cap_reference(torch.diag(torch.tensor([1.5, 0.5])).double(), 1.0).diagonal()
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    apart = w.mT @ w / cap**2 - identity  # H - I
    sign = apart / apart.norm()
    for _ in range(steps):
        sign = 1.5 * sign - 0.5 * sign @ sign @ sign
    larger = identity + (apart + apart @ sign) / 2  # M
    scaled, root = larger / larger.norm(), identity / larger.norm() ** 0.5
    for _ in range(steps):
        step = 1.5 * identity - 0.5 * scaled
        root, scaled = root @ step, step @ scaled @ step
    return w @ root
