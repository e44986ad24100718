"""Proofs of claims: bounds on what operations use of stored tensors, in float64 with a margin for rounding."""

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wellnormed.matrix import spectral_norm_upper_bound

_UNIT = 2.0**-53
_SLACK = 1e-9
"""Relative excess of spectral norms, so that another machine's Cholesky factorisation proves them too."""


def spectral(weight: Tensor, parts: int = 1, transposed: bool = False) -> tuple[float, ...]:
    """Bound on the largest singular value of each of `parts` equal groups of rows of a matrix, or of its transpose."""
    groups = matrix(weight, transposed).unflatten(0, (parts, -1))
    return tuple(_with_slack(float(spectral_norm_upper_bound(part))) for part in groups)


def matrix(weight: Tensor, transposed: bool = False) -> Tensor:
    """A stored tensor as the matrix that maps inputs to outputs, in float64: one row for each output."""
    wide = _wide(weight)
    return wide.mT if transposed else wide.flatten(1)


def product(
    left: Tensor, right: Tensor, pairs: Sequence[Sequence[int]], parts: Sequence[int], transposed: Sequence[bool]
) -> tuple[float, ...]:
    """Bound on the largest singular value of `A_i^T B_j`, for pairs of groups of rows of two matrices.

    The computed product differs from the exact one by at most `gamma_k |A|_F |B|_F`, k being the rows of a group.
    """
    bounds = []
    a_parts, b_parts = (
        matrix(w, t).unflatten(0, (n, -1)) for w, n, t in zip((left, right), parts, transposed, strict=True)
    )
    for i, j in pairs:
        a, b = a_parts[i], b_parts[j]
        # powers of two keep what follows away from underflow
        scales = [2.0 ** math.frexp(float(x.abs().max()))[1] for x in (a, b)]
        a, b = a / scales[0], b / scales[1]
        gamma = (len(a) + 2) * _UNIT / (1 - (len(a) + 2) * _UNIT)
        error = 2 * gamma * float(torch.linalg.matrix_norm(a)) * float(torch.linalg.matrix_norm(b))
        bound = _with_slack(float(spectral_norm_upper_bound(a.mT @ b)) + error)
        bounds.append(_times(bound, *scales))
    return tuple(bounds)


def group_norm(tensor: Tensor, parts: int = 1) -> tuple[float, ...]:
    """Bound on the Euclidean norm of each of `parts` equal groups of a vector's entries."""
    return tuple(_norm(part) for part in _wide(tensor).reshape(-1).unflatten(0, (parts, -1)))


def positive_norm(tensor: Tensor) -> tuple[float, ...]:
    """Bound on the Euclidean norm of the positive entries."""
    return group_norm(tensor.detach().clamp(min=0))


def row_norm(tensor: Tensor) -> tuple[float]:
    """Bound on the largest Euclidean norm over the last axis."""
    rows = _wide(tensor).reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    largest = rows.square().sum(-1) if float(rows.abs().max()) < 1e100 else rows.abs().amax(-1)
    candidates = rows[largest >= float(largest.max()) * (1 - 1e-9)]
    return (max(_norm(row) for row in candidates),)


def row_difference(weight: Tensor, transposed: bool = False) -> tuple[float]:
    """Bound on the largest Euclidean norm of the difference of two rows of a matrix, or of its transpose."""
    rows = matrix(weight, transposed)
    scale = 2.0 ** math.frexp(float(rows.abs().max()))[1]
    rows = rows / scale
    # differences and sums of squares, in any order, and the same again for whoever checks it
    margin = 1 + 4 * (rows.shape[1] + 8) * _UNIT
    largest = max(float((rows - row).square().sum(1).max()) for row in rows)
    return (_times(math.sqrt(largest) * margin, scale) if largest else 0.0,)


def diameter(tensor: Tensor) -> tuple[float]:
    """Bound on the largest distance of two vectors along the last axis.

    What the distances of the two most distant from a centre add to: from their mean, or from 0 if that is less. With
    the mean it is at most twice the largest distance, and at most `sqrt(2)` times if the mean is the centre of the
    smallest ball that has all vectors (Jung's theorem); the largest distance itself takes the square of their number.
    """
    rows = _wide(tensor).reshape(-1, tensor.shape[-1])
    scale = 2.0 ** math.frexp(float(rows.abs().max()))[1]
    rows = rows / scale
    # the mean of whoever checks it differs by rounding, and so do its two distances
    margin = 1 + 4 * (rows.shape[1] + 8) * _UNIT
    moved = 8 * (len(rows) + 8) * _UNIT * math.sqrt(rows.shape[1])
    least = math.inf
    for centre in (rows.mean(0), torch.zeros(rows.shape[1], dtype=rows.dtype)):
        distances = torch.cat([(block - centre).square().sum(1) for block in rows.split(4096)]).sqrt()
        least = min(least, float(distances.topk(min(2, len(rows))).values.sum()))
    return (_times(least * margin + moved, scale),)


def max_abs(tensor: Tensor) -> tuple[float]:
    """The largest absolute value of an entry; exact."""
    return (float(_wide(tensor).abs().max()),)


def row_sum(tensor: Tensor, parts: int = 1) -> tuple[float, ...]:
    """Bound on the largest sum of absolute values over the last axis, for each of `parts` equal groups of rows."""
    rows = _wide(tensor).abs().reshape(-1, tensor.shape[-1]).unflatten(0, (parts, -1))
    # sums of non-negative numbers in any order, and the same again for whoever checks it
    margin = 1 + 4 * (tensor.shape[-1] + 2) * _UNIT
    return tuple(float(part.sum(-1).max()) * margin for part in rows)


def _norm(x: Tensor) -> float:
    largest = float(x.abs().max()) if x.numel() else 0.0
    if not largest:
        return 0.0
    scale = 2.0 ** math.frexp(largest)[1]
    squared = float((x / scale).square().sum()) * (1 + 4 * (x.numel() + 8) * _UNIT)
    # below the normal numbers rounding has no relative bound; there the smallest normal number bounds all
    return max(_times(math.sqrt(squared) * (1 + 8 * _UNIT), scale), sys.float_info.min)


def _times(bound: float, *scales: float) -> float:
    """A product with powers of two, rounded up."""
    for scale in scales:
        bound = math.nextafter(bound * scale, math.inf) if bound else 0.0
    return bound


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float64)


def _with_slack(bound: float) -> float:
    return math.nextafter(bound * (1 + _SLACK), math.inf) if bound else 0.0


MEASURES: dict[str, Callable[..., tuple[float, ...]]] = {
    proof.__name__: proof
    for proof in (spectral, product, group_norm, positive_norm, row_norm, row_difference, row_sum, max_abs, diameter)
}
"""Name of a measure -> the proof; convolutions add theirs."""
