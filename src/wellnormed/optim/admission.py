"""What no optimizer of this library can serve, refused by name before anything is changed."""

import sys

import torch
from torch import Tensor

from wellnormed.parallel.layout import is_distributed, layout


def refuse_parameter(name: str, parameter: Tensor) -> None:
    """Refuse a parameter that cannot be trained.

    Raises:
        ValueError: It is empty, or a piece of what FSDP1 flattens; naming parameter, value and remedy.
    """
    if "_fsdp_wrapped_module" in name or getattr(parameter, "_is_flat_param", False):
        raise ValueError(
            f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens weights so that none has "
            "its shape; shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if parameter.numel() == 0:
        raise ValueError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} is empty; give its layer a size of at least 1, or "
            "freeze it with requires_grad_(False)"
        )


def refuse_zero_redundancy() -> None:
    """Refuse to be made by `ZeroRedundancyOptimizer`.

    It hands every process some of the parameters, and says so to nobody; only the calling frames tell.

    Raises:
        ValueError: With the remedy.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(
                "ZeroRedundancyOptimizer cannot wrap an optimizer of this library; pass process_group= to the "
                "optimizer itself, which then shares out the oracles, or shard the model with fully_shard (FSDP2)"
            )
        frame = frame.f_back


def refuse_gradient(name: str, parameter: Tensor, gradient: Tensor) -> None:
    """Refuse a gradient that no step can be made of.

    Raises:
        ValueError: The parameter has no values (meta), or the gradient is sparse or lies otherwise over processes than
            the parameter, such as one not yet summed; naming the parameter and the remedy.
    """
    if parameter.is_meta:
        raise ValueError(
            f"parameter {name!r} is a meta tensor and has no values; make them with model.to_empty(device=...) and an "
            "initialisation, then make the optimizer"
        )
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {name!r} is sparse ({gradient.layout}), and a norm needs it whole; make the layer with "
            "sparse=False, or its gradient dense with to_dense()"
        )
    if layout(parameter) != layout(gradient):
        own, other = (tuple(t.placements) if is_distributed(t) else "plain" for t in (parameter, gradient))
        raise ValueError(
            f"the gradient of {name!r} lies as {other}, its parameter as {own}; redistribute the gradient to the "
            "parameter's placements before the step"
        )
