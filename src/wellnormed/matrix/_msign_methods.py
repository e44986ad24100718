"""The ways to compute a matrix sign; those that are only published are in `published`. `msign` is the public face.

`newton_schulz` by steps and `spectrum` at once evaluate the polynomial of a coefficient set, `svd` and `eigh` know
none, and all four take tall matrices (`m >= n`); `polynomial` and `exact` bring a matrix to them.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix import published
from wellnormed.matrix._checks import finite_scale, working_dtype
from wellnormed.matrix._spectral_function import zero_tolerance
from wellnormed.matrix._symmetric import symmetric_product, times_symmetric
from wellnormed.matrix.coefficients import CoefficientSet, Step

_LONG = 2**16  # terms up to which a float32 sum of squares is off by less than 1e-6


def exact(x: Tensor, *_: Tensor, by: Callable[..., Tensor]) -> Tensor:
    """One of the methods that know no set, in float64, whatever the shape and the scale of `x`."""
    if x.shape[-2] < x.shape[-1]:
        return exact(x.mT, by=by).mT.contiguous()
    wide = x.double()
    return by(wide / finite_scale(wide, "x")).to(x.dtype)


def polynomial(x: Tensor, *_: Tensor, chosen: CoefficientSet, method: str) -> Tensor:
    """The polynomial of a set, of `(m, n)` or `(batch, m, n)`, by "newton-schulz", "spectrum" or "gram"."""
    if x.shape[-2] < x.shape[-1]:
        return polynomial(x.mT, chosen=chosen, method=method).mT.contiguous()
    work = x.to(working_dtype(x))
    work = work / finite_scale(work, "x")  # squares of 1e-30 or 1e30 leave the range of float32
    # By rows, or what lies in memory like rows: one float32 sum is off by 3e-5 at 768 x 3072, and a float64 copy takes
    # as long as a product.
    by = -1 if work.stride(-1) == 1 else -2
    summed = torch.float64 if work.shape[by] > _LONG else work.dtype
    rows = torch.linalg.vector_norm(work, dim=by, keepdim=True, dtype=summed)
    frobenius = torch.linalg.matrix_norm(rows, keepdim=True, dtype=torch.float64)
    assert chosen.normalisation is not None  # check_sign
    # Largest entry at least 1/2: only a zero matrix has a smaller norm.
    norm = chosen.normalisation.scale * frobenius.clamp_min(0.5) + chosen.normalisation.epsilon
    if work.ndim == 3 and work.shape[0] == 1:
        work, norm = work[0], norm[0]
    if method == "spectrum":
        return spectrum(work, chosen.steps, norm).to(x.dtype).reshape(x.shape)
    work.div_(norm.to(work.dtype))  # a copy since it was scaled
    if method == "gram":
        return published.gram(work, chosen.steps).to(x.dtype).reshape(x.shape)
    if method == "bfloat16" or x.dtype.itemsize == 2:
        work = work.to(torch.bfloat16 if method == "bfloat16" else x.dtype)
    paired = work.shape[-2] >= 2 * work.shape[-1] and (work.dtype.itemsize > 2 or chosen.bears_half_rounding)
    count = 2 if paired else 1
    for i in range(0, len(chosen.steps), count):
        work = newton_schulz(work, *chosen.steps[i : i + count])  # under the same name, so that what came in is freed
    return work.to(x.dtype).reshape(x.shape)


def newton_schulz(x: Tensor, first: Step, second: Step | None = None) -> Tensor:
    """`X <- a X + X (b G + c G^2)` with `G = X^T X`, once or twice, for matrices of spectral norm near 1 at most.

    Two products with X (`2 m n^2` operations each) and one of the small side (`2 n^3`) per step, none where `c` is 0.
    Two steps make one multiplier of X: the second one's Gram matrix is `Q G Q` with the first one's
    `Q = a I + b G + c G^2`. That saves two products with X for three of the small side, so it pays for long matrices.
    As it stops after two steps, the growth of rounding that `published.gram` has to watch does not begin.
    """
    g = symmetric_product(x.mT, x)
    a, b, c = first
    r = symmetric_product(g, g, g, beta=b, alpha=c) if c else b * g
    if second is None:
        del g  # the product with X is as large as X; what led to its multiplier is freed first
        return times_symmetric(x, r, x, beta=a)
    r.diagonal(dim1=-2, dim2=-1).add_(a)
    g = symmetric_product(symmetric_product(r, g), r)
    a, b, c = second
    q = symmetric_product(g, g, g, beta=b, alpha=c) if c else b * g
    multiplier = symmetric_product(r, q, r, beta=a)
    del g, q, r
    return times_symmetric(x, multiplier)


@torch.compiler.assume_constant_result
@functools.cache
def multiplies_bfloat16(device: str) -> bool:
    """Whether a kind of device has instructions for products in bfloat16, so that they take less time than float32.

    Example:
        >>> multiplies_bfloat16("meta")
        False
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # torch < 2.10
        return False
    known = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def spectrum(x: Tensor, steps: tuple[Step, ...], norm: Tensor) -> Tensor:
    """The polynomial of `X / norm` as a function of the eigenvalues of `X^T X`: no iteration, two passes over X.

    One Gram matrix, one eigendecomposition, one small and one large product, in float64: the multiplier of the smallest
    singular values is as large as the set's slope, and what float32 rounds off it would be felt by the largest. `norm`
    is float64, `(*batch, 1, 1)`; X is given undivided by it, so that an exact rank stays exact.
    """
    wide = x.double()
    values, vectors = torch.linalg.eigh(symmetric_product(wide.mT, wide))
    # A rounded zero may be negative. Below this floor p(s)/s is its slope at zero to rounding.
    s = (values / norm[..., 0] ** 2).clamp_min(1e-3 * torch.finfo(torch.float64).eps).sqrt()
    p = s
    for a, b, c in steps:
        square = p * p
        p = p * (a + square * (b + c * square))
    multiplier = p / (s * norm[..., 0])
    return times_symmetric(wide, symmetric_product(vectors * multiplier[..., None, :], vectors.mT)).to(x.dtype)


def svd(x: Tensor) -> Tensor:
    """`U V^T` by a float64 singular value decomposition, without what is rounding of zero."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u * (s > zero_tolerance(s[..., :1], *x.shape[-2:]))[..., None, :]) @ vh


def eigh(x: Tensor) -> Tensor:
    """`X (X^T X)^{-1/2}` by a float64 eigendecomposition, without what squaring makes indistinguishable from zero."""
    g, v = torch.linalg.eigh(symmetric_product(x.mT, x))
    resolved = g > x.shape[-1] * torch.finfo(x.dtype).eps * g[..., -1:]
    inverse_root = torch.where(resolved, g, 1).rsqrt() * resolved
    return times_symmetric(x, symmetric_product(v * inverse_root[..., None, :], v.mT))
