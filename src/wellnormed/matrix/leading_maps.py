"""Maps that move the largest singular value alone: the spectral hammer and spectral weight decay.

LT is Training Transformers with Enforced Lipschitz Bounds, section 3.1. Neither map guarantees a bound; those of
`clips` do.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix._checks import Matrices, as_bound, check_matrix, check_positive, check_share
from wellnormed.matrix._spectral_function import SpectralFunction, differentiable
from wellnormed.matrix.leading import Triplet, leading_singular_triplet

_TIE = 1e-6
"""Singular values relatively closer to the largest than this move with it in the derivative, which has a pole there."""


def spectral_hammer(w: Matrices, upper: float | Tensor, triplet: Triplet | None = None) -> Matrices:
    """Set the largest singular value to `upper` if it is above: `W + (upper - s) u v^T` (LT section 3.1).

    One value moves and the others stay, so the new norm is the larger of `upper` and the second singular value, within
    the accuracy of the triplet (1e-3 by default). If several values exceed `upper`, so does the new norm; the result of
    `spectral_hardcap` never does. A matrix with no value above `upper` is returned bit for bit, where LT's code raises
    its largest value to `upper`.

    The map is differentiable once, with the exact derivative for converged vectors (by a float64 SVD). The derivative
    has a pole where two values are the largest, so values within 1e-6 of the largest are treated as moving with it.

    Args:
        w: Matrices; a zero matrix stays zero.
        upper: In spectral units, a number or one per matrix; no gradient flows to it.
        triplet: `leading_singular_triplet(w)`, perhaps from a warm start; None computes it.

    Example:
        >>> spectral_hammer(torch.diag(torch.tensor([4.0, 0.5])), 1.0).diagonal().round(decimals=4)
        tensor([1.0000, 0.5000])
    """
    check_matrix(w, "w")
    level = as_bound(upper, w, "upper")
    return _moved(w, triplet, lambda bounds: check_positive(bounds[1], "upper"), level, level, torch.zeros_like(level))


def spectral_weight_decay(w: Matrices, decay: float | Tensor, triplet: Triplet | None = None) -> Matrices:
    """Shrink the largest singular value by `1 - decay`: `W - decay s u v^T` (LT section 3.1; Yoshida and Miyato 2017).

    The norm never grows. `decay` lies in [0, 1] and is a number or one per matrix. The rest is as in `spectral_hammer`.

    Example:
        >>> spectral_weight_decay(torch.diag(torch.tensor([4.0, 0.5])), 0.25).diagonal().round(decimals=4)
        tensor([3.0000, 0.5000])
    """
    check_matrix(w, "w")
    kept = 1 - as_bound(decay, w, "decay")
    zero = torch.zeros_like(kept)
    whole = "the largest singular value"
    return _moved(w, triplet, lambda bounds: check_share(1 - bounds[2], "decay", whole), zero, zero, kept)


class _LargestMoved(SpectralFunction):
    """`f(s) = level + slope s` for the largest singular value if it is above `above`, and `f(s) = s` for all others."""

    def __init__(self, above: Tensor, level: Tensor, slope: Tensor) -> None:
        self.above, self.level, self.slope = (bound[..., None] for bound in (above, level, slope))

    def pieces(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        largest = s[..., :1]
        moves = (s > self.above) & (largest - s <= _TIE * largest)
        return torch.where(moves, self.level + self.slope * s, s), torch.where(moves, self.slope, 1), moves


def _moved(w: Tensor, triplet: Triplet | None, check: Callable[..., None], *bounds: Tensor) -> Tensor:
    """`W + (f(s) - s) u v^T`; bit for bit `w` where `f(s) = s`."""

    def compute(w: Tensor, *bounds: Tensor) -> Tensor:
        check(bounds)
        if w.numel() == 0:
            return w.clone()
        single = w.dtype if w.dtype == torch.float64 else torch.float32
        # In 16 bits a triplet of `w` itself would be rounded, or overflow.
        u, s, v = leading_singular_triplet(w.to(single)) if triplet is None else triplet
        moved = _LargestMoved(*bounds).pieces(s.double()[..., None])[0][..., 0]
        change = (moved - s).to(single)[..., None, None]
        value = w + (change * u[..., :, None]) * v[..., None, :]
        return torch.where(change == 0, w, value.to(w.dtype))

    return differentiable(w, compute, _LargestMoved, *bounds)
