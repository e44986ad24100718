"""The view of a row that a rule gets, with the checks that rules share."""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np

from wellnormed.proof.arithmetic import FORMATS, Arithmetic, Executed, Format, gamma, of_norm
from wellnormed.proof.decimals import ONE, ZERO, Decimals, decimals, root
from wellnormed.proof.functions import Shape, shape_of
from wellnormed.proof.reading import require
from wellnormed.proof.rows import Bounds, Claim
from wellnormed.proof.value import Value


@dataclass(eq=False)
class Inference:
    """A row of a primitive, checked as far as all primitives have in common, with its inputs as values."""

    name: str
    operation: str
    inputs: list[Value]
    shape: tuple[int, ...]
    constants: dict[str, Any]
    """The constants that the rule declares, in their types."""
    claims: list[Claim]
    """The claims, with complete settings and the right number of values."""
    reads: list[tuple[int, ...]]
    axes: tuple[int, ...]
    shape_of: Callable[[str], tuple[int, ...]]
    """Gives the shape of a stored tensor."""
    tensor: Callable[[str], np.ndarray]
    """Gives the entries of a stored tensor."""
    promised: Container[str]
    """The parameters of which only a cap is known."""
    bounds: list[Bounds]
    """For every input, the bounds of the groups along the axes in `reads`."""
    executed: Executed | None
    """How it is executed; None if that is not known."""
    arithmetic: Arithmetic
    absolute: Callable[..., list[Decimal]]
    """Gives norms of the absolute values of a stored tensor; see `Proof.absolute`."""
    changes: Callable[[Claim], tuple[list[Decimal], list[Decimal]]]
    """Bounds the difference of two tensors, and the executed one, in the measure of a claim; see `Proof.changes`."""
    of_original: bool = False
    """Whether its errors are those of an original, which has other tensors."""
    counted: set[str] = field(default_factory=set)
    """The tensors whose changes are part of the row's errors."""
    faulty: bool = False
    """Whether its rounding errors have no bound; rules then return any error."""
    logits: np.ndarray | None = None
    """For every head of an attention, or for all at once, a bound of its logits, `(heads,)`."""

    @property
    def beyond(self) -> bool:
        """Whether it computes with a number that its dtype of sums rounds by more than its unit."""
        if self.executed is None:
            return False
        form = FORMATS[self.format.sums]
        lists = (each if isinstance(each, tuple) else (each,) for each in self.constants.values())
        numbers = [abs(each) for some in lists for each in some if isinstance(each, float | Decimal)]
        return any(each and not form.normal <= each <= form.largest for each in numbers)

    def claim(self, place: int, measure: str, **settings: Any) -> Claim:
        """Return one of its claims, which must have that measure and these settings."""
        require(place < len(self.claims), f"it lacks a claim of {measure}")
        claim = self.claims[place]
        differs = [key for key, each in settings.items() if claim.constants.get(key) != each]
        require(claim.measure == measure and not differs, f"its claim {place} must be {measure} with {settings}")
        return claim

    def change(self, place: int, measure: str = "") -> np.ndarray:
        """Bound how far the executed tensor of a claim is from the stored one, for each part; 0 without such a claim.

        Args:
            place: The number of the claim, all of whose tensors the errors of the row then count.
            measure: Another measure than the claim's.
        """
        if place >= len(self.claims):
            return decimals([0.0])
        claim = self.claims[place]
        self.counted.update(claim.tensors)
        return decimals(self.changes(replace(claim, measure=measure or claim.measure))[0])

    def function(self) -> Shape:
        """The bounds of a row's function, for the arguments that it has."""
        name, numbers = self.constants["function"], self.constants.get("numbers", ())
        return shape_of(name, *numbers, *([self.bounds[0].largest.max()] if name == "exp" else []))

    def carried(self, radius: Decimals, error: Decimals, shape: tuple[int, ...]) -> Decimals:
        """How far the executed `W0 h0` is from `W h`, for the W of the first claim: `W0 (h0 - h) + (W0 - W) h`.

        Args:
            radius: The norm of h.
            error: That of `h0 - h`.
            shape: That of the norms of parts of W, which broadcasts with them.
        """
        executed = decimals(self.changes(self.claims[0])[1]).reshape(shape)
        return executed * error + self.change(0).reshape(shape) * radius

    def only(self, inputs: int, claims: tuple[int, ...] = (0,)) -> None:
        """Check the number of inputs, and that the number of claims is one of those given."""
        require(len(self.inputs) == inputs, f"it has {len(self.inputs)} inputs instead of {inputs}")
        require(len(self.claims) in claims, f"it has {len(self.claims)} claims instead of {claims}")

    def groups(self, *axes: int) -> None:
        """Check that its inputs and its result have the same groups, and that these extend along the given axes."""
        for read in [*self.reads, self.axes]:
            require(read == self.axes and set(axes) <= set(read), f"it must read and leave groups along {axes}")

    def keeps_shape(self, inputs: int = 1, claims: tuple[int, ...] = (0,)) -> None:
        """Check the numbers of inputs and claims, and that all inputs have the shape and the groups of the result."""
        self.only(inputs, claims)
        self.groups()
        require(all(x.shape == self.shape for x in self.inputs), "its result has another shape than its inputs")

    def without_error(self) -> Decimal:
        """Note that its rounding errors have no bound."""
        self.faulty = True
        return ZERO

    def rate(self, count: int, of_sums: bool = False) -> Decimal:
        """The relative error after so many roundings in the result's dtype, or in that of sums, or more if stated."""
        unit = FORMATS[self.format.sums].unit if of_sums else self.format.unit
        return self._bounded(gamma(max(count, self.how.roundings or 0), unit))

    def _bounded(self, rate: Decimal | None) -> Decimal:
        """A relative error; None notes that the row's errors have no bound."""
        return self.without_error() if rate is None else rate

    @property
    def how(self) -> Executed:
        """How it is executed; where that is not known, its rounding errors have no bound."""
        if self.executed is None:
            self.without_error()
        return self.executed or Executed("float32")

    @property
    def format(self) -> Format:
        """The format of its result."""
        return FORMATS[self.how.dtype]

    def require_held(self, *sizes: Any, of_sums: bool = False) -> None:
        """Note a fault if vectors of such norms may overflow, or sums of such sizes before they are stored."""
        sums = FORMATS[self.format.sums].largest
        most = sums if of_sums else min(self.format.largest, sums)
        self.faulty = self.faulty or any(bool((np.asarray(size) > most).any()) for size in sizes)

    def summed(self, count: int, total: Any, entries: int, ordered: Any = None) -> Any:
        """The error of a group of sums of products, in any order.

        Args:
            count: The number of addends of each sum.
            total: The norm of the group, had it sums of absolute values.
            entries: The number of sums.
            ordered: The same, had it sums of shares of absolute values; see `matrices.shares`. By default it is the
                total, as for a sum of known depth, or for a row that states how often its addends are rounded.
        """
        self.require_held(total)
        rate, whole = self.of_sum(count), self.of_sum(count, products=True)
        if ordered is None or self.arithmetic.lanes or self.how.roundings is not None:
            ordered = total
        return rate * ordered + (whole - rate) * total + count * FORMATS[self.format.sums].floor * root(entries)

    def of_sum(self, count: int, products: bool = False) -> Decimal:
        """The relative error of a sum of so many addends, or of so many products of factors."""
        depth = self.arithmetic.depth(max(count, self.how.roundings or 0))
        rate = self._bounded(gamma(depth, FORMATS[self.format.sums].unit))
        of_factors = self.arithmetic.of_factors * (products and self.how.dtype == "float32")
        return rate + of_factors * (ONE + rate)

    def stored(self, size: Any, error: Any, entries: int, count: int = 1) -> Any:
        """The error after a result of that size and error is rounded to its dtype so often, if sums have another one.

        A sum to which a bias is added afterwards is rounded twice.
        """
        if self.format.sums == self.how.dtype:
            return error
        return error + self.rate(count) * (size + error) + count * self.format.floor * root(entries)

    def of_norm(self, entries: int, least: Decimal, *sizes: Any) -> Decimal:
        """The relative error of vectors that are divided by their norms; see `arithmetic.of_norm`."""
        self.require_held(*(size * size for size in sizes))
        return self._bounded(of_norm(entries, self.how, self.arithmetic, least))

    def entries(self) -> int:
        """Return the number of entries of a group of the result."""
        return math.prod(self.shape[axis] for axis in self.axes)

    def along(self, axes: tuple[int, ...]) -> int:
        """Return the number of entries of the vectors along some axes, each of which must lie in one group."""
        require(len(set(axes)) == len(axes) > 0, f"over={axes} must be axes, each once")
        self.groups(*axes)
        return math.prod(self.shape[axis] for axis in axes)


def weight_of(row: Inference) -> tuple[str, bool]:
    """Return the name of a linear row's matrix, and whether the row applies its transpose."""
    return row.claims[0].tensors[0], row.claims[0].constants["transposed"]


def map_of(row: Inference) -> tuple[tuple[str, bool], list[tuple[str, ...]]]:
    """Return the matrix of a linear row as `weight_of` does, and the names of its bias, if it has one."""
    return weight_of(row), [claim.tensors for claim in row.claims[1:]]


def bias_of(row: Inference, measure: str, outputs: int, **settings: Any) -> list[Decimal]:
    """Return the values of the claim of a linear map's bias, which is the second; zeros for a row without it."""
    if len(row.claims) < 2:
        return [ZERO] * settings.get("parts", 1)
    claim = row.claim(1, measure, **settings)
    require(claim.tensors[1:2] in ((), row.claims[0].tensors[1:]), "its bias is scaled otherwise than its map")
    require(math.prod(row.shape_of(claim.tensors[0])) == outputs, f"its bias has not {outputs} entries")
    return [Decimal(value) for value in claim.values]
