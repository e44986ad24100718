"""The results of rows: values, which are sums of rearranged and scaled results of primitives.

The result of a primitive is a `Base`: its entries fall into groups, and every group has bounds. A move (a view, a
transposition, a concatenation, a product with constants, a sum) derives no bound: every entry of its `Value` is a sum
of entries of bases, each times a constant. `gather` bounds any groups of a value, whichever groups the bases had. So
the heads of fused projections, grouped queries, patches, class tokens, rotary positions and residuals need no rules of
their own.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

import numpy as np

from wellnormed.proof.reading import integer, integers, number, of_type, require
from wellnormed.proof.rows import Bounds

UNIT = 2.0**-53
"""The largest relative error of one rounding to float64."""
SMALL, LARGE = 2.0**-1000, 2.0**1000
"""Values are multiplied by constants between these only, so that sums of their squares neither over- nor underflow."""
_TERMS, _MOVED = 2**12, 2**25
"""The most terms of a value, and the most entries that one row moves, all terms together: 1 GB with their positions."""
_ABSENT = -(2**56)
"""A gap in a table: so negative that a sum with it is negative, while a sum of 64 of them still has 64 bits."""


@dataclass(frozen=True, eq=False)
class Base:
    """The result of a primitive, with the bounds of its groups."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    """The axes along which a group extends, in rising order."""
    bounds: Bounds
    inference: Any
    """The `Inference` that derived it; None after a rounding, so that no rule rests on where the entries come from."""
    divisible: bool = False
    """Whether it is the result of a linear map, whose outputs further rows may bound in equal parts."""
    cuts: "dict[int, Base]" = field(default_factory=dict)
    """Number of equal parts of the last axis -> the same entries with these parts as their groups."""
    parts: "dict[int, Base]" = field(default_factory=dict)
    """The copies of `cuts` that `gather` has used. A rounded base shares `cuts` with the exact one but not `parts`, so
    that terms of the two never count as entries of one base."""

    @cached_property
    def order(self) -> np.ndarray:
        """The flat positions of all entries, in the base's shape: the index of a term that moves nothing."""
        return _order(self.shape)

    @cached_property
    def groups(self) -> np.ndarray:
        """For every entry, the number of its group; of shape `(entries,)`."""
        return self._spread([1 if axis in self.axes else n for axis, n in enumerate(self.shape)])

    @cached_property
    def labels(self) -> np.ndarray:
        """For every entry, where the bounds of its group stand in `table`; of shape `(entries,)`."""
        return self._spread(np.broadcast_shapes(*(each.shape for each in self.bounds)))

    @cached_property
    def table(self) -> list[np.ndarray]:
        """The three bounds, flat and of equal length."""
        shape = np.broadcast_shapes(*(each.shape for each in self.bounds))
        return [np.broadcast_to(each, shape).reshape(-1) for each in self.bounds]

    def _spread(self, shape: Sequence[int]) -> np.ndarray:
        return np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), self.shape).reshape(-1)


@lru_cache(2**10)
def _order(shape: tuple[int, ...]) -> np.ndarray:
    """The same array for all bases of a shape."""
    return np.arange(math.prod(shape)).reshape(shape)


@dataclass(frozen=True, eq=False)
class Term:
    """The tensor `factor * base[index]`, one addend of a value."""

    base: Base | np.ndarray
    """The result of a primitive, or the flat entries of a constant."""
    index: np.ndarray
    """For every entry of the value, the flat index into `base`, or -1 for an entry that is zero; of the value's shape.
    A term that moves nothing has the very array `base.order`."""
    factor: np.ndarray | None = None
    """The constants by which the entries are multiplied, of a shape that broadcasts to the value's; None for 1."""
    roundings: int = 0
    """How often each factor was rounded."""


@dataclass(frozen=True, eq=False)
class Value:
    """The result of a row: the sum of its terms."""

    name: str
    shape: tuple[int, ...]
    terms: tuple[Term, ...]
    gathered: dict[tuple[int, ...], Bounds] = field(default_factory=dict)
    """Axes of groups -> their bounds, as far as `gather` has derived them."""


def move(value: Value, name: str, positions: np.ndarray) -> Value:
    """Take the entries at flat positions, and zero where a position is -1; the result has the shape of `positions`."""
    terms = []
    _require_few(value, positions.size)
    for term in value.terms:
        index = np.where(positions < 0, -1, term.index.reshape(-1)[positions])
        factor = term.factor
        if factor is not None and factor.ndim:
            factor = np.broadcast_to(factor, value.shape).reshape(-1)[positions]
        terms.append(Term(term.base, index, factor, term.roundings))
    return Value(name, positions.shape, tuple(terms))


def _require_few(value: Value, entries: int) -> None:
    """Refuse to make so many entries of every term, before memory is asked for."""
    require(len(value.terms) * entries <= _MOVED, f"it moves {entries} entries of {len(value.terms)} terms, too many")


