"""What depends on the device that tensors lie on, beside the choice of a method."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def default_on_cpu() -> Iterator[None]:
    """Within it, or in a function that it decorates, tensors are made on the CPU, whatever the default device is.

    Example:
        >>> with torch.device("meta"), default_on_cpu():
        ...     torch.zeros(2).device.type
        'cpu'
    """
    with torch.device("cpu") if torch.empty(0).device.type != "cpu" else nullcontext():
        yield


def recording(device: torch.device) -> bool:
    """Whether what is launched on a device now is recorded in a CUDA graph, so that no value can be looked at."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def entries_at_once(device: torch.device, total: int, share: int = 10) -> int:
    """Entries of a batch, of tensors that have so many entries in total.

    A CPU gains from batches of small tensors and loses by those of large ones: with 48 matrices of 768 x 768 at once
    every temporary is 113 MB of fresh memory, and a step took 1.5 times as long (`benchmarks/optimizer_step.py`). On
    other devices beginning a product takes longer than a small product itself, so that a batch is a share of all
    tensors there: one in 10 for an oracle, whose temporaries take 3 times a batch, and one in 24 for constraints, whose
    temporaries take 7 to 14 times a batch. 2^26 entries keep every device busy.

    Example:
        >>> entries_at_once(torch.device("cpu"), 10**9) == 2**20
        True
    """
    return 2**20 if device.type == "cpu" else min(max(2**20, total // share), 2**26)
