"""Programs run with wrong results of every operation, which shows how far rounding errors reach."""

from typing import Any

import torch
from torch import Tensor, fx

from wellnormed.program.operation import PLACING, kind_of
from wellnormed.program.program import Program


class Shaken(fx.Interpreter):
    """Runs a program, where every number that an operation computes is wrong by a share of itself, up or down.

    So it shows how far rounding errors may reach, wherever in the model they arise, and whatever enlarges them.

    Args:
        program: The program.
        share: The share; by default the machine epsilon of each result's dtype.
        seed: Seed of the signs.
    """

    def __init__(self, program: Program, share: float | None = None, seed: int = 0) -> None:
        super().__init__(program.module)
        generator, self._factors = torch.Generator().manual_seed(seed), dict[fx.Node, Tensor]()
        for node in program.nodes:
            result = node.meta.get("val")
            floats = isinstance(result, Tensor) and result.is_floating_point() and result.dtype.itemsize > 1
            if floats and node in program.depends.variable and kind_of(node) not in PLACING:
                signs = torch.randint(0, 2, result.shape, generator=generator) * 2 - 1
                size = torch.finfo(result.dtype).eps if share is None else share
                self._factors[node] = (1 + size * signs.double()).to(result.dtype)

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.run(*tensors)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result * self._factors[n].to(result.device) if n in self._factors else result
