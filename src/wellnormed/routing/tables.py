"""Tables of text with aligned columns, in which the repeated blocks of a model form one row."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

WIDTH, LEAST = 80, 16
"""The width of a printed table in characters, and the least width to which its last column is wrapped."""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text with aligned columns; the last column is wrapped if the others leave room for it.

    Example:
        >>> print(aligned([("parameter", "why"), ("head.weight", "it is " + "long " * 20)]))
        parameter    why
        head.weight  it is long long long long long long long long long long long long
                     long long long long long long long long
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = WIDTH - left if WIDTH - left >= LEAST else widths[-1]
    lines = []
    for *cells, last in rows:
        start = "".join(cell.ljust(width + 2) for cell, width in zip(cells, widths, strict=False))
        first, *more = textwrap.wrap(last, max(room, 1), break_long_words=False) or [""]
        lines += [(start + first).rstrip(), *(" " * left + line for line in more)]
    return "\n".join(lines)


def grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[int, tuple[str, ...]]]:
    """Merge rows that differ only in numbers inside their first cell, the name of a parameter; each row has its count.

    A number counts if it is a whole part of the name, like the places in a list. A merged row takes the place of its
    first row, and its name covers exactly the rows that it replaces.

    Example:
        >>> grouped([("h.0.weight", "a"), ("h.1.weight", "a"), ("h.2.weight", "b"), ("h.4.weight", "a")])
        [(3, ('h.{0,1,4}.weight', 'a')), (1, ('h.2.weight', 'b'))]
    """
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[int, ...], int]] = defaultdict(dict)
    for position, (name, *cells) in enumerate(rows):
        parts = name.split(".")
        words = tuple("" if _is_number(part) else part for part in parts)
        alike[words, tuple(cells)][tuple(int(part) for part in parts if _is_number(part))] = position
    groups = []
    for (words, cells), positions in alike.items():
        for block in _blocks(list(positions)):
            numbers = iter(block)
            name = ".".join(word or _shown(next(numbers)) for word in words)
            groups.append((positions[tuple(members[0] for members in block)], math.prod(map(len, block)), name, cells))
    return [(count, (name, *cells)) for _, count, name, cells in sorted(groups)]


def _is_number(part: str) -> bool:
    return part.isdecimal() and str(int(part)) == part


def _blocks(members: list[tuple[int, ...]]) -> list[tuple[list[int], ...]]:
    """Partition tuples of numbers into products of sets."""
    if not members[0]:
        return [()]
    rests: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for first, *rest in members:
        rests[first].append(tuple(rest))
    firsts: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for first, tails in rests.items():
        firsts[tuple(sorted(tails))].append(first)
    return [(sorted(heads), *block) for tails, heads in firsts.items() for block in _blocks(list(tails))]


def _shown(numbers: list[int]) -> str:
    """Numbers in ascending order, such as `{0..3,5}`; one alone without braces."""
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    runs = (str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}..{b}" for a, b in zip(starts, ends, strict=True))
    return ",".join(runs) if len(numbers) == 1 else f"{{{','.join(runs)}}}"
