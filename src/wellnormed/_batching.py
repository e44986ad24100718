"""How many tensors of one shape are stacked and treated at once."""

from torch import Tensor

_CPU_ENTRIES = 2**20
"""Entries of a batch on a CPU. Small tensors gain from batching, large ones lose: with 48 matrices of 768 x 768 at once
every temporary is 113 MB of fresh memory pages, and a step took 1.5 times as long (`benchmarks/optimizer_step.py`)."""


def batches(tensors: list[Tensor]) -> list[slice]:
    """Slices of consecutive tensors of one shape, each to be stacked: all on an accelerator, on a CPU as many as pay.

    Example:
        >>> import torch
        >>> batches([torch.empty(8, 8)] * 3), batches([torch.empty(1024, 512)] * 3)
        ([slice(0, 3, None)], [slice(0, 2, None), slice(2, 3, None)])
    """
    count = len(tensors)
    if tensors[0].device.type == "cpu":
        count = max(1, _CPU_ENTRIES // max(1, tensors[0].numel()))
    return [slice(first, min(first + count, len(tensors))) for first in range(0, len(tensors), count)]
