"""What an optimizer takes in, also later, and what none can serve.

What is refused is refused before anything is changed, by a `ValueError` that names the parameter and the remedy.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellnormed.norms import AssignedParameter, MatrixNorm, Norm
from wellnormed.norms.assignment import check_norm
from wellnormed.optim.directions import second_moment_like
from wellnormed.optim.rounding import by_entries
from wellnormed.parallel.layout import is_distributed, layout


def refuse_parameter(name: str, parameter: Tensor) -> None:
    """Refuse a parameter that cannot be trained: a piece of what FSDP1 flattens."""
    marks = (getattr(parameter, mark, False) for mark in ("_is_flat_param", "_fsdp_flattened"))
    if "_fsdp_wrapped_module" in name or any(marks):
        raise ValueError(
            f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens weights so that none has "
            "its shape; shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )


def refuse_zero_redundancy() -> None:
    """Refuse to be made by `ZeroRedundancyOptimizer`.

    It hands every process some of the parameters, and says so to nobody; only the calling frames tell.
    """
    frame = sys._getframe(1)
    while frame is not None and type(frame.f_locals.get("self")).__name__ != "ZeroRedundancyOptimizer":
        frame = frame.f_back
    if frame is not None:
        raise ValueError(
            "ZeroRedundancyOptimizer cannot wrap an optimizer of this library; pass process_group= to the optimizer "
            "itself, which then shares out the oracles, or shard the model with fully_shard (FSDP2)"
        )


def refuse_gradient(name: str, parameter: Tensor, gradient: Tensor) -> None:
    """Refuse a gradient that is sparse, or not laid over processes as the parameter is, such as one not yet summed."""
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


def refuse_cast(name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """Refuse a parameter that was cast to another dtype after a step, which its averages do not have."""
    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        if key in state and state[key].dtype != parameter.dtype:
            raise ValueError(
                f"parameter {name!r} is of {parameter.dtype}, and its {key} of {state[key].dtype}: the model was cast "
                "after a step. Cast the optimizer too, by optimizer.load_state_dict(optimizer.state_dict())"
            )


def refuse_state(
    state_dict: Mapping[str, Any], groups: list[dict[str, Any]], norms: Mapping[Tensor, Norm | None], memory: str
) -> None:
    """Refuse a state whose tensors are not those that these groups keep, as of other norms, sizes or `memory`."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    named = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    for number, (name, parameter) in zip(numbers, named, strict=False):  # torch refuses other counts
        own, norm, shape = state_dict["state"].get(number), norms[parameter], tuple(parameter.shape)
        if not own:
            continue
        kept: dict[str, tuple[int, ...]] = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        if norm is not None:
            kept = {"momentum_buffer": shape}
            if memory == "buffer":
                kept["agreement"] = shape if by_entries(parameter, norm) else ()
            if "second_moment" in own and isinstance(norm, MatrixNorm):
                kept["second_moment"] = tuple(second_moment_like(parameter, norm).shape)
        if (found := {key: tuple(getattr(value, "shape", ())) for key, value in own.items()}) != kept:
            here = f"{norm!r} and memory={memory!r}" if norm else "AdamW"
            raise ValueError(
                f"load_state_dict: the state of {name!r} holds {_shapes(found)}, and here {here} keep {_shapes(kept)}; "
                "load it into an optimizer with the same norms and the same memory=, of a model of the same sizes"
            )


def _shapes(tensors: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in sorted(tensors.items()))


def assign_later(
    members: list[tuple[str, nn.Parameter]],
    group: Mapping[str, Any],
    known: Mapping[nn.Parameter, AssignedParameter],
    taken: Iterable[str],
) -> tuple[AssignedParameter, ...]:
    """Names and norms of parameters that come in the middle of training; refused if unknown, unfit, or named twice.

    Their group's key `norm` decides for all `members`, else what is `known` of them. `taken` are the optimizer's names.
    """
    names, entries = set(taken), []
    for name, parameter in members:
        entry = known.get(parameter)
        name = name if entry is None else entry.name
        while name.isdigit() and name in names:
            name = str(int(name) + 1)
        if "norm" in group:
            check_norm(group["norm"], "add_param_group: norm")
            entry = AssignedParameter(name, parameter, group["norm"], "add_param_group")
        elif entry is None:
            raise ValueError(
                f"add_param_group: nothing says which norm parameter {name!r} of shape {tuple(parameter.shape)} lives "
                "in; give the group a key 'norm' (None for AdamW), or make the optimizer with the model"
            )
        if name in names:
            raise ValueError(f"add_param_group: parameter {name!r} is in this optimizer already; name it otherwise")
        names.add(name)
        entries.append(entry)
    return tuple(entries)
