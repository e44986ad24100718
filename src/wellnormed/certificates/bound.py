"""The numbers a certificate is made of: decimals that round up, and the bound they make of one value.

`decimal` with 30 digits and an exponent that cannot overflow takes the place of logarithms: the activation bound of a
deep transformer may pass 10^400, and every operation on non-negative numbers errs upwards.
"""

import decimal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import Decimal

UPWARD = decimal.Context(
    prec=30,
    rounding=decimal.ROUND_CEILING,
    Emin=decimal.MIN_EMIN,
    Emax=decimal.MAX_EMAX,
    traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
)
"""Sums, products and quotients of non-negative numbers round up. Square roots do not: use `sqrt_up`."""


def rounding_up(digits: int = UPWARD.prec) -> AbstractContextManager[decimal.Context]:
    """A `with` block in which decimal arithmetic on non-negative numbers rounds up, to so many digits."""
    return decimal.localcontext(UPWARD, prec=digits)


def sqrt_up(x: Decimal) -> Decimal:
    """A number that the square root does not exceed (`Decimal.sqrt` rounds to nearest whatever the context).

    Example:
        >>> sqrt_up(Decimal(2))  # 1.414213562373095048801688724209698...
        Decimal('1.41421356237309504880168872422')
    """
    root = UPWARD.sqrt(x)
    return UPWARD.next_plus(root) if x else root


def hypotenuse(a: Decimal, b: Decimal) -> Decimal:
    """`sqrt(a a + b b)`, rounded up; by products, for `Decimal ** 2` may not round as the context says."""
    with rounding_up():
        return sqrt_up(a * a + b * b)


def root_mean_square(values: Sequence[Decimal]) -> Decimal:
    """Root mean square of non-negative numbers, rounded up."""
    with rounding_up():
        return sqrt_up(sum((v * v for v in values), Decimal(0)) / len(values))


@dataclass(frozen=True)
class LinearIn:
    """Says that a value is `W x`, head by head, for the value `x` of another row and a stored weight `W`."""

    source: "Bound"
    """The bound of x."""
    weight: str
    """Name of W among the model's tensors."""
    shape: tuple[int, ...]
    """Shape of W, all heads together: (outputs, inputs)."""
    gain: tuple[Decimal, ...]
    """Proved RMS -> RMS norm of each head's slice of W."""


@dataclass(frozen=True)
class Bound:
    """What is proved about one value of the network, for every input of the domain.

    The value is a sequence of tokens, or one such sequence per head; `radius` and `lipschitz` have one entry per head
    (one entry for a plain sequence). RMS is over a token's entries.
    """

    radius: tuple[Decimal, ...]
    """No token has a larger RMS."""
    lipschitz: tuple[Decimal, ...]
    """Largest RMS change of a token over largest RMS change of an input token. Constants have 0."""
    row: str = ""
    """Name of the row that derived it."""
    linear_in: LinearIn | None = None
    """Set while the value is exactly linear in another one; attention then has a smaller constant."""

    def __post_init__(self) -> None:
        assert len(self.radius) == len(self.lipschitz) >= 1
        assert all(number.is_finite() and number >= 0 for number in self.radius + self.lipschitz)

    @property
    def heads(self) -> int:
        """Number of entries of the fields."""
        return len(self.radius)
