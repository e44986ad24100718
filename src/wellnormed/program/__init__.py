"""Programs: a model's tensor operations for one sample as a graph; its capture, and its comparison with the model."""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace

if TYPE_CHECKING:
    from wellnormed.program.comparing import Comparison as Comparison
    from wellnormed.program.comparing import compare as compare
    from wellnormed.program.program import Program as Program
else:
    __getattr__, __dir__ = lazy_namespace(__name__)
