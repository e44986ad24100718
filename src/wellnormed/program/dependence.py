"""Which nodes of a graph depend on the certified variable, and which are constants made of the input's integers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from wellnormed.program.operation import kind_of, record_of


class Dependence(NamedTuple):
    """The nodes of a graph that depend on the input, in three sets; all other nodes are constants."""

    variable: set[fx.Node]
    """The nodes that depend on the entries of floats of the input, or of vectors that its integers look up."""
    lookups: set[fx.Node]
    """The nodes that look up entries of a stored table, a subset of `variable`. Their results and the floats of the
    input are the certified variable."""
    integers: set[fx.Node]
    """The nodes that depend on integers of the input, but not on the certified variable."""


def dependence(nodes: Iterable[fx.Node], inputs: Mapping[str, tuple[str, Tensor]]) -> Dependence:
    """Find out how every node of a graph depends on the input.

    Args:
        nodes: In order of execution.
        inputs: Placeholder -> name of an input, and its tensor in the example.
    """
    depends = Dependence(set(), set(), set())
    for node in nodes:
        if node.op == "placeholder" and node.name in inputs:
            floats = inputs[node.name][1].is_floating_point()
            (depends.variable if floats else depends.integers).add(node)
        elif not depends.variable.isdisjoint(_with_entries(node)):
            depends.variable.add(node)
        elif not depends.integers.isdisjoint(node.all_input_nodes):
            is_lookup = kind_of(node) == "lookup" and node.meta["val"].is_floating_point() and not _masked(node)
            if is_lookup and node.args[0] not in depends.integers:  # the table is a constant
                depends.lookups.add(node)
                depends.variable.add(node)
            else:
                depends.integers.add(node)
    return depends


def _with_entries(node: fx.Node) -> list[fx.Node]:
    """The nodes whose entries an operation uses, and not only their shape."""
    record = record_of(node)
    if record is None or not record.shape_only:
        return node.all_input_nodes
    found: list[fx.Node] = []
    others = [each for place, each in enumerate(node.args) if place not in record.shape_only]
    fx.node.map_arg((others, dict(node.kwargs)), found.append)
    return found


def _masked(node: fx.Node) -> bool:
    """Whether a lookup is by booleans: the number of entries then depends on these, so the program fixes them."""
    return any(getattr(each.meta.get("val"), "dtype", None) is torch.bool for each in node.all_input_nodes[1:])


def values_read(node: fx.Node, depends: Dependence) -> list[fx.Node]:
    """The nodes whose values a node uses: not a lookup's index, and not a tensor of which only the shape counts."""
    if node in depends.lookups:
        return []
    if kind_of(node) == "filler":
        return [each for each in node.all_input_nodes if each is not node.args[0]]
    return node.all_input_nodes


def fixing(result: fx.Node, depends: Dependence) -> set[fx.Node]:
    """The integer nodes that the result depends on in other ways than by looking up rows of a table.

    From such a node a path leads to the result that passes through no lookup, and through no operation that uses only
    the shape of its argument. The inputs among these nodes are `Program.fixed`.
    """
    return reached(result, lambda node: values_read(node, depends)) & depends.integers


def reached(start: fx.Node, sources: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """All nodes that can be reached from a node by `sources`, with the node itself."""
    nodes, front = {start}, [start]
    while front:
        for each in sources(front.pop()):
            if each not in nodes:
                nodes.add(each)
                front.append(each)
    return nodes


def repeats(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Node -> the first one that applies the same operation to the same arguments, for a graph without mutation."""
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}

    def key(each: Any) -> Any:
        if isinstance(each, list | tuple):
            return tuple(map(key, each))
        return same[each] if isinstance(each, fx.Node) else (type(each), each)

    for node in nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            call = (node.target, key(node.args), key(sorted(node.kwargs.items())))
            same[node] = first.setdefault(call, node)
        else:
            same[node] = node
    return same
