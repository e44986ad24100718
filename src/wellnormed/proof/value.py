"""The results of rows: values, which are sums of rearranged and scaled results of primitives.

The result of a primitive is a `Base`: its entries fall into groups, and every group has bounds. A move (a view, a
transposition, a concatenation, a product with constants, a sum) derives no bound: every entry of its `Value` is a sum
of entries of bases, each times a constant. `gather` bounds any groups of a value, whichever groups the bases had. So
the heads of fused projections, grouped queries, patches, class tokens, rotary positions and residuals need no rules of
their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from wellnormed.proof.decimals import ZERO, rounding_up
from wellnormed.proof.reading import require
from wellnormed.proof.rows import Bounds

UNIT = 2.0**-53
"""The largest relative error of one rounding to float64."""
TINY = 2.0**-900
"""This exceeds the sum of all underflows where the largest entry is scaled into [1/2, 1)."""
SMALL, LARGE = 2.0**-1000, 2.0**1000
"""Values are multiplied by constants between these only, so that sums of their squares neither over- nor underflow."""
_MOVED, _BLOCK = 2**26, 2**18
"""The most entries that one row moves, all terms together, each with a position of 32 bits; and how many at once."""


def gamma(k: int) -> float:
    """The largest relative error after k roundings."""
    return k * UNIT / (1 - k * UNIT) * (1 + 1e-12)


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

    def groups(self, positions: np.ndarray) -> np.ndarray:
        """For entries at flat positions, the numbers of their groups; -1 for a position -1."""
        return self._numbers([1 if axis in self.axes else n for axis, n in enumerate(self.shape)], positions)

    def labels(self, positions: np.ndarray) -> np.ndarray:
        """For entries at flat positions, where the bounds of their groups stand in `table`; -1 for a position -1."""
        return self._numbers(np.broadcast_shapes(*(each.shape for each in self.bounds)), positions)

    @cached_property
    def reach(self) -> Decimal:
        """The largest absolute value of an executed entry."""
        with rounding_up():
            return self.bounds.largest.max() + self.bounds.error.max()

    @cached_property
    def table(self) -> list[np.ndarray]:
        """The bounds, flat and of equal length."""
        shape = np.broadcast_shapes(*(each.shape for each in self.bounds))
        return [np.broadcast_to(each, shape).reshape(-1) for each in self.bounds]

    def _numbers(self, shape: Sequence[int], positions: np.ndarray) -> np.ndarray:
        numbers = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), self.shape)[None]
        return np.where(positions < 0, -1, numbers[np.unravel_index(np.maximum(positions, 0), numbers.shape)])


@lru_cache(2**6)
def _order(shape: tuple[int, ...]) -> np.ndarray:
    """The same array for all bases of a shape."""
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


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
    error: Decimal = ZERO
    """The executed value has, in the place of each factor, a number that differs from it by at most this."""
    cancelled: bool = False
    """Whether factors that are 0 have that error, too, as where a model subtracts what it has added before."""
    moved: np.ndarray | None = None
    """Of a constant, its executed entries less these, rounded away from zero; None if both are the same."""

    @cached_property
    def most(self) -> Decimal:
        """The largest absolute value of a factor."""
        with rounding_up():
            most = Decimal(1 if self.factor is None else max(float(self.factor.max()), -float(self.factor.min())))
            return most * (1 + Decimal(self.roundings * UNIT * 1.01))

    @property
    def span(self) -> tuple[int, ...]:
        """The shape of the factor."""
        return () if self.factor is None else self.factor.shape


@dataclass(frozen=True, eq=False)
class Value:
    """The result of a row: the sum of its terms."""

    name: str
    shape: tuple[int, ...]
    terms: tuple[Term, ...]
    floor: Decimal = ZERO
    """What underflows add at most to the error of an entry, beside the errors of bases and of factors."""
    fault: str = ""
    """The name of the first row whose rounding errors have no bound; empty if all have one."""
    gathered: dict[tuple[int, ...], Bounds] = field(default_factory=dict)
    """Axes of groups -> their bounds, as far as `gather` has derived them."""


def unmoved(value: Value) -> Base | None:
    """The base that a value is, with neither a factor nor an entry moved; None for any other value."""
    for term in value.terms if len(value.terms) == 1 else ():
        if isinstance(term.base, Base) and term.index is term.base.order and term.factor is None:
            return term.base
    return None


def taken(value: Value, positions: np.ndarray) -> Value:
    """Take the entries at flat positions, and zero where a position is -1; the result has the shape of `positions`."""
    terms = []
    for term in value.terms:
        index, factor = _entries(term.index, positions), term.factor
        index[positions < 0] = -1
        if factor is not None and factor.ndim:
            factor = _entries(np.broadcast_to(factor, value.shape), positions)
        terms.append(replace(term, index=index, factor=factor))
    return replace(value, shape=positions.shape, terms=tuple(terms), gathered={})


def _entries(array: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The entries of an array at flat positions, which NumPy would all widen to 64 bits at once."""
    flat, places = array.reshape(-1), positions.reshape(-1)
    found = np.empty(places.shape, array.dtype)
    for start in range(0, len(places), _BLOCK):
        found[start : start + _BLOCK] = flat[places[start : start + _BLOCK]]
    return found.reshape(positions.shape)


def spread(value: Value, shape: tuple[int, ...], *others: tuple[int, ...]) -> Value:
    """Broadcast to a shape, which must be the one to which the value and the other shapes broadcast."""
    broadcast = np.broadcast_shapes(value.shape, *others)
    require(broadcast == shape, f"its shape must be {broadcast}")
    if shape == value.shape:
        return value
    require_few(value, math.prod(shape))
    return replace(value, shape=shape, gathered={}, terms=tuple(_spread(each, shape) for each in value.terms))


def _spread(term: Term, shape: tuple[int, ...]) -> Term:
    return replace(term, index=np.broadcast_to(term.index, shape))


def require_few(value: Value, entries: int) -> None:
    """Refuse to make so many entries of every term, before memory is asked for."""
    require(len(value.terms) * entries <= _MOVED, f"it moves {entries} entries of {len(value.terms)} terms, too many")
