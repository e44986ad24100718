"""Products of float32 matrices with all their digits, whatever `torch.set_float32_matmul_precision` allows a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def all_digits() -> Iterator[None]:
    """Within it, or in a function that it decorates, products of float32 are rounded to float32 and no further.

    With "high" or "medium", which is usual on accelerators, they are rounded to 11 or 8 bits, and a cap could be
    exceeded by a thousandth. Changes nothing in `torch.compile`, where the compiler decides.

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
