"""Models are drawn from these: a stream of draws, a registry of layers, and layers that fit a shape."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
LARGEST = 1024
"""Entries of a tensor between two layers."""
EVERY = (2, 3, 4, 5)
"""Numbers of axes: vectors, tokens, images, volumes."""


class Draw:
    """Draws of one model, by NumPy, whose streams do not depend on the machine."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = np.random.default_rng([seed, number])
        self.products = 0
        """Products of two values so far: each squares the size of activations."""
        self.nested = 0

    def chance(self, probability: float = 0.5) -> bool:
        """Heads or tails."""
        return bool(self._random.random() < probability)

    def whole(self, low: int, high: int) -> int:
        """An integer of `low, ..., high`."""
        return int(self._random.integers(low, high + 1))

    def between(self, low: float, high: float) -> float:
        """A positive number, uniform in its logarithm."""
        return math.exp(self._random.uniform(math.log(low), math.log(high)))

    def width(self, high: int = 64) -> int:
        """An integer of `1, ..., high`, small ones more often."""
        return int(self.between(1.0, high + 0.999))

    def choice(self, options: Sequence[Any]) -> Any:
        """One of several."""
        return options[self.whole(0, len(options) - 1)]

    def divisor(self, number: int, high: int = 8) -> int:
        """A divisor of a number, not above `high`."""
        return self.choice([each for each in range(1, min(number, high) + 1) if number % each == 0])

    def tensor(self, *shape: int, size: float | None = None) -> Tensor:
        """Entries of random scale; with structure in one draw of three, for bounds are attained there."""
        size = self.between(0.05, 3.0) if size is None else size
        entries = self._random.standard_normal(shape)
        kind = self.choice(["normal"] * 8 + ["positive", "signs", "sparse", "rank one"])
        if kind == "positive":
            entries = np.abs(entries)
        elif kind == "signs":
            entries = np.where(entries < 0, -1.0, 1.0)
        elif kind == "sparse":
            entries = entries * (self._random.random(shape) < 0.3)
        elif kind == "rank one" and len(shape) == 2:
            entries = entries[:, :1] * entries[:1]
        return torch.from_numpy(entries * size).float()

    def matrix(self, rows: int, columns: int) -> Tensor:
        """A matrix whose norm is moderate whatever its shape."""
        return self.tensor(rows, columns, size=self.between(0.1, 3.0) / math.sqrt(max(rows, columns)))

    def fill(self, module: nn.Module) -> nn.Module:
        """The module in evaluation mode, with random weights, biases and statistics."""
        for name, each in module.named_parameters():
            fan = math.sqrt(each.numel() / each.shape[0]) if each.ndim > 1 else 1.0
            each.data = self.tensor(*each.shape, size=self.between(0.1, 3.0) / fan)
            if name.endswith("logits_HT"):
                each.data = self.tensor(*each.shape, size=self.between(0.3, 5.0))
        for name, each in module.named_buffers():
            if name.endswith("running_mean"):
                each.copy_(self.tensor(*each.shape))
            elif name.endswith("running_var"):
                each.copy_(self.tensor(*each.shape).abs() + self.between(1e-3, 1.0))
        return module.eval()


class Layer(nn.Module):
    """A function of its parts, which are tensors and modules, and its input."""

    def __init__(self, function: Callable[..., Tensor], /, **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


Builder = Callable[[Draw, Shape], nn.Module | None]
_SHARES = {
    "linear": 3, "activation": 3, "gate": 1, "product": 1, "residual": 2, "normalization": 1, "attention": 3,
    "softmax": 1, "position": 1, "potential": 1, "average": 1, "move": 1, "selection": 1, "recurrence": 1,
    "convolution": 2, "pooling": 2, "space": 3,
}  # fmt: skip
"""Family -> how often it is drawn, beside the others."""
OFTEN = [family for family, share in _SHARES.items() for _ in range(share)]
"""The families, as often as they are drawn."""
FAMILIES: dict[str, dict[str, tuple[Builder, tuple[int, ...]]]] = {family: {} for family in _SHARES}
"""Family -> name of a layer -> what draws it for a shape (None if it does not fit), and the numbers of axes."""


def layer(family: str, *ranks: int, name: str = "") -> Callable[[Builder], Builder]:
    """Decorate what draws a layer."""

    def register(build: Builder) -> Builder:
        label = name or build.__name__.strip("_").replace("_", " ")
        FAMILIES[family][label] = (build, ranks or EVERY)
        return build

    return register


def plain(family: str, name: str, function: Callable[[Tensor], Tensor], *ranks: int) -> None:
    """A layer without parts."""
    layer(family, *ranks, name=name)(lambda draw, shape: Layer(lambda s, x: function(x)))


def draw_layer(draw: Draw, shape: Shape, family: str, name: str = "") -> tuple[str, nn.Module, Shape] | None:
    """A layer of a family for a shape, and the shape that it makes; None if the one drawn does not fit."""
    members = {n: entry for n, entry in FAMILIES[family].items() if len(shape) in entry[1]}
    if not members or (name and name not in members):
        return None
    name = name or draw.choice(list(members))
    try:
        built = members[name][0](draw, shape)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that are slow
            made = None if built is None else tuple(built(torch.zeros(shape)).shape)
    except (RuntimeError, ValueError, IndexError, TypeError):  # torch says which settings do not fit a shape
        return None
    if built is None or made is None or not 0 < math.prod(made) <= LARGEST or len(made) not in EVERY:
        return None
    return f"{family}: {name}", built, made
