"""Bounds of any groups of a value, from the bounds of the groups of its bases.

A group y of a value is `sum_g A_g x_g` over groups x_g of bases. The x_g fall into clusters such that every entry of y
comes from one cluster, and `|y|^2` is at most the sum over clusters of `(sum_g |A_g| |x_g|)^2`. So is what comes from
one base, with clusters of its groups alone, and y is at most the sum of these over bases: where a residual adds tokens
to an image, the tokens share no entry. `|A_g|` is the largest factor if A_g only moves entries; otherwise `|A_g|^2` is
at most the largest sum of absolute values of a row of `A_g^T A_g`, and `|A_g|` is at most the sum of the norms of its
terms.

The error of y obeys the same sums as its gain. In the place of its factors, the executed value has numbers that differ
from these by at most some e: that adds to the error, for each term and group, `e (|x_g| + its error)`, times the root
of the number of copies of one entry.

All floats are summed in a fixed order, so that every machine derives the same decimals.
"""

import math
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from wellnormed.proof.arithmetic import UNBOUNDED
from wellnormed.proof.decimals import ZERO, Decimals, decimals, root, rounding_up
from wellnormed.proof.reading import require, word
from wellnormed.proof.rows import Bounds
from wellnormed.proof.value import LARGE, SMALL, UNIT, Base, Term, Value

_GROUPS = 2**20
"""The most groups of a value, and of bases in a group of it, each of which has decimals of its own."""
_ENTRIES, _KINDS, _PAIRS = 2**26, 2**18, 2**23
"""The most entries of all terms of a value, of terms of all kinds of its groups, and of products in a Gram matrix."""
_BLOCK, _GROUP = 2**20, 2**22
"""About so many entries are sorted at once; so many at most if they are one group's, up to 400 bytes for each."""


def gather(value: Value, axes: tuple[int, ...]) -> Bounds:
    """Bound the groups of a value that extend along the given axes.

    Args:
        value: A tensor of n axes.
        axes: Axes in rising order; entries whose positions differ only along them are one group.

    Returns:
        Bounds whose arrays have n axes, of size 1 along `axes`.

    Raises:
        CheckError: The groups are too many, or the entries of a constant too large.

    Example:
        >>> from wellnormed.proof import Proof, Row
        >>> tokens = Proof().add(Row("x", "input", (), (1, 2, 9), {"dtype": "float32", "radius": 1.0}, axes=(2,)))
        >>> float(gather(tokens, (2,)).radius.max())  # vectors of norm at most 3
        3.0
        >>> round(float(gather(tokens, (1, 2)).radius.max()), 4)  # two of them: the root of 3 x 3 + 3 x 3
        4.2426
    """
    if axes not in value.gathered:
        with rounding_up():
            value.gathered[axes] = _gather(value, axes)
    return value.gathered[axes]


