"""The matrix sign (polar factor) `U V^T` by polynomial iterations or by an SVD.

What lives here: running a coefficient set on a batch of matrices. What does not: the sets themselves
(`coefficients`), the exact gradient (`_spectral_function`), and any unit of a layer (`norms`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from wellnormed.matrix._checks import check_finite, check_matrix
from wellnormed.matrix._spectral_function import Sign, attach_gradient, zero_tolerance
from wellnormed.matrix.coefficients import CoefficientSet, get, get_for_msign

METHODS = ("auto", "newton-schulz", "gram", "svd")
_GRAM_ASPECT = 2.0  # measured on CPU, float32 and float64: below it, the Gram form saves nothing


def msign(
    x: Float[Tensor, "*batch m n"],
    coefficients: str | CoefficientSet = "polar-express-8",
    method: str = "auto",
) -> Float[Tensor, "*batch m n"]:
    """`U V^T` of `x = U S V^T`: every nonzero singular value becomes 1 (within the set's own error).

    The update of Muon and Scion is `-lr * msign(momentum)` (Modular Duality in Deep Learning).
    Polynomial methods map a singular value `s` to `p(s / |x|_F)`: values below about `1 / slope` of the
    Frobenius norm do not reach 1. The scale of `x` does not matter.

    Args:
        x: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        coefficients: Name in `coefficients.REGISTRY`, or a set. Not used by "svd", but the name must exist.
        method: "newton-schulz" iterates on the matrix, in its own dtype. "gram" iterates on the Gram matrix
            of the smaller side (float32 or wider) and touches `x` two to four times; singular values below
            `sqrt(eps) |x|_F` (3.5e-4 in float32) carry a relative error of up to some percent, because
            squaring loses them, and restarts keep that error from growing. "svd" is exact, in float64. "auto"
            takes "gram" for matrices at least twice as long as wide in float32 or float64 on a CPU, else
            "newton-schulz".

    Returns:
        Same shape and dtype; spectral norm at most `overshoot` of the set, within rounding (1e-5 in float32,
        2% in bfloat16 and float16). A zero matrix gives zero. Differentiable once: the gradient is that of
        the exact polar factor, whatever the method.

    Raises:
        ValueError: Not a floating-point matrix, NaN or infinity (not checked under `torch.compile`), unknown
            method or set, a set that is not a matrix sign or not safe in this dtype.

    Example:
        >>> x = torch.tensor([[3.0, 0.0], [0.0, -0.5], [0.0, 0.0]])
        >>> msign(x, method="svd")
        tensor([[ 1.,  0.],
                [ 0., -1.],
                [ 0.,  0.]])
    """
    check_matrix(x, "x")
    if method not in METHODS:
        raise ValueError(
            f"method={method!r} is not one of {', '.join(METHODS)}; 'auto' picks by shape, dtype and device"
        )
    chosen = get(coefficients) if method == "svd" else get_for_msign(coefficients, x.dtype)
    if x.numel() == 0:
        return x.clone()
    with torch.no_grad():
        value = _forward(x.detach(), chosen, resolve_method(x) if method == "auto" else method)
    return attach_gradient(x, value, Sign())


def resolve_method(x: Tensor) -> str:
    """The method that "auto" stands for, from shape, dtype and device alone.

    Example:
        >>> resolve_method(torch.empty(512, 64)), resolve_method(torch.empty(64, 64))
        ('gram', 'newton-schulz')
    """
    short, long = sorted(x.shape[-2:])
    wide_dtype = x.dtype in (torch.float32, torch.float64)
    return "gram" if wide_dtype and x.device.type == "cpu" and long >= _GRAM_ASPECT * short else "newton-schulz"


def _forward(x: Tensor, chosen: CoefficientSet, method: str) -> Tensor:
    if x.shape[-2] < x.shape[-1]:
        return _forward(x.mT, chosen, method).mT.contiguous()
    # From here m >= n. Division by the largest entry first: squares of 1e-30 or 1e30 leave the range of
    # float32.
    work = x if x.dtype == torch.float64 else x.float()
    largest = work.abs().amax((-2, -1), keepdim=True)
    check_finite(largest, "x")
    work = work / torch.where(largest > 0, largest, 1)
    if method == "svd":
        return _by_svd(work).to(x.dtype)
    assert chosen.normalisation is not None  # get_for_msign
    # Largest entry 1, so the Frobenius norm is at least 1; only a zero matrix is below.
    frobenius = torch.linalg.matrix_norm(work, keepdim=True).clamp_min(1)
    work = work / (chosen.normalisation.scale * frobenius + chosen.normalisation.epsilon)
    batch = work.flatten(0, -3) if work.ndim > 3 else work
    if batch.ndim == 3 and batch.shape[0] == 1:
        batch = batch[0]
    iterate = _by_gram if method == "gram" else _by_newton_schulz
    out = iterate(batch if method == "gram" else batch.to(x.dtype), chosen.steps)
    return out.to(x.dtype).reshape(x.shape)


def _by_svd(x: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u * (s > zero_tolerance(s, *x.shape[-2:]))[..., None, :]) @ vh


def _plus_product(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """`beta c + alpha a b` in one pass over memory."""
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(c, a, b, beta=beta, alpha=alpha)


def _by_newton_schulz(x: Tensor, steps: tuple[tuple[float, float, float], ...]) -> Tensor:
    """The readable iteration: `X <- a X + X (b G + c G^2)` with `G = X^T X`, m >= n."""
    for a, b, c in steps:
        g = x.mT @ x
        x = _plus_product(x, x, _plus_product(g, g, g, beta=b, alpha=c), beta=a)
    return x


def _by_gram(x: Tensor, steps: tuple[tuple[float, float, float], ...]) -> Tensor:
    """The same polynomial through `R = X^T X` and `Q`: n x n products only, except once per segment.

    Rounding leaves R with eigenvalues near `-eps`; every step multiplies them by `a^2`, and below zero the
    polynomial grows without bound. A segment therefore ends, and R is formed anew from `X Q`, before `slope^2
    eps` can reach 3e-2.
    """
    limit = (3e-2 / torch.finfo(x.dtype).eps) ** 0.5
    r, q, slope = x.mT @ x, None, 1.0
    for index, (a, b, c) in enumerate(steps):
        z = _plus_product(r, r, r, beta=b, alpha=c)
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
