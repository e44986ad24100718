"""The ways to compute a matrix sign, on tall matrices (`m >= n`); those that are only published are in `published`.

`newton_schulz` and `spectrum` evaluate the polynomial of a coefficient set; `svd` and `eigh` know none. `msign` is the
public face.
"""

import torch
from torch import Tensor

from wellnormed.matrix._spectral_function import zero_tolerance
from wellnormed.matrix._symmetric import symmetric_product, times_symmetric

Steps = tuple[tuple[float, float, float], ...]


def newton_schulz(x: Tensor, steps: Steps) -> Tensor:
    """The iteration `X <- a X + X (b G + c G^2)` with `G = X^T X`, for matrices of Frobenius norm at most 1.

    Two products with X (`2 m n^2` operations each) and one of the small side (`2 n^3`) per step, none where `c` is 0;
    reads X four times a step.
    """
    for a, b, c in steps:
        g = symmetric_product(x.mT, x)
        x = times_symmetric(x, symmetric_product(g, g, g, beta=b, alpha=c) if c else b * g, x, beta=a)
    return x


def spectrum(x: Tensor, steps: Steps, norm: Tensor) -> Tensor:
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
