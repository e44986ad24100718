"""The matrix sign (polar factor) `U V^T` and its multiples: exactly, or by products alone; and the exact gradient.

There are two methods: "svd", the definition in float64, and "newton-schulz", the polynomial of a set of `coefficients`,
in float32 or with products in bfloat16. The end of the file has a readable reference of each. Units of a layer belong
to `norms`.
"""

import functools
import math
from functools import partial

import torch
from torch import Tensor

from wellnormed._batching import in_batches
from wellnormed._inputs import require_choice
from wellnormed._precision import all_digits
from wellnormed.matrix._checks import (
    OTHER_METHODS,
    Matrices,
    as_bound,
    check_finite,
    check_matrix,
    check_positive,
    finite_scale,
    to_check,
    unread,
    working_dtype,
)
from wellnormed.matrix._spectral_function import Sign, differentiable, zero_tolerance
from wellnormed.matrix._symmetric import CALL, symmetric_product, times_symmetric
from wellnormed.matrix.coefficients import BFLOAT16_ERROR, CoefficientSet, Step, check_dtype, get

METHODS = ("auto", "newton-schulz", "bfloat16", "svd")
_NOTHING = 2.0**-60
"""Entries at or below it count as 0 beside a Frobenius norm of 1. The momentum of a unit that never fires decays into
denormal numbers, for which products on a CPU take ten times as long; no set enlarges 2^-60 to the rounding of 1."""
_SMALL = 2.0**-30
"""From here to its inverse, the sum of the squares of a matrix with this Frobenius norm is accurate in float32."""
_LONG = 2**16  # terms up to which a float32 sum of squares is off by less than 1e-6


def msign(x: Matrices, coefficients: str | CoefficientSet = "polar-express-8", method: str = "auto") -> Matrices:
    """`U V^T` of `x = U S V^T`: every nonzero singular value becomes 1, within the error of the coefficient set.

    The update of Muon and Scion is `-lr * msign(momentum)` (Modular Duality, section 4). The scale of `x` does not
    matter. The page on matrix functions compares the methods in cost and error.

    Args:
        x: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        coefficients: A name in `coefficients.REGISTRY`, or a `CoefficientSet`; "svd" does not use it.
        method: "newton-schulz" ("auto") is the polynomial of the set; "bfloat16" is the same with products in bfloat16,
            whatever the dtype of `x`; "svd" is the sign itself. On a CPU, "auto" computes 16-bit matrices in float32.

    Returns:
        Same shape and dtype; spectral norm at most `overshoot(coefficients, method)` within rounding: 1e-5 in float32
        (5e-6 with "svd"), `BFLOAT16_ERROR` (2%) in 16 bits. Zero gives zero. The error of "svd" is up to
        `max(m, n) 2^-52` times the largest singular value over the least nonzero one; values at or below
        `max(m, n) 2^-52` of the largest count as zero. The gradient (reverse mode, forward mode once,
        `torch.func.vmap`) is that of the exact polar factor, whatever the method.

    Example:
        >>> msign(torch.tensor([[3.0, 0.0], [0.0, -0.5]]), method="svd")
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    check_matrix(x, "x")
    require_choice("method", method, METHODS, OTHER_METHODS)
    if method == "auto" and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return msign(x.float(), coefficients).to(x.dtype)
    chosen = get(coefficients)
    if method != "svd":
        check_dtype(chosen, torch.bfloat16 if method == "bfloat16" else x.dtype)
    if x.numel() == 0:
        return x.clone()
    compute = _exact if method == "svd" else partial(_polynomial, chosen=chosen, half=method == "bfloat16")
    return differentiable(x, partial(in_batches, compute), Sign)


def coarse_msign(x: Matrices, size: float, coefficients: str | CoefficientSet, method: str = "auto") -> Matrices:
    """`size * msign(x)` for an optimizer's step: less accurate, but of norm at most `size * overshoot(...)`.

    "auto" multiplies float32 and bfloat16 matrices in bfloat16 if three conditions hold: the device has instructions
    for that, the error of the set is larger than that of the rounding (jordan-5, you-5-nanogpt; not polar-express-8),
    and the products of a batch are large enough to save time (`CALL`). The spectral norm could then exceed the
    overshoot by 2%, so the result is divided by 1.02.
    """
    work = math.prod(x.shape[:-2]) * min(x.shape[-2:]) ** 3
    half = method == "auto" and x.dtype in (torch.float32, torch.bfloat16) and work >= CALL
    if half and get(coefficients).coarser_than_bfloat16 and multiplies_bfloat16(x.device.type):
        method = "bfloat16"
    value, factor = msign(x, coefficients, method), size / (1 + BFLOAT16_ERROR) if method == "bfloat16" else size
    if factor == 1:
        return value
    return value * factor if value.requires_grad else value.mul_(factor)


def stiefel_project(
    w: Matrices, scale: float | Tensor = 1.0, coefficients: str | CoefficientSet = "you-6", method: str = "auto"
) -> Matrices:
    """Push every nonzero singular value to `scale`: `scale * msign(w)`, square or not (LT section 3.1).

    LT uses J. You's set, which takes values to between 0.9955 and 0.9994 of `scale`. `scale` is positive, in spectral
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


