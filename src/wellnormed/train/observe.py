"""The largest entries of a model's activations, and its largest attention logits, on some inputs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Observed(NamedTuple):
    """The largest absolute value, by the name of the module that computes it."""

    entries: dict[str, float]
    """The largest entries of the results of modules without parts."""
    logits: dict[str, float]
    """The largest attention logits, before any mask, of modules that call `scaled_dot_product_attention`."""
    inputs: dict[str, float]
    """The largest entries of the first inputs of modules without parts."""


def largest_of(seen: Sequence[Observed]) -> Observed:
    """The largest of what several processes saw of the same model."""

    def largest(observations: Sequence[dict[str, float]]) -> dict[str, float]:
        names = {name: None for values in observations for name in values}
        return {name: max(values[name] for values in observations if name in values) for name in names}

    return Observed(*map(largest, zip(*seen, strict=True)))


@torch.no_grad()
def observed(model: nn.Module, call: Callable[[], Any]) -> Observed:
    """Observe the model, in eval mode, while `call` runs it.

    Example:
        >>> observed(model := nn.Sequential(nn.Identity(), nn.ReLU()), lambda: model(torch.tensor([-3.0, 2.0]))).entries
        {'0': 3.0, '1': 2.0}
    """
    entries: dict[str, Tensor] = {}
    logits: dict[str, Tensor] = {}
    inputs_seen: dict[str, Tensor] = {}
    open_modules: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: open_modules.append(name)

    def leave(name: str, leaf: bool) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any, output: Any) -> None:
            open_modules.pop()
            if leaf and isinstance(output, Tensor):
                _keep(entries, name, output)
            if leaf and inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
                _keep(inputs_seen, name, inputs[0])

        return hook

    class Attention(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                _keep(logits, open_modules[-1] if open_modules else "", _logits(*args, **(kwargs or {})))
            return func(*args, **(kwargs or {}))

    training, hooks = model.training, []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(name)))
        hooks.append(module.register_forward_hook(leave(name, leaf=next(module.children(), None) is None)))
    try:
        model.eval()
        with Attention():
            call()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return Observed(
        *({name: float(value) for name, value in found.items()} for found in (entries, logits, inputs_seen))
    )


def _keep(largest_by_name: dict[str, Tensor], name: str, values: Tensor) -> None:
    largest = values.abs().amax().float()
    largest_by_name[name] = torch.maximum(largest_by_name[name], largest) if name in largest_by_name else largest


def _logits(query: Tensor, key: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Tensor:
    """`scale <q, k>`, with the default scale of torch."""
    return query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