def require_few_groups(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Refuse a tensor that has more groups along the given axes than memory holds decimals."""
    groups = math.prod(n for axis, n in enumerate(shape) if axis not in axes)
    require(groups <= _GROUPS, f"{groups} groups of a tensor of shape {shape} are more than {_GROUPS}")


class _Part(NamedTuple):
    """One term, its entries sorted by groups of the value: in arrays `(groups, entries)`."""

    base: Base
    column: np.ndarray
    """The flat index into `base` of every entry, or -1 for an entry that is zero."""
    group: np.ndarray
    """The number of that entry's group in `base`, or -1."""
    label: np.ndarray
    """The place of that group's bounds in `base.table`, or -1."""
    factor: np.ndarray
    roundings: int
    error: Decimal
    """The largest error of a factor."""


def _gather(value: Value, axes: tuple[int, ...]) -> Bounds:
    """As `gather`, derived anew: from the terms that depend on the input, plus the norms of the constant ones."""
    shape, lead = (value.shape, [axis for axis in range(len(value.shape)) if axis not in axes])
    outer = [1 if axis in axes else n for axis, n in enumerate(shape)]
    require_few_groups(shape, axes)
    moving = [(term.base, term) for term in value.terms if isinstance(term.base, Base)]
    entries, bounds = math.prod(shape) * len(value.terms), _unmoved(moving, shape, axes)
    blocks = np.array_split(np.arange(math.prod(outer)), min(-(-entries // _BLOCK), math.prod(outer)))

    def by_group(array: np.ndarray | None, groups: np.ndarray) -> np.ndarray:
        """Broadcast to the value's shape, and take some groups: `(groups, entries)`; None stands for ones."""
        array = np.broadcast_to(np.ones(()) if array is None else array, shape)
        ends = np.moveaxis(array, lead, range(len(lead)))[None]
        return ends[np.unravel_index(groups, [1, *(shape[axis] for axis in lead)])].reshape(len(groups), -1)

    if bounds is None:
        require(entries <= _ENTRIES, f"the terms of {word(value.name)} have {entries} entries, more than {_ENTRIES}")
        most = entries // math.prod(outer)
        require(most <= _GROUP, f"the groups of {word(value.name)} have {most} entries, more than {_GROUP}")
        derived, kinds = np.empty((4, math.prod(outer)), dtype=object), 0
        for groups in blocks:
            parts = []
            for whole, term in moving:
                factor = by_group(term.factor, groups)
                column = np.where(factor == 0, -1, by_group(term.index, groups).astype(np.int64))
                base, factor = _finest(whole, column), np.where(column < 0, 0.0, factor)
                group, label, slip = base.groups(column), base.labels(column), term.error * (not term.cancelled)
                parts.append(_Part(base, column, group, label, factor, term.roundings, slip))
            first, inverse = _alike(parts)
            kinds += len(first) * len(parts)
            require(kinds <= _KINDS, f"{word(value.name)} has more than {_KINDS} kinds of groups, with all its terms")
            some = np.array([_one_group(parts, row) for row in first], dtype=object)
            derived[:, groups] = some[inverse].T
        bounds = Bounds(*(each.reshape(outer) for each in derived))
        for term in (term for _, term in moving if term.cancelled):
            taken = gather(Value(value.name, shape, (Term(term.base, term.index),)), axes)
            bounds = bounds._replace(error=bounds.error + term.error * (taken.radius + taken.error))
    bounds = Bounds(*map(collapse, bounds))
    different = np.broadcast_shapes(*(each.shape for each in bounds))
    alike = tuple(axis for axis, (n, m) in enumerate(zip(outer, different, strict=True)) if n > m)

    def of_constant(term: Term) -> list[Decimals]:
        norms = [_norms_of_constant(term, by_group(term.index, g), by_group(term.factor, g)) for g in blocks]
        both = (np.concatenate(each).reshape(outer) for each in zip(*norms, strict=True))
        # along axes with equal bounds so far, the largest norm stands for all: a table of positions has many
        return [each.max(alike, keepdims=True) for each in both]

    radius, gain, largest, error = bounds
    for term in value.terms:
        if not isinstance(term.base, Base):
            norm, entry = of_constant(term)
            radius, largest = radius + norm, largest + entry
            moved = None if term.moved is None else replace(term, base=term.moved)
            error = error if moved is None else error + of_constant(moved)[0]
            for each in (term, moved) if term.error else ():
                error = error if each is None else error + term.error * of_constant(replace(each, factor=None))[0]
    error = error + value.floor * root(math.prod(shape[axis] for axis in axes))
    if value.fault:
        error = np.full_like(error, UNBOUNDED)
    return Bounds(*map(collapse, (radius, gain, largest, error)))


def _unmoved(terms: list[tuple[Base, Term]], shape: tuple[int, ...], axes: tuple[int, ...]) -> Bounds | None:
    """The sum of the bases' bounds, if each base is scaled by one number and has these very groups; None otherwise.

    Residuals and results that nothing has moved are of this kind; their entries need not be looked at.
    """
    wide = [axis for axis in axes if shape[axis] > 1]
    zero = np.full([1] * len(shape), ZERO, dtype=object)
    bases, total = [], [zero] * 4
    for base, term in terms:
        factor = np.ones(()) if term.factor is None else term.factor
        moved = term.index is not base.order or factor.ndim or any(base is each for each in bases)
        if moved or [axis for axis in base.axes if shape[axis] > 1] != wide:
            return None
        size = Decimal(abs(float(factor))) * (1 + Decimal(term.roundings * UNIT * 1.01))
        total = [a + size * b for a, b in zip(total, base.bounds, strict=True)]
        total[3] = total[3] + term.error * (base.bounds.radius + base.bounds.error)
        bases.append(base)
    return Bounds(*total)


def collapse(array: np.ndarray) -> np.ndarray:
    """Shrink the axes along which all numbers are equal to size 1."""
    array = np.asarray(array)  # of arrays without axes, NumPy makes numbers
    for axis, size in enumerate(array.shape):
        first = array.take([0], axis) if size else array
        array = first if bool((array == first).all()) else array
    return array


def _norms_of_constant(term: Term, column: np.ndarray, factor: np.ndarray) -> tuple[Decimals, Decimals]:
    """Norm and largest entry of every group of a constant, each `(groups,)`."""
    content = np.where(column < 0, 0.0, abs(np.asarray(term.base)[column]))
    with np.errstate(all="ignore"):
        entries = content * abs(factor)
    entries = np.where((content > 0) & (factor != 0), np.maximum(entries, SMALL), 0.0)
    largest = entries.max(1)
    require(bool((largest <= LARGE).all()), "the entries of a constant exceed 2^1000")
    scale = np.where(largest > 0, largest, 1.0)
    squares = np.cumsum(np.square(entries / scale[:, None]), 1)[:, -1]  # `sum` adds in another order on another machine
    norms = np.sqrt(squares) * scale
    margin = 1 + (entries.shape[1] + term.roundings + 8) * UNIT
    return decimals(norms * margin), decimals(largest * (1 + (term.roundings + 4) * UNIT))


def _finest(base: Base, column: np.ndarray) -> Base:
    """The cut of a base into the most parts such that each group of the value has entries of one part; or the base."""
    last, here = (base.shape or (1,))[-1], column >= 0
    low, high = (np.where(here, column % last, last).min(1), np.where(here, column % last, -1).max(1))
    for parts in sorted(base.cuts, reverse=True):
        width = last // parts
        if ((low // width == high // width) | (high < 0)).all():
            return base.parts.setdefault(parts, replace(base.cuts[parts]))
    return base


def _alike(parts: list[_Part]) -> tuple[np.ndarray, np.ndarray]:
    """Sort groups into kinds: one of each kind, and the kind of each. A kind has groups that differ by a shift only."""
    if len(parts[0].column) == 1:
        return np.zeros(1, int), np.zeros(1, int)
    shifts: dict[int, list[np.ndarray]] = {}
    for part in parts:
        least = [np.where(each < 0, 2**60, each).min(1) for each in (part.column, part.group)]
        known = shifts.get(id(part.base), least)
        shifts[id(part.base)] = [np.minimum(a, b) for a, b in zip(known, least, strict=True)]
    columns = []
    for part in parts:
        here = part.column >= 0
        for each, shift in zip((part.column, part.group), shifts[id(part.base)], strict=True):
            columns.append(np.where(here, each - shift[:, None], -1))
        columns += [part.label, np.ascontiguousarray(part.factor).view(np.int64)]
    kinds = np.ascontiguousarray(np.concatenate(columns, 1))
    _, first, inverse = np.unique(kinds.view(f"V{kinds.shape[1] * 8}"), return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _one_group(parts: list[_Part], row: int) -> tuple[Decimal, ...]:
    """The bounds of one group of the value."""
    bases = list({id(part.base): part.base for part in parts}.values())
    entry, term, base, column, group, label, factor = _addends(parts, row, bases)
    if not len(entry):
        return (ZERO,) * 4
    atom = np.unique(base * (group.max() + 1) + group, return_inverse=True)[1]
    require(atom.max() < _GROUPS, f"a group has entries of {atom.max() + 1} groups, more than {_GROUPS}")
    order = np.argsort(atom, kind="stable")
    ends = np.flatnonzero(np.diff(atom[order], prepend=-1, append=-1))
    sizes = []
    for start, end in pairwise(ends):
        some = order[start:end]  # the addends from one group of a base
        norm, most, slip = _size(entry[some], column[some], factor[some], term[some], parts)
        radius, gain, largest, error = (each[label[some[0]]] for each in bases[base[some[0]]].table)
        sizes.append([norm * radius, norm * gain, most * largest, norm * error + slip * (radius + error)])
    bounds = _joined(sizes, _clusters(entry, atom))
    if 1 < len(bases) < len(sizes):  # a sum of the bounds of what comes from each base is a bound, too
        own, edges = _clusters(entry * len(bases) + base, atom), np.diff(base[order[ends[:-1]]], prepend=-1, append=-1)
        each = [_joined(sizes[i:j], own[i:j]) for i, j in pairwise(np.flatnonzero(edges))]
        bounds = [min(bound, sum(some, ZERO)) for bound, some in zip(bounds, zip(*each, strict=True), strict=True)]
    return bounds[0], bounds[1], min(bounds[0], bounds[2]), bounds[3]


def _addends(parts: list[_Part], row: int, bases: list[Base]) -> list[np.ndarray]:
    """Of all addends of a group's entries: entry, term, base, and their places, groups, labels and factors."""
    addends = []
    for number, part in enumerate(parts):
        entry = np.flatnonzero(part.column[row] >= 0)
        which = [np.full(len(entry), each) for each in (number, bases.index(part.base))]
        addends.append([entry, *which, *(x[row][entry] for x in (part.column, part.group, part.label, part.factor))])
    return [np.concatenate(each) for each in zip(*addends, strict=True)]


def _joined(sizes: list[list[Decimal]], clusters: list[int]) -> list[Decimal]:
    """The bounds of all addends together, from those of every atom, where no two clusters share an entry."""
    totals: dict[int, list[Decimal]] = {}
    for cluster, size in zip(clusters, sizes, strict=True):
        totals[cluster] = [a + b for a, b in zip(totals.get(cluster, [ZERO] * 4), size, strict=True)]
    columns = list(zip(*totals.values(), strict=True))
    radius, gain, _, error = (each[0] if len(each) == 1 else root(sum((t * t for t in each), ZERO)) for each in columns)
    return [radius, gain, max(columns[2]), error]


def _clusters(entry: np.ndarray, atom: np.ndarray) -> list[int]:
    """For every atom, which is a group of a base, the least atom that shares an entry with it or with one that does."""
    first = np.full(entry.max() + 1, atom.max())
    np.minimum.at(first, entry, atom)
    parent = list(range(atom.max() + 1))

    def top(a: int) -> int:
        while parent[a] != a:
            a = parent[a] = parent[parent[a]]
        return a

    for a, b in np.unique(np.stack([first[entry], atom]), axis=1).T:
        low, high = sorted((top(int(a)), top(int(b))))
        parent[high] = low
    return [top(a) for a in range(len(parent))]


def _size(
    entry: np.ndarray, column: np.ndarray, factor: np.ndarray, term: np.ndarray, parts: list[_Part]
) -> tuple[Decimal, Decimal, Decimal]:
    """Of a matrix from a group of a base to the entries: its norm, its largest sum of a row, the norm of its errors."""
    roundings = {int(t): parts[t].roundings for t in np.unique(term)}
    norm = largest_sum = slip = ZERO
    for t, count in roundings.items():
        here = term == t
        most = Decimal(float(abs(factor[here]).max())) * (1 + Decimal(count * UNIT * 1.01))
        copies = int(np.unique(column[here], return_counts=True)[1].max())
        norm += most if copies == 1 else _gram_norm(entry[here], column[here], factor[here], count)
        slip += parts[t].error if copies == 1 else parts[t].error * root(copies)
        largest_sum += most
    pairs = int(np.square(np.bincount(entry)).sum())
    if len(roundings) > 1 and pairs <= _PAIRS:  # a sum of norms is a bound, too
        norm = min(norm, _gram_norm(entry, column, factor, max(roundings.values())))
    return norm, largest_sum, slip


def _gram_norm(entry: np.ndarray, column: np.ndarray, factor: np.ndarray, roundings: int) -> Decimal:
    """The norm of a matrix, which has each factor in its entry's row and its column, from its Gram matrix's row sums.

    Relative to the sums of absolute values, an entry errs by the roundings of two factors, one of their product, and
    one for each addend.
    """
    scale = 2.0 ** math.frexp(float(abs(factor).max()))[1]
    order = np.argsort(entry, kind="stable")
    entry, factor = entry[order], factor[order] / scale
    names, column = np.unique(column[order], return_inverse=True)
    places, products = [], []
    for distance in range(len(entry)):
        i = np.flatnonzero(entry[distance:] == entry[: len(entry) - distance])
        if not len(i):
            break
        j = i + distance
        for a, b in ((i, j), (j, i)) if distance else ((i, j),):
            places.append(column[a] * len(names) + column[b])
            products.append(factor[a] * factor[b])
    product = np.concatenate(products)
    place, at = np.unique(np.concatenate(places), return_inverse=True)
    row = place // len(names)
    sums = np.bincount(row, abs(np.bincount(at, product)))
    error = np.bincount(row, np.bincount(at, abs(product))) * ((len(product) + 3 + 2 * roundings) * UNIT * 1.01)
    return root(Decimal(float((sums + error).max() * (1 + 4 * UNIT)))) * Decimal(scale)
