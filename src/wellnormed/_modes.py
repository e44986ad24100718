"""Training and evaluation mode of a model's modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode; afterwards the mode of every module is restored."""
    training = [module for module in model.modules() if module.training]
    try:
        yield model.eval()
    finally:
        for module in training:
            module.training = True
