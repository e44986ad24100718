"""Which graph nodes depend on the certified variable, and which only on integer inputs such as masks."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, fx

from wellnormed.propagation.registry import name_of

LOOKUPS = ("embedding", "index", "index_select", "gather", "take", "take_along_dim")
"""Operations that look up entries by integers."""
EMPTY = ("empty", "empty_like", "new_empty", "empty_permuted", "empty_strided", "new_empty_strided")
"""Operations that make a tensor of which no entry has been written."""


class Dependence(NamedTuple):
    """The nodes of a graph that depend on the input, by the way in which they do; all others are constants."""

    variable: set[fx.Node]
    """The nodes that depend on floats of the input, or on vectors that its integers look up."""
    lookups: set[fx.Node]
    """The variable nodes that look up rows of a stored table. These rows and the floats of the input are the certified
    variable."""
    integers: dict[fx.Node, frozenset[str]]
    """Node that is computed from integers of the input, and not from the variable -> the names of these inputs."""

    def names(self, nodes: Iterable[fx.Node]) -> frozenset[str]:
        """The names of the inputs whose integers some nodes are computed from."""
        return frozenset().union(*(self.integers.get(each, ()) for each in nodes))


def dependence(nodes: Iterable[fx.Node], inputs: Mapping[str, tuple[str, Tensor]]) -> Dependence:
    """Follow the input through a graph, and say how every node depends on it.

    Args:
        nodes: In order of execution.
        inputs: Placeholder -> name of an input, and the example.
    """
    depends = Dependence(set(), set(), {})
    for node in nodes:
        if node.op == "placeholder" and node.name in inputs:
            name, example = inputs[node.name]
            if example.is_floating_point():
                depends.variable.add(node)
            else:
                depends.integers[node] = frozenset({name})
        elif any(each in depends.variable for each in node.all_input_nodes):
            depends.variable.add(node)
        elif names := depends.names(node.all_input_nodes):
            is_lookup = packet(node) in LOOKUPS and node.meta["val"].is_floating_point()
            if is_lookup and node.args[0] not in depends.integers:  # the table is a constant
                depends.lookups.add(node)
                depends.variable.add(node)
            else:
                depends.integers[node] = names
    return depends


def reached(start: fx.Node, sources: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """A node, the nodes that it is computed from, those that these are computed from, and so on."""
    nodes, front = {start}, [start]
    while front:
        for each in sources(front.pop()):
            if each not in nodes:
                nodes.add(each)
                front.append(each)
    return nodes


def packet(node: fx.Node) -> str:
    """The name of an operation without the name of its overload."""
    return name_of(node.target).removeprefix("aten.").partition(".")[0]
