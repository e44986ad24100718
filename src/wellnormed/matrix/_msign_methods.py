"""The ways to compute a matrix sign, on tall matrices (`m >= n`).

Polynomial ways (`newton_schulz`, `gram`, `spectrum`) run a coefficient set on matrices of Frobenius norm at most 1,
the last dividing by that norm itself; exact ones (`svd`, `eigh`, `inverse_root`, `sketch`) know none, and take float64
matrices of any scale near 1. `msign` is the public face.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix._spectral_function import zero_tolerance
from wellnormed.matrix._symmetric import full_product, mixed_eigh, symmetric_product, times_symmetric

Steps = tuple[tuple[float, float, float], ...]

_GRAM_NOISE = 4.0
"""Error of the eigenvalues of a Gram matrix, in rounding units of the largest (measured 1 to 3 at n = 256 and 768)."""
_RESOLVED = 2e-5
"""Relative error of the smallest eigenvalue below which float32 serves `spectrum`: half of it reaches the result."""


def largest_eigenvalue_estimate(g: Tensor) -> Tensor:
    """From below, by some per cent: six power iterations from the longest row of semidefinite `(*batch, n, n)`."""
    lengths = torch.linalg.vector_norm(g, dim=-1)
    start = lengths.argmax(-1)[..., None, None].expand(*g.shape[:-1], 1)
    v = g.gather(-1, start)
    for _ in range(6):
        v = g @ (v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny))
    return torch.linalg.vector_norm(v, dim=-2)[..., 0]


def newton_schulz(x: Tensor, steps: Steps, product: Callable[..., Tensor] = symmetric_product) -> Tensor:
    """The readable iteration: `X <- a X + X (b G + c G^2)` with `G = X^T X`.

    Two products with X (`2 m n^2` operations each) and one of the small side (`2 n^3`) per step, none where `c` is 0;
    reads X four times a step. Both but the last are symmetric, and `product` computes them.
    """
    for a, b, c in steps:
        g = product(x.mT, x)
        x = times_symmetric(x, product(g, g, g, beta=b, alpha=c) if c else b * g, x, beta=a)
    return x


def gram(x: Tensor, steps: Steps) -> Tensor:
    """The same polynomial through `R = X^T X` and `Q`: four small products a step, X only at the ends of a segment.

    Rounding leaves R with eigenvalues near `-eps`; every step multiplies them by `a^2`, and below zero the
    polynomial grows without bound. A segment therefore ends, and R is formed anew from `X Q`, before `slope^2
    eps` can reach 3e-2: two to four passes over X in all. R and its polynomials commute, but their products are full:
    one triangle of them makes that growth worse (0.1 instead of 5e-3 for a constant plus a tenth of the identity).
    """
    limit = (3e-2 / torch.finfo(x.dtype).eps) ** 0.5
    r, q, slope = symmetric_product(x.mT, x), None, 1.0
    for index, (a, b, c) in enumerate(steps):
        z = full_product(r, r, r, beta=b, alpha=c)
        z.diagonal(dim1=-2, dim2=-1).add_(a)
        q = z if q is None else q @ z
        slope *= a
        if index + 1 == len(steps):
            break
        if slope * steps[index + 1][0] > limit:
            x, q, slope = times_symmetric(x, q), None, 1.0
            r = symmetric_product(x.mT, x)
        else:
            r = (r @ z) @ z
    assert q is not None  # a set has at least one step
    return times_symmetric(x, q)


def spectrum(x: Tensor, steps: Steps, norm: Tensor) -> Tensor:
    """The polynomial of `X / norm` as a function of the eigenvalues of `X^T X`: exact, no iteration, two passes over X.

    One Gram matrix, one eigendecomposition, one small and one large product. In float64, unless one Cholesky
    factorisation shows that no singular value of a float32 matrix is small enough for the rounding of its Gram matrix
    to matter. The last product, too: the multiplier of the smallest singular values is as large as the set's slope, and
    its rounding to float32 would be felt by the largest (1e-3 of the norm for constant blocks, even at a slope of 485).

    Args:
        x: `(*batch, m, n)`, not divided by `norm`, so that an exact rank stays exact.
        steps: The set.
        norm: float64, `(*batch, 1, 1)`.
    """
    g = symmetric_product(x.mT, x)
    eps = torch.finfo(x.dtype).eps
    if x.dtype == torch.float32:
        noise = _GRAM_NOISE * eps * largest_eigenvalue_estimate(g)
        shifted = g.clone()
        shifted.diagonal(dim1=-2, dim2=-1).sub_(noise[..., None] / _RESOLVED)
        if int(torch.linalg.cholesky_ex(shifted).info.amax()) != 0:
            return spectrum(x.double(), steps, norm).to(x.dtype)
    values, vectors = mixed_eigh(g)
    if x.dtype == torch.float32 and bool((values[..., 0] * _RESOLVED < _GRAM_NOISE * eps * values[..., -1]).any()):
        return spectrum(x.double(), steps, norm).to(x.dtype)  # the estimate may miss the largest eigenvalue
    # A rounded zero may be negative. Below this floor p(s)/s is its slope at zero to rounding.
    floor = 1e-3 * torch.finfo(torch.float64).eps
    s = (values.double() / norm[..., 0] ** 2).clamp_min(floor).sqrt()
    p = s
    for a, b, c in steps:
        square = p * p
        p = p * (a + square * (b + c * square))
    multiplier = (p / (s * norm[..., 0])).to(x.dtype)
    return times_symmetric(x, symmetric_product(vectors * multiplier[..., None, :], vectors.mT))


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


def inverse_root(x: Tensor) -> Tensor:
    """`X (X^T X + e I)^{-1/2}` by the coupled Newton iteration (Lakic 1998; Modular Duality, section 5.2).

    `e` is the rounding of the Gram matrix, without which rank-deficient matrices have no inverse. In float64, three
    small products in each of some 45 iterations: eigenvalues grow by 9/4 a step.
    """
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    m = symmetric_product(x.mT, x)
    ridge = x.shape[-1] * torch.finfo(x.dtype).eps
    m.diagonal(dim1=-2, dim2=-1).add_(ridge)
    m = m / (1 + ridge)
    eye = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    root = eye.expand_as(m)
    for _ in range(math.ceil(math.log(1 / ridge) / math.log(9 / 4)) + 5):
        t = (3 * eye - m) / 2
        root, m = symmetric_product(root, t), symmetric_product(symmetric_product(m, t), t)
        m = (m + m.mT) / 2  # rounding would grow in the antisymmetric part
    return x @ root / math.sqrt(1 + ridge)


def sketch(x: Tensor, rank: int, generator: torch.Generator | None) -> Tensor:
    """`U_r V_r^T` of a randomised SVD of that rank (Halko, Martinsson, Tropp 2011; Modular Duality, section 5.1).

    Eight columns more than asked for and two power iterations; six products with X, `2 m n (rank + 8)` operations
    each.
    """
    width = min(rank + 8, x.shape[-1])
    y = torch.randn(x.shape[-1], width, dtype=torch.float64, device=generator.device if generator else None,
                    generator=generator)  # fmt: skip
    y = y.to(x.device).expand(*x.shape[:-2], -1, -1)
    for _ in range(2):
        y = torch.linalg.qr(x.mT @ torch.linalg.qr(x @ y).Q).Q
    basis = torch.linalg.qr(x @ y).Q
    u, s, vh = torch.linalg.svd(basis.mT @ x, full_matrices=False)
    top = (s > zero_tolerance(s[..., :1], *x.shape[-2:]))[..., None, :rank]
    return (basis @ u[..., :rank] * top) @ vh[..., :rank, :]
