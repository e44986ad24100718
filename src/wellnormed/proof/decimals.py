"""The numbers that bounds are made of: decimals that round up, alone and in arrays.

`decimal` with 30 digits and an exponent that cannot overflow takes the place of logarithms: the activation bound of a
deep transformer may pass 10^400, and every operation on non-negative numbers errs upwards.
"""

import decimal
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import Any

import numpy as np

UP = decimal.Context(
    prec=30,
    rounding=decimal.ROUND_CEILING,
    Emin=decimal.MIN_EMIN,
    Emax=decimal.MAX_EMAX,
    traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
)
"""Sums, products and quotients of non-negative numbers round up. Square roots do not: use `root`."""
ZERO, ONE, TWO = Decimal(0), Decimal(1), Decimal(2)
Decimals = np.ndarray
"""An array of `Decimal` objects: NumPy's arithmetic on it is decimal arithmetic in the current context."""


def rounding_up() -> AbstractContextManager[decimal.Context]:
    """Return a context for a `with` block in which decimal arithmetic on non-negative numbers rounds up."""
    return decimal.localcontext(UP)


def root(x: Decimal | int | float) -> Decimal:
    """Return an upper bound of the square root (`Decimal.sqrt` rounds to nearest whatever the context).

    Example:
        >>> root(2)  # 1.414213562373095048801688724209698...
        Decimal('1.41421356237309504880168872421')
        >>> root(9)
        Decimal('3')
    """
    x = Decimal(x)
    nearest = UP.sqrt(x)
    return nearest if _EXACT.multiply(nearest, nearest) >= x else UP.next_plus(nearest)


def root_down(x: Decimal | int) -> Decimal:
    """Return a lower bound of the square root."""
    nearest = UP.sqrt(Decimal(x))
    return nearest if _EXACT.multiply(nearest, nearest) <= x else UP.next_minus(nearest)


_EXACT = decimal.Context(prec=2 * UP.prec + 2, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
"""This context holds the square of every number of `UP`."""
roots: Callable[[Decimals], Decimals] = np.frompyfunc(root, 1, 1)
"""`root` of every entry of an array of decimals."""
least: Callable[[Any, Any], Any] = np.minimum
"""The smaller of two decimals or arrays of them, entry by entry."""


def decimals(values: Any) -> Decimals:
    """Convert numbers to an array of decimals of the same shape, exactly.

    Example:
        >>> decimals([0.5, 2])
        array([Decimal('0.5'), Decimal('2')], dtype=object)
    """
    return np.asarray(np.frompyfunc(Decimal, 1, 1)(np.asarray(values, dtype=object)), dtype=object)


_HAIR = Decimal("1e-12")
"""What is less than this share of the last digit that is printed is a hair."""


def shown(x: Decimal | float, form: str = ".6g", up: bool = True) -> str:
    """A number as sentences and tables print it, in a format that rounds.

    A claimed bound is rounded up, so that what is read back is not less; a radius, or what a search found, down. A
    bound that exceeds the next smaller number of the format by a hair only, such as the bound of an identity after
    some square roots, is printed as that number and the hair.

    Example:
        >>> shown(Decimal("1.0000001")), shown(2.0, ".3f"), shown(1.9999999, up=False)
        ('1.00001', '2.000', '1.99999')
        >>> shown(Decimal("1.000000000000000000000000001"))
        '1 + 1e-27'
    """
    x = Decimal(x)
    if not x.is_finite():
        return str(float(x))
    with decimal.localcontext(UP, rounding=decimal.ROUND_FLOOR):
        low = format(x, form)
    with rounding_up():
        high, hair = format(x, form), x - Decimal(low)
        if not up or not 0 < hair < (Decimal(high) - Decimal(low)) * _HAIR or x < 0:
            return high if up else low
        least = low.rstrip("0").rstrip(".") if "." in low and "e" not in low else low
        return f"{least} + {hair:.0e}" if Decimal(low) else f"{hair:.0e}"


def assumed(x: float, form: str = "") -> str:
    """A number that a claim assumes, such as the radius of its domain: the digits of the float, unless these exceed it.

    Example:
        >>> assumed(0.1), assumed(0.3)  # the float of 0.3 is a little less
        ('0.1', '0.29999999999999998')
    """
    digits = format(x, form)
    if Decimal(digits) <= Decimal(x):
        return digits
    return shown(x, ".17g" if float(digits) == x else form, up=False)


def between(low: float, high: float) -> str:
    """The ends of a box that a claim assumes; none is printed outside."""
    return f"from {f'-{assumed(-low)}'.removeprefix('--')} to {assumed(high)}"


def float_up(x: Decimal) -> float:
    """Return the least float that is not below a decimal; infinity beyond the floats."""
    nearest = float(x)
    return nearest if Decimal(nearest) >= x else math.nextafter(nearest, math.inf)
