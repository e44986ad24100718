"""A plugin, `pytest -p tests.third`: every tolerance of `assert_close` is a third of what the test says.

`python -m tests.portable` runs the numerical tests with it, so that a tolerance has room for a processor that nobody
has tried. Comparisons written out (`error < 1e-6`), and published numbers by their digits (`pytest.approx`), keep their
own bounds.
"""

from torch.testing import _comparison


def pytest_configure() -> None:
    """Called for a plugin, and not where the file is only imported."""
    whole = _comparison.get_tolerances
    _comparison.get_tolerances = lambda *inputs, **given: tuple(part / 3 for part in whole(*inputs, **given))
