"""A plugin, `pytest -p tests.third`: every tolerance of `assert_close` and `approx` is a third of what the test says.

`python -m tests.portable` runs the numerical tests with it, so that a tolerance has room for a processor that nobody
has tried. Comparisons written out (`error < 1e-6`) keep their own bounds.
"""

import inspect

import pytest
from torch.testing import _comparison


def pytest_configure() -> None:
    """Called for a plugin, and not where the file is only imported."""
    of_tensors = _comparison.get_tolerances
    _comparison.get_tolerances = lambda *inputs, **given: tuple(part / 3 for part in of_tensors(*inputs, **given))
    numbers = inspect.getmodule(pytest.approx).ApproxScalar  # pyrefly: ignore
    of_numbers = numbers.tolerance.fget
    numbers.tolerance = property(lambda self: of_numbers(self) / 3)
