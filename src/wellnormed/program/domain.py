"""Domains, the inputs that a bound holds for: a ball for every group, or a box for every entry; how a row states it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wellnormed._inputs import require_numbers

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
"""Name -> dtype of an input that a certificate can speak of."""
STORED = (*_DTYPES, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""The dtypes of stored tensors that the kernel reads."""


@dataclass(frozen=True)
class Box:
    """All inputs with every entry between two numbers.

    Raises:
        ValueError: `low` is not below `high`, or one is not finite.

    Example:
        >>> Box(0, 1)  # the pixels of an image
        Box(low=0.0, high=1.0)
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        require_numbers("box: ", {"low": self.low, "high": self.high})
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"box=({self.low}, {self.high}) must be two finite numbers, the smaller one first")
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))


Domain = float | Box
"""Largest root mean square of a group of the input, infinity for every finite input, or a box for its entries."""


def constants_of(domain: Domain, dtype: torch.dtype) -> dict[str, Any]:
    """The constants of an input's row. Every finite input is the box between the largest numbers of its dtype."""
    name = str(dtype).removeprefix("torch.")
    if domain == math.inf:
        largest = torch.finfo(dtype).max
        domain = Box(-largest, largest)
    if isinstance(domain, Box):
        return {"dtype": name, "low": domain.low, "high": domain.high}
    return {"dtype": name, "radius": float(domain)}


def domain_of(constants: dict[str, Any]) -> Domain:
    """The domain that `constants_of` wrote."""
    if "radius" in constants:
        return float(constants["radius"])
    box, largest = Box(constants["low"], constants["high"]), torch.finfo(DTYPES[constants["dtype"]]).max
    return math.inf if box == Box(-largest, largest) else box


def default_axes(shape: Sequence[int], signal: bool = False) -> tuple[int, ...]:
    """The axes of a group: the last one (groups are tokens); for 4 axes and more, and signals, all but the first."""
    return tuple(range(1, len(shape))) if len(shape) > 3 - signal else (len(shape) - 1,)
