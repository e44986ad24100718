"""Numbers of a certificate: bounds as floats that know their decimals, the largest of a row, and digits of tables."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal, Self

from wellnormed.proof import Row
from wellnormed.proof.decimals import UP, float_up, root_down, rounding_up, shown

Unit = Literal["euclidean", "rms"]
"""The norms of the groups of inputs and results that a constant compares."""
UNITS: dict[Unit, str] = {"euclidean": "in Euclidean norms", "rms": "from RMS to RMS"}


class Bound(float):
    """A proved bound: a float, rounded up, that knows the decimal it was rounded from.

    It is infinity where no float is as large; `exact` and `log10` are finite then, too.

    Example:
        >>> bound = Bound(Decimal("1e400") / 3)
        >>> bound, bound.log10, Bound(Decimal("0.1")) + 1
        (inf, 399.52287874528037, 1.1)
    """

    exact: Decimal
    """The bound as it was derived."""

    def __new__(cls, exact: Decimal) -> Self:
        bound = super().__new__(cls, float_up(exact))
        bound.exact = exact
        return bound

    def __getnewargs__(self) -> tuple[Decimal]:  # type: ignore[override]
        """What a copy is made from."""
        return (self.exact,)

    @property
    def log10(self) -> float:
        """The decimal logarithm, rounded up; -infinity for 0."""
        return float_up(UP.next_plus(UP.log10(self.exact))) if self.exact else -math.inf


def group_size(row: Row) -> int:
    """Number of entries of a group of a row's result."""
    return math.prod(row.shape[axis] for axis in row.axes)


def largest_rms(row: Row, what: str) -> Decimal:
    """The largest `radius`, `gain` or `error` of a row's groups, in root mean squares."""
    with rounding_up():
        return greatest(row, what) / root_down(group_size(row))


def greatest(row: Row, what: str) -> Decimal:
    """The largest `radius`, `gain` or `error` of a row's groups, in Euclidean norms."""
    return max(getattr(row.bounds, what).flat, default=Decimal(0))


def entries_of(rows: Sequence[Row], unit: Unit) -> int:
    """Number of entries by whose root a gain is divided, to be a constant of the last row in this unit.

    Gains are Euclidean norms over the largest RMS of a change d of n entries, which is `|d| / sqrt(n)`: no more than
    the largest `|d|` over the root of the smallest n.
    """
    return group_size(rows[-1]) if unit == "rms" else min(group_size(row) for row in rows if row.operation == "input")


def slope(row: Row, entries: int) -> Decimal:
    """The largest `gain` of a row's groups over the root of a number of entries."""
    with rounding_up():
        return greatest(row, "gain") / root_down(entries)


def short(x: Decimal) -> str:
    """A bound with five digits, rounded up, as tables show it."""
    return shown(x, ".5g" if Decimal("1e-4") < x < Decimal("1e6") or not x else ".4e")
