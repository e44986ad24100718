"""Upper bounds on the spectral norm that are proved in floating point: what a certificate may use."""

import math

import torch
from torch import Tensor

from wellnormed.matrix._checks import Matrices, check_matrix, finite_scale
from wellnormed.matrix._symmetric import symmetric_product

_UNIT = 2.0**-53  # rounding unit of float64
_UNDERFLOW = 2.0**-960  # more than all underflows: matrices are scaled so that the largest entry is in [1/2, 1)
_MARGIN = 1e-9  # first relative margin of the tested bound; measured excess of the result is about half


def spectral_norm_upper_bound(w: Matrices) -> float | Tensor:
    """A number that the spectral norm provably does not exceed, within 1e-8 of it.

    With `n` the smaller side and `G = fl(W^T W)`, a completed float64 Cholesky factorisation of `fl(c I - G)`
    proves, for `gamma_k = k u / (1 - k u)`,

        sigma_max(W)^2 <= c + gamma_{n+1} / (1 - gamma_{n+1}) tr(T) + gamma_m |W|_F^2 + u (c + max_i G_ii)

    (Rump, Verification of positive definiteness, BIT 2006; Higham, Accuracy and Stability, theorem 10.5). The
    line is evaluated rounding up; `c` grows until the factorisation completes. Runs on the CPU, where float64
    is never emulated.

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
    if wide.numel() == 0:
        return 0.0 if w.ndim == 2 else torch.zeros(w.shape[:-2], dtype=torch.float64)
    pairs = zip(wide.reshape(-1, *w.shape[-2:]), finite_scale(wide, "w").flatten().tolist(), strict=True)
    bounds = [_bound_one(matrix, power) for matrix, power in pairs]
    return bounds[0] if w.ndim == 2 else torch.tensor(bounds, dtype=torch.float64).reshape(w.shape[:-2])


def _bound_one(w: Tensor, scale: float) -> float:
    if w.shape[0] < w.shape[1]:
        w = w.mT
    m, n = w.shape
    w = w / scale  # exact, but for underflow
    if not bool(w.any()):
        return 0.0
    gram = symmetric_product(w.mT, w)  # each entry one sum of m terms, in some order
    diagonal = gram.diagonal()
    largest = float(torch.linalg.eigvalsh(gram)[-1])
    # Sums of non-negative numbers: relative error at most gamma_{mn}, below 1e-6 for every matrix that fits in memory.
    frobenius_squared = float(diagonal.sum()) * (1 + 1e-6)
    margin = _MARGIN
    while True:
        c = max(largest, float(diagonal.max())) * (1 + margin)
        shifted = gram.neg()
        shifted.diagonal().add_(c)
        factor, info = torch.linalg.cholesky_ex(shifted)
        if int(info) == 0 and bool(torch.isfinite(factor.diagonal()).all()):
            break
        margin *= 4
    trace = float(shifted.diagonal().sum()) * (1 + 1e-6)
    gamma_n, gamma_m = _gamma(n + 1), _gamma(m)
    rounding = gamma_n / (1 - gamma_n) * trace + gamma_m * frobenius_squared + _UNIT * (c + float(diagonal.max()))
    squared = _up(_up(c + rounding * (1 + 1e-12)) + _UNDERFLOW)
    return _up(_up(math.sqrt(squared)) * scale)


def _gamma(k: int) -> float:
    return k * _UNIT / (1 - k * _UNIT) * (1 + 1e-12)


def _up(x: float) -> float:
    return math.nextafter(x, math.inf)
