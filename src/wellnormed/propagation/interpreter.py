"""The one way through a captured graph: a node after the other, each from the values of those that it reads."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from wellnormed.propagation.capture import Captured
from wellnormed.propagation.dependence import reached
from wellnormed.propagation.errors import DRAWS, UncertifiableError
from wellnormed.propagation.places import place


class Interpreter(ABC):
    """Gives every node of a captured graph a value; a subclass says which.

    The walk of a certificate gives bounds to the nodes that depend on the certified input, `Continuous` gives them
    tensors of float64. Both compute all other nodes as the model does.

    Args:
        captured: The graph, with its inputs and stored tensors.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured, self.depends = captured, captured.depends

    def operands(self, node: fx.Node) -> Any:
        """The tree of arguments that the value of a node is computed from; nodes in it stand for their values."""
        return node.target, node.args, dict(node.kwargs)

    @abstractmethod
    def evaluate(self, node: fx.Node, operands: Any) -> Any:
        """The value of a node, from its operands with values in the place of nodes."""

    def needed(self, result: fx.Node) -> list[fx.Node]:
        """The nodes that a result is computed from, in order of execution, and the result."""
        found = reached(result, self.sources)
        return [node for node in self.captured.nodes if node in found]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes among the operands of a node."""
        nodes: list[fx.Node] = []
        fx.node.map_arg(self.operands(node), nodes.append)
        return nodes

    def interpret(self, nodes: Iterable[fx.Node], values: dict[fx.Node, Any]) -> None:
        """Add the values of some nodes to those of the nodes before them."""
        for node in nodes:
            operands = fx.node.map_aggregate(
                self.operands(node), lambda each: values[each] if isinstance(each, fx.Node) else each
            )
            values[node] = self.evaluate(node, operands)


def draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def compute(node: fx.Node, arguments: Any, keywords: Any) -> Any:
    """The result of a node that does not depend on the certified input, as the model computes it.

    Raises:
        UncertifiableError: It draws random numbers, or runs a graph of its own.
    """
    if node.op == "get_attr":
        raise UncertifiableError(f"{place(node)}: a graph within the graph is run; write its operations out")
    if draws(node):
        raise UncertifiableError(f"{place(node)}: {DRAWS}")
    with torch.no_grad():
        return node.target(*arguments, **keywords)  # type: ignore[operator]
