"""Modules that routing knows by the names of their classes, attributes and parameters."""

from typing import Any

from torch import Tensor, nn


def made(kind: str = "Module", **parts: Any) -> nn.Module:
    """A module of a class of this name, which holds these layers, parameters (of tensors) and numbers."""
    model = type(kind, (nn.Module,), {})()
    for name, each in parts.items():
        setattr(model, name, nn.Parameter(each) if type(each) is Tensor else each)
    return model
