"""Spectral normalization: scale a matrix whose norm is too large, in plain spectral (l2 -> l2) units."""

import torch
from jaxtyping import Float
from torch import Tensor

from wellnormed.matrix._checks import as_bound, check_matrix, check_positive
from wellnormed.matrix._spectral_function import Derivative, differentiable
from wellnormed.matrix.estimate import largest_singular_value, leading_product


def spectral_normalize(w: Float[Tensor, "*batch m n"], upper: float | Tensor) -> Float[Tensor, "*batch m n"]:
    """Divide a matrix that is too large by its spectral norm: `w * min(1, upper / norm)`.

    `norm` comes from the largest eigenvalue of the float64 Gram matrix, not from a power iteration, which stays below
    the norm and lets the result exceed the cap (about 10% in the runs of Training Transformers with Enforced Lipschitz
    Bounds, LT). Costs `2 m n^2 + 4 n^3` operations in float64, w read twice.

    Args:
        w: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        upper: Cap in spectral units, a number or one per matrix; no gradient flows to it.

    Returns:
        Same shape and dtype, spectral norm at most `upper` within the rounding of its entries; bit for bit `w` inside
        the ball. Differentiable: reverse mode, forward mode once and `torch.func.vmap`; a subgradient where the largest
        singular value is repeated.

    Raises:
        ValueError: Not a floating-point matrix, NaN or infinity, `upper` not positive or not
            broadcastable.

    Example:
        >>> spectral_normalize(torch.diag(torch.tensor([4.0, 2.0])), 1.0).diagonal().round(decimals=5)
        tensor([1.0000, 0.5000])
    """
    check_matrix(w, "w")
    return differentiable(w, _compute, _Normalize, as_bound(upper, w, "upper"))


def _compute(w: Tensor, upper: Tensor) -> Tensor:
    check_positive(upper, "upper")
    if w.numel() == 0:
        return w.clone()
    norm, bound = largest_singular_value(w)[..., None, None], upper[..., None, None]
    inside = norm <= bound * (1 + torch.finfo(w.dtype).eps)
    return torch.where(inside, w, (w.double() * torch.where(inside, 1, bound / norm)).to(w.dtype))


class _Normalize(Derivative):
    def __init__(self, upper: Tensor) -> None:
        self.upper = upper[..., None, None]

    def along(self, x: Tensor, tangent: Tensor) -> Tensor:
        if x.numel() == 0:
            return tangent
        uv, s = leading_product(x)
        change = tangent - x * ((uv * tangent).sum((-2, -1), keepdim=True) / s)
        return torch.where(s > self.upper, self.upper / s * change, tangent).to(tangent.dtype)

    def adjoint(self, x: Tensor, gradient: Tensor) -> Tensor:
        if x.numel() == 0:
            return gradient
        uv, s = leading_product(x)
        change = gradient - uv * ((x * gradient).sum((-2, -1), keepdim=True) / s)
        return torch.where(s > self.upper, self.upper / s * change, gradient).to(gradient.dtype)
