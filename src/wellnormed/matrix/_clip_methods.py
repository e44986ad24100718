"""The ways to clip singular values, by an eigendecomposition of the small Gram matrix or by an SVD.

`clip(W) = W h(W^T W)` with `h(g) = f(sqrt g) / sqrt g` has no cancellation where a singular value is close to a bound,
unlike nested matrix signs. `clips` is the public face.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix._checks import finite_scale, working_dtype
from wellnormed.matrix._msign_methods import largest_eigenvalue_estimate
from wellnormed.matrix._spectral_function import Clip, zero_tolerance

EIGENVALUE_ERROR = 1e-13
"""Relative, of the largest eigenvalue of a float64 Gram matrix: some hundred roundings."""
_TINY = torch.finfo(torch.float64).tiny

_SINGLE_MARGIN = 7e-6
"""What a result computed wholly in float32 may exceed the cap by, relative (measured up to 4e-6 at n = 768)."""
_UNDECIDED = 1e-5
"""Distance from the cap, relative, within which float32 cannot tell inside from outside."""
_NEAR = 2.0
"""Largest singular value over the cap up to which `_SINGLE_MARGIN` was measured; the error grows with its square."""
_PRODUCT_MARGIN = (4e-6, 2e-6)
"""The same with only the products in float32, and times that ratio (measured: 5e-7 times it for random matrices, 1.3e-6
for constant blocks, whose roundings add up; 2.8e-6 for Hadamard matrices near the cap)."""
_FAR = 20.0
"""Ratio up to which the products may be in float32: beyond, the cap would be lowered by more than 5e-5."""
_SQUARABLE = 1e3
"""Ratio up to which a float64 Gram matrix knows the values at the cap, to 1e-10; beyond, an SVD and a second pass."""
_SAFE_SQUARES = (1e-12, 1e12)
"""Caps whose squares, and those of singular values worth keeping, stay within the range of float32."""
HALF_MARGIN = 1.25
"""Norm of the rounding of a matrix to 16 bits, in units of `u` times its norm: `(1 + sqrt(n / m)) / sqrt 3` for
independent roundings and equal singular values, less for any other spectrum."""
_LARGE = 2**14
"""Entries of a matrix from which float32 products save time (measured: a third at 128 x 128, half at 2048 x 128)."""
_SQUARED_AWAY = 1e-5
"""Singular values below this part of the largest are raised by an SVD: a float64 Gram matrix knows them too badly."""


def clip(w: Tensor, lower: Tensor, upper: Tensor, decay: Tensor, method: str) -> Tensor:
    """The function `Clip(lower, upper, decay)` of the singular values.

    Args:
        w: Matrices `(*batch, m, n)`, not empty.
        lower: float64, broadcasting to the batch.
        upper: The same.
        decay: The same; where it is 1, the result is rounded so that it ends at or below `upper`.
        method: "gram" or "svd".
    """
    if w.shape[-2] < w.shape[-1]:
        return clip(w.mT, lower, upper, decay, method).mT.contiguous()
    raises = bool((lower > 0).any())
    large = w.shape[-2] * w.shape[-1] >= _LARGE and working_dtype(w) == torch.float32
    if method == "gram" and large and not raises:
        value = _with_single_products(w, upper, decay)
        if value is not None:
            return value
    wide = w.double()
    scale = finite_scale(wide, "w")
    wide = wide / scale
    lower, upper = lower / scale[..., 0, 0], upper / scale[..., 0, 0]
    s, rebuild = (_by_gram if method == "gram" else _by_svd)(wide)
    ratio = s.amax(-1) / upper
    far = bool((ratio > _SQUARABLE).any())
    if method == "gram" and (far or (raises and bool((s.amin(-1) < _SQUARED_AWAY * s.amax(-1)).any()))):
        s, rebuild = _by_svd(wide)
    if raises:
        s = torch.where(s > zero_tolerance(s.amax(-1, keepdim=True), *w.shape[-2:]), s, 0)
    inside = (s.amax(-1) <= upper) & ((s >= lower[..., None]) | (s == 0)).all(-1)
    squared = 4 * torch.finfo(torch.float64).eps * ratio.clamp(1, _SQUARABLE) ** 2
    safe = torch.where(decay == 1, _lowered(upper, s, w.dtype) * (1 - squared), upper)
    target = Clip(lower.minimum(safe), safe, decay).values(s)
    value = torch.where(inside[..., None, None], w, (rebuild(target) * scale).to(w.dtype))
    if far and bool((decay == 1).any()):
        # Rounding of what was far above the cap is left on top of it.
        scale = scale[..., 0, 0]
        return torch.where(
            (decay == 1)[..., None, None], clip(value, lower * scale, upper * scale, decay, "svd"), value
        )
    return value


def _by_svd(w: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Singular values `(*batch, n)`, and the function from new ones to the matrix that has them."""
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    return s, lambda target: (u * target[..., None, :]) @ vh


