"""What a program computes from the integers of its input: indices of lookups, and constants such as masks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wellnormed.program.dependence import fixing, reached, values_read
from wellnormed.program.interpreter import Interpreter, compute, is_stored
from wellnormed.program.program import Program, tensors_of


class Integers(Interpreter):
    """Computes all that a program computes from integers alone, for one sample after the other.

    A certificate holds for the constants that the program makes of the example's integers, such as masks: they are the
    values of `kept`. Samples with other integers belong to its domain if these values stay the same.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        depends, used = self.depends, reached(program.result, lambda node: node.all_input_nodes)
        self.lookups = [node for node in program.nodes if node in depends.lookups and node in used]
        """The lookups that the result depends on, in order of execution."""
        read = (each for node in used & depends.variable for each in values_read(node, depends))
        self.kept = fixing(program.result, depends) & {*read, program.result}
        """The nodes computed from integers whose values the operations on the certified input read."""
        needed = {each for node in (*self.kept, *self.lookups) for each in reached(node, lambda n: n.all_input_nodes)}
        own = depends.integers | depends.lookups
        self._inputs = [node for node in program.nodes if node.op == "placeholder"]
        self._steps = [node for node in program.nodes if node in needed & own and node.op != "placeholder"]
        self._constants: dict[fx.Node, Any] = {}
        self.interpret([node for node in program.nodes if node in needed - own], self._constants)

    def evaluate(self, node: fx.Node, operands: Any) -> Any:
        """The value of a node, as the model computes it."""
        if is_stored(node, self.program):
            return self.program.stored[str(node.target)].tensor.detach()
        _, arguments, keywords = operands
        return compute(node, arguments, keywords)

    def values(self, sample: Sequence[Tensor]) -> dict[fx.Node, Any]:
        """The values of the nodes for a sample, given as the list of its tensors.

        Raises:
            Exception: Whatever an operation raises for these integers, such as an IndexError of a lookup.
        """
        values = self._constants | dict(zip(self._inputs, sample, strict=True))
        self.interpret(self._steps, values)
        return values

    def keep(self, values: dict[fx.Node, Any], others: dict[fx.Node, Any]) -> bool:
        """Whether the nodes of `kept` have the same values in two samples."""
        return all(_equal(values[node], others[node]) for node in self.kept)

    def changed(self, values: dict[fx.Node, Any], others: dict[fx.Node, Any]) -> set[fx.Node]:
        """The lookups with another index in one sample than in another."""
        return {node for node in self.lookups if not all(_equal(values[n], others[n]) for n in self.index(node))}

    def index(self, lookup: fx.Node) -> list[fx.Node]:
        """The nodes that say what a lookup looks up in its table, its first argument."""
        return lookup.all_input_nodes[1:]

    def rows_from(self, lookup: fx.Node) -> tuple[int, set[str]]:
        """The number of rows of a lookup's table, and the inputs that its index is computed from."""
        found = {each for node in self.index(lookup) for each in reached(node, lambda n: n.all_input_nodes)}
        return lookup.all_input_nodes[0].meta["val"].shape[0], {node.name for node in found if node in self._inputs}


def _equal(a: Any, b: Any) -> bool:
    """Whether two results of an operation, a tensor or several, have the same entries."""
    return all(map(torch.equal, tensors_of(a), tensors_of(b)))
