"""Flat positions of entries, as sums of one entry of a table for every axis."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from wellnormed.proof.reading import Offset, require

Table = tuple[Offset, ...] | Offset
"""The entries of an axis's table, negative for a gap; or the step between them, from 0."""
_ABSENT = -(2**56)
"""A gap in a table, which no other entry has."""


def positions_of(shape: tuple[int, ...], tables: Sequence[Table], offset: int, count: int) -> np.ndarray:
    """Add up an offset and one entry of each axis's table: flat positions of shape `shape`, -1 where a table has a gap.

    Args:
        shape: Shape of the result.
        tables: The table of every axis.
        offset: The integer that is added to each sum.
        count: The number of entries that the positions point into.

    Raises:
        CheckError: A table has another length than its axis, or a position lies beyond the entries.

    Example:
        >>> positions_of((2, 3), (3, (0, -1, 1)), 1, 6).tolist()
        [[1, -1, 2], [4, -1, 5]]
    """
    require(len(tables) == len(shape), f"it has {len(tables)} tables for {len(shape)} axes")
    complete = [_entries(table, size, axis) for axis, (table, size) in enumerate(zip(tables, shape, strict=True))]
    present = [each[each != _ABSENT] for each in complete]
    if not all(map(len, present)):
        return np.full(shape, -1, np.int32)
    low, high = (offset + sum(int(end(each)) for each in present) for end in (np.min, np.max))
    require(0 <= low <= high < count, f"its tables lead beyond the {count} entries of its input")
    above = [np.where(a == _ABSENT, 0, a - b.min()).astype(np.int32) for a, b in zip(complete, present, strict=True)]
    positions = reduce(np.add.outer, above, np.array(low, np.int32))  # which fits: no row has 2^31 entries
    for axis, table in enumerate(complete):
        positions[(slice(None),) * axis + (table == _ABSENT,)] = -1
    return positions


def _entries(table: Table, size: int, axis: int) -> np.ndarray:
    """The table of an axis as an array `(size,)`."""
    entries = np.array(table, np.int64)
    if not entries.ndim:
        require(abs(int(entries)) * size < 2**44, "its table's step is too large")
        return np.arange(size) * entries
    require(len(entries) == size, f"its table of axis {axis} has {len(entries)} entries instead of {size}")
    return np.where(entries < 0, _ABSENT, entries)
