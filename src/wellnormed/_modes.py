"""Training and evaluation mode of a model's modules, and computing without autocast."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode; afterwards the mode of every module is restored.

    The flags are changed, and no `train` or `eval` of the model is called: those of some layers, as LoRA's, merge
    trained weights into frozen ones, which would hide them from a proof.
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield model
    finally:
        for module in training:
            module.training = True


@contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast converts anything in the block: neither one around it, nor one that a model enters itself."""
    kind = torch.autocast
    own = {name: getattr(kind, name) for name in ("__enter__", "__exit__")}
    with kind("cpu", enabled=False):
        for name in own:
            setattr(kind, name, lambda autocast, *error: None)
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(kind, name, function)
