"""Batches of tensors of one shape that are stacked and processed at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from wellnormed._devices import entries_at_once

_ENTRIES_STACKED = 2**22
"""The entries of a batch on a CPU, for tensors that are stacked already. Beside other work, 12 matrices of 768 x 768
take 1.2 times as long at once as in pieces; 12 of 256 x 1024 take the same time."""


def batches(tensors: list[Tensor], entries: int) -> list[slice]:
    """Slices of consecutive tensors of one shape, each with at most `entries` entries, or one tensor.

    Example:
        >>> import torch
        >>> batches([torch.empty(8, 8)] * 3, 2**20), batches([torch.empty(1024, 512)] * 3, 2**20)
        ([slice(0, 3, None)], [slice(0, 2, None), slice(2, 3, None)])
    """
    count = max(1, entries // max(1, tensors[0].numel()))
    return [slice(first, min(first + count, len(tensors))) for first in range(0, len(tensors), count)]


def in_batches(compute: Callable[..., Tensor], x: Tensor, *bounds: Tensor) -> Tensor:
    """`compute(x, *bounds)`, called with at most one batch dimension, and in pieces if the batch is large.

    Args:
        compute: Takes matrices `(m, n)` or `(batch, m, n)`; its result starts with the batch dimension.
        x: `(*batch, m, n)`.
        *bounds: Tensors that broadcast to the batch shape.
    """
    shape = x.shape[:-2]
    if x.ndim > 3:
        bounds = tuple(bound.expand(shape).flatten() for bound in bounds)
        return in_batches(compute, x.flatten(0, -3), *bounds).unflatten(0, shape)
    most = _ENTRIES_STACKED if x.device.type == "cpu" else entries_at_once(x.device, x.numel(), share=1)
    if x.ndim == 2 or x.numel() <= most:
        return compute(x, *bounds)
    pieces = batches(list(x), most)
    cut = [[bound[piece] if bound.ndim and len(bound) > 1 else bound for bound in bounds] for piece in pieces]
    return torch.cat([compute(x[piece], *parts) for piece, parts in zip(pieces, cut, strict=True)])
