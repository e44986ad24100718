"""Products of float32 matrices in full precision, whatever `torch.set_float32_matmul_precision` allows a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CUDA = torch.backends.cuda.matmul
_BACKENDS = (_CUDA, torch.backends.mkldnn.matmul) if hasattr(_CUDA, "fp32_precision") else ()  # pyrefly: ignore


@contextmanager
def all_digits() -> Iterator[None]:
    """In the block, or in a decorated function, products of float32 are computed in full float32 precision.

    With "high" or "medium", which are usual on accelerators, factors are rounded to 11 or 8 bits, and a cap could be
    exceeded by a thousandth. This has no effect under `torch.compile`, where the compiler decides.

    Example:
        >>> torch.set_float32_matmul_precision("high")
        >>> with all_digits():
        ...     torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
        ('high', 'ieee')
        >>> torch.set_float32_matmul_precision("highest")
    """
    if torch.compiler.is_compiling():
        yield
    elif _BACKENDS:
        fewer = [(b, precision) for b in _BACKENDS if (precision := b.fp32_precision) not in ("none", "ieee")]
        try:
            for backend, _ in fewer:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in fewer:
                backend.fp32_precision = precision
    else:  # torch < 2.9
        allowed = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(allowed)
