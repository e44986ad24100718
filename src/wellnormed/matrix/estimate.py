"""A fast estimate of the spectral norm, for logging and scaling. It proves nothing: see `bounds` for that."""

import torch
from jaxtyping import Float
from torch import Tensor

from wellnormed.matrix._checks import check_matrix, finite_scale
from wellnormed.matrix._spectral_function import Derivative, differentiable
from wellnormed.matrix._symmetric import symmetric_product


def spectral_norm(w: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Largest singular value, from the small float64 Gram matrix: an estimate good to rounding, not a proof.

    The value is rounded down to the dtype, so it does not exceed `spectral_norm_upper_bound`. For many
    weights per step stack those of equal shape: one call serves the batch.

    Args:
        w: Matrices of any floating dtype, entries from 1e-30 to 1e30.

    Returns:
        One norm per matrix, in `w`'s dtype (at most its largest number), plain spectral (l2 -> l2) units.
        Differentiable (a subgradient where the largest singular value is repeated; zero at zero).

    Raises:
        ValueError: Not a floating-point matrix, NaN or infinity.

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor(5.)
    """
    check_matrix(w, "w")
    return differentiable(w, _compute, _LargestSingularValue)


def leading_product(x: Tensor) -> tuple[Tensor, Tensor]:
    """`u v^T` of the largest singular value, in float64 (zero for a zero matrix), and that value `(*batch, 1, 1)`."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s[..., :1, None]
    return u[..., :1] @ vh[..., :1, :] * (s > 0), s


class _LargestSingularValue(Derivative):
    def along(self, x: Tensor, tangent: Tensor) -> Tensor:
        if x.numel() == 0:
            return tangent.sum((-2, -1))
        return (leading_product(x)[0] * tangent).sum((-2, -1)).to(tangent.dtype)

    def adjoint(self, x: Tensor, gradient: Tensor) -> Tensor:
        if x.numel() == 0:
            return torch.zeros_like(x)
        return (leading_product(x)[0] * gradient[..., None, None]).to(x.dtype)


def largest_singular_value(w: Tensor) -> Tensor:
    """In float64, `(*batch,)`, of matrices that are not empty; refuses NaN and infinity."""
    wide = w.double() if w.shape[-2] >= w.shape[-1] else w.mT.double()
    scale = finite_scale(wide, "w")
    wide = wide / scale
    top = torch.linalg.eigvalsh(symmetric_product(wide.mT, wide))[..., -1]
    return top.clamp_min(0).sqrt() * scale[..., 0, 0]


def _compute(w: Tensor) -> Tensor:
    return _rounded_down(largest_singular_value(w), w.dtype) if w.numel() else w.new_zeros(w.shape[:-2])


def _rounded_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    # A few roundings of float64 first: an eigenvalue solver is not monotone in its last bits.
    rounded = (value * (1 - 2.0**-48)).to(dtype)
    above = rounded.double() > value
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
