"""Momentum: what a direction sees of the gradients so far, or an average of directions; one buffer for every weight."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

States = Mapping[Tensor, Mapping[str, Tensor]]
"""What is kept of every parameter."""


class Momentum(ABC):
    """Where an average is kept, of which a step keeps a fraction: `1 - alpha` of Norm-Constrained LMOs."""

    state: ClassVar[tuple[str, ...]] = ()
    """What it keeps of every weight in the optimizer's state, in the weight's shape."""

    @abstractmethod
    def average(
        self, values: list[Tensor], parameters: list[Tensor], states: States, kept: float, ahead: bool = False
    ) -> list[Tensor]:
        """Bring averages up to date with a value for every parameter; return them, or one step `ahead` (Nesterov)."""

    def after_step(self, gradients: list[Tensor], kept: float) -> None:  # noqa: B027
        """What happens to the gradients once the weights have moved; nothing by default."""


class Buffer(Momentum):
    """An exponential moving average in a buffer, which is not corrected for its start at zero."""

    state = ("momentum_buffer",)

    def average(
        self, values: list[Tensor], parameters: list[Tensor], states: States, kept: float, ahead: bool = False
    ) -> list[Tensor]:
        buffers = [states[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, values, 1 - kept)
        return list(torch._foreach_lerp(buffers, values, 1 - kept)) if ahead else buffers


class InGradient(Momentum):
    """The sum in `parameter.grad`, on which the next backward pass adds: no state (LMO's memory-light form)."""

    def average(
        self, values: list[Tensor], parameters: list[Tensor], states: States, kept: float, ahead: bool = False
    ) -> list[Tensor]:
        return values

    def after_step(self, gradients: list[Tensor], kept: float) -> None:
        torch._foreach_mul_(gradients, kept)


MEMORIES: dict[str, Momentum] = {"buffer": Buffer(), "gradient": InGradient()}
