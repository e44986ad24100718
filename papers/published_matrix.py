"""Ways to a clip and to a matrix sign that are published, to compare with: nobody would choose them.

The clips of Spectral clipping (SC) are compositions of matrix signs, each one or more Newton-Schulz iterations with the
six steps of the paper's code, in the dtype of the weight. A sign of anything below some 0.5% of the Frobenius norm, be
it a singular value or its distance from a bound, has not converged, and its error is multiplied by the norm of the
weight (`benchmarks/matrix/`). The matrix signs of Modular Duality (MD), section 5, the iteration on the Gram matrix and
the eigendecomposition take matrices `(*batch, m, n)` of float32 or float64.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from wellnormed.matrix import REGISTRY
from wellnormed.matrix.coefficients import get
from wellnormed.matrix.soft_cap import reached_norm, root_strength

HARD_CAP = (
    (0.805032, 0.206361, -0.019763),
    (0.649867, 0.162935, -0.011150),
    (1.810259, -0.200265, 0.008251),
    (1.004384, -0.183490, 0.014413),
)
"""LT's hard cap by four quintics: steps `(a, b, c)` of `a x + b x^3 + c x^5`, fitted to `min(x, 1)` on `[0, 3.5]`."""
_STEPS = REGISTRY["spectral-clipping-6"].steps


def soft_cap_strength_as_published(cap: float, update_norm: float, decay: float = 0.0) -> float:
    """LT, theorem B.1, as printed: `p(k) = cap` at every step size, unsafe past `k = (81/62) cap`.

    Singular values inside `(0, k)` come out above the cap (1.19 times at a step of one cap). Arguments as in
    `wellnormed.matrix.soft_cap_strength`.

    Example:
        >>> from wellnormed.matrix import soft_cap_strength
        >>> soft_cap_strength_as_published(1.0, 1.0) < soft_cap_strength(1.0, 1.0)
        True
    """
    ratio = reached_norm(cap, update_norm, decay) / cap
    return 0.0 if ratio <= 1 else root_strength(ratio) / cap / cap


def hard_cap(x: Tensor) -> Tensor:
    """LT, section 3.1: the four quintics of `HARD_CAP` on the singular values of matrices, which must be at most 3.5.

    The result exceeds 1 by up to 0.0109, and small singular values shrink to 0.951 of themselves.

    Example:
        >>> hard_cap(torch.diag(torch.tensor([3.0, 0.01]))).diagonal()
        tensor([1.0009, 0.0095])
    """
    if x.shape[-2] < x.shape[-1]:
        return hard_cap(x.mT).mT
    for a, b, c in HARD_CAP:
        g = x.mT @ x
        x = a * x + x @ (b * g + c * g @ g)
    return x


def clip_by_identities(w: Tensor, lower: float, upper: float) -> Tensor:
    """SC equation 6, the lift of a clip that SC rejects: the scalar formula with the identity for 1, `(*batch, m, n)`.

    It is the clip of symmetric positive matrices alone: the identity has not the singular vectors of another one. The
    result is `(*batch, m, m)`, so that a matrix that is not square changes its shape.

    Example:
        >>> clip_by_identities(torch.diag(torch.tensor([3.0, 1.5])), 1.0, 2.0)
        tensor([[2.0000, 0.0000],
                [0.0000, 1.5000]])
    """
    m, n = w.shape[-2:]
    one = torch.eye(m, n, dtype=w.dtype, device=w.device)
    far, near = (_absolute(bound * one - w) for bound in (lower, upper))
    return ((lower + upper) * torch.eye(m, dtype=w.dtype, device=w.device) + far - near) / 2


def _absolute(x: Tensor) -> Tensor:
    """`X msign(X)^T`, exact: equation 6 fails whatever computes its signs."""
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    return (u * s[..., None, :]) @ u.mT


def _nested(w: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """SC equation 7, or the two-sign forms of sections 3.2 and 3.3 where one bound is absent.

    Two or three matrix signs, and two products `2 m n^2` more for each bound.
    """
    if w.shape[-2] > w.shape[-1]:
        return _nested(w.mT, lower, upper).mT
    sign = _sign(w)
    if upper is None:
        return w if lower is None else (lower * sign + w + _times_sign(lower * sign - w, sign)) / 2
    capped = -_times_sign(upper * sign - w, sign)
    if lower is None:
        return (upper * sign + w + capped) / 2
    return ((lower + upper) * sign + _times_sign(lower * sign - w, sign) + capped) / 2


def _sign(x: Tensor) -> Tensor:
    largest = x.abs().amax((-2, -1), keepdim=True)
    x = x / torch.where(largest > 0, largest, 1)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1)
    y = x.mT
    for a, b, c in _STEPS:  # as published
        g = y.mT @ y
        y = a * y + y @ (b * g + c * g @ g)
    return y.mT


