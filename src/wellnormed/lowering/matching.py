"""The language of patterns: formulas of several operations, and the search for them in a captured graph.

Patterns match executed operations, up to copies and conversions that lose no digits. So the same formula has the same
bound in any model, and a module's class is never trusted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from wellnormed.lowering.rounding import rounds
from wellnormed.program.operation import family_of, kind_of

Found = dict[str, Any]
"""Name in a pattern -> the node, number or list that stands there."""


@dataclass(frozen=True)
class Anything:
    """A placeholder for any node or list; all placeholders of one name must match the same one."""

    name: str


@dataclass(frozen=True)
class Number:
    """A placeholder for a number that is a constant of the graph."""

    name: str


@dataclass(frozen=True)
class Op:
    """An operation of one of these families with these arguments; further arguments are bound to the name `rest`.

    With `keywords`, its keyword arguments must have exactly these names; without, they count as further arguments.
    """

    families: tuple[str, ...]
    arguments: tuple[Any, ...]
    either_order: bool = False
    rest: str = ""
    keywords: tuple[tuple[str, Any], ...] = ()


def op(families: str, *arguments: Any, either_order: bool = False, rest: str = "", **keywords: Any) -> Op:
    """One of the operations of some families, whose names are separated by spaces; see `Operation.family`."""
    given = tuple(sorted(keywords.items()))
    return Op(tuple(families.split()), arguments, either_order, rest, given)


def mul(a: Any, b: Any) -> Op:
    """`a b`, in either order."""
    return op("mul", a, b, either_order=True)


def add(a: Any, b: Any) -> Op:
    """`a + b`, in either order."""
    return op("add", a, b, either_order=True)


def square(x: Any) -> tuple[Op, ...]:
    """`x^2`."""
    return op("square.default", x), op("pow.Tensor_Scalar", x, 2), mul(x, x)


X = Anything("x")
SQUARE = square(X)


def by_family(formulas: Iterable[tuple[Any, Any]]) -> dict[str, list[tuple[Op, Any]]]:
    """Family of the outermost operation -> the forms of patterns that have it, each with the bound of its pattern."""
    table: dict[str, list[tuple[Op, Any]]] = {}
    for pattern, bound in formulas:
        for form in _forms(pattern):
            for family in form.families:
                table.setdefault(family, []).append((form, bound))
    return table


def _forms(pattern: Any) -> list[Op]:
    return [pattern] if isinstance(pattern, Op) else [form for each in pattern for form in _forms(each)]


def match(pattern: Any, node: Any, found: Found, same: Mapping[fx.Node, fx.Node]) -> Found | None:
    """The bindings of a pattern at a node, added to those found before; None if the pattern does not match.

    `same` is the result of `repeats`: two nodes that compute the same count as one.
    """
    if isinstance(pattern, tuple):
        return next((each for option in pattern if (each := match(option, node, found, same)) is not None), None)
    node = peel(node)
    if isinstance(pattern, Number):
        is_number = isinstance(node, float | int) and not isinstance(node, bool)
        return {**found, pattern.name: float(node)} if is_number else None
    if isinstance(pattern, Anything):
        node = same[node] if isinstance(node, fx.Node) else node
        known = found.get(pattern.name, node)
        equal = known is node or (not isinstance(node, fx.Node) and known == node)
        return {**found, pattern.name: node} if equal else None
    if not isinstance(pattern, Op):
        return found if not isinstance(node, fx.Node) and node == pattern else None
    if not isinstance(node, fx.Node) or family_of(node) not in pattern.families or rounds(node):
        return None
    arguments = list(node.args) + [node.kwargs[key] for key in sorted(node.kwargs)]
    parts = (*pattern.arguments, *(part for _, part in pattern.keywords))
    if pattern.keywords and sorted(node.kwargs) != [key for key, _ in pattern.keywords]:
        return None
    count = len(parts)
    if len(arguments) < count or (len(arguments) > count and not pattern.rest):
        return None
    rest = arguments[count:]
    if found.get(pattern.rest, rest) != rest:  # an operation that occurs twice in a pattern has the same settings
        return None
    orders = [arguments[:count]] + ([arguments[count - 1 :: -1]] if pattern.either_order else [])
    for order in orders:
        result: Found | None = {**found, pattern.rest: rest} if pattern.rest else found
        for part, argument in zip(parts, order, strict=True):
            result = None if result is None else match(part, argument, result, same)
        if result is not None:
            return result
    return None


def peel(node: Any) -> Any:
    """The node behind all copies and conversions to a floating dtype that represents every number of the previous."""
    while isinstance(node, fx.Node) and kind_of(node) == "copy" and not rounds(node):
        source = node.args[0]
        if not (isinstance(source, fx.Node) and all(_is_float(each) for each in (node, source))):
            return node
        node = source
    return node


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)
