"""The arithmetic in which rows are executed: formats of floats, and how far sums and products in them may err.

Besides the gain, rows bound the error E: the Euclidean norm of a group's executed minus real value, for every input of
the domain, every batch and every order of summation. For an operation h, `E_out = G_h E_in + delta(R + E)`, with the
local gain G_h and the rounding errors delta of h itself. Where these are not known, E is `UNBOUNDED`.

Assumed is: sums and products are rounded to nearest, one at a time or fused, in the format of the result (in float32
for results of 16 bits, which are rounded once more); results below the least normal number may become zero; no product
of matrices is computed by Strassen's, Winograd's or Fourier's method. Functions err as `functions.ERRORS` says.
"""

from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, NamedTuple

from wellnormed.proof.decimals import ONE, TWO, rounding_up

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
LARGEST = {
    "float64": (2 - 2.0**-52) * 2.0**1023, "float32": (2 - 2.0**-23) * 2.0**127,
    "bfloat16": (2 - 2.0**-7) * 2.0**127, "float16": 65504.0,
}  # fmt: skip
"""Dtype -> its largest finite number."""
UNBOUNDED = Decimal("1E+9999")
"""It stands for the error of a group whose rounding errors have no bound; it exceeds every float."""


class Format(NamedTuple):
    """Floats of a dtype as results of operations."""

    unit: Decimal
    """The largest relative error of one rounding, of numbers between `normal` and `largest`."""
    floor: Decimal
    """What an underflow adds to the error of one operation: the least normal number, as results below may be set to
    zero; for float16, whose least numbers all processors keep, the least positive number."""
    largest: Decimal
    normal: float
    """The least normal number."""
    sums: str
    """The dtype in which sums and functions are computed before the result is rounded."""


FORMATS: dict[str, Format] = {"real": Format(Decimal(0), Decimal(0), Decimal("Infinity"), 0.0, "real")} | {
    name: Format(Decimal(unit), Decimal(floor), Decimal(LARGEST[name]), normal, sums)
    for name, unit, floor, normal, sums in (
        ("float64", 2.0**-53, 2.0**-1022, 2.0**-1022, "float64"),
        ("float32", 2.0**-24, 2.0**-126, 2.0**-126, "float32"),
        ("float16", 2.0**-11, 2.0**-24, 2.0**-14, "float32"),
        ("bfloat16", 2.0**-8, 2.0**-126, 2.0**-126, "float32"),
    )
}
"""Dtype -> format, from the finest to the coarsest; before them that of real numbers, which nothing rounds."""


@dataclass(frozen=True)
class Executed:
    """How a row's result is computed."""

    dtype: Dtype
    """The dtype of the result, and the coarsest of the operations that the row stands for."""
    roundings: int | None = None
    """How often each addend of the result is rounded, if the operations that the row stands for round more often than
    the row's own sum or product; 0 for an operation that only selects entries."""
    beside: float = 0.0
    """The largest size of other numbers that are rounded as often, and once at least: constants that the dtype does not
    hold, or addends that cancel, as where the program computes the shift of a batch normalization."""


EXACT = Executed("real", roundings=0)  # type: ignore[arg-type]  # which no document may state
"""How a row is executed in real numbers."""


@dataclass(frozen=True)
class Arithmetic:
    """How sums and products are executed, beyond the dtypes of a program's graph.

    Args:
        products: The dtype to which both factors of a product of float32 matrices are rounded before it: `tf32` or
            `bfloat16`, with sums in float32. By default `float32`, which is all digits.
        lanes: So many partial sums at least make each sum, with no more addends for one than for another, before a tree
            adds these up. By default sums have any order.
    """

    products: Literal["float32", "tf32", "bfloat16"] = "float32"
    lanes: int | None = None

    def __str__(self) -> str:
        order = "any order" if self.lanes is None else f"{self.lanes} lanes and a tree"
        return f"with sums in {order}" + f", products in {self.products}" * (self.products != "float32")

    def depth(self, addends: int) -> int:
        """How often an addend, which may be a product, is rounded in a sum.

        Example:
            >>> Arithmetic(lanes=64).depth(784), Arithmetic().depth(784)
            (20, 784)
        """
        if not self.lanes:
            return addends
        return min(addends, -(-addends // self.lanes) + (self.lanes - 1).bit_length() + 1)

    @property
    def of_factors(self) -> Decimal:
        """The relative error of a product whose factors are rounded before, or cut off, as some processors do."""
        unit = {"float32": 0.0, "tf32": 2.0**-10, "bfloat16": 2.0**-7}[self.products]
        return Decimal(2 * unit + unit * unit)


ANY_ORDER = Arithmetic()


def gamma(count: int, unit: Decimal) -> Decimal | None:
    """The largest relative error `(1 + u)^n - 1` after n roundings; None if they are too many for a bound.

    Example:
        >>> float(gamma(1, FORMATS["float32"].unit)) >= 2**-24
        True
    """
    with rounding_up():
        first = count * unit
        return first * (ONE + TWO * first) if first <= _MOST else None


def of_norm(entries: int, executed: Executed, arithmetic: Arithmetic, least: Decimal) -> Decimal | None:
    """The relative error of a vector divided by its norm, root mean square, or the larger of one and a number.

    The squares are rounded, summed, scaled, rooted and inverted, and the product with x is rounded.

    Args:
        entries: The number of entries of the vector.
        executed: How it is computed.
        arithmetic: How sums are.
        least: What an underflow of a square adds to the sum is multiplied by this, relative to the result.
    """
    form = FORMATS[executed.dtype]
    sums, others = (
        gamma(arithmetic.depth(entries + 2), FORMATS[form.sums].unit),
        gamma(12 + (executed.roundings or 0), form.unit),
    )
    if sums is None or others is None:
        return None
    with rounding_up():
        rate = sums + others + entries * form.floor * least
        return rate * (ONE + rate) if rate <= _MOST else None


_MOST = Decimal("0.5")
