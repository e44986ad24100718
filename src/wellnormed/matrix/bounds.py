"""Upper bounds on the spectral norm, proved in floating point: by the kernel of certificates, or on a device."""

import math

import torch
from torch import Tensor

from wellnormed._precision import all_digits
from wellnormed.matrix._checks import (
    Matrices,
    as_bound,
    check_matrix,
    finite_scale,
    known_to_hold,
    tall_and_scaled,
    working_dtype,
)
from wellnormed.matrix._symmetric import symmetric_product
from wellnormed.proof.matrices import proved_norm, shift

ABOVE = 2.0**-14
"""The largest relative excess of `proved_bound` over the norm; half of it is for rounding errors of float32."""


def spectral_norm_upper_bound(w: Matrices) -> float | Tensor:
    """A number that the spectral norm provably does not exceed, within 1e-8 of it.

    A float64 Cholesky factorisation that completes proves it; `proof.matrices.norms_below` has the theorem. Runs on the
    CPU, where float64 is never emulated.

    Every floating dtype converts to float64 exactly, and a power of two is divided out first, so 1e-30 to 1e30 are
    alike. A single matrix gives a Python float, a batch a float64 CPU tensor of the batch shape, in plain spectral
    (l2 -> l2) units; zero and empty matrices give 0.0. Not differentiable.

    Example:
        >>> bound = spectral_norm_upper_bound(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        >>> 5.0 <= bound <= 5.0 * (1 + 1e-8)
        True
    """
    check_matrix(w, "w")
    wide = w.detach().to(device="cpu", dtype=torch.float64)
    if not wide.numel():
        return 0.0 if w.ndim == 2 else torch.zeros(w.shape[:-2], dtype=torch.float64, device="cpu")
    finite_scale(wide, "w")  # refuses what is not finite
    bounds = [proved_norm(matrix[None]) for matrix in wide.reshape(-1, *w.shape[-2:]).numpy()]
    return bounds[0] if w.ndim == 2 else torch.tensor(bounds, dtype=torch.float64, device="cpu").reshape(w.shape[:-2])


@torch.no_grad()
def spectral_norm_within(w: Matrices, upper: float | Tensor) -> Tensor:
    """Whether a proof on `w`'s device finds that the spectral norm is at most `upper`: booleans of the batch shape.

    A float64 Cholesky factorisation that completes is the proof (`proof.matrices.norms_below` has the theorem). It
    costs `m n^2 + n^3 / 3` multiplications and no eigenvalues, and needs a device with IEEE float64. The answer can be
    `False` for a norm that is less than 1e-8 below `upper`. NaN and infinity are refused.

    Example:
        >>> w = torch.tensor([[3.0, 0.0], [4.0, 0.0]])
        >>> bool(spectral_norm_within(w, 5.001)), bool(spectral_norm_within(w, 4.999))
        (True, False)
    """
    check_matrix(w, "w")
    bound = as_bound(upper, w, "upper").expand(w.shape[:-2])
    return _within(w, bound)[0] if w.numel() else bound >= 0


def _within(w: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the bound is proved, and a bound on the Frobenius norm, for each matrix of a nonempty batch."""
    wide, scale = tall_and_scaled(w, torch.float64)
    target = bound / scale
    m, n = wide.shape[-2:]
    gram = symmetric_product(wide.mT, wide)
    del wide  # to free the memory of large matrices, as below
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    frobenius = diagonal.sum(-1)
    c = shift(target, m, n, frobenius, diagonal.amax(-1))
    gram.neg_().diagonal(dim1=-2, dim2=-1).add_(c[..., None])  # c I - G
    factor, failed = torch.linalg.cholesky_ex(gram)
    # Each entry of a row is squared on the way to its diagonal entry, which is finite only if all of them are.
    completes = (failed == 0) & factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    # A bound above the Frobenius norm needs no factorisation, whose numbers might overflow.
    above = frobenius * (1 + 1e-6)  # for the roundings of the products and of their sum
    return (bound >= 0) & (completes | (target * target > above) | (frobenius == 0)), above.sqrt() * scale


@torch.no_grad()
def proved_bound(w: Matrices) -> Tensor:
    """A number that the spectral norm provably does not exceed, on `w`'s device and without eigenvalues.

    It is the bound of `_high_power`, slightly enlarged and then proved as by `spectral_norm_within`: at most 6.2e-5
    above the norm, in float64, of the batch shape. If the rounding errors of float32 exceed their allowance, so that
    the proof fails, it is the Frobenius norm. NaN and infinity are refused.

    Example:
        >>> bound = proved_bound(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        >>> bool(5 <= bound <= 5 * (1 + ABOVE))
        True
    """
    check_matrix(w, "w")
    if not w.numel():
        return w.new_zeros(w.shape[:-2], dtype=torch.float64)
    tall, scale = tall_and_scaled(w, working_dtype(w))
    size, power = _high_power(tall)
    bound = torch.where(power.diagonal(dim1=-2, dim2=-1).amax(-1) > 0, size * scale, 0) * (1 + ABOVE / 3)
    del tall, power
    with known_to_hold():  # `tall_and_scaled` has checked that the entries are finite
        proved, frobenius = _within(w, bound)
    return torch.where(proved, bound, frobenius)


def norm_along_power(w: Tensor) -> Tensor:
    """A lower bound on the norm: `|W v| / |v|`, where `v` is a column of `_high_power`.

    The column is the one with the largest diagonal entry. The bound equals the norm up to rounding if the largest
    singular value exceeds the others by a thousandth, and is never more than `ABOVE` below it. It is float64, of the
    batch shape.
    """
    if not w.numel():
        return w.new_zeros(w.shape[:-2], dtype=torch.float64)
    tall, scale = tall_and_scaled(w, working_dtype(w))
    _, power = _high_power(tall)
    longest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None].expand(*power.shape[:-1], 1)
    v = power.gather(-1, longest).double()
    image, length = (torch.linalg.vector_norm(x, dim=-2)[..., 0] for x in (tall.double() @ v, v))
    return image / length.clamp_min(torch.finfo(torch.float64).tiny) * scale


@all_digits()
def _high_power(tall: Tensor) -> tuple[Tensor, Tensor]:
    """A bound on the norm of matrices with entries near 1, not all 0; and the power of `W^T W` that it comes from.

    Apart from roundings of 1e-6, the bound is not below the norm, and at most `ABOVE / 2` above it. With `G_0 = W^T W`
    and `G_(i+1) = (G_i / f_i)^2`, where `f_i = |G_i|_F`, the largest eigenvalue of `G_0` is at most
    `f_0 f_1^(1/2) ... f_k^(1/2^k)`, which exceeds it by at most a factor of `n^(1/2^(k+1))`. It is computed in float32
    for matrices of at most 32 bits, by `2 m n^2 + 32 n^3` operations for 768 columns.
    """
    power = symmetric_product(tall.mT, tall)
    logarithm = power.new_zeros(power.shape[:-2], dtype=torch.float64)
    # the norm is the root of the eigenvalue; half of the allowed excess
    count = math.ceil(math.log2(math.log(max(2, power.shape[-1])) / math.log1p(ABOVE / 2))) - 1
    for i in range(count):
        if i:
            power = symmetric_product(power, power)
        size = torch.linalg.matrix_norm(power, keepdim=True).clamp_min(torch.finfo(power.dtype).tiny)
        logarithm += 2.0**-i * size[..., 0, 0].double().log()
        power = power / size
    return (logarithm / 2).exp(), power
