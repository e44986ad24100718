"""Constants that a program computes from integers of its input, such as masks; a certificate holds for their values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wellnormed.program.constants import compute
from wellnormed.program.dependence import fixing, reached, values_read
from wellnormed.program.program import Program, tensors_of


class Integers:
    """Computes the nodes of a program that depend on integers alone, for one sample at a time."""

    def __init__(self, program: Program) -> None:
        self._program, depends = program, program.depends
        used = {node for node in program.nodes if node in reached(program.result, lambda node: node.all_input_nodes)}
        self.lookups = [node for node in program.nodes if node in depends.lookups and node in used]
        """The lookups that the result depends on, in order of execution."""
        read = (each for node in used & depends.variable for each in values_read(node, depends))
        self._kept = fixing(program.result, depends) & {*read, program.result}
        needed = {each for node in (*self._kept, *self.lookups) for each in reached(node, lambda n: n.all_input_nodes)}
        self._inputs = [node for node in program.nodes if node.op == "placeholder"]
        self._steps = [node for node in program.nodes if node in needed and node.op != "placeholder"]

    def constants(self, sample: Sequence[Tensor]) -> list[Tensor]:
        """The constants of a sample that operations on the certified variable use.

        Raises:
            Exception: Whatever an operation raises for these integers, such as an IndexError of a lookup.
        """
        values: dict[fx.Node, Any] = dict(zip(self._inputs, sample, strict=True))
        for node in self._steps:
            arguments, keywords = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = compute(self._program, node, arguments, keywords)
        return [each for node in self._steps if node in self._kept for each in tensors_of(values[node])] + [
            value for node, value in values.items() if node in self._kept and node.op == "placeholder"
        ]

    def rows(self, name: str) -> list[int]:
        """The numbers of rows of the tables that an integer input indexes."""
        sizes = []
        for lookup in self.lookups:
            table, *index = lookup.all_input_nodes
            if any(name == each.name for node in index for each in reached(node, lambda n: n.all_input_nodes)):
                sizes.append(table.meta["val"].shape[0])
        return sizes


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors have the same entries."""
    return all(map(torch.equal, first, second))