def _times_sign(gap: Tensor, sign: Tensor) -> Tensor:
    return (gap @ _sign(gap).mT) @ sign


def _by_caps(cap: Callable[[Tensor], Tensor], w: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """These forms need an odd function without a jump: `clip(s) = min(s, upper) + lower - min(s, lower)`."""
    value = w if upper is None else upper * cap(w / upper)
    return value if lower is None else value + lower * (_sign(w) - cap(w / lower))


def _block_cap(w: Tensor) -> Tensor:
    """SC section 4.2: one matrix sign of the dense `[[I, W], [W^T, I]]` of side `m + n`."""
    m, n = w.shape[-2:]
    left, right = (torch.eye(k, dtype=w.dtype, device=w.device).expand(*w.shape[:-2], k, k) for k in (m, n))
    sign = _sign(torch.cat((torch.cat((left, w), -1), torch.cat((w.mT, right), -1)), -2))
    return sign[..., :m, m:] + sign[..., :m, :m] @ w


def _blockwise_cap(w: Tensor) -> Tensor:
    """SC section 4.3: the same through the blocks P, Q, R, nine products in each of three multiplications a step."""
    m, n = w.shape[-2:]
    left, right = (torch.eye(k, dtype=w.dtype, device=w.device) for k in (m, n))
    frobenius = torch.sqrt(m + n + 2 * torch.linalg.matrix_norm(w, keepdim=True) ** 2)
    blocks = left / frobenius, w / frobenius, right / frobenius
    for a, b, c in _STEPS:
        square = _multiply(blocks, blocks)
        fourth = _multiply(square, square)
        p, q, r = (b * two + c * four for two, four in zip(square, fourth, strict=True))
        blocks = _multiply(blocks, (a * left + p, q, a * right + r))
    return blocks[1] + blocks[0] @ w


def _multiply(x: tuple[Tensor, Tensor, Tensor], y: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return x[0] @ y[0] + x[1] @ y[1].mT, x[0] @ y[1] + x[1] @ y[2], x[1].mT @ y[1] + x[2] @ y[2]


def _by_svd(w: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """SC algorithm 2: the definition, in float64."""
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    clipped = s if upper is None else s.minimum(upper.double())
    clipped = clipped if lower is None else clipped.maximum(lower.double())
    return ((u * (clipped * (s > 0))[..., None, :]) @ vh).to(w.dtype)


CLIPS = {
    "nested": _nested,
    "block": partial(_by_caps, _block_cap),
    "blockwise": partial(_by_caps, _blockwise_cap),
    "svd": _by_svd,
}


def clip(w: Tensor, lower: float | None, upper: float | None, method: str) -> Tensor:
    """`spectral_clip` by "nested", "block" or "blockwise" matrix signs, as in SC, or by "svd"; None sets no bound.

    Example:
        >>> clip(torch.diag(torch.tensor([4.0, 0.5])), None, 1.0, "nested").diagonal().round(decimals=1)
        tensor([1.0000, 0.5000])
    """
    low, high = (None if bound is None else w.new_tensor(bound) for bound in (lower, upper))
    return CLIPS[method](w, low, high)


def gram(x: Tensor, coefficients: str = "polar-express-8") -> Tensor:
    """The polynomial of a set through `R = X^T X` and `Q`: four small products a step, X only at the ends of a segment.

    As in the package gram-newton-schulz. Rounding leaves R with eigenvalues near `-eps`; every step multiplies them by
    `a^2`, and below zero the polynomial grows without bound. A segment therefore ends, and R is formed anew from `X Q`,
    before `slope^2 eps` can reach 3e-2: two to four passes over X in all. R and its polynomials commute, but their
    products are full: one triangle of them makes that growth worse.
    """
    chosen = get(coefficients)
    if x.shape[-2] < x.shape[-1]:
        return gram(x.mT, coefficients).mT
    steps, limit = chosen.steps, (3e-2 / torch.finfo(x.dtype).eps) ** 0.5
    x = x / (chosen.scale * torch.linalg.matrix_norm(x, keepdim=True) + chosen.epsilon)
    r, q, slope = x.mT @ x, None, 1.0
    for index, (a, b, c) in enumerate(steps):
        z = b * r + c * r @ r
        z.diagonal(dim1=-2, dim2=-1).add_(a)
        q = z if q is None else q @ z
        slope *= a
        if index + 1 == len(steps):
            break
        if slope * steps[index + 1][0] > limit:
            x, q, slope = x @ q, None, 1.0
            r = x.mT @ x
        else:
            r = (r @ z) @ z
    assert q is not None  # a set has at least one step
    return x @ q


def eigh(x: Tensor) -> Tensor:
    """`X (X^T X)^{-1/2}` by a float64 eigendecomposition, without what squaring makes indistinguishable from zero."""
    if x.shape[-2] < x.shape[-1]:
        return eigh(x.mT).mT
    wide = x.double()
    g, v = torch.linalg.eigh(wide.mT @ wide)
    resolved = g > x.shape[-1] * torch.finfo(wide.dtype).eps * g[..., -1:]
    inverse_root = torch.where(resolved, g, 1).rsqrt() * resolved
    return (wide @ (v * inverse_root[..., None, :]) @ v.mT).to(x.dtype)


def inverse_root(x: Tensor) -> Tensor:
    """`X (X^T X + e I)^{-1/2}` by the coupled Newton iteration (Lakic 1998; Modular Duality, section 5.2).

    `e` is the rounding of the Gram matrix, without which rank-deficient matrices have no inverse. In float64, three
    small products in each of some 45 iterations: eigenvalues grow by 9/4 a step.
    """
    if x.shape[-2] < x.shape[-1]:
        return inverse_root(x.mT).mT
    given, x = x.dtype, x.double()
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    m = x.mT @ x
    ridge = x.shape[-1] * torch.finfo(x.dtype).eps
    m.diagonal(dim1=-2, dim2=-1).add_(ridge)
    m = m / (1 + ridge)
    eye = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    root = eye.expand_as(m)
    for _ in range(math.ceil(math.log(1 / ridge) / math.log(9 / 4)) + 5):
        t = (3 * eye - m) / 2
        root, m = root @ t, m @ t @ t
        m = (m + m.mT) / 2  # rounding would grow in the antisymmetric part
    return (x @ root / math.sqrt(1 + ridge)).to(given)


def qdwh(x: Tensor) -> Tensor:
    """The polar factor by QR factorisations (SC, table of section 2.1; Nakatsukasa, Bai and Gygi 2010, as JAX has it).

    Each iteration is the rational function `x (a + b x^2) / (1 + c x^2)` of singular values, whose weights follow from
    `least`, below which none is assumed to lie; from the rounding of float64 it takes six. It needs neither a
    polynomial's interval nor a Gram matrix, but an `(m + n) x n` QR in each iteration instead of products; torch has
    none in half precision.

    Example:
        >>> qdwh(torch.diag(torch.tensor([3.0, -1e-6], dtype=torch.float64))).diagonal()
        tensor([ 1.0000, -1.0000], dtype=torch.float64)
    """
    if x.shape[-2] < x.shape[-1]:
        return qdwh(x.mT).mT
    m, n = x.shape[-2:]
    least = rounding = torch.finfo(x.dtype).eps
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    eye = torch.eye(n, dtype=x.dtype, device=x.device).expand(*x.shape[:-2], n, n)
    while 1 - least > 10 * rounding:
        d = (4 * (1 - least**2) / least**4) ** (1 / 3)
        root = math.sqrt(1 + d)
        a = root + math.sqrt(8 - 4 * d + 8 * (2 - least**2) / (least**2 * root)) / 2
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        q = torch.linalg.qr(torch.cat((math.sqrt(c) * x, eye), -2)).Q
        x = b / c * x + (a - b / c) / math.sqrt(c) * q[..., :m, :] @ q[..., m:, :].mT
        least = min(least * (a + b * least**2) / (1 + c * least**2), 1.0)
    return x


def sketch(x: Tensor, rank: int, generator: torch.Generator | None = None) -> Tensor:
    """`U_r V_r^T` of a randomised SVD of that rank (Halko, Martinsson, Tropp 2011; Modular Duality, section 5.1).

    Eight columns more than asked for and two power iterations: six products with X of `2 m n (rank + 8)` operations, in
    float64.
    """
    if x.shape[-2] < x.shape[-1]:
        return sketch(x.mT, rank, generator).mT
    wide, width = x.double(), min(rank + 8, x.shape[-1])
    y = torch.randn(x.shape[-1], width, dtype=torch.float64, generator=generator).expand(*x.shape[:-2], -1, -1)
    for _ in range(2):
        y = torch.linalg.qr(wide.mT @ torch.linalg.qr(wide @ y).Q).Q
    basis = torch.linalg.qr(wide @ y).Q
    u, s, vh = torch.linalg.svd(basis.mT @ wide, full_matrices=False)
    top = (s > max(x.shape[-2:]) * torch.finfo(torch.float64).eps * s[..., :1])[..., None, :rank]
    return ((basis @ u[..., :rank] * top) @ vh[..., :rank, :]).to(x.dtype)


SIGNS = {"gram": gram, "eigh": eigh, "inverse-root": inverse_root, "qdwh": qdwh}
"""Ways to a matrix sign, each a function of matrices alone."""
