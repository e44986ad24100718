"""The ways to clip singular values: the smaller Gram matrix in float32, the same in float64, or an SVD.

`clip(W) = W - W V diag(1 - f(s)/s) V^T`, where V holds the right singular vectors whose values change. Values close to
a bound cause no cancellation, unlike in nested matrix signs. The public functions are in `clips`.

An error `e` of the Gram matrix, relative to its norm, reaches the capped matrix as at most `e r^3 / 2` of the cap, for
a norm of `r` caps: the multiplier `1 - min(1, cap / sqrt(g))` of an eigenvalue `g` has slopes of at most
`1 / (2 cap^2)`. A floor magnifies it to `e k^2 / 2` of the norm, where `k` is the norm over the least singular value
that is raised. An SVD with the error `e` gives `e r`; a floor magnifies that error by the floor over that least value,
as in every float64 method. The first of these methods that is accurate enough is taken, else the SVD.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from wellnormed._devices import recording
from wellnormed.matrix._cap_by_products import cap_by_products, is_near
from wellnormed.matrix._checks import fails, finite_scale, known_to_hold
from wellnormed.matrix._spectral_function import Clip, zero_tolerance
from wellnormed.matrix._symmetric import CALL, full_product, symmetric_product, times_symmetric

_EPS, _TINY = torch.finfo(torch.float64).eps, torch.finfo(torch.float64).tiny


def accuracy(dtype: torch.dtype) -> float:
    """The stated error of a clip without a floor, over the largest singular value, and its excess over the cap."""
    return {torch.float64: 1e-12, torch.float32: 5e-6}.get(dtype, torch.finfo(dtype).eps / 2)


def clip(
    w: Tensor,
    lower: Tensor,
    upper: Tensor,
    decay: Tensor,
    method: str,
    raises: bool,
    most: float = math.inf,
    blur: float = 0.0,
) -> Tensor:
    """Apply `Clip(lower, upper, decay)` to the singular values of nonempty `(m, n)` or `(batch, m, n)`.

    The bounds are float64 and broadcast to the batch. The method is "gram", "products" or "svd", which is taken where
    "gram" is not accurate enough. `raises` tells whether any of `lower` is positive. Only "products" uses `most` and
    `blur`, which are those of `spectral_hardcap`.
    """
    if w.shape[-2] < w.shape[-1]:
        return clip(w.mT, lower, upper, decay, method, raises, most, blur).mT.contiguous()
    work = w if w.dtype == torch.float64 else w.float()
    with known_to_hold() if method == "products" else nullcontext():  # its result shows it too: NaN counts as far
        scale = finite_scale(work, "w")
    work, size = work / scale, scale[..., 0, 0].double()
    low, high = lower / size, upper / size
    if method == "products":
        capped = None if raises else _by_products(w, work, high, upper, decay, most, blur)
        return clip(w, lower, upper, decay, "gram", raises) if capped is None else capped
    s, vectors, left = _decomposed(work, low, high, method, raises, accuracy(w.dtype))
    largest = s.amax(-1)
    within = 1 + max(torch.finfo(w.dtype).eps, w.shape[-1] * _EPS)
    inside = ((largest <= high * within) | (decay == 0)) & ((s * within >= low[..., None]) | (s == 0)).all(-1)
    clipped = Clip(low, high, decay).values(s)
    if left is None:
        removed = torch.where(s > 0, 1 - clipped / s.clamp_min(_TINY), 0)
        value = _without(w.to(vectors.dtype), vectors, torch.where(inside[..., None], 0, removed)).to(w.dtype)
    else:  # W v / s would magnify the rounding of W v where a small singular value s is raised
        removed = torch.where(inside[..., None], 0, s - clipped) * size[..., None]
        value = full_product(left * removed[..., None, :], vectors.mT, w.double(), alpha=-1).to(w.dtype)
    if bool(inside.any()):
        value = torch.where(inside[..., None, None], w, value)
    far = largest / high * (w.shape[-1] * _EPS) > accuracy(w.dtype)
    if bool((far & (decay == 1)).any()):  # so far above the cap, rounding leaves a result above it
        again = clip(value, lower, upper, decay, "svd", raises)
        return torch.where((decay == 1)[..., None, None], again, value)
    return value


def _by_products(
    w: Tensor, work: Tensor, high: Tensor, upper: Tensor, decay: Tensor, most: float, blur: float
) -> Tensor | None:
    """A cap without a decomposition; `high` is `upper` in the units of `work`. None if W is far above the cap."""
    shape = (..., None, None)
    in_caps = (work / high[shape].clamp_min(_TINY)).to(work.dtype)
    value, inside, far = cap_by_products(in_caps, decay, accuracy(work.dtype), most, blur)
    looks = not recording(w.device)
    if fails(~far) if is_near(most) else looks and bool(far.any()):  # in `known_to_hold` a known norm is not checked
        return None
    return torch.where((inside | (decay == 0))[shape], w, (value * upper[shape]).to(w.dtype))


def _decomposed(
    work: Tensor, lower: Tensor, upper: Tensor, method: str, raises: bool, accuracy: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Singular values in float64 and right singular vectors, by the first method that is accurate enough.

    An SVD also gives the left singular vectors, and sets rounding errors of zero to zero.
    """
    if method == "gram":
        for values, vectors, error in _gram_eigens(work, upper, accuracy, raises):
            s = values.double().sqrt()
            largest, least = s.amax(-1), s.amin(-1).clamp_min(_TINY)
            raised = torch.where(least < lower, largest / least, 0)
            if bool((error * (largest / upper).pow(3).maximum(raised.square()) / 2 <= accuracy).all()):
                return s, vectors, None
    u, s, vh = torch.linalg.svd(work.double(), full_matrices=False)
    return torch.where(s > zero_tolerance(s[..., :1], *work.shape[-2:]), s, 0), vh.mT, u


