"""The spectral norm, and division by it or by a bound on it, in plain spectral (l2 -> l2) units."""

import torch
from torch import Tensor

from wellnormed._inputs import require_choice
from wellnormed.matrix._checks import Matrices, as_bound, check_matrix, check_positive, tall_and_scaled, to_check
from wellnormed.matrix._spectral_function import Derivative, differentiable
from wellnormed.matrix._symmetric import symmetric_product
from wellnormed.matrix.bounds import norm_along_power, proved_bound

METHODS = ("auto", "eigenvalue", "products")


def spectral_norm(w: Matrices, method: str = "auto") -> Tensor:
    """Estimate the largest singular value of each matrix; `spectral_norm_upper_bound` proves a bound.

    `method="eigenvalue"`, the default ("auto") on a CPU, uses the float64 Gram matrix and is exact to rounding.
    `"products"`, the default elsewhere, uses float32 products and one float64 product with a vector. It is exact to
    1e-6 if the largest singular value exceeds the others by a thousandth, and at most 6.2e-5 too small otherwise.

    The result is `(*batch,)`, in plain spectral (l2 -> l2) units, rounded down to `w`'s dtype so that it does not
    exceed `spectral_norm_upper_bound`; infinity if that dtype cannot hold it. It is differentiable (a subgradient where
    the largest singular value is repeated; zero at zero).

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor(5.)
    """
    check_matrix(w, "w")
    measured = _norm if _method(method, w) == "eigenvalue" else norm_along_power
    return differentiable(w, lambda w: _rounded_down(measured(w), w.dtype), _LargestSingularValue)


def _method(method: str, w: Tensor) -> str:
    """The method that a name means; "auto" depends on the device."""
    require_choice("method", method, METHODS, "'auto' picks by the device")
    return method if method != "auto" else "eigenvalue" if w.device.type == "cpu" else "products"


def _leading_product(x: Tensor) -> Tensor:
    """`u v^T` of the largest singular value, in float64; zero for a zero matrix, empty for an empty one."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u[..., :1] * (s[..., None, :1] > 0)) @ vh[..., :1, :]


class _LargestSingularValue(Derivative):
    def along(self, x: Tensor, tangent: Tensor) -> Tensor:
        return (_leading_product(x) * tangent).sum((-2, -1)).to(tangent.dtype)

    def adjoint(self, x: Tensor, gradient: Tensor) -> Tensor:
        g = gradient[..., None, None]
        x = torch.where(g == 0, x.detach(), x)  # detached where unused, so that no second derivative is NaN
        return (_leading_product(x) * g).to(x.dtype)


def _norm(w: Tensor) -> Tensor:
    """The norm in float64, `(*batch,)`; NaN and infinity are refused."""
    if w.numel() == 0:
        return w.new_zeros(w.shape[:-2], dtype=torch.float64)
    wide, scale = tall_and_scaled(w, torch.float64)
    return torch.linalg.eigvalsh(symmetric_product(wide.mT, wide))[..., -1].clamp_min(0).sqrt() * scale


def _rounded_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    # A few roundings of float64 first: an eigenvalue solver is not monotone in its last bits.
    rounded = (value * (1 - 2.0**-48)).to(dtype)
    above = rounded.double() > value
    above &= rounded.isfinite()  # a value beyond the dtype stays infinite
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def spectral_normalize(w: Matrices, upper: float | Tensor, method: str = "auto") -> Matrices:
    """Divide a matrix that is too large by its spectral norm: `w * min(1, upper / norm)`.

    With `method="eigenvalue"`, the default ("auto") on a CPU, `norm` is computed from the largest eigenvalue of the
    float64 Gram matrix, by `2 m n^2 + 4 n^3` operations. A power iteration would stay below the norm, and the result
    could exceed the cap (by about 10% in the runs of Training Transformers with Enforced Lipschitz Bounds, LT). With
    `method="products"`, the default elsewhere, `norm` is `proved_bound`: products in float32 and a proof of
    `2 m n^2 + n^3 / 3` operations in float64. It is up to 6.2e-5 too large, so a matrix this close to its cap is scaled
    as well.

    The cap `upper` is in spectral units, a number or one per matrix, and the norm of the result exceeds it at most by
    the rounding of its entries; inside the ball `w` comes back bit for bit. Differentiable in `w` (reverse mode,
    forward mode once and `torch.func.vmap`; a subgradient where the largest singular value is repeated).

    Example:
        >>> spectral_normalize(torch.diag(torch.tensor([4.0, 2.0])), 1.0).diagonal().round(decimals=5)
        tensor([1.0000, 0.5000])
    """
    check_matrix(w, "w")
    bound = as_bound(upper, w, "upper")
    measured = _norm if _method(method, w) == "eigenvalue" else proved_bound

    def checked(wide: Tensor, bound: Tensor) -> Tensor:
        check_positive(to_check(upper, bound), "upper")
        return measured(wide.to(w.dtype))

    norm = differentiable(w.double(), checked, _LargestSingularValue, bound)
    inside = norm <= bound * (1 + torch.finfo(w.dtype).eps)
    factor = torch.where(inside, 1, bound / torch.where(inside, 1, norm))
    return torch.where(inside[..., None, None], w, (w.double() * factor[..., None, None]).to(w.dtype))
