"""The ways to clip singular values, by an eigendecomposition of the small Gram matrix or by an SVD.

`clip(W) = W h(W^T W)` with `h(g) = f(sqrt g) / sqrt g` has no cancellation where a singular value is close to a bound,
unlike nested matrix signs. `clips` is the public face.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix._checks import check_finite, finite_scale, working_dtype
from wellnormed.matrix._msign_methods import largest_eigenvalue_estimate
from wellnormed.matrix._spectral_function import Clip, zero_tolerance
from wellnormed.matrix._symmetric import full_product, mixed_eigh, symmetric_product, times_symmetric

EIGENVALUE_ERROR = 1e-13
"""Relative, of the largest eigenvalue of a float64 Gram matrix: some hundred roundings."""
_TINY = torch.finfo(torch.float64).tiny

_UNDECIDED = 1e-5
"""Distance from the cap, relative, within which float32 cannot tell inside from outside."""
_NEAR = 2.0
"""Largest singular value over the cap up to which taking away what is above the cap is more accurate than building what
is kept, because the part that is taken away is small."""
_NEAR_MARGIN = (2.5e-6, 3e-6)
"""What a result with products in float32 may exceed the cap by up to there, relative: the first, and the second times
the square of that ratio; times `sqrt(n / 768)` above that side. Measured up to half of it, and up to all of it for
clusters of singular values whose vectors are chosen against the reflection in `mixed_eigh`."""
_MARGIN = (4e-6, 2.2e-6)
"""The same beyond, times the ratio itself. Two clusters of singular values, the lower one just above the cap, can
exceed it four times, so there a result by float32 eigenvectors is checked."""
_MARGIN_SIDE = 768
_WIDE = 2048
"""Short side up to which that leaves the error below 1e-5 of the norm."""
_CHECKED = 4e-6
"""Part of the squared cap by which the float32 check wants the result below the cap: three times what it is off by."""
_SINGLE = 10.5
"""The ratio up to which the eigendecomposition, too, may be in float32: at 10, errors reach 9e-6 of the norm."""
_FAR = 20.0
"""The ratio up to which the products may be in float32: beyond, the cap would be lowered by more than 5e-5."""
_LONG = 2**16
"""Rows from which sums of equal terms lose too much in float32 (measured: 1e-6 of the norm at 2e5 rows)."""
_SQUARABLE = 1e3
"""Ratio up to which a float64 Gram matrix knows the values at the cap, to 1e-10; beyond, an SVD and a second pass."""
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
        w: Matrices `(m, n)` or `(batch, m, n)`, not empty.
        lower: float64, broadcasting to the batch.
        upper: The same.
        decay: The same; where it is 1, the result is rounded so that it ends at or below `upper`.
        method: "gram" or "svd".
    """
    if w.shape[-2] < w.shape[-1]:
        return clip(w.mT, lower, upper, decay, method).mT.contiguous()
    raises = bool((lower > 0).any())
    m, n = w.shape[-2:]
    fits = m * n >= _LARGE and m <= _LONG and n <= _WIDE and working_dtype(w) == torch.float32
    if method == "gram" and fits and not raises:
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
    g, v = torch.linalg.eigh(symmetric_product(w.mT, w))
    s = g.clamp_min(0).sqrt()

    def rebuild(target: Tensor) -> Tensor:
        kept = torch.where(s > 0, target / s.clamp_min(_TINY), 1)
        return times_symmetric(w, symmetric_product(v * kept[..., None, :], v.mT))

    return s, rebuild


def _with_single_products(w: Tensor, upper: Tensor, decay: Tensor) -> Tensor | None:
    """A cap of tall matrices with the large products in float32; None where that is not accurate enough.

    A float32 Gram matrix knows its eigenvalues to some 1e-7 of the largest, so the decomposition, too, is in float32
    only for matrices that are neither near the decision (inside or outside) nor far above the cap: the usual case
    after a step.
    """
    work = w.float()
    largest = work.abs().amax((-2, -1), keepdim=True)
    check_finite(largest, "w")
    largest = torch.where(largest > 0, largest, 1)
    # Squares stay in range, and where all entries are alike they are 1: their roundings would all go one way.
    scaled = work / largest
    bound = upper / largest[..., 0, 0].double()
    gram = symmetric_product(scaled.mT, scaled)
    estimate = (largest_eigenvalue_estimate(gram).double().sqrt() / bound).amax()
    growth = max(1.0, (w.shape[-1] / _MARGIN_SIDE) ** 0.5)
    # In 16 bits, rounding of the result hides errors of some 1e-4.
    single = _SINGLE / growth if w.dtype == torch.float32 else _FAR
    for dtype, limit in ((torch.float32, single), (torch.float64, _FAR)):
        if bool(estimate > limit):
            continue
        if dtype == torch.float64:
            wide = work.double() / largest.double()
            gram = symmetric_product(wide.mT, wide)
        g, v = mixed_eigh(gram)
        ratio = g[..., -1].clamp_min(0).double().sqrt() / bound
        undecided = dtype == torch.float32 and bool(((ratio - 1).abs() < _UNDECIDED).any())
        if undecided or bool((ratio > limit).any()):
            continue
        near = bool((ratio <= _NEAR).all())
        if w.dtype != torch.float32:
            margin = HALF_MARGIN * torch.finfo(w.dtype).eps / 2
        elif near:
            margin = (_NEAR_MARGIN[0] + _NEAR_MARGIN[1] * ratio.clamp_min(1) ** 2) * growth
        else:
            margin = (_MARGIN[0] + _MARGIN[1] * ratio.clamp_min(1)) * growth
        s = g.double().clamp_min(0).sqrt()
        safe = torch.where(decay == 1, bound * (1 - margin), bound)
        kept = torch.where(s > 0, Clip(torch.zeros_like(safe), safe, decay).values(s) / s.clamp_min(_TINY), 1)
        kept, v = kept.to(work.dtype), v.to(work.dtype)
        if near:
            value = _without(work, v, 1 - kept)
        else:
            value = times_symmetric(work, symmetric_product(v * kept[..., None, :], v.mT))
        outside = (ratio > 1) & (decay > 0)
        value = value if bool(outside.all()) else torch.where(outside[..., None, None], value, work)
        capped = w.dtype == torch.float32 and bool((decay == 1).any())
        if near or not capped or dtype == torch.float64 or _below(value / upper[..., None, None].float()):
            return value.to(w.dtype)
    return None


def _below(x: Tensor) -> bool:
    """Whether every matrix has a norm below 1: by a float32 Gram matrix, and a Cholesky factorisation of the rest."""
    rest = symmetric_product(x.mT, x).neg_()
    rest.diagonal(dim1=-2, dim2=-1).add_(1 - _CHECKED)
    return int(torch.linalg.cholesky_ex(rest).info.amax()) == 0


def _without(w: Tensor, v: Tensor, removed: Tensor) -> Tensor:
    """`W (I - V diag(removed) V^T)`; `removed` `(*batch, n)` is zero for all but the last, where V is cut."""
    n = w.shape[-1]
    count = int((removed > 0).sum(-1).amax())
    top = v[..., n - count :]
    scaled = top * removed[..., None, n - count :]
    if 2 * count > n:
        return times_symmetric(w, symmetric_product(scaled, top.mT), w, alpha=-1)
    if w.mT.is_contiguous():
        return full_product(top, scaled.mT @ w.mT, w.mT, alpha=-1).mT
    return full_product(w @ scaled, top.mT, w, alpha=-1)


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
