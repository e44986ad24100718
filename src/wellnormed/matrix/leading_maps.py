"""Maps that move the largest singular value alone: the spectral hammer and spectral weight decay.

LT is Training Transformers with Enforced Lipschitz Bounds, section 3.1. Neither proves a bound: `clips` has the maps
whose result can be proved.
"""

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from wellnormed.matrix._checks import as_bound, check_matrix, check_positive, shown
from wellnormed.matrix._spectral_function import SpectralFunction, differentiable
from wellnormed.matrix.leading import Triplet, leading_singular_triplet

_TIE = 1e-6
"""Singular values relatively closer to the largest than this count as equal to it in the derivative."""


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
        w: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        upper: Spectral units, a number or one per matrix; no gradient flows to it.
        triplet: `leading_singular_triplet(w)`, perhaps from a warm start; None computes it.
        as_published: LT's map also *raises* a largest singular value below `upper` to it. By default such a matrix
            comes back bit for bit.

    Returns:
        Same shape and dtype; zero stays zero. Differentiable once, with the exact derivative of the map through
        converged vectors (by a float64 SVD); it has a pole where two values share the top, so values within 1e-6 of
        the largest are treated as moving with it.

    Raises:
        ValueError: Not a floating-point matrix, NaN or infinity, `upper` not positive or not broadcastable.

    Example:
        >>> spectral_hammer(torch.diag(torch.tensor([4.0, 0.5])), 1.0).diagonal().round(decimals=4)
        tensor([1.0000, 0.5000])
    """
    check_matrix(w, "w")
    bounds = as_bound(upper, w, "upper"), torch.as_tensor(as_published, device=w.device)

    def compute(w: Tensor, upper: Tensor, raises: Tensor) -> Tensor:
        check_positive(upper, "upper")
        return _moved(w, triplet, _Hammered(upper, raises))

    return differentiable(w, compute, _Hammered, *bounds)


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

    def compute(w: Tensor, decay: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not bool(((decay >= 0) & (decay <= 1)).all()):
            raise ValueError(
                f"decay={shown(decay)} must lie in [0, 1]: it is the part of the largest singular value that is removed"
            )
        return _moved(w, triplet, _Decayed(decay))

    return differentiable(w, compute, _Decayed, as_bound(decay, w, "decay"))


class _LeadingMoved(SpectralFunction):
    """`f(s_1)` for the largest singular value and `f(s) = s` for the others."""

    @abstractmethod
    def of_top(self, top: Tensor) -> tuple[Tensor, Tensor]:
        """`f(s_1)` and its derivative, for `s_1` of the batch shape."""

    def quotients(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = s[..., :1]
        f, slope = (value.expand(s.shape[:-1])[..., None] for value in self.of_top(top[..., 0]))
        tie = top - s <= _TIE * top  # the quotient has a pole there
        divisor = torch.where(top > 0, top + s, 1)  # a zero matrix: as the identity
        symmetric = torch.where(tie, slope, (f - s) / torch.where(tie, 1, top - s))
        antisymmetric = torch.where(top > 0, (f + s) / divisor, 1)
        ratio = torch.ones_like(s)
        ratio[..., :1] = torch.where(top > 0, f / torch.where(top > 0, top, 1), 1)
        return _bordered(symmetric), _bordered(antisymmetric), ratio


class _Hammered(_LeadingMoved):
    def __init__(self, upper: Tensor, raises: Tensor) -> None:
        self.upper, self.raises = upper, raises

    def of_top(self, top: Tensor) -> tuple[Tensor, Tensor]:
        moves = (self.raises | (top > self.upper)) & (top > 0)
        return torch.where(moves, self.upper, top), (~moves).to(top.dtype)


class _Decayed(_LeadingMoved):
    def __init__(self, decay: Tensor) -> None:
        self.decay = decay

    def of_top(self, top: Tensor) -> tuple[Tensor, Tensor]:
        return (1 - self.decay) * top, 1 - self.decay


def _bordered(border: Tensor) -> Tensor:
    """Ones, but for the first row and column: `(*batch, k)` to `(*batch, k, k)`."""
    first = torch.arange(border.shape[-1], device=border.device) == 0
    square = torch.where(first[:, None], border[..., None, :], 1)
    return torch.where(first, border[..., :, None], square)


def _moved(w: Tensor, triplet: Triplet | None, function: _LeadingMoved) -> Tensor:
    """`W + (f(s) - s) u v^T`; bit for bit `w` where `f(s) = s`."""
    if w.numel() == 0:
        return w.clone()
    if triplet is None:  # in 16 bits the triplet itself would be rounded, or overflow
        triplet = leading_singular_triplet(w if w.dtype == torch.float64 else w.float())
    u, s, v = triplet
    single = w.dtype if w.dtype == torch.float64 else torch.float32
    change = (function.of_top(s.double())[0] - s).to(single)[..., None, None]
    moved = w + (change * u[..., :, None]) * v[..., None, :]
    return torch.where(change == 0, w, moved.to(w.dtype))
