"""A fast estimate of the spectral norm, for logging and scaling. It proves nothing: see `bounds` for that."""

import torch
from jaxtyping import Float
from torch import Tensor

from wellnormed.matrix._checks import check_finite, check_matrix, power_of_two_scale


def spectral_norm(w: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Largest singular value, from the small float64 Gram matrix: an estimate good to rounding, not a proof.

    The value is rounded down to the dtype, so it does not exceed `spectral_norm_upper_bound`. For many
    weights per step stack those of equal shape: one call serves the batch.

    Args:
        w: Matrices of any floating dtype, entries from 1e-30 to 1e30.

    Returns:
        One norm per matrix, in `w`'s dtype, plain spectral (l2 -> l2) units. Differentiable (a subgradient
        where the largest singular value is repeated; zero at zero).

    Raises:
        ValueError: Not a floating-point matrix, NaN or infinity.

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor(5.)
    """
    check_matrix(w, "w")
    if w.numel() == 0:
        return w.new_zeros(w.shape[:-2])
    if w.shape[-2] < w.shape[-1]:
        w = w.mT
    wants_gradient = torch.is_grad_enabled() and w.requires_grad
    with torch.no_grad():
        wide = w.detach().double()
        check_finite(wide.abs().amax((-2, -1)), "w")
        scale = power_of_two_scale(wide)
        wide = wide / scale
        gram = wide.mT @ wide
        if not wants_gradient:
            top = torch.linalg.eigvalsh(gram)[..., -1]
            return _rounded_down(top.clamp_min(0).sqrt() * scale[..., 0, 0], w.dtype)
        top, v = (part[..., -1:] for part in torch.linalg.eigh(gram))
        norm = top[..., None, :].clamp_min(0).sqrt()
        u = (wide @ v) / norm.clamp_min(torch.finfo(torch.float64).tiny)
        value = _rounded_down((norm * scale)[..., 0, 0], w.dtype)
    # u^T W v has the exact gradient u v^T; the value is the one computed above.
    linear = (u * (w.double() @ v)).sum((-2, -1)).to(w.dtype)
    return value + (linear - linear.detach())


def _rounded_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    # A few roundings of float64 first: an eigenvalue solver is not monotone in its last bits.
    rounded = (value * (1 - 2.0**-48)).to(dtype)
    above = rounded.double() > value
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