def _by_gram(w: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The same through `W^T W`; what is zero in it stays as it is in W."""
    g, v = torch.linalg.eigh(w.mT @ w)
    s = g.clamp_min(0).sqrt()

    def rebuild(target: Tensor) -> Tensor:
        kept = torch.where(s > 0, target / s.clamp_min(_TINY), 1)
        return w @ ((v * kept[..., None, :]) @ v.mT)

    return s, rebuild


def _with_single_products(w: Tensor, upper: Tensor, decay: Tensor) -> Tensor | None:
    """A cap of tall matrices with the large products in float32; None where that is not accurate enough.

    A float32 Gram matrix knows its eigenvalues to some 1e-6 of the largest, so the decomposition, too, is in float32
    only for matrices that are neither near the decision (inside or outside) nor far above the cap: the usual case
    after a step. When few singular values are above the cap only their vectors are touched.
    """
    low, high = _SAFE_SQUARES
    if not bool(((upper > low) & (upper < high)).all()):
        return None
    work = w.float()
    gram = work.mT @ work
    if not bool(gram.diagonal(dim1=-2, dim2=-1).isfinite().all()):
        # NaN, infinity or a square that overflowed, all of which the diagonal shows: float64 tells them apart
        return None
    # In 16 bits, rounding of the result hides errors of some 1e-4.
    near = _NEAR if w.dtype == torch.float32 else _FAR
    estimate = (largest_eigenvalue_estimate(gram).double().sqrt() / upper).amax()
    for dtype, limit in ((torch.float32, near), (torch.float64, _FAR)):
        if bool(estimate > limit):
            continue
        g, v = torch.linalg.eigh(gram if dtype == torch.float32 else _gram_in_double(w))
        ratio = g[..., -1].clamp_min(0).double().sqrt() / upper
        undecided = dtype == torch.float32 and bool(((ratio - 1).abs() < _UNDECIDED).any())
        if undecided or bool((ratio > limit).any()):
            continue
        if w.dtype != torch.float32:
            margin = HALF_MARGIN * torch.finfo(w.dtype).eps / 2
        else:
            fixed, growing = _PRODUCT_MARGIN
            margin = _SINGLE_MARGIN if dtype == torch.float32 else fixed + growing * ratio.clamp_min(1)
        s = g.double().clamp_min(0).sqrt()
        safe = torch.where(decay == 1, upper * (1 - margin), upper)
        kept = Clip(torch.zeros_like(safe), safe, decay).values(s) / s.clamp_min(_TINY)
        value = _without(work, v, torch.where(s > 0, 1 - kept, 0)).to(w.dtype)
        outside = ratio > 1
        return value if bool(outside.all()) else torch.where(outside[..., None, None], value, w)
    return None


def _gram_in_double(w: Tensor) -> Tensor:
    wide = w.double()
    return wide.mT @ wide


def _without(w: Tensor, v: Tensor, removed: Tensor) -> Tensor:
    """`W (I - V diag(removed) V^T)`; `removed` `(*batch, n)` is zero for all but the last, where V is cut."""
    n = w.shape[-1]
    count = int((removed > 0).sum(-1).amax())
    if 2 * count > n:
        return w @ ((v * (1 - removed).to(v.dtype)[..., None, :]) @ v.mT).to(w.dtype)
    top = v[..., n - count :].to(w.dtype)
    return w - ((w @ top) * removed[..., None, n - count :].to(w.dtype)) @ top.mT


def rounding(dtype: torch.dtype, frobenius: Tensor, norm: Tensor) -> Tensor:
    """Relative growth of the spectral norm when every entry is rounded to `dtype`.

    `u |W|_F / |W|_2` is the worst case (entry errors are at most `u |w_ij|`). In 16 bits it would cost up to
    `sqrt(n) / 256`, so there the size of the error of independent roundings is taken.
    """
    unit = torch.finfo(dtype).eps / 2
    if dtype in (torch.float32, torch.float64):
        return unit * frobenius / norm.clamp_min(_TINY) + EIGENVALUE_ERROR
    return torch.full_like(norm, HALF_MARGIN * unit)


def _lowered(bound: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """The cap, `(*batch,)`, less the rounding of the result to `dtype`; `s` are the singular values `(*batch, n)`."""
    capped = torch.linalg.vector_norm(s.minimum(bound[..., None]), dim=-1)
    return bound * (1 - rounding(dtype, capped, bound))
