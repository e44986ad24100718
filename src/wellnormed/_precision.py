"""Products of float32 matrices in full precision, whatever `torch.set_float32_matmul_precision` allows a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
    elif hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # pyrefly: ignore
        allowed = [(backend, backend.fp32_precision) for backend in backends]
        fewer = [(backend, precision) for backend, precision in allowed if precision not in ("none", "ieee")]
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
