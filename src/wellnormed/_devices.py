"""Helpers that depend on the device of tensors."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def default_on_cpu() -> Iterator[None]:
    """In the block, or in a decorated function, tensors are made on the CPU, whatever the default device is.

    Example:
        >>> with torch.device("meta"), default_on_cpu():
        ...     torch.zeros(2).device.type
        'cpu'
    """
    with torch.device("cpu") if torch.empty(0).device.type != "cpu" else nullcontext():
        yield


def recording(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded on a device, so that no value can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def entries_at_once(device: torch.device, total: int, share: int = 10) -> int:
    """The entries of a batch, for tensors with `total` entries together.

    On a CPU, batches of small tensors save time and batches of large ones lose it: with 48 matrices of 768 x 768 at
    once every temporary is 113 MB of new memory, and a step took 1.5 times as long (`benchmarks/optimizer_step.py`). On
    other devices launching a small product takes longer than the product itself, so a batch is a share of all tensors
    there: 1/10 for an oracle, whose temporaries take 3 times a batch, and 1/24 for constraints, whose temporaries take
    7 to 14 times a batch. 2^26 entries keep every device busy.

    Example:
        >>> entries_at_once(torch.device("cpu"), 10**9) == 2**20
        True
    """
    return 2**20 if device.type == "cpu" else min(max(2**20, total // share), 2**26)
