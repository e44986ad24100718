"""Flat positions of entries, as sums of one entry of a table for every axis."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from wellnormed.proof.reading import Offset, require

Table = tuple[Offset, ...] | Offset
"""The entries of an axis's table, negative for a gap; or the step between them, from 0."""


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
    complete = [np.array(table, np.int64) for table in tables]
    for axis, (table, size) in enumerate(zip(complete, shape, strict=True)):
        fits = table.shape in ((), (size,))
        require(fits, f"its table of axis {axis} has {table.size} entries instead of {size}")
    ends = [_ends(table, size) for table, size in zip(complete, shape, strict=True)]
    if not all(ends):
        return np.full(shape, -1, np.int32)
    low, high = (offset + sum(each) for each in zip(*ends, strict=True)) if ends else (offset, offset)
    require(0 <= low <= high < count, f"its tables lead beyond the {count} entries of its input")
    above = [_above(table, size, least) for table, size, (least, _) in zip(complete, shape, ends, strict=True)]
    positions = reduce(np.add.outer, above, np.array(low, np.int32))  # which fits: no row has 2^31 entries
    for axis, table in enumerate(complete):
        if table.ndim:
            positions[(slice(None),) * axis + (table < 0,)] = -1
    return positions


def _ends(table: np.ndarray, size: int) -> tuple[int, ...]:
    """The least and the largest entry of the table of an axis; nothing if it has gaps only."""
    if not table.ndim:
        return tuple(sorted((0, int(table) * (size - 1))))
    present = table[table >= 0]
    return (int(present.min()), int(present.max())) if len(present) else ()


def _above(table: np.ndarray, size: int, least: int) -> np.ndarray:
    """The table of an axis as an array `(size,)`, less its least entry; 0 where it has a gap."""
    if table.ndim:
        return np.maximum(table - least, 0).astype(np.int32)
    return np.arange(size, dtype=np.int32) * np.int32(table) - np.int32(least)
