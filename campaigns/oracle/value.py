"""A tensor that depends on the input, as the oracle knows it: where entries come from, and how large they are.

An operation that computes leaves a `Base`: its entries fall into groups, and the Euclidean norm of every group is
bounded. An operation that only moves entries (a view, a transposition, a concatenation) or multiplies them by constants
leaves no new bound: every entry of a `Value` is a sum of entries of bases, each times a constant. The next operation
that computes asks for groups of its own, and `gather` bounds those.

So the heads of fused projections, grouped queries, patches, class tokens, rotary positions, convex residuals and joins
by squares need no rules. For a group y made of groups x_g of bases, `y = sum_g A_g x_g`, and

    |y|^2 <= sum_g |A_g|^2 |x_g|^2     where no entry of y mixes two groups,
    |y|   <= sum_g |A_g| |x_g|         where entries do.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from campaigns.oracle.combining import UNIT, Part, alike, one_group, slack
from campaigns.oracle.upper import ZERO, Upper, Uppers, uppers

LARGEST = 2.0**1000
"""The largest constant: products and sums of squares of so scaled ones stay floats."""


class Bounds(NamedTuple):
    """Bounds of every group, in arrays whose axes inside a group have size 1, as have axes along which all are equal.

    They hold for every input of the domain.
    """

    radius: Uppers
    """Largest Euclidean norm."""
    gain: Uppers
    """Largest Euclidean norm of a change, over the size of the input's change in the certificate's norm."""
    largest: Uppers
    """Largest absolute value of an entry."""


@dataclass(frozen=True, eq=False)
class Linear:
    """Says that a base is `W x + b` along its last axis, with a stored W `(outputs, inputs)`."""

    source: "Value"
    weight: Any
    """W, a `Stored`."""
    transposed: bool
    """Whether it is stored as `(inputs, outputs)`."""
    bias: Any
    """b, a `Stored`, or None."""


@dataclass(frozen=True, eq=False)
class Base:
    """The result of an operation that computes."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    """Axes of a group, rising."""
    bounds: Bounds
    linear: Linear | None = None
    function: str | None = None
    """The function of every entry whose results these are."""
    cut: "Callable[[int], Base] | None" = None
    """Number of equal parts -> the base whose groups are those parts of the last axis, each with a bound of its own."""

    def groups(self) -> np.ndarray:
        """Number of every entry's group, over the flat entries."""
        outer = [1 if axis in self.axes else size for axis, size in enumerate(self.shape)]
        numbers = np.arange(math.prod(outer)).reshape(outer)
        return np.broadcast_to(numbers, self.shape).reshape(-1)

    def labels(self) -> np.ndarray:
        """A number for every flat entry; entries with the same number have the same bounds."""
        shape = np.broadcast_shapes(*(each.shape for each in self.bounds))
        numbers = np.arange(math.prod(shape)).reshape(shape)
        return np.broadcast_to(numbers, self.shape).reshape(-1)


