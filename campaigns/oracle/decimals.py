"""The numbers that bounds are made of: decimals that round up, alone and in arrays.

`decimal` with 30 digits and an exponent that cannot overflow takes the place of logarithms: the activation bound of a
deep transformer may pass 10^400, and every operation on non-negative numbers errs upwards.
"""

import decimal
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import Any

import numpy as np

UPWARD = decimal.Context(
    prec=30,
    rounding=decimal.ROUND_CEILING,
    Emin=decimal.MIN_EMIN,
    Emax=decimal.MAX_EMAX,
    traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
)
"""Sums, products and quotients of non-negative numbers round up. Square roots do not: use `sqrt_up`."""
ZERO, ONE = Decimal(0), Decimal(1)
Decimals = np.ndarray
"""An array of `Decimal` objects: NumPy's arithmetic on it is decimal arithmetic in the current context."""


def rounding_up(digits: int = UPWARD.prec) -> AbstractContextManager[decimal.Context]:
    """A `with` block in which decimal arithmetic on non-negative numbers rounds up, to so many digits."""
    return decimal.localcontext(UPWARD, prec=digits)


def sqrt_up(x: Decimal | int | float) -> Decimal:
    """A number that the square root does not exceed (`Decimal.sqrt` rounds to nearest whatever the context).

    Example:
        >>> sqrt_up(Decimal(2))  # 1.414213562373095048801688724209698...
        Decimal('1.41421356237309504880168872422')
    """
    x = Decimal(x)
    root = UPWARD.sqrt(x)
    return UPWARD.next_plus(root) if x else root


def decimals(values: Any) -> Decimals:
    """An array of decimals, exactly the given numbers.

    Example:
        >>> decimals([0.5, 2])
        array([Decimal('0.5'), Decimal('2')], dtype=object)
    """
    given = np.asarray(values, dtype=object)
    exact = np.empty(given.shape, dtype=object)
    exact[...] = np.frompyfunc(Decimal, 1, 1)(given)
    return exact


def square_roots(values: Decimals) -> Decimals:
    """`sqrt_up` of every entry."""
    roots = np.empty(np.shape(values), dtype=object)
    roots[...] = np.frompyfunc(sqrt_up, 1, 1)(values)
    return roots


def hypotenuse(a: Any, b: Any) -> Any:
    """`sqrt(a a + b b)`, rounded up, of decimals or arrays of them; by products, for `Decimal ** 2` may round down."""
    with rounding_up():
        squared = a * a + b * b
        return square_roots(squared) if isinstance(squared, np.ndarray) else sqrt_up(squared)


def least(a: Any, b: Any) -> Any:
    """The smaller of two, entry by entry, of decimals or arrays of them."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)
