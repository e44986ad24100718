"""The largest entries and attention logits that a model has on some inputs; `formats` has those that are proved."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wellnormed._inputs import require_module

INPUT, LOGITS = "input of ", "logits of "
"""The beginnings of the names of the inputs and attention logits of a module."""


@torch.no_grad()
def largest_entries(model: nn.Module, *inputs: Any) -> dict[str, float]:
    """The largest absolute entry of every weight, and of what `observed` sees in one call of the model.

    Args:
        model: The model, which is called once, as `model(*inputs)`, in its present mode.
        inputs: The arguments of the call.

    Returns:
        Name -> largest absolute entry: names of parameters for these, and the names that `observed` gives.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 0.5)
        >>> largest_entries(nn.Sequential(layer), torch.ones(1, 2))
        {'0.weight': 0.5, 'input of 0': 1.0, '0': 1.0}
    """
    require_module("largest_entries", model)
    weights = {name: float(weight.abs().max()) for name, weight in model.named_parameters() if weight.numel()}
    return weights | observed(model, lambda: model(*inputs))


@torch.no_grad()
def observed(model: nn.Module, call: Callable[[], Any]) -> dict[str, float]:
    """The largest absolute entries in a model while `call` runs it.

    A module that is called several times has the largest of all calls.

    Returns:
        Name -> largest absolute entry: names of modules without children for their results, `input of NAME` for their
        first inputs, and `logits of NAME` for modules that call `scaled_dot_product_attention`, before any mask.

    Example:
        >>> observed(model := nn.Sequential(nn.Identity(), nn.ReLU()), lambda: model(torch.tensor([-3.0, 2.0])))
        {'input of 0': 3.0, '0': 3.0, 'input of 1': 3.0, '1': 2.0}
    """
    largest: dict[str, Tensor] = {}  # on the device, which is not waited for
    running = [""]

    def note(name: str, content: Any) -> None:
        for each in torch.utils._pytree.tree_leaves(content):
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel():
                size = each.abs().amax()
                largest[name] = torch.maximum(largest[name], size) if name in largest else size

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(name: str, module: nn.Module, arguments: Any, result: Any) -> None:
        running.pop()
        if next(module.children(), None) is None:
            note(f"{INPUT}{name}", arguments[:1])
            note(name, result)

    class Attention(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                note(f"{LOGITS}{running[-1]}", _logits(*args, **(kwargs or {})))
            return func(*args, **(kwargs or {}))

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(partial(leave, name)))
    try:
        with Attention():
            call()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: float(size) for name, size in largest.items()}


def summary(seen: Mapping[str, float]) -> dict[str, float]:
    """The `largest_entry` of all results that `observed` saw, and the `largest_logit` if it saw any attention.

    Example:
        >>> summary({"input of 0": 9.0, "0": 3.0, "1": 2.0, "logits of 1": 0.5})
        {'largest_entry': 3.0, 'largest_logit': 0.5}
    """
    logits = [size for name, size in seen.items() if name.startswith(LOGITS)]
    entry = max(size for name, size in seen.items() if not name.startswith((INPUT, LOGITS)))
    return {"largest_entry": entry} | ({"largest_logit": max(logits)} if logits else {})


def _logits(
    query: Tensor, key: Tensor, *_: Any, scale: float | None = None, enable_gqa: bool = False, **__: Any
) -> Tensor:
    """`scale <q, k>`, with the default scale of torch."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
