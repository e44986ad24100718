"""Values that depend on the input, and the moves that make one of others.

A primitive leaves a `Base`: its entries fall into groups, and every group is bounded. A move (a view, a transposition,
a concatenation, a product with constants, a sum) leaves no new bound: every entry of a `Value` is a sum of entries of
bases, each times a constant. `gather` bounds groups of a value, whichever groups the bases had. So the heads of fused
projections, grouped queries, patches, class tokens, rotary positions and residuals need no rules of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from wellnormed.proof.reading import integer, integers, number, of_type, require
from wellnormed.proof.rows import Bounds

UNIT = 2.0**-53
"""Half a unit in the last place of float64, relatively."""
SMALL, LARGE = 2.0**-1000, 2.0**1000
"""Between these lie the constants that values are multiplied by: their squares and sums of those stay floats."""
_ABSENT = -(2**56)
"""In a table: below all sums of what is present, and 64 of them are still integers of 64 bits."""


@dataclass(frozen=True, eq=False)
class Base:
    """The result of a row that computes, with bounds of its groups."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    """Axes of a group, rising."""
    bounds: Bounds
    inference: Any
    """The `Inference` that derived it; None for what is rounded: no rule may rest on where its entries come from."""
    divisible: bool = False
    """Whether it is a linear map's result, to which rows may lend bounds of equal parts of its outputs."""
    cuts: "dict[int, Base]" = field(default_factory=dict)
    """The same entries in smaller groups, by the number of equal parts of the last axis."""
    parts: "dict[int, Base]" = field(default_factory=dict)
    """Those cuts that a group was taken of. What is rounded shares `cuts` with what it was, and has `parts` of its own:
    terms of the two never count as entries of one base."""

    @cached_property
    def order(self) -> np.ndarray:
        """The flat positions of all entries: the index of a term that moves nothing."""
        return np.arange(math.prod(self.shape)).reshape(self.shape)

    @cached_property
    def groups(self) -> np.ndarray:
        """The number of every flat entry's group."""
        return self._spread([1 if axis in self.axes else n for axis, n in enumerate(self.shape)])

    @cached_property
    def labels(self) -> np.ndarray:
        """Where every flat entry's bounds stand in `table`."""
        return self._spread(np.broadcast_shapes(*(each.shape for each in self.bounds)))

    @cached_property
    def table(self) -> list[np.ndarray]:
        """The flat bounds."""
        shape = np.broadcast_shapes(*(each.shape for each in self.bounds))
        return [np.broadcast_to(each, shape).reshape(-1) for each in self.bounds]

    def _spread(self, shape: Sequence[int]) -> np.ndarray:
        return np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), self.shape).reshape(-1)


@dataclass(frozen=True, eq=False)
class Term:
    """`factor * base[index]`; an index of -1 stands for nothing, and a base may be the flat entries of a constant."""

    base: Base | np.ndarray
    index: np.ndarray
    factor: np.ndarray | None = None
    roundings: int = 0


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor: the sum of its terms. `gathered` keeps the bounds that were asked for."""

    name: str
    shape: tuple[int, ...]
    terms: tuple[Term, ...]
    gathered: dict[tuple[int, ...], Bounds] = field(default_factory=dict)


def move(value: Value, name: str, positions: np.ndarray) -> Value:
    """The value whose entries are those at flat positions; nothing where a position is -1."""
    terms = []
    for term in value.terms:
        index = np.where(positions < 0, -1, term.index.reshape(-1)[positions])
        factor = term.factor
        if factor is not None and factor.ndim:
            factor = np.broadcast_to(factor, value.shape).reshape(-1)[positions]
        terms.append(Term(term.base, index, factor, term.roundings))
    return Value(name, positions.shape, tuple(terms))


def pick(value: Value, name: str, shape: tuple[int, ...], c: dict[str, Any], tensor: Callable) -> Value:
    """The move of that name, by a stored tensor of positions or by tables."""
    count = math.prod(value.shape)
    if "positions" in c:
        positions = tensor(c["positions"])
        require(positions.dtype == np.int64, "its positions are no 64-bit integers")
        require(positions.shape == shape, f"its positions have shape {positions.shape} instead of {shape}")
    else:
        positions = positions_of(shape, of_type(c.get("tables"), list, "tables"), c.get("offset"), count)
    require(bool(((positions >= -1) & (positions < count)).all()), f"it takes entries beyond the {count} of its input")
    return move(value, name, positions)


def positions_of(shape: tuple[int, ...], tables: Sequence[Any], offset: Any, count: int) -> np.ndarray:
    """The sums of an offset and of one entry of every axis's table, or -1 where a table has a gap."""
    require(len(tables) == len(shape), f"it has {len(tables)} tables for {len(shape)} axes")
    steps = [_steps(table, size, axis) for axis, (table, size) in enumerate(zip(tables, shape, strict=True))]
    present, offset = [each[each != _ABSENT] for each in steps], integer(offset, "offset")
    if all(map(len, present)):  # before memory is asked for
        low, high = (offset + sum(int(end(each)) for each in present) for end in (np.min, np.max))
        require(0 <= low <= high < count, f"its tables lead beyond the {count} entries of its input")
    return np.maximum(offset + sum(np.ix_(*steps), np.int64(0)), -1)


