"""Proved bounds on what rules use of a stored tensor, in float64 with a margin for rounding."""

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed.matrix import spectral_norm_upper_bound
from wellnormed.norms import ColNorm

_UNIT = 2.0**-53
_SLACK = 1e-9
"""Relative excess of spectral norms, so that another machine's Cholesky factorisation proves them too."""


def spectral(weight: Tensor, parts: int = 1) -> tuple[float, ...]:
    """Bound on the largest singular value of each of `parts` equal groups of rows; plain l2 units."""
    return tuple(_with_slack(float(spectral_norm_upper_bound(part))) for part in weight.unflatten(0, (parts, -1)))


def product(left: Tensor, right: Tensor, parts: int = 1) -> tuple[float, ...]:
    """Bound on the largest singular value of `A_h^T B_h` for groups of rows of two weights; plain l2 units.

    The computed product G differs from the exact one by at most `gamma_k |A|_F |B|_F` with k the rows of a group.
    """
    bounds = []
    for a, b in zip(*(_wide(w).unflatten(0, (parts, -1)) for w in (left, right)), strict=True):
        gamma = (len(a) + 2) * _UNIT / (1 - (len(a) + 2) * _UNIT)
        error = 2 * gamma * float(torch.linalg.matrix_norm(a)) * float(torch.linalg.matrix_norm(b))
        bounds.append(_with_slack(float(spectral_norm_upper_bound(a.mT @ b)) + error))
    return tuple(bounds)


def row_rms(tensor: Tensor) -> tuple[float]:
    """Bound on the largest RMS over the last dimension (of a scalar: its absolute value), as `ColNorm` proves it."""
    rows = _wide(tensor).reshape(-1, 1, tensor.shape[-1] if tensor.ndim else 1)
    # eight more rounding units let `verify` prove it too, in any order of summation
    largest = float(ColNorm(input_axis=0).upper_bound(rows).max()) * (1 + 8 * _UNIT)
    # below the normal numbers rounding has no relative bound; there the smallest normal number bounds all
    return (max(largest, sys.float_info.min) if rows.any() else 0.0,)


def positive_rms(tensor: Tensor) -> tuple[float]:
    """Bound on the largest RMS over the last dimension, of positive entries alone."""
    return row_rms(tensor.detach().clamp(min=0))


def max_abs(tensor: Tensor) -> tuple[float]:
    """The largest absolute value of an entry; exact."""
    return (float(tensor.detach().abs().max()),)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float64)


def _with_slack(bound: float) -> float:
    return math.nextafter(bound * (1 + _SLACK), math.inf) if bound else 0.0


MEASURES: dict[str, Callable[..., tuple[float, ...]]] = {
    proof.__name__: proof for proof in (spectral, product, row_rms, positive_rms, max_abs)
}
