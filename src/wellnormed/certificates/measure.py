"""Proved bounds on what rules use of a stored tensor, in float64 with a margin for rounding."""

import math

import torch
from torch import Tensor

from wellnormed.matrix import spectral_norm_upper_bound

_UNIT = 2.0**-53
_SLACK = 1e-9
"""Relative excess of spectral norms, so that another machine's Cholesky factorisation proves them too."""


def spectral(weight: Tensor, parts: int = 1) -> tuple[float, ...]:
    """Bound on the largest singular value of each of `parts` equal groups of rows; plain l2 units."""
    slices = weight.detach().unflatten(0, (parts, -1))
    return tuple(_with_slack(float(spectral_norm_upper_bound(part))) for part in slices)


def product(left: Tensor, right: Tensor, parts: int = 1) -> tuple[float, ...]:
    """Bound on the largest singular value of `A_h^T B_h` for groups of rows of two weights; plain l2 units.

    The computed product G differs from the exact one by at most `gamma_k |A|_F |B|_F` with k the rows of a
    group.
    """
    bounds = []
    for a, b in zip(left.unflatten(0, (parts, -1)), right.unflatten(0, (parts, -1)), strict=True):
        a, b = (w.detach().to(device="cpu", dtype=torch.float64) for w in (a, b))
        gamma = (len(a) + 2) * _UNIT / (1 - (len(a) + 2) * _UNIT)
        error = 2 * gamma * float(torch.linalg.matrix_norm(a)) * float(torch.linalg.matrix_norm(b))
        bounds.append(_with_slack(float(spectral_norm_upper_bound(a.mT @ b)) + error))
    return tuple(bounds)


def row_rms(tensor: Tensor) -> tuple[float]:
    """Bound on the largest RMS over the last dimension (of a scalar: its absolute value)."""
    rows = tensor.detach().to(device="cpu", dtype=torch.float64)
    rows = rows.reshape(1) if rows.ndim == 0 else rows
    scale = float(rows.abs().max()) if rows.numel() else 0.0
    if not scale:
        return (0.0,)
    largest = float((rows / scale).square().mean(-1).max())
    return (math.nextafter(math.sqrt(largest) * scale * (1 + 2 * (rows.shape[-1] + 8) * _UNIT), math.inf),)


def max_abs(tensor: Tensor) -> tuple[float]:
    """The largest absolute value of an entry; exact."""
    return (float(tensor.detach().abs().max()),)


def _with_slack(bound: float) -> float:
    return math.nextafter(bound * (1 + _SLACK), math.inf) if bound else 0.0
