"""Draws inputs from the domain of a certificate, at which a model is compared with its captured program."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from wellnormed.propagation.axes import default_axes
from wellnormed.propagation.capture import Captured, Example, map_tensors
from wellnormed.propagation.dependence import packet
from wellnormed.propagation.domain import Box, Domain
from wellnormed.propagation.operations.movement import MOVES

_SHARES = (1.0, 0.03, 1e-3)
"""The sizes of drawn inputs, as shares of the largest size in the domain."""
_SIZES = (1e3, 1.0, 1e-3)
"""The sizes of drawn inputs, as root mean squares, if the domain is every finite input."""
_INSIDE = 1 - 2**-7
"""A factor that keeps drawn inputs in the domain when they are rounded to bfloat16."""


class Drawing:
    """Draws inputs for a captured program. The same program and domain always give the same inputs.

    Floats are drawn at random from the domain. Integers that only look up rows of a table are drawn from the numbers of
    its rows. All other inputs stay as they are in the example, since the certificate holds only for their values there.

    Args:
        captured: The program, with its example.
        domain: The inputs that its certificate holds for.
    """

    def __init__(self, captured: Captured, domain: Domain) -> None:
        self.example, self._domain = captured.example, domain
        self._rows = [_rows(captured, placeholder) for placeholder in captured.inputs]
        self._generator = torch.Generator().manual_seed(0)

    def scaled(self, batch: int | None = None) -> list[Example]:
        """Draw inputs of three sizes, and one whose groups have a single entry that is not 0.

        Args:
            batch: The size of the batch; that of the example if None.
        """
        sizes = _SIZES if self._domain == math.inf else _SHARES
        return [self._draw(size, batch) for size in sizes] + [self._draw(sizes[0], batch, single=True)]

    def _draw(self, size: float, batch: int | None, single: bool = False) -> Example:
        rows = iter(self._rows)

        def drawn(example: Tensor) -> Tensor:
            count = next(rows)
            shape = example.shape if batch is None else (batch, *example.shape[1:])
            if example.is_floating_point():
                return self._floats(shape, size, single).to(example)
            if count is not None:
                return torch.randint(count, shape, generator=self._generator).to(example)
            if batch is None:
                return example.clone()
            return example[torch.arange(batch, device=example.device) % len(example)]

        return map_tensors(drawn, self.example)

    def _floats(self, shape: Sequence[int], size: float, single: bool) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        axes = default_axes(shape) if len(shape) else ()
        if single:
            largest = drawn.abs().amax(axes, keepdim=True) if drawn.numel() else drawn
            drawn = torch.where(drawn.abs() == largest, drawn, 0.0)
        if isinstance(self._domain, Box):
            middle, half = (self._domain.high + self._domain.low) / 2, (self._domain.high - self._domain.low) / 2
            return middle + _INSIDE * half * size * torch.erf(drawn)
        rms = drawn.square().mean(axes, keepdim=True).sqrt() if drawn.numel() else drawn
        radius = size if self._domain == math.inf else size * self._domain
        return _INSIDE * radius * drawn / rms.clamp(min=1e-300)


def _rows(captured: Captured, placeholder: str) -> int | None:
    """The number of rows of the smallest table that an input of integers looks up.

    The result is None if the input looks up no table, or is used for anything else as well.
    """
    depends = captured.depends
    name = captured.inputs[placeholder][0]
    tables: list[int] = []
    for node, names in depends.integers.items():
        if name not in names:
            continue
        if node.op != "placeholder" and (packet(node) not in MOVES or len(node.all_input_nodes) > 1):
            return None
        for user in node.users:
            if user in depends.lookups:
                tables.append(_table(user).meta["val"].shape[0])
            elif user in depends.variable:
                return None
    return min(tables, default=None)


def _table(lookup: fx.Node) -> fx.Node:
    table = lookup.args[0]
    assert isinstance(table, fx.Node)  # the table is the first argument of all lookups
    return table