@all_digits()
def semi_orthogonal(x: Matrices) -> Matrices:
    """`U V^T` by products alone in float32, repeated until it is orthogonal within rounding: for large random matrices.

    The coefficients of "polar-express-8" take most singular values to 1; steps `s (15 - 10 s^2 + 3 s^4) / 8`, which
    multiply small values by 15/8, take the others there. Every singular value ends within 1e-5 of 1. If one is below
    the rounding of float32, its direction is decided by rounding errors; a matrix for which even these give none is
    refused. The result is float32, whatever the dtype of x.

    Example:
        >>> x = semi_orthogonal(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
        >>> (x.mT @ x - torch.eye(4)).abs().max() < 1e-5
        tensor(True)
    """
    check_matrix(x, "x")
    if x.shape[-2] < x.shape[-1]:
        return semi_orthogonal(x.mT).mT.contiguous()
    x = msign(x.float())
    identity = torch.eye(x.shape[-1], device=x.device)
    for _ in range(40):
        gram = symmetric_product(x.mT, x)
        converged = bool((torch.linalg.matrix_norm(gram - identity) < 1e-3).all())  # a step then leaves 1e-9
        x = times_symmetric(x, symmetric_product(gram, gram, gram, beta=-1.25, alpha=0.375), x, beta=1.875)
        if converged:
            return x
    raise ValueError("semi_orthogonal: x is rank-deficient, or nearly so; use msign(x, method='svd')")


def overshoot(coefficients: str | CoefficientSet, method: str = "auto") -> float:
    """The largest singular value that `msign` gives, apart from rounding: 1 with "svd", else the set's own.

    Example:
        >>> overshoot("jordan-5"), overshoot("jordan-5", "svd")
        (1.20237, 1.0)
    """
    return 1.0 if method == "svd" else get(coefficients).overshoot


def _exact(x: Tensor, *_: Tensor) -> Tensor:
    """`U V^T` by a float64 singular value decomposition, without singular values that are rounding errors of zero."""
    if x.shape[-2] < x.shape[-1]:
        return _exact(x.mT).mT.contiguous()
    wide = x.double()
    u, s, vh = torch.linalg.svd(wide / finite_scale(wide, "x"), full_matrices=False)
    return (u.mul_((s > zero_tolerance(s[..., :1], *x.shape[-2:]))[..., None, :]) @ vh).to(x.dtype)


def _polynomial(x: Tensor, *_: Tensor, chosen: CoefficientSet, half: bool) -> Tensor:
    """The polynomial of a set, of `(m, n)` or `(batch, m, n)`, with products in bfloat16 if `half`."""
    if x.shape[-2] < x.shape[-1]:
        return _polynomial(x.mT, chosen=chosen, half=half).mT.contiguous()
    work = _normalised(x.to(working_dtype(x)), chosen)
    if work.ndim == 3 and work.shape[0] == 1:
        work = work[0]
    if work.dtype == torch.float32:
        torch.hardshrink(work, _NOTHING, out=work)
    if half or x.dtype.itemsize == 2:
        work = work.to(torch.bfloat16 if half else x.dtype)
    paired = work.shape[-2] >= 2 * work.shape[-1] and (work.dtype.itemsize > 2 or chosen.bears_half_rounding)
    count = 2 if paired else 1
    for i in range(0, len(chosen.steps), count):
        work = newton_schulz(work, *chosen.steps[i : i + count])  # reusing the name frees the previous matrix
    return work.to(x.dtype).reshape(x.shape)