@dataclass(frozen=True, eq=False)
class Term:
    """`factor * base[index]`, for every entry of a value."""

    base: Base | Tensor
    """A base, or a constant tensor in float64."""
    index: Tensor | None = None
    """Flat positions in the base, of the value's shape, -1 where there is nothing; None for every entry in order."""
    factor: Tensor | None = None
    """Float64, of a shape that broadcasts to the value's; None for 1."""
    roundings: int = 0
    """Rounding errors that a factor may carry, in units of the last place."""

    def positions(self, shape: tuple[int, ...]) -> Tensor:
        """The index in full."""
        return torch.arange(math.prod(shape)).reshape(shape) if self.index is None else self.index

    def times(self, factor: Tensor, roundings: int = 1) -> "Term":
        """The term, times a constant that broadcasts to its value's shape."""
        product = factor if self.factor is None else self.factor * factor
        zero = (factor == 0) if self.factor is None else (factor == 0) | (self.factor == 0)
        if not bool((zero | ((product.abs() >= 1 / LARGEST) & (product.abs() <= LARGEST))).all()):
            raise ValueError("the product of the constants it multiplies by is too small or large for a float")
        return replace(self, factor=product, roundings=self.roundings + roundings)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor that depends on the input: a sum of terms."""

    name: str
    shape: tuple[int, ...]
    terms: tuple[Term, ...]
    _gathered: dict[tuple[int, ...], Bounds] = field(default_factory=dict, repr=False)

    def move(self, name: str, apply: Callable[[Tensor], Tensor]) -> "Value":
        """What an operation makes of it that only moves entries.

        Args:
            name: Of the result.
            apply: The operation, as a function of tensors of this shape. It is called with positions of entries
                and with factors of terms.
        """
        terms = []
        for term in self.terms:
            index = apply(term.positions(self.shape))
            factor = term.factor
            if factor is not None and factor.ndim:
                factor = apply(factor.broadcast_to(self.shape).contiguous())
            terms.append(replace(term, index=index, factor=factor))
        return Value(name, tuple(terms[0].index.shape), tuple(terms))  # type: ignore[union-attr]

    def times(self, name: str, factor: Tensor, roundings: int = 1) -> "Value":
        """The product with a constant of a shape that broadcasts, which carries so many rounding errors."""
        shape = tuple(np.broadcast_shapes(self.shape, tuple(factor.shape)))
        terms = self.spread(name, shape).terms
        return Value(name, shape, tuple(term.times(factor.double(), roundings) for term in terms))

    def apart(self) -> "Value":
        """The same entries, of bases of their own, of which nothing is known but their bounds."""
        whole = {id(term.base): term.base for term in self.terms if isinstance(term.base, Base)}
        own = {key: replace(base, linear=None, function=None) for key, base in whole.items()}
        return replace(self, terms=tuple(replace(t, base=own.get(id(t.base), t.base)) for t in self.terms))

    def spread(self, name: str, shape: tuple[int, ...]) -> "Value":
        """Broadcast to a shape."""
        return self if shape == self.shape else self.move(name, lambda x: x.broadcast_to(shape))

    def gather(self, axes: Iterable[int]) -> Bounds:
        """Bounds of the groups along the given axes: of any groups, whichever the bases had.

        Args:
            axes: Axes of a group, in any order; the entries that differ only along them are one group.

        Returns:
            Arrays with as many axes as the value, of size 1 inside a group.
        """
        key = tuple(sorted(axis % len(self.shape) for axis in axes))
        if key not in self._gathered:
            self._gathered[key] = _gather(self, key)
        return self._gathered[key]


def add(name: str, values: Sequence[Value]) -> Value:
    """The sum of values of shapes that broadcast."""
    shape = tuple(np.broadcast_shapes(*(value.shape for value in values)))
    return Value(name, shape, tuple(term for value in values for term in value.spread(name, shape).terms))


def constant(name: str, tensor: Tensor) -> Value:
    """A stored tensor as a value."""
    content = tensor.detach().double()
    return Value(name, tuple(content.shape), (Term(content),))


def collapse(bounds: Bounds) -> Bounds:
    """The same bounds, with size 1 for every axis along which they do not differ."""
    return Bounds(*map(_collapse, bounds))


def _collapse(array: Uppers) -> Uppers:
    for axis, size in enumerate(array.shape):
        first = array.take([0], axis)
        if size > 1 and bool((array == first).all()):
            array = first
    return array


def _gather(value: Value, axes: tuple[int, ...]) -> Bounds:
    moving = [term for term in value.terms if isinstance(term.base, Base)]
    constants = [term for term in value.terms if isinstance(term.base, Tensor)]
    if moving and all(_aligned(term, value.shape, axes) for term in moving):
        bounds = _aligned_sum(moving)
    elif moving:
        bounds = _combined(moving, value.shape, axes)
    else:
        nothing = uppers(np.zeros([1] * len(value.shape), dtype=int))
        bounds = Bounds(nothing, nothing, nothing)
    for term in constants:
        radius, largest = _constant_norms(term, value.shape, axes, bounds.radius.shape)
        bounds = Bounds(bounds.radius + radius, bounds.gain, bounds.largest + largest)
    return collapse(bounds)


def _aligned(term: Term, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether the groups asked for are those of the base, each times one number."""
    base, factor = term.base, term.factor
    assert isinstance(base, Base)
    of_one_number = factor is None or factor.numel() == 1
    inner = tuple(axis for axis in axes if shape[axis] > 1)
    return term.index is None and of_one_number and tuple(axis for axis in base.axes if shape[axis] > 1) == inner


def _aligned_sum(terms: list[Term]) -> Bounds:
    total: Bounds | None = None
    for term in terms:
        assert isinstance(term.base, Base)
        size = ZERO + Upper(1 if term.factor is None else abs(float(term.factor)) * slack(term.roundings))
        part = Bounds(*(size * each for each in term.base.bounds))
        total = part if total is None else Bounds(*(a + b for a, b in zip(total, part, strict=True)))
    assert total is not None
    return total


