"""Caps of the singular values by matrix products alone, for devices whose decompositions are slow.

With `H = W^T W / cap^2` and the larger of an eigenvalue and 1 written as `(1 + h + |h - 1|) / 2`,

    min(W, cap) = W M^(-1/2),   M = (I + H + |H - I|) / 2,   |H - I| = (H - I) sign(H - I).

The sign is computed by cubic polynomials. Those of degree 5 cost as many products for as much progress, but their
coefficients alternate and are ten times as large: after them float32 misses a capped matrix by 1e-5, after cubic ones
by 1e-6. The eigenvalues of M lie in `[1, |H|]`, close to 1 for a weight that was below its cap before the last step, so
that the inverse root takes few steps.

**Error.** The sign of an eigenvalue below `low` of its bound `c` is not resolved, which leaves an error of
at most `c low / 2` in M and half of that in the capped value; `low` is so small that this is a quarter of what clips
promise.
"""

import functools
import itertools

import torch
from torch import Tensor

from wellnormed.matrix._symmetric import full_product, symmetric_product, times_symmetric
from wellnormed.matrix.coefficients import Step
from wellnormed.matrix.minimax import optimal_coefficients

FARTHEST = 8.0
"""Largest bound on `|H|`: a norm of 1.9 caps at 768 columns. Beyond it float32 is not accurate enough."""


def cap_by_products(w: Tensor, decay: Tensor, accuracy: float) -> tuple[Tensor, Tensor, Tensor]:
    """`W (I - decay (I - M^(-1/2)))` for tall `(*batch, m, n)` in units of the cap.

    `decay`, which broadcasts to the batch, is 1 for a cap, and less for a clipped weight decay. Returned beside the
    matrices is which are below the cap within the accuracy, and which are so far above it that the result is not
    accurate, both `(*batch,)`.
    """
    gram = symmetric_product(w.mT, w)
    squared = symmetric_product(gram, gram)
    fourth = symmetric_product(squared, squared)
    # |H| <= |H^4|_F^(1/4), which is n^(1/8) times as large at most; and roundings
    bound = (torch.linalg.matrix_norm(fourth, keepdim=True) ** 0.25 * (1 + 2**-10)).clamp_min(1)
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    apart = gram - identity
    sign = apart / bound
    for a, b, _ in _steps(accuracy / FARTHEST, 3, w.dtype, accuracy):
        sign = _symmetric(a * sign + b * symmetric_product(sign, symmetric_product(sign, sign)))
    larger = (identity + gram + _symmetric(symmetric_product(apart, sign))) / 2
    root = _inverse_root(larger, bound, identity, accuracy)
    removed = decay[..., None, None].to(w.dtype) * (identity - root)
    inside = torch.linalg.matrix_norm(larger - identity) <= accuracy
    return times_symmetric(w, removed, w, alpha=-1), inside, ~(bound[..., 0, 0] <= FARTHEST)


def _inverse_root(x: Tensor, bound: Tensor, identity: Tensor, accuracy: float) -> Tensor:
    """`X^(-1/2)` of symmetric matrices with eigenvalues from 1 to the bound."""
    scaled, root = x / bound, identity * bound**-0.5
    for a, b, c in _steps(FARTHEST**-0.5, 5, x.dtype, accuracy):
        step = a * identity + b * scaled + c * symmetric_product(scaled, scaled)
        root = _symmetric(symmetric_product(root, step))
        scaled = _symmetric(full_product(full_product(step, scaled), step))
    return root


def _symmetric(x: Tensor) -> Tensor:
    """Without what rounding makes of the other half, which the iteration would enlarge."""
    return (x + x.mT) / 2


@functools.cache
def _steps(lower: float, degree: int, dtype: torch.dtype, accuracy: float) -> tuple[Step, ...]:
    """The fewest steps after which all from `lower` to 1 is 1 within what leaves a quarter of the accuracy."""
    counted = (optimal_coefficients(lower, count, degree, dtype) for count in itertools.count(1))
    return next(found.steps for found in counted if 1 - found.minimum <= accuracy / (2 * FARTHEST))
