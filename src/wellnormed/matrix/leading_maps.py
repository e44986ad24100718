"""Maps that move the largest singular value alone: the spectral hammer and spectral weight decay.

LT is Training Transformers with Enforced Lipschitz Bounds, section 3.1. Neither proves a bound: `clips` has the maps
whose result can be proved.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from wellnormed.matrix._checks import as_bound, check_matrix, check_positive, check_share
from wellnormed.matrix._spectral_function import SpectralFunction, differentiable
from wellnormed.matrix.leading import Triplet, leading_singular_triplet

_TIE = 1e-6
"""Singular values relatively closer to the largest than this move with it in the derivative, which has a pole there."""


def spectral_hammer(
    w: Float[Tensor, "*batch m n"],
    upper: float | Tensor,
    triplet: Triplet | None = None,
    *,
    as_published: bool = False,
) -> Float[Tensor, "*batch m n"]:
    """Set the largest singular value to `upper` if it is above: `W + (upper - s) u v^T` (LT section 3.1).

    One value moves; the others stay, so the norm ends at the larger of `upper` and the second singular value, within
    the accuracy of the triplet (1e-3 by default). With several values above `upper` it stays above: `spectral_hardcap`
    makes a promise.

    Args:
        w: Matrices.
        upper: Spectral units, a number or one per matrix; no gradient flows to it.
        triplet: `leading_singular_triplet(w)`, perhaps from a warm start; None computes it.
        as_published: LT's map also *raises* a largest singular value below `upper` to it. By default such a matrix
            comes back bit for bit.

    Returns:
        Same shape and dtype; zero stays zero. Differentiable once, with the exact derivative of the map through
        converged vectors (by a float64 SVD); it has a pole where two values share the top, so values within 1e-6 of
        the largest are treated as moving with it.

    Example:
        >>> spectral_hammer(torch.diag(torch.tensor([4.0, 0.5])), 1.0).diagonal().round(decimals=4)
        tensor([1.0000, 0.5000])
    """
    check_matrix(w, "w")
    level = as_bound(upper, w, "upper")

    def compute(w: Tensor, *bounds: Tensor) -> Tensor:
        check_positive(bounds[1], "upper")
        return _moved(w, triplet, _LargestMoved(*bounds))

    above = torch.zeros_like(level) if as_published else level
    return differentiable(w, compute, _LargestMoved, above, level, torch.zeros_like(level))


def spectral_weight_decay(
    w: Float[Tensor, "*batch m n"], decay: float | Tensor, triplet: Triplet | None = None
) -> Float[Tensor, "*batch m n"]:
    """Shrink the largest singular value by `1 - decay`: `W - decay s u v^T` (LT section 3.1; Yoshida and Miyato 2017).

    Never larger in norm; `decay` lies in [0, 1], a number or one per matrix. Otherwise as `spectral_hammer`.

    Example:
        >>> spectral_weight_decay(torch.diag(torch.tensor([4.0, 0.5])), 0.25).diagonal().round(decimals=4)
        tensor([3.0000, 0.5000])
    """
    check_matrix(w, "w")
    kept = 1 - as_bound(decay, w, "decay")

    def compute(w: Tensor, *bounds: Tensor) -> Tensor:
        check_share(1 - bounds[2], "decay", "the largest singular value")
        return _moved(w, triplet, _LargestMoved(*bounds))

    return differentiable(w, compute, _LargestMoved, torch.zeros_like(kept), torch.zeros_like(kept), kept)


class _LargestMoved(SpectralFunction):
    """`f(s) = level + slope s` for the largest singular value if it is above `above`, and `f(s) = s` for all others."""

    def __init__(self, above: Tensor, level: Tensor, slope: Tensor) -> None:
        self.above, self.level, self.slope = (bound[..., None] for bound in (above, level, slope))

    def pieces(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        largest = s[..., :1]
        moves = (s > self.above) & (largest - s <= _TIE * largest)
        return torch.where(moves, self.level + self.slope * s, s), torch.where(moves, self.slope, 1), moves


def _moved(w: Tensor, triplet: Triplet | None, function: _LargestMoved) -> Tensor:
    """`W + (f(s) - s) u v^T`; bit for bit `w` where `f(s) = s`."""
    if w.numel() == 0:
        return w.clone()
    if triplet is None:  # in 16 bits the triplet itself would be rounded, or overflow
        triplet = leading_singular_triplet(w if w.dtype == torch.float64 else w.float())
    u, s, v = triplet
    single = w.dtype if w.dtype == torch.float64 else torch.float32
    change = (function.pieces(s.double()[..., None])[0][..., 0] - s).to(single)[..., None, None]
    moved = w + (change * u[..., :, None]) * v[..., None, :]
    return torch.where(change == 0, w, moved.to(w.dtype))
