"""The matrix sign (polar factor) `U V^T`: which method, which coefficient set, and its exact gradient.

The methods themselves are in `_msign_methods`, the sets in `coefficients`; units of a layer belong to `norms`.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from wellnormed._batching import in_batches
from wellnormed.matrix import _msign_methods
from wellnormed.matrix._checks import check_matrix, finite_scale, working_dtype
from wellnormed.matrix._spectral_function import Sign, differentiable
from wellnormed.matrix._symmetric import symmetric_product
from wellnormed.matrix.coefficients import CoefficientSet, get, get_for_msign

_POLYNOMIAL = ("newton-schulz", "triton", "gram", "spectrum")
_EXACT = {
    "svd": _msign_methods.svd,
    "eigh": _msign_methods.eigh,
    "inverse-root": _msign_methods.inverse_root,
}
METHODS = ("auto", *_POLYNOMIAL, *_EXACT, "sketch")

_LONG = 2**16  # terms up to which a float32 sum of squares is off by less than 1e-6
_TALL = 2.0  # measured on a CPU in float32 and float64: below this aspect an eigendecomposition saves nothing


def msign(
    x: Float[Tensor, "*batch m n"],
    coefficients: str | CoefficientSet = "polar-express-8",
    method: str = "auto",
    rank: int | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*batch m n"]:
    """`U V^T` of `x = U S V^T`: every nonzero singular value becomes 1 (within the set's own error).

    The update of Muon and Scion is `-lr * msign(momentum)` (Modular Duality in Deep Learning, MD). Polynomial
    methods map a singular value `s` to `p(s / |x|_F)`: values below about `1 / slope` of the Frobenius norm do not
    reach 1. The scale of `x` does not matter.

    With the short side `n`, T steps, and products counted as multiply and add:

    | method | computes | cost | error, float32 |
    |---|---|---|---|
    | "newton-schulz" | the set, on the matrix | `T (4 m n^2 + 2 n^3)`, x read 4 T times | 1e-5, slope 6000: 1e-4 |
    | "triton" | the same, by a GPU kernel | `T (3 m n^2 + n^3)`, x read 4 T times | that of 16 bits |
    | "gram" | the set, on the Gram matrix | `4 to 8 m n^2 + 8 T n^3`, x read 2 to 4 times | 5e-3, see below |
    | "spectrum" | the set, on Gram eigenvalues | `4 m n^2 + 11 n^3`, x read twice | 1e-5 |
    | "eigh" | the sign, by the same | the same in float64 | 1e-7 above 1e-4 of the norm, 0 below 1e-7 |
    | "svd" | the sign | about `14 m n^2 + 8 n^3` in float64 | 1e-7 |
    | "inverse-root" | the sign (MD 5.2) | `4 m n^2 + 270 n^3` in float64 | 1e-7 above 1e-4 of the norm |
    | "sketch" | `U_r V_r^T` (MD 5.1) | `12 m n (rank + 8)` in float64 | that of a randomised SVD |

    In "gram", singular values below `sqrt(eps) |x|_F` (3.5e-4 in float32) carry a relative error of up to some
    percent, because squaring loses them, and restarts keep that error from growing. On a CPU, one triangle of Gram
    matrices is computed from a side of 256, which saves up to a quarter of "newton-schulz". "triton" does that on a
    CUDA device, in the dtype of `x`; it is tested with Triton's interpreter and its compiler, and not yet measured on
    hardware (`benchmarks/matrix/gpu.py` will), so "auto" does not take it. Measured on 2 cores in float32
    (`results/matrix/speed.json`): "auto" takes 0.30 to 0.57 of the time of a plain loop of the same five steps on long
    matrices, 0.52 to 0.94 if they are ill-conditioned, and 0.82 on square ones.

    Args:
        x: Matrices of any floating dtype, entries from 1e-30 to 1e30.
        coefficients: Name in `coefficients.REGISTRY`, or a set, for example from `optimal_coefficients`. The exact
            methods do not use it, but the name must exist.
        method: One of the table, or "auto": "spectrum" for matrices at least twice as long as wide in float32 or
            float64 on a CPU, else "newton-schulz" ("gram" for long ones in `torch.compile`); 16 bits are computed in
            float32 on a CPU.
        rank: Number of singular values that "sketch" keeps.
        generator: Random numbers of "sketch"; torch's default without it.

    Returns:
        Same shape and dtype; spectral norm at most `overshoot` of the set, within rounding (1e-5 in float32, 5e-3
        with "gram", 1% in bfloat16 and float16; 2% when the iteration itself runs in them, and then what rounding adds
        to the null space of a rank-deficient matrix is amplified by the slope of the set). A zero matrix gives zero.
        The gradient (reverse mode, forward mode once, `torch.func.vmap`) is that of the exact polar factor, or of the
        exact `U_r V_r^T`, whatever the method.

    Raises:
        ValueError: Not a floating-point matrix, NaN or infinity (not checked under `torch.compile`), unknown
            method or set, a set that is not a matrix sign or not safe in this dtype, "sketch" without a rank or a
            rank without "sketch".

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
    if (rank is not None) != (method == "sketch"):
        raise ValueError(f"rank={rank} with method={method!r}: give a rank to 'sketch', and to no other method")
    if method == "auto" and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return msign(x.float(), coefficients).to(x.dtype)
    if method == "auto":
        method = resolve_method(x)
    chosen = get_for_msign(coefficients, x.dtype) if method in _POLYNOMIAL else get(coefficients)
    if x.numel() == 0:
        return x.clone()
    short = min(x.shape[-2:])
    if rank is not None and not 1 <= rank <= short:
        raise ValueError(f"rank={rank} must lie between 1 and the short side of the matrix, {short}")
    if rank is not None:
        compute = partial(_exact, by=partial(_msign_methods.sketch, rank=rank, generator=generator))
    elif method in _EXACT:
        compute = partial(in_batches, partial(_exact, by=_EXACT[method]))
    else:
        compute = partial(in_batches, partial(_polynomial, chosen, method))
    return differentiable(x, compute, Sign, torch.tensor(rank or short, device=x.device))


def resolve_method(x: Tensor) -> str:
    """The method that "auto" stands for, from shape, dtype and device alone.

    Example:
        >>> resolve_method(torch.empty(512, 64)), resolve_method(torch.empty(64, 64))
        ('spectrum', 'newton-schulz')
    """
    short, long = sorted(x.shape[-2:])
    wide_dtype = x.dtype in (torch.float32, torch.float64)
    if not (wide_dtype and x.device.type == "cpu" and long >= _TALL * short):
        return "newton-schulz"
    return "gram" if torch.compiler.is_compiling() else "spectrum"


def _exact(x: Tensor, *_: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
    if x.shape[-2] < x.shape[-1]:
        return _exact(x.mT, by=by).mT.contiguous()
    wide = x.double()
    return by(wide / finite_scale(wide, "x")).to(x.dtype)


def _polynomial(chosen: CoefficientSet, method: str, x: Tensor, *_: Tensor) -> Tensor:
    if x.shape[-2] < x.shape[-1]:
        return _polynomial(chosen, method, x.mT).mT.contiguous()
    work = x.to(working_dtype(x))
    work = work / finite_scale(work, "x")  # squares of 1e-30 or 1e30 leave the range of float32
    # By rows, or what lies in memory like rows: one float32 sum is off by 3e-5 at 768 x 3072, and a float64 copy takes
    # as long as a product.
    by = -1 if work.stride(-1) == 1 else -2
    summed = torch.float64 if work.shape[by] > _LONG else work.dtype
    rows = torch.linalg.vector_norm(work, dim=by, keepdim=True, dtype=summed)
    frobenius = torch.linalg.matrix_norm(rows, keepdim=True, dtype=torch.float64)
    assert chosen.normalisation is not None  # get_for_msign
    # Largest entry at least 1/2: only a zero matrix has a smaller norm.
    norm = chosen.normalisation.scale * frobenius.clamp_min(0.5) + chosen.normalisation.epsilon
    if work.ndim == 3 and work.shape[0] == 1:
        work, norm = work[0], norm[0]
    if method == "spectrum":
        return _msign_methods.spectrum(work, chosen.steps, norm).to(x.dtype).reshape(x.shape)
    work = work / norm.to(work.dtype)
    if method == "gram":
        return _msign_methods.gram(work, chosen.steps).to(x.dtype).reshape(x.shape)
    if method == "triton" or x.dtype.itemsize == 2:
        work = work.to(x.dtype)
    product = symmetric_product
    if method == "triton":
        from wellnormed.matrix import _triton  # triton takes a second to import, where it is installed

        _triton.require(x)
        product = _triton.symmetric_product
    return _msign_methods.newton_schulz(work, chosen.steps, product).to(x.dtype).reshape(x.shape)
