"""The base class of this package's models."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wellnormed.nn.starting import Start, start_


class TokenModel(nn.Module, ABC):
    """A model of integers `(B, T)` to logits `(B, T, vocabulary_size)`, whose `config` has a `length`."""

    config: Any

    @abstractmethod
    def starts(self) -> Iterator[Start]:
        """Every parameter with the function that sets its start."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the start that `starts` describes."""
        start_(self.starts(), generator)

    def example_input(self) -> Tensor:
        """The example input with which a certificate of this model is captured: integers `(1, length)`."""
        return torch.zeros(1, self.config.length, dtype=torch.long)
