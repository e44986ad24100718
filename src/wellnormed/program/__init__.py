"""A program: what a model computes of one sample, as a value; how it is captured, and compared with the model."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "Comparison": ".comparing",
        "Program": ".program",
        "compare": ".comparing",
    },
)
