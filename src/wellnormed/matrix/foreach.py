"""One call for many matrices: those of equal shape, up to transposition, go through a matrix function as one batch."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wellnormed._batching import batches
from wellnormed.matrix._checks import check_matrix


def foreach(function: Callable[..., Tensor], matrices: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """`[function(matrix, *args, **kwargs) for matrix in matrices]`, batched by shape, dtype and device.

    The function is one of this room that returns what it takes, such as `msign` or `spectral_hardcap`, or one number
    per matrix, such as `spectral_norm`; it must commute with transposition, as they all do. Further arguments are the
    same for every batch, so bounds must be numbers. The results are views of the batches. Each matrix is
    `(*batch, m, n)`, and a `ValueError` names those at fault by their position.

    A batch on a CPU holds at most 2^20 entries, or one matrix that is larger: larger temporaries cost more than a call
    saves.

    Example:
        >>> from wellnormed.matrix import spectral_norm
        >>> foreach(spectral_norm, [torch.eye(2), 3 * torch.ones(1, 4), 5 * torch.eye(2)])
        [tensor(1.), tensor(6.), tensor(5.)]
    """
    groups, flat = defaultdict(list), []
    for index, matrix in enumerate(matrices):
        check_matrix(matrix, f"matrices[{index}]")
        tall = matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT
        flat.append(tall.reshape(math.prod(tall.shape[:-2]), *tall.shape[-2:]))
        groups[tall.shape[-2:], matrix.dtype, matrix.device].append(index)
    results: dict[int, Tensor] = {}
    for ((m, n), *_), members in groups.items():
        for piece in batches([flat[index] for index in members]):
            numbers = members[piece]
            batch = [flat[index] for index in numbers]
            try:
                value = function(torch.cat(batch) if len(batch) > 1 else batch[0], *args, **kwargs)
            except ValueError as error:
                raise ValueError(f"among matrices {numbers}, of {m} x {n} up to transposition: {error}") from error
            for index, part in zip(numbers, value.split([len(matrix) for matrix in batch]), strict=True):
                shape = matrices[index].shape
                if value.ndim == 3 and shape[-2] < shape[-1]:
                    part = part.mT
                results[index] = part.reshape(shape if value.ndim == 3 else shape[:-2])
    return [results[index] for index in range(len(matrices))]