def _constant_norms(
    term: Term, shape: tuple[int, ...], axes: tuple[int, ...], kept: tuple[int, ...]
) -> tuple[Uppers, Uppers]:
    """Euclidean norm and largest entry of every group of a constant, the largest over axes that are not kept."""
    assert isinstance(term.base, Tensor)
    index = term.positions(shape).numpy()
    entries = np.where(index < 0, 0.0, np.abs(term.base.reshape(-1).numpy()[index]))
    if term.factor is not None:
        entries = entries * np.abs(term.factor.numpy())
    largest = entries.max(axis=axes, keepdims=True)
    scale = np.where(largest > 0, largest, 1.0)  # against underflow and overflow
    count = math.prod(shape[axis] for axis in axes)
    norms = np.sqrt(np.square(entries / scale).sum(axis=axes, keepdims=True)) * scale
    margin = 1 + 2 * (count + term.roundings + 8) * UNIT
    over = tuple(axis for axis, (a, b) in enumerate(zip(norms.shape, kept, strict=True)) if a > b)
    tiny = 2.0**-1000  # what underflow may have taken
    grown = [np.where(x > 0, x * margin + tiny, 0.0).max(axis=over, keepdims=True) for x in (norms, largest)]
    return uppers(grown[0]), uppers(grown[1])


def _combined(terms: list[Term], shape: tuple[int, ...], axes: tuple[int, ...]) -> Bounds:
    whole = list({id(term.base): term.base for term in terms}.values())
    bases = [_cut(base, [term for term in terms if term.base is base], shape, axes) for base in whole]
    number = [next(i for i, base in enumerate(whole) if base is term.base) for term in terms]
    parts: list[list[np.ndarray]] = []
    for term, place in zip(terms, number, strict=True):
        base, index = bases[place], term.positions(shape).numpy()
        present = index >= 0
        safe = np.where(present, index, 0)
        factor = np.ones(1) if term.factor is None else term.factor.numpy()
        factor = np.where(present, np.broadcast_to(factor, shape), 0.0)
        parts.append([np.where(factor == 0, -1, index), base.groups()[safe], base.labels()[safe], factor])
    for axis, size in enumerate(shape):
        if axis not in axes and size > 1 and alike(parts, number, axis):
            parts = [[array.take([0], axis) for array in part] for part in parts]
    left = [1 if axis in axes else size for axis, size in enumerate(parts[0][0].shape)]
    rows = math.prod(left)
    inner = [axis for axis in range(len(shape)) if axis in axes]

    def flat(array: np.ndarray) -> np.ndarray:
        return np.moveaxis(array, inner, range(-len(inner), 0)).reshape(rows, -1) if inner else array.reshape(rows, 1)

    flattened = [
        Part(n, *(flat(array) for array in part), roundings=term.roundings)
        for n, part, term in zip(number, parts, terms, strict=True)
    ]
    tables = [
        [dict(enumerate(np.broadcast_to(each, _label_shape(base)).reshape(-1))) for each in base.bounds]
        for base in bases
    ]
    results = [one_group([part.of_group(row) for part in flattened], tables) for row in range(rows)]
    return Bounds(*(_as_array([result[i] for result in results], left) for i in range(3)))


def _label_shape(base: Base) -> tuple[int, ...]:
    return np.broadcast_shapes(*(each.shape for each in base.bounds))


def _as_array(values: list[Upper], shape: list[int]) -> Uppers:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(shape)


def _cut(base: Any, terms: list[Term], shape: tuple[int, ...], axes: tuple[int, ...]) -> Base:
    """The base, cut into parts of its outputs if every group asked for lies in one such part."""
    if base.cut is None or all(term.index is None for term in terms):
        return base
    outputs = base.shape[-1]
    lows, highs = [], []
    for term in terms:
        index = term.positions(shape).numpy()
        feature, missing = index % outputs, index < 0
        lows.append(np.where(missing, outputs, feature).min(axis=axes, keepdims=True))
        highs.append(np.where(missing, -1, feature).max(axis=axes, keepdims=True))
    low, high = np.min(lows, axis=0), np.max(highs, axis=0)
    some = high >= 0
    width = int((high - low)[some].max(initial=0)) + 1
    if width >= outputs or outputs % width or (low[some] % width).any():
        return base
    return base.cut(outputs // width)
