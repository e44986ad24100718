"""The spectral norm, and division by it, in plain spectral (l2 -> l2) units. Nothing is proved here: see `bounds`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wellnormed.matrix._checks import Matrices, as_bound, check_matrix, check_positive, finite_scale, to_check
from wellnormed.matrix._spectral_function import Derivative, differentiable
from wellnormed.matrix._symmetric import symmetric_product

if TYPE_CHECKING:
    from jaxtyping import Float

METHODS = ("auto", "eigenvalue", "products")
ABOVE = 2.0**-17
"""The share of the norm by which the norm from products may exceed it."""


def spectral_norm(w: Matrices) -> Float[Tensor, "*batch"]:
    """Largest singular value, from the small float64 Gram matrix: an estimate good to rounding, not a proof.

    One norm per matrix in plain spectral (l2 -> l2) units, rounded down to `w`'s dtype, so that it does not exceed
    `spectral_norm_upper_bound`. Differentiable (a subgradient where the largest singular value is repeated; zero at
    zero).

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor(5.)
    """
    check_matrix(w, "w")
    return differentiable(w, lambda w: _rounded_down(_norm(w), w.dtype), _LargestSingularValue)


def _leading_product(x: Tensor) -> Tensor:
    """`u v^T` of the largest singular value, in float64; zero for a zero matrix, empty for an empty one."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u[..., :1] * (s[..., None, :1] > 0)) @ vh[..., :1, :]


class _LargestSingularValue(Derivative):
    def __init__(self, *_: Tensor) -> None:
        """The largest singular value depends on no bound."""

    def along(self, x: Tensor, tangent: Tensor) -> Tensor:
        return (_leading_product(x) * tangent).sum((-2, -1)).to(tangent.dtype)

    def adjoint(self, x: Tensor, gradient: Tensor) -> Tensor:
        return (_leading_product(x) * gradient[..., None, None]).to(x.dtype)


def _scaled_gram(w: Tensor) -> tuple[Tensor, Tensor]:
    """The smaller Gram matrix of `w` over a power of two, in float64, and that power, `(*batch,)`."""
    wide = w.double() if w.shape[-2] >= w.shape[-1] else w.mT.double()
    scale = finite_scale(wide, "w")
    wide = wide / scale
    return symmetric_product(wide.mT, wide), scale[..., 0, 0]


def _norm(w: Tensor) -> Tensor:
    """The norm in float64, `(*batch,)`; NaN and infinity are refused."""
    if w.numel() == 0:
        return w.new_zeros(w.shape[:-2], dtype=torch.float64)
    gram, scale = _scaled_gram(w)
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt() * scale


def _norm_by_products(w: Tensor) -> Tensor:
    """The norm by matrix products alone, in float64 and from above: at most `ABOVE` larger, and no smaller.

    With `G_0 = W^T W` and `G_(i+1) = (G_i / f_i)^2`, where `f_i = |G_i|_F`, the largest eigenvalue of `G_0` is at most
    `f_0 f_1^(1/2) ... f_k^(1/2^k)`, and that is at most `n^(1/2^(k+1))` times as large. Roundings of 1e-13 are covered.
    """
    if w.numel() == 0:
        return w.new_zeros(w.shape[:-2], dtype=torch.float64)
    gram, scale = _scaled_gram(w)
    logarithm = torch.zeros_like(scale)
    # of the norm, the root of the eigenvalue, and half of what is allowed: the other half is for rounding
    count = math.ceil(math.log2(math.log(max(2, gram.shape[-1])) / math.log1p(ABOVE / 2))) - 1
    size = torch.ones_like(gram[..., :1, :1])
    for power in range(count):
        if power:
            gram = symmetric_product(gram / size, gram / size)
        size = torch.linalg.matrix_norm(gram, keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)
        logarithm = logarithm + 2.0**-power * size[..., 0, 0].log()
    return (logarithm / 2).exp() * (1 + ABOVE / 4) * scale


def _rounded_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    # A few roundings of float64 first: an eigenvalue solver is not monotone in its last bits.
    rounded = (value * (1 - 2.0**-48)).to(dtype)
    above = rounded.double() > value
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def spectral_normalize(w: Matrices, upper: float | Tensor, method: str = "auto") -> Matrices:
    """Divide a matrix that is too large by its spectral norm: `w * min(1, upper / norm)`.

    `norm` comes from the largest eigenvalue of the float64 Gram matrix, not from a power iteration, which stays below
    the norm and lets the result exceed the cap (about 10% in the runs of Training Transformers with Enforced Lipschitz
    Bounds, LT). Costs `2 m n^2 + 4 n^3` operations in float64, w read twice. With `method="products"`, which "auto"
    takes where the device is no CPU, it comes from matrix products alone, `2 m n^2 + 38 n^3` operations, and is up to
    1e-5 too large: a matrix so close to its cap is scaled as well. The other method is "eigenvalue".

    The cap `upper` is in spectral units, a number or one per matrix, and the norm of the result exceeds it at most by
    the rounding of its entries; inside the ball `w` comes back bit for bit. Differentiable in `w` (reverse mode,
    forward mode once and `torch.func.vmap`; a subgradient where the largest singular value is repeated).

    Example:
        >>> spectral_normalize(torch.diag(torch.tensor([4.0, 2.0])), 1.0).diagonal().round(decimals=5)
        tensor([1.0000, 0.5000])
    """
    check_matrix(w, "w")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}; 'auto' picks by the device")
    bound = as_bound(upper, w, "upper")
    if method == "auto":
        method = "eigenvalue" if w.device.type == "cpu" else "products"
    measured = _norm if method == "eigenvalue" else _norm_by_products

    def checked(w: Tensor, bound: Tensor) -> Tensor:
        check_positive(to_check(upper, bound), "upper")
        return measured(w)

    norm = differentiable(w.double(), checked, _LargestSingularValue, bound)
    inside = norm <= bound * (1 + torch.finfo(w.dtype).eps)
    factor = torch.where(inside, 1, bound / torch.where(inside, 1, norm))
    return torch.where(inside[..., None, None], w, (w.double() * factor[..., None, None]).to(w.dtype))
