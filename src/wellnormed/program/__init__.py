"""A program: what a model computes of one sample, as a value; how it is captured, and compared with the model."""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace

if TYPE_CHECKING:
    from wellnormed.program.comparing import Comparison as Comparison
    from wellnormed.program.comparing import compare as compare
    from wellnormed.program.program import Program as Program
else:
    __getattr__, __dir__ = lazy_namespace(__name__)
