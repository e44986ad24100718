"""What in a captured graph depends on the certified variable, and what on the input in another way."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, fx

from wellnormed.propagation.registry import name_of

LOOKUPS = ("embedding", "index", "index_select", "gather", "take", "take_along_dim")
"""Operations that look up entries by integers."""


class Dependence(NamedTuple):
    """Nodes of a graph by what they depend on; all others are constants."""

    variable: set[fx.Node]
    """What depends on floats of the input, or on what its integers look up."""
    lookups: set[fx.Node]
    """Those among them that look up rows of a stored table: with the floats of the input, the certified variable."""
    integers: dict[fx.Node, frozenset[str]]
    """What is computed from integers of the input and not from the variable -> the names of these inputs."""

    def names(self, nodes: Iterable[fx.Node]) -> frozenset[str]:
        """The inputs whose integers some nodes are computed from."""
        return frozenset().union(*(self.integers.get(each, ()) for each in nodes))


def dependence(nodes: Iterable[fx.Node], inputs: Mapping[str, tuple[str, Tensor]]) -> Dependence:
    """Follow the input through a graph.

    Args:
        nodes: In order of execution.
        inputs: Placeholder -> name of an input, and the example.
    """
    found = Dependence(set(), set(), {})
    for node in nodes:
        if node.op == "placeholder" and node.name in inputs:
            name, example = inputs[node.name]
            if example.is_floating_point():
                found.variable.add(node)
            else:
                found.integers[node] = frozenset({name})
        elif any(each in found.variable for each in node.all_input_nodes):
            found.variable.add(node)
        elif names := found.names(node.all_input_nodes):
            if packet(node) in LOOKUPS and node.meta["val"].is_floating_point() and node.args[0] not in found.integers:
                found.lookups.add(node)
                found.variable.add(node)
            else:
                found.integers[node] = names
    return found


def reached(start: fx.Node, sources: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """A node, its sources, theirs, and so on."""
    found, front = {start}, [start]
    while front:
        for each in sources(front.pop()):
            if each not in found:
                found.add(each)
                front.append(each)
    return found


def packet(node: fx.Node) -> str:
    """The name of an operation without that of its overload."""
    return name_of(node.target).removeprefix("aten.").partition(".")[0]
