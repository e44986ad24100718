"""Numbers of a certificate's rows: the largest of a row's bounds, and decimals as tables and logarithms show them."""

import math
from decimal import Decimal

from wellnormed.proof import Row
from wellnormed.proof.decimals import UP, float_up, root_down, rounding_up, shown


def group_size(row: Row) -> int:
    """Number of entries of a group of a row's result."""
    return math.prod(row.shape[axis] for axis in row.axes)


def largest_rms(row: Row, what: str) -> Decimal:
    """The largest `radius` or `gain` of a row's groups, in root mean squares."""
    with rounding_up():
        return greatest(row, what) / root_down(group_size(row))


def greatest(row: Row, what: str) -> Decimal:
    """The largest `radius` or `gain` of a row's groups, in Euclidean norms."""
    return max(getattr(row.bounds, what).flat, default=Decimal(0))


def log10_up(x: Decimal) -> float:
    """The decimal logarithm, rounded up; -infinity for 0."""
    return float_up(UP.next_plus(UP.log10(x))) if x else -math.inf


def short(x: Decimal) -> str:
    """A bound with five digits, rounded up, as tables show it."""
    return shown(x, ".5g" if Decimal("1e-4") < x < Decimal("1e6") or not x else ".4e")
