"""Reports without pictures, which take most of a small run's time; `tests/train/test_report.py` draws
them."""

from contextlib import contextmanager
from unittest import mock

from wellnormed.train import report


@contextmanager
def undrawn():
    """Reports are written with an empty picture for every figure, which says its name."""
    names = [name for name in vars(report) if name.endswith("_figure")]
    figures = {name: lambda *content, name=name: name.strip("_").replace("_", " ") for name in names}
    with mock.patch.multiple(report, _svg=lambda name: f"<svg>{name}</svg>", **figures):
        yield
