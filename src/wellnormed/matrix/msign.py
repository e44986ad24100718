"""The matrix sign (polar factor) `U V^T` and its multiples: which method, which set, and the exact gradient.

The methods themselves are in `_msign_methods` and `published`, the sets in `coefficients`; units of a layer belong to
`norms`.
"""

from functools import partial

import torch
from torch import Tensor

from wellnormed._batching import in_batches
from wellnormed.matrix import _msign_methods, published
from wellnormed.matrix._checks import Matrices, as_bound, check_finite, check_matrix, check_positive, to_check
from wellnormed.matrix._spectral_function import Sign, differentiable
from wellnormed.matrix.coefficients import BFLOAT16_ERROR, CoefficientSet, check_sign, get

_EXACT = {
    "svd": _msign_methods.svd,
    "eigh": _msign_methods.eigh,
    "inverse-root": published.inverse_root,
    "sketch": published.sketch,
}
_POLYNOMIAL = ("newton-schulz", "bfloat16", "spectrum", "gram")
METHODS = ("auto", *_POLYNOMIAL, *_EXACT)
_WORTH_HALF = 128  # products of smaller matrices take no less time
_WORTH_DECOMPOSING = 2**17  # entries from which a float64 decomposition takes no longer than eight steps in float32


def msign(
    x: Matrices,
    coefficients: str | CoefficientSet = "polar-express-8",
    method: str = "auto",
    rank: int | None = None,
    generator: torch.Generator | None = None,
) -> Matrices:
    """`U V^T` of `x = U S V^T`: every nonzero singular value becomes 1, within the error of the coefficient set.

    The update of Muon and Scion is `-lr * msign(momentum)` (Modular Duality, section 4). The scale of `x` does not
    matter. The documentation of the matrix room compares the methods in cost and error.

    Args:
        x: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        coefficients: Name in `coefficients.REGISTRY`, or a set of your own; the exact methods do not use it.
        method: The polynomial of the set by "newton-schulz", "spectrum" or "gram", or, with products in 16 bits
            whatever the dtype of `x`, "bfloat16"; the sign itself by "svd", "eigh" or "inverse-root"; or "sketch".
            "auto" is "newton-schulz", and "spectrum" on a CPU where that is faster: for large matrices and a set of
            many steps. A CPU computes 16 bits in float32.
        rank: Number of singular values that "sketch" keeps.
        generator: Random numbers of "sketch"; torch's default without it.

    Returns:
        Same shape and dtype; spectral norm at most `overshoot(coefficients, method)` within rounding: 5e-6 in float32
        (1e-5 with "newton-schulz", 5e-3 with "gram"), `BFLOAT16_ERROR` (2%) in 16 bits. Zero gives zero. The gradient
        (reverse mode, forward mode once, `torch.func.vmap`) is that of the exact polar factor, whatever the method.

    Example:
        >>> msign(torch.tensor([[3.0, 0.0], [0.0, -0.5]]), method="svd")
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    check_matrix(x, "x")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}; 'auto' picks the faster one")
    if (rank is not None) != (method == "sketch"):
        raise ValueError(f"rank={rank} with method={method!r}: give a rank to 'sketch', and to no other method")
    if method == "auto" and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return msign(x.float(), coefficients).to(x.dtype)
    chosen = get(coefficients)
    short, long = sorted(x.shape[-2:])
    if method == "auto":
        many = len(chosen.steps) * x.dtype.itemsize >= 32 and short * long >= _WORTH_DECOMPOSING
        decomposes = many and x.device.type == "cpu" and not torch.compiler.is_compiling()
        method = "spectrum" if decomposes else "newton-schulz"
    if method not in _EXACT:
        check_sign(chosen, torch.bfloat16 if method == "bfloat16" else x.dtype)
    if x.numel() == 0:
        return x.clone()
    if rank is not None and not 1 <= rank <= short:
        raise ValueError(f"rank={rank} must lie between 1 and the short side of the matrix, {short}")
    if rank is not None:
        compute = partial(_msign_methods.exact, by=partial(published.sketch, rank=rank, generator=generator))
    elif method in _EXACT:
        compute = partial(in_batches, partial(_msign_methods.exact, by=_EXACT[method]))
    else:
        compute = partial(in_batches, partial(_msign_methods.polynomial, chosen=chosen, method=method))
    return differentiable(x, compute, Sign, torch.tensor(rank or short, device=x.device))


def coarse_msign(x: Matrices, size: float, coefficients: str | CoefficientSet, method: str = "auto") -> Matrices:
    """`size * msign(x)` for a step: at most `size * overshoot(coefficients, method)`, but only as exact as its set.

    "auto" multiplies float32 and bfloat16 matrices with both sides from 128 on in bfloat16 where the device has
    instructions for that, if the set itself leaves more open than the rounding does (jordan-5, you-5-nanogpt; not
    polar-express-8). As the spectral norm could exceed the overshoot by 2% then, the result is divided by 1.02.
    """
    half = method == "auto" and x.dtype in (torch.float32, torch.bfloat16) and min(x.shape[-2:]) >= _WORTH_HALF
    if half and get(coefficients).coarser_than_bfloat16 and _msign_methods.multiplies_bfloat16(x.device.type):
        method = "bfloat16"
    value, factor = msign(x, coefficients, method), size / (1 + BFLOAT16_ERROR) if method == "bfloat16" else size
    return value * factor if value.requires_grad else value.mul_(factor)


def stiefel_project(
    w: Matrices, scale: float | Tensor = 1.0, coefficients: str | CoefficientSet = "you-6", method: str = "auto"
) -> Matrices:
    """Push every nonzero singular value to `scale`: `scale * msign(w)`, square or not (LT section 3.1).

    LT follows J. You's set, with which values end within 0.9955 and 0.9994 of `scale`. `scale` is positive, in spectral
    units, a number or one per matrix; no gradient flows to it. Everything else is as in `msign`.

    Example:
        >>> stiefel_project(torch.diag(torch.tensor([4.0, 0.5])), 2.0, method="svd").diagonal().round(decimals=4)
        tensor([2., 2.])
    """
    check_matrix(w, "w")
    size = as_bound(scale, w, "scale")
    check_positive(to_check(scale, size), "scale")
    check_finite(to_check(scale, size), "scale")
    return msign(w, coefficients, method) * size[..., None, None].to(w.dtype)


def overshoot(coefficients: str | CoefficientSet, method: str = "auto") -> float:
    """The largest singular value that `msign` gives, apart from rounding: 1 with an exact method, else the set's own.

    Example:
        >>> overshoot("jordan-5"), overshoot("jordan-5", "eigh")
        (1.20237, 1.0)
    """
    return 1.0 if method in _EXACT else get(coefficients).overshoot
