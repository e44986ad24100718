"""Interpreters of a captured graph: they compute node after node, each from the values of the nodes that it reads."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import fx

from wellnormed.program.dependence import reached
from wellnormed.program.program import Program


class Interpreter(ABC):
    """Computes a value for every node of a program; subclasses define the values.

    In `lowering.walk.Walk` the values are bounds for nodes that depend on the certified input. It and `Integers`
    compute all other nodes as the model does.

    Args:
        program: The graph, with its inputs and stored tensors.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.depends = program, program.depends

    def operands(self, node: fx.Node) -> Any:
        """The arguments of a node, as a tree in which nodes stand for their values."""
        return node.target, node.args, dict(node.kwargs)

    @abstractmethod
    def evaluate(self, node: fx.Node, operands: Any) -> Any:
        """The value of a node, from its operands with values instead of nodes."""

    def needed(self, result: fx.Node) -> list[fx.Node]:
        """The nodes that a result is computed from, in order of execution, and the result."""
        found = reached(result, self.sources)
        return [node for node in self.program.nodes if node in found]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes among the operands of a node."""
        nodes: list[fx.Node] = []
        fx.node.map_arg(self.operands(node), nodes.append)
        return nodes

    def interpret(self, nodes: Iterable[fx.Node], values: dict[fx.Node, Any]) -> None:
        """Compute the values of these nodes, and add them to `values`, which has those of earlier nodes."""
        for node in nodes:
            operands = fx.node.map_aggregate(
                self.operands(node), lambda each: values[each] if isinstance(each, fx.Node) else each
            )
            values[node] = self.evaluate(node, operands)


def is_stored(node: fx.Node, program: Program) -> bool:
    """Whether a node is a stored tensor of the program; other attributes are graphs within the graph."""
    return node.op == "get_attr" and str(node.target) in program.stored