def _gram_eigens(w: Tensor, upper: Tensor, accuracy: float, raises: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Eigenvalues and eigenvectors of `W^T W` by methods of rising accuracy and cost, each with its error.

    The error is `|W^T W - V diag(values) V^T|` over the largest eigenvalue. In float32 it is estimated. Float32 is
    skipped for matrices too small to save time (`CALL`), and where a floor or the distance from the cap needs more
    digits. LAPACK's float32 eigenvectors can be off from orthogonal by `n u` for structured matrices, whose rounding
    errors add up; one Newton-Schulz step squares this error. In float64 the error is `n u` (Higham, Accuracy and
    Stability, section 3.5).
    """
    wide = w.double()
    if w.dtype == torch.float32 and not raises and w.shape[-1] ** 3 >= CALL:
        gram = symmetric_product(w.mT, w)
        longest = torch.linalg.vector_norm(gram, dim=-1).argmax(-1)[..., None, None].expand(*gram.shape[:-1], 1)
        largest = _norm_estimate(lambda x: gram @ x, gram.gather(-1, longest), 2)
        ratio = largest.double().sqrt() / upper
        if bool((torch.finfo(w.dtype).eps / 2 * ratio**3 / 2 <= accuracy).all()):  # as good as float32 can be
            values, vectors = torch.linalg.eigh(gram)
            values = values.clamp_min(0)
            yield values, vectors, _error(wide, values.double(), vectors.double())
            vectors = 1.5 * vectors - 0.5 * (vectors @ symmetric_product(vectors.mT, vectors))
            yield values, vectors, _error(wide, values.double(), vectors.double())
    values, vectors = torch.linalg.eigh(symmetric_product(wide.mT, wide))
    yield values.clamp_min(0), vectors, torch.full_like(values[..., 0], wide.shape[-1] * _EPS / 2)


def _error(w: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Norm of `W^T W - V diag(values) V^T` over the largest value, by thin float64 products.

    Three iterations magnify an error in one direction, three times as large as the rest, by 27. This is enough to find
    it from a random start in 768 dimensions.
    """
    start = torch.randn(w.shape[-1], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    start = start.to(w.device).expand(*w.shape[:-2], -1, 1)
    error = _norm_estimate(lambda x: w.mT @ (w @ x) - vectors @ (values[..., None] * (vectors.mT @ x)), start, 3)
    return error / values[..., -1].clamp_min(_TINY)


def _norm_estimate(multiply: Callable[[Tensor], Tensor], x: Tensor, iterations: int) -> Tensor:
    """Spectral norm of a symmetric matrix, from below: `(*batch,)`, by power iterations from `x`, `(*batch, n, 1)`."""
    for _ in range(iterations):
        length = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        x = multiply(x / length.clamp_min(torch.finfo(x.dtype).tiny))
    return torch.linalg.vector_norm(x, dim=-2)[..., 0]


def _without(w: Tensor, v: Tensor, removed: Tensor) -> Tensor:
    """`W (I - V diag(removed) V^T)`; columns of V with `removed = 0` in every matrix of the batch are skipped."""
    columns = (removed != 0).reshape(-1, removed.shape[-1]).any(0)
    v, removed = v[..., columns], removed[..., None, columns].to(w.dtype)
    if 3 * v.shape[-1] > w.shape[-1]:  # then two thin products take longer than one
        return times_symmetric(w, symmetric_product(v * removed, v.mT), w, alpha=-1)
    if w.mT.is_contiguous():  # keep the layout of w, so that nothing is copied afterwards
        return full_product(v, (v * removed).mT @ w.mT, w.mT, alpha=-1).mT
    return full_product(w @ (v * removed), v.mT, w, alpha=-1)


def clip_reference(w: Tensor, lower: float, upper: float) -> Tensor:
    """`spectral_clip` of one matrix by its definition: nonzero singular values are clamped to two bounds.

    Example:
        >>> clip_reference(torch.diag(torch.tensor([4.0, 0.5, 0.1])), 0.25, 1.0).diagonal()
        tensor([1.0000, 0.5000, 0.2500])
    """
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    clipped = torch.where(s > zero_tolerance(s[:1], *w.shape), s.clamp(lower, upper), 0)
    return ((u * clipped) @ vh).to(w.dtype)