def pick(value: Value, name: str, shape: tuple[int, ...], c: dict[str, Any], tensor: Callable) -> Value:
    """Apply a row `pick`, which has a stored tensor of positions or a table for every axis."""
    _require_few(value, math.prod(shape))
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
    """Add up an offset and one entry of each axis's table: flat positions of shape `shape`, -1 where a table has a gap.

    Args:
        shape: Shape of the result.
        tables: For each axis, its entries as a list with -1 for a gap, or the step between them as an integer.
        offset: The integer that is added to each sum.
        count: The number of entries that the positions point into.
    """
    require(len(tables) == len(shape), f"it has {len(tables)} tables for {len(shape)} axes")
    complete = [_table(table, size, axis) for axis, (table, size) in enumerate(zip(tables, shape, strict=True))]
    present, offset = [each[each != _ABSENT] for each in complete], integer(offset, "offset")
    if all(map(len, present)):  # before memory is asked for
        low, high = (offset + sum(int(end(each)) for each in present) for end in (np.min, np.max))
        require(0 <= low <= high < count, f"its tables lead beyond the {count} entries of its input")
    return np.maximum(offset + sum(np.ix_(*complete), np.int64(0)), -1)


def _table(table: Any, size: int, axis: int) -> np.ndarray:
    """The table of an axis as an array `(size,)`."""
    if isinstance(table, list):
        entries = np.array(integers(table, "a table", -1), np.int64)
        require(len(entries) == size, f"its table of axis {axis} has {len(entries)} entries instead of {size}")
        return np.where(entries < 0, _ABSENT, entries)
    step = integer(table, "a table's step", -(2**40))
    require(abs(step) * size < 2**44, "its table's step is too large")
    return np.arange(size) * step


def rounded(value: Value, name: str) -> Value:
    """Convert a value to fewer digits: the result has copies of its bases that know nothing but their bounds."""
    copies: dict[int, Base] = {}
    terms = []
    for term in value.terms:
        if isinstance(exact := term.base, Base):
            base = copies.setdefault(id(exact), replace(exact, inference=None, parts={}))
            term = replace(term, base=base, index=base.order if term.index is exact.order else term.index)
        terms.append(term)
    return Value(name, value.shape, tuple(terms))


def spread(value: Value, shape: tuple[int, ...], *others: tuple[int, ...]) -> Value:
    """Broadcast to a shape, which must be the one to which the value and the other shapes broadcast."""
    broadcast = np.broadcast_shapes(value.shape, *others)
    require(broadcast == shape, f"its shape must be {broadcast}")
    positions = np.arange(math.prod(value.shape)).reshape(value.shape)
    return value if shape == value.shape else move(value, value.name, np.broadcast_to(positions, shape))


def times(value: Value, name: str, shape: tuple[int, ...], c: dict[str, Any], tensor: Callable) -> Value:
    """Multiply a value by a number or a stored tensor, or divide it by one."""
    require(("factor" in c) != ("divisor" in c), "it must have either a factor or a divisor")
    constant, divide, inexact = c.get("factor", c.get("divisor")), "divisor" in c, False
    new = tensor(constant).astype(float) if isinstance(constant, str) else np.array(number(constant, "its factor"))
    if divide:
        require(bool((new != 0).all()), "it divides by zero")
        inexact = bool((np.frexp(new)[0] != np.copysign(0.5, new)).any())  # 1 / 2^k is exact
        with np.errstate(all="ignore"):
            new = 1 / new
    value, terms = spread(value, shape, new.shape), []
    shapes = [new.shape, *(term.factor.shape for term in value.terms if term.factor is not None)]
    _require_few(value, math.prod(np.broadcast_shapes(*shapes)))
    for term in value.terms:
        with np.errstate(all="ignore"):
            factor = new if term.factor is None else term.factor * new
        zero = (new == 0) | (False if term.factor is None else term.factor == 0)
        moderate = (abs(factor) >= SMALL) & (abs(factor) <= LARGE)
        require(bool((zero | moderate).all()), "the product of its factors leaves [2^-1000, 2^1000]")
        roundings = term.roundings + inexact + (term.factor is not None)
        terms.append(Term(term.base, term.index, factor, roundings))
    return Value(name, value.shape, tuple(terms))


def add(values: Sequence[Value], name: str, shape: tuple[int, ...], *_: Any) -> Value:
    """Add values, whose shapes broadcast to `shape`; terms that take the same entries become one."""
    require(len(values) > 0, "it adds nothing")
    shapes, alike = [value.shape for value in values], dict[Any, list[Term]]()
    terms = [term for value in values for term in spread(value, shape, *shapes).terms]
    count = Counter(id(term.base) for term in terms)
    for place, term in enumerate(terms):
        several = count[id(term.base)] > 1
        same = alike.setdefault((id(term.base), sha256(term.index.tobytes()).digest()) if several else place, [])
        joined = _joined(same[-1], term) if same else None
        same[-1:] = [*same[-1:], term] if joined is None else [joined]
    result = tuple(term for same in alike.values() for term in same)
    require(len(result) <= _TERMS, f"it is a sum of {len(result)} terms, more than {_TERMS}")
    return Value(name, shape, result)


def _joined(a: Term, b: Term) -> Term | None:
    """The sum of two terms that take the same entries; None if its factors cannot be rounded without a large error."""
    first, second = (np.ones(()) if each.factor is None else each.factor for each in (a, b))
    factor, exact = first + second, a.roundings == b.roundings == 0
    moderate = (factor == 0) | ((abs(factor) >= SMALL) & (abs(factor) <= LARGE))
    if not bool((moderate & (exact | (np.sign(first) * np.sign(second) >= 0))).all()):
        return None
    return Term(a.base, a.index, factor, max(a.roundings, b.roundings) + 1)
