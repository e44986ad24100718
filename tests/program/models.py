"""A small model that computes any function."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """A function of the module and its inputs, with a layer whose gain is 0.5."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(0.5 * torch.eye(4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.own = random.Random(0)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)