def _steps(table: Any, size: int, axis: int) -> np.ndarray:
    """What every index along an axis adds to a position."""
    if isinstance(table, list):
        steps = np.array(integers(table, "a table", -1), np.int64)
        require(len(steps) == size, f"its table of axis {axis} has {len(steps)} entries instead of {size}")
        return np.where(steps < 0, _ABSENT, steps)
    step = integer(table, "a table's step", -(2**40))
    require(abs(step) * size < 2**44, "its table's step is too large")
    return np.arange(size) * step


def rounded(value: Value, name: str) -> Value:
    """The value after a conversion that rounds: of bases of its own, which know nothing but their bounds."""
    whole = {id(term.base): term.base for term in value.terms if isinstance(term.base, Base)}
    own = {key: replace(base, inference=None, parts={}) for key, base in whole.items()}
    terms = []
    for term in value.terms:
        base = own.get(id(term.base), term.base)
        in_order = isinstance(term.base, Base) and isinstance(base, Base) and term.index is term.base.order
        terms.append(replace(term, base=base, index=base.order if in_order else term.index))
    return Value(name, value.shape, tuple(terms))


def spread(value: Value, shape: tuple[int, ...], *others: tuple[int, ...]) -> Value:
    """Broadcast to a shape, which must be that of the value with others."""
    broadcast = np.broadcast_shapes(value.shape, *others)
    require(broadcast == shape, f"its shape must be {broadcast}")
    positions = np.arange(math.prod(value.shape)).reshape(value.shape)
    return value if shape == value.shape else move(value, value.name, np.broadcast_to(positions, shape))


def times(value: Value, name: str, shape: tuple[int, ...], c: dict[str, Any], tensor: Callable) -> Value:
    """The product with a number or a stored tensor, or the quotient."""
    require(("factor" in c) != ("divisor" in c), "it must have either a factor or a divisor")
    given, divide = c.get("factor", c.get("divisor")), "divisor" in c
    new = tensor(given).astype(float) if isinstance(given, str) else np.array(number(given, "its factor"))
    require(bool((new != 0).all()) or not divide, "it divides by zero")
    exact = new
    with np.errstate(all="ignore"):
        new = 1 / new if divide else new
    inexact = divide and bool((np.frexp(exact)[0] != np.copysign(0.5, exact)).any())
    value, terms = spread(value, shape, new.shape), []
    for term in value.terms:
        with np.errstate(all="ignore"):
            factor = new if term.factor is None else term.factor * new
        zero = (new == 0) | (False if term.factor is None else term.factor == 0)
        within = (abs(factor) >= SMALL) & (abs(factor) <= LARGE)
        require(bool((zero | within).all()), "the product of its factors leaves [2^-1000, 2^1000]")
        roundings = term.roundings + inexact + (term.factor is not None)
        terms.append(Term(term.base, term.index, factor, roundings))
    return Value(name, value.shape, tuple(terms))


def add(values: Sequence[Value], name: str, shape: tuple[int, ...]) -> Value:
    """The sum of values of shapes that broadcast."""
    shapes = [value.shape for value in values]
    return Value(name, shape, tuple(term for value in values for term in spread(value, shape, *shapes).terms))
