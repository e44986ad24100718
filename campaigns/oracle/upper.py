"""The oracle's numbers: `mantissa * 2^exponent` of integers of any size, rounded up to 128 bits after every operation.

Nothing here is decimal, and nothing depends on a context, so that a mistake in the kernel's numbers is not in these.
"""

from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext
from fractions import Fraction
from functools import total_ordering
from math import isqrt
from typing import Any

import numpy as np

BITS = 128


@total_ordering
class Upper:
    """A number that is at least the exact result of the operation that made it, for operands that are not negative.

    Example:
        >>> (Upper(1) / 3) * 3 > 1
        True
        >>> Upper(0.5) + Upper("0.25") == 0.75
        True
    """

    __slots__ = ("exponent", "mantissa")

    def __init__(self, value: "Upper | Fraction | Decimal | float | str") -> None:
        if isinstance(value, Upper):
            self.mantissa, self.exponent = value.mantissa, value.exponent
            return
        exact = Fraction(value)
        bits = exact.denominator.bit_length() - 1
        if exact.denominator == 1 << bits:
            self._round(exact.numerator, -bits)
        else:
            shift = BITS + 2 + bits
            self._round(-((-exact.numerator << shift) // exact.denominator), -shift)

    def _round(self, mantissa: int, exponent: int) -> None:
        shift = max(0, mantissa.bit_length() - BITS)
        self.mantissa, self.exponent = -(-mantissa >> shift), exponent + shift

    @classmethod
    def of(cls, mantissa: int, exponent: int) -> "Upper":
        """`mantissa * 2^exponent`, rounded up."""
        made = cls.__new__(cls)
        made._round(mantissa, exponent)
        return made

    def _aligned(self, other: "Upper") -> tuple[int, int, int]:
        least = min(self.exponent, other.exponent)
        return self.mantissa << (self.exponent - least), other.mantissa << (other.exponent - least), least

    def __add__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented  # entry by entry
        a, b, exponent = self._aligned(Upper(other))
        return Upper.of(a + b, exponent)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented
        other = Upper(other)
        return Upper.of(self.mantissa * other.mantissa, self.exponent + other.exponent)

    def __truediv__(self, other: Any) -> Any:
        other = Upper(other)
        shift = max(0, BITS + 2 + other.mantissa.bit_length() - self.mantissa.bit_length())
        return Upper.of(-((-self.mantissa << shift) // other.mantissa), self.exponent - other.exponent - shift)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Any) -> "Upper":
        return self + -Upper(other)

    def __rtruediv__(self, other: Any) -> "Upper":
        return Upper(other) / self

    def __neg__(self) -> "Upper":
        return Upper.of(-self.mantissa, self.exponent)

    def __abs__(self) -> "Upper":
        return Upper.of(abs(self.mantissa), self.exponent)

    def __eq__(self, other: object) -> bool:
        a, b, _ = self._aligned(Upper(other))  # type: ignore[arg-type]
        return a == b

    def __lt__(self, other: Any) -> bool:
        a, b, _ = self._aligned(Upper(other))
        return a < b

    def __hash__(self) -> int:
        return hash(self.exact())

    def exact(self) -> Fraction:
        """The number itself."""
        return self.mantissa * Fraction(2) ** self.exponent

    def decimal(self) -> Decimal:
        """The number to 40 digits, which are more than it has."""
        with localcontext(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN):
            return self.mantissa * Decimal(2) ** self.exponent


ZERO, ONE = Upper(0), Upper(1)
Uppers = np.ndarray
"""An array of these numbers: NumPy's arithmetic on it is theirs, entry by entry."""


def root_up(x: Upper | float) -> Upper:
    """A number that the square root does not exceed, and equals it if it is an integer of 64 bits.

    Example:
        >>> root_up(9) == 3, root_up(2) * root_up(2) > 2
        (True, True)
    """
    x = Upper(x)
    shift = 2 * BITS + x.exponent % 2
    scaled = x.mantissa << shift
    root = isqrt(scaled)
    return Upper.of(root + (root * root < scaled), (x.exponent - shift) // 2)


def uppers(values: Any) -> Uppers:
    """An array of these numbers, none less than the given one."""
    return np.asarray(np.frompyfunc(Upper, 1, 1)(np.asarray(values, dtype=object)), dtype=object)


def to_decimals(values: Uppers) -> np.ndarray:
    """The numbers as decimals."""
    return np.asarray(np.frompyfunc(Upper.decimal, 1, 1)(values), dtype=object)


def hypotenuse(a: Any, b: Any) -> Any:
    """`sqrt(a a + b b)`, of numbers or arrays of them."""
    return np.frompyfunc(root_up, 1, 1)(a * a + b * b)


def least(a: Any, b: Any) -> Any:
    """The smaller of two, entry by entry."""
    return np.minimum(a, b)