def _normalised(x: Tensor, chosen: CoefficientSet) -> Tensor:
    """Matrices divided by their Frobenius norm in the units of a set, so that singular values enter its interval.

    Sums of squares of 1e-30 or 1e30 leave the range of float32. Where the norms may be looked at and none is extreme,
    that takes no scale; the quotients are the same, since the scale is a power of two.
    """
    plain = chosen.scale == 1 and not chosen.epsilon and not unread(x)
    norm = frobenius(x) if plain else None
    if norm is None or not all(_SMALL < one < 1 / _SMALL for one in norm.flatten().tolist()):
        x = x / finite_scale(x, "x")
        # The largest entry is at least 1/2, so only a zero matrix has a smaller norm.
        norm = chosen.scale * frobenius(x).clamp_min(0.5) + chosen.epsilon
    return x / norm.to(x.dtype)


def frobenius(x: Tensor) -> Tensor:
    """Frobenius norms in float64, `(*batch, 1, 1)`.

    Summed along the contiguous axis first: one float32 sum is off by 3e-5 at 768 x 3072, and a float64 copy takes as
    long as a product.
    """
    by = -1 if x.stride(-1) == 1 else -2
    rows = torch.linalg.vector_norm(x, dim=by, keepdim=True, dtype=torch.float64 if x.shape[by] > _LONG else x.dtype)
    return torch.linalg.vector_norm(rows, dim=(-2, -1), keepdim=True, dtype=torch.float64)


def newton_schulz(x: Tensor, first: Step, second: Step | None = None) -> Tensor:
    """`X <- a X + X (b G + c G^2)` with `G = X^T X`, once or twice, for matrices of spectral norm near 1 at most.

    A step takes two products with X (`2 m n^2` operations each) and one of the small side (`2 n^3`), or none of these
    if `c` is 0. Two steps are combined into one multiplier of X: with `Q = a I + b G + c G^2` of the first step, the
    Gram matrix of the second is `Q G Q`. This replaces two products with X by three of the small side, which pays for
    long matrices. A longer iteration on G would let rounding errors grow into negative eigenvalues; two steps do not.
    """
    g = symmetric_product(x.mT, x)
    a, b, c = first
    r = symmetric_product(g, g, g, beta=b, alpha=c) if c else b * g
    if second is None:
        del g  # freed before the product with X, which is as large as X
        return times_symmetric(x, r, x, beta=a)
    r.diagonal(dim1=-2, dim2=-1).add_(a)
    g = symmetric_product(symmetric_product(r, g), r)
    a, b, c = second
    q = symmetric_product(g, g, g, beta=b, alpha=c) if c else b * g
    multiplier = symmetric_product(r, q, r, beta=a)
    del g, q, r
    return times_symmetric(x, multiplier)


@functools.cache
def multiplies_bfloat16(device: str) -> bool:
    """Whether a kind of device has instructions for products in bfloat16, so that they take less time than float32.

    The processor's flags decide, so that every process on a machine decides alike. A processor with `avx512_fp16` has
    AMX as well; where a virtual machine hides that, `avx512_bf16` alone takes 1.2 to 1.7 times the time of float32
    (measured in `docs/results.md`).

    Example:
        >>> multiplies_bfloat16("meta")
        False
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # torch < 2.10
        return False
    known = torch.cpu.get_capabilities()
    native = known.get("amx_bf16") or known.get("bf16") or (known.get("avx512_bf16") and not known.get("avx512_fp16"))
    return torch.backends.mkldnn.is_available() and bool(native)


# `torch.compiler.assume_constant_result` does this, but imports the compiler, which adds a second to the import.
multiplies_bfloat16._dynamo_marked_constant = True  # pyrefly: ignore


def exact_reference(x: Tensor) -> Tensor:
    """`msign(x, method="svd")` of one matrix in two lines, without the treatment of scale, rank and 16 bits.

    Example:
        >>> x = torch.tensor([[3.0, 1.0], [0.0, -0.5]])
        >>> torch.allclose(exact_reference(x), msign(x, method="svd"))
        True
    """
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u @ vh).to(x.dtype)


def products_reference(x: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """`msign` of one matrix by the steps of a set (Jordan, 2024), readable and slow.

    Example:
        >>> x = torch.tensor([[3.0, 1.0], [0.0, -0.5]])
        >>> torch.allclose(products_reference(x, get("jordan-5").steps), msign(x, "jordan-5"), atol=1e-5)
        True
    """
    x = x / x.norm()
    for a, b, c in steps:
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x
