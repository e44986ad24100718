"""The ledger that operations write to: a growing proof, claims on stored tensors, refusals that say where they are."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from wellnormed.lowering.axes import inner_axes, parts_of_outputs, with_inner_axes
from wellnormed.lowering.stored import raw_tensor
from wellnormed.program.domain import STORED, Domain
from wellnormed.program.errors import UncertifiableError
from wellnormed.proof import Bounds, CheckError, Claim, Promise, Proof, Row
from wellnormed.proof.arithmetic import ANY_ORDER, Arithmetic, Executed
from wellnormed.proof.gather import gather
from wellnormed.proof.value import LARGE, Value

Reads = Sequence[tuple[Value, Iterable[int]]]


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor that does not depend on the input: a parameter, a buffer, or a tensor computed from these."""

    name: str
    tensor: Tensor
    computed: bool = False
    """Whether the walk computed the tensor. The model does not hold it then, so the certificate's file must."""
    transpose_of: "Stored | None" = None
    """The parameter that this tensor is the transpose of; None otherwise."""
    rows_of: "Stored | None" = None
    """The parameter whose rows this tensor consists of (complete rows, possibly reordered or repeated), as after an
    index or a slice; None otherwise. The rows lie along the last axis of more than one entry."""
    entries_of: "tuple[Stored, Tensor] | None" = None
    """The parameter of unknown entries that this tensor's entries are of, and their positions in it, as after a split;
    None otherwise."""
    value_of: "Callable[[], Value] | None" = None
    """Bounds what this tensor is computed from as if it were an input, where that has unknown entries."""
    made_of: tuple["Stored", ...] = ()
    """The operands of an operation from which a bound has computed this tensor: it has all that matters of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.tensor.shape)

    def __contains__(self, other: "Stored") -> bool:
        """Whether this tensor is another one, or was computed from it by a bound."""
        same = self.name == other.name or (other.transpose_of is not None and self.name == other.transpose_of.name)
        return same or any(other in each for each in self.made_of)


class Ledger:
    """Collects the rows of a certificate while operations are bounded; a bounding function receives it as `ledger`.

    Args:
        radius: The domain: largest root mean square of a group of the input, infinity, or a `Box` for its entries.
        promises: Name of a parameter whose entries the bound must not depend on -> the bound on its norm that a
            constraint guarantees, or None without one. The entries are set to NaN, so that every claim must follow from
            the promise.
        apart: Whether operations on vectors, such as norm layers, put each vector of their result into a separate
            group. Its radius is then known, which attention needs, but joint changes of all vectors are bounded less
            tightly.
        arithmetic: As for `Proof`.
    """

    def __init__(
        self,
        radius: Domain,
        promises: Mapping[str, Promise | None] | None = None,
        apart: bool = False,
        arithmetic: Arithmetic | None = ANY_ORDER,
    ) -> None:
        self.promises: Mapping[str, Promise | None] = promises or {}
        """Name of a parameter whose entries are NaN -> the promise that a constraint makes of it, or None."""
        self.radius = radius
        """The domain: largest root mean square of a group of the input, infinity, or a `Box` for its entries."""
        self.proof = Proof(arithmetic=arithmetic)
        """The rows, with the bounds that follow from them."""
        self.used: dict[str, Stored] = {}
        """Name -> stored tensor that a row uses."""
        self.name = "model"
        """The name of the rows that the current operation derives."""
        self.where = "model"
        """The place of the current operation in the model, for refusals."""
        self.ordered: list[tuple[Value, int, Value]] = []
        """Values whose lines along an axis were sorted, with the axis and the sorted value."""
        self.pairs: dict[tuple[str, str], Value] = {}
        """Names of two values -> both side by side along a new last axis."""
        self.apart = apart
        """Whether operations on vectors put each vector into a separate group."""
        self.executed: Executed | None = None
        """How the rows of the current operation are executed; None if it executes something else than its rows."""
        self.beside = 0.0
        """The largest constant of the current operation that its dtype does not hold, so that it is rounded."""
        self.joined = False
        """Whether an operation on vectors has put several of them into one group."""
        self.dtype = torch.float32
        """The dtype of the current operation's result."""
        self.constants_of_promises = False
        """Whether a constant of some row was computed from a claim, so that its rows hold for these promises alone."""
        self.biases: dict[str, Sequence[tuple[Any, float]]] = {}
        """Row of an attention -> the constants that are added to its logits, each with a factor; it reads none."""
        self.choices: list[int] = []
        """The numbers of the bounds that were chosen among several of the same tensor, in order."""
        self.followed: Iterator[int] | None = None
        """The choices of another walk, which this one makes again."""
        self._claims: dict[tuple, Claim] = {}
        self._computed: dict[str, Tensor] = {}
        self._names: dict[str, int] = {}

    def refuse(self, reason: str) -> UncertifiableError:
        """The error to raise, as in `raise ledger.refuse(...)`, with the operation's place in the model.

        Args:
            reason: The problem and its remedy, as the continuation of a sentence that begins with the operation.
        """
        return UncertifiableError(f"{self.where}: {reason}")

    def unique_name(self, name: str | None = None) -> str:
        """A name that no row has yet."""
        name = name or self.name
        repeats = self._names[name] = self._names.get(name, 0) + 1
        return name if repeats == 1 else self.unique_name(f"{name}#{repeats}")

    def derive(
        self,
        primitive: str,
        reads: Reads,
        *,
        shape: Sequence[int],
        axes: Sequence[int] | None = None,
        constants: Mapping[str, Any] | None = None,
        claims: Sequence[Claim] = (),
        name: str | None = None,
        roundings: int | None = None,
        beside: float = 0.0,
    ) -> Value:
        """Add the row of a primitive to the proof and return its result.

        Args:
            primitive: Its name, such as `elementwise`; `docs/sound-bounds.md` lists all.
            reads: The inputs, each with the axes of the groups whose bounds the primitive uses.
            shape: The shape of the result.
            axes: Axes of the result's groups; by default those of the first input.
            constants: Numbers that the executed operation applies; refused if they are not finite.
            claims: The claims on its weights, as `prove` returned them.
            name: The name of the row; by default that of the current operation.
            roundings: How often each addend is rounded, if not as often as in the row; see `proof.arithmetic`.
            beside: The largest size of other numbers that are rounded as often.

        Raises:
            UncertifiableError: The row does not follow; the message gives the reason.

        Example:
            >>> from wellnormed.lowering.operations.source import source
            >>> ledger = Ledger(radius=1.0)
            >>> x = source(ledger, (1, 4), "x")  # a vector of 4 entries: its gain is 2
            >>> sigmoid = {"function": "sigmoid", "numbers": []}
            >>> y = ledger.derive("elementwise", [(x, [-1])], shape=(1, 4), constants=sigmoid, name="y")
            >>> float(ledger.proof.rows["y"].bounds.gain.max())  # the slope of a sigmoid is at most 1/4
            0.5
        """
        if 0 in shape:
            raise self.refuse("its result has no entries; pass an example that has some, and remove what is empty")
        read = tuple(tuple(sorted({a % len(value.shape) for a in given})) for value, given in reads)
        axes = read[0] if axes is None else tuple(sorted(axis % len(shape) for axis in axes))
        for (value, _), each in zip(reads, read, strict=True):
            self.divide(value, each)
        inputs = [value for value, _ in reads]
        executed = self._executed(primitive, roundings, beside)
        return self._add(self.unique_name(name), primitive, inputs, shape, constants, claims, read, axes, executed)

    def move(
        self,
        operation: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        constants: Mapping[str, Any],
        roundings: int | None = None,
        beside: float = 0.0,
    ) -> Value:
        """Add the row of a move to the proof and return its result; see `lowering.moves` and `proof.arithmetic`."""
        executed = self._executed(operation, roundings, beside)
        return self._add(self.unique_name(), operation, inputs, shape, constants, executed=executed)

    def _executed(self, operation: str, roundings: int | None, beside: float = 0.0) -> Executed | None:
        if self.executed is None or operation in _EXACT:
            return None
        return replace(self.executed, roundings=roundings, beside=max(beside, self.beside))

    @contextmanager
    def executing(self, how: Executed | None) -> Iterator[None]:
        """Rows that are added inside are executed so; with None they are not what the operation executes."""
        executed, self.executed = self.executed, how
        try:
            yield
        finally:
            self.executed = executed

    def choose(self, decide: Callable[[], int]) -> int:
        """The number of the next choice, as `decide` returns it or as the walk that this one follows has made it."""
        made = None if self.followed is None else next(self.followed, None)
        self.choices.append(decide() if made is None else made)
        return self.choices[-1]

    def least(self, *values: Value) -> Value:
        """The value with the smallest gain, of several values that bound the same tensor in different ways."""
        axes = {axis for value in values for axis in inner_axes(value)}
        gains = [self.bounds(value, axes).gain.max() for value in values]
        return values[self.choose(lambda: gains.index(min(gains)))]

    def vectors(self, x: Value, over: Iterable[int]) -> tuple[int, ...]:
        """The axes of groups, of input and result, for an operation on every vector along the axes `over`."""
        own, joined = tuple(sorted({axis % len(x.shape) for axis in over})), with_inner_axes(x, over)
        self.joined = self.joined or joined != own
        return own if self.apart else joined

    def bounds(self, x: Value, axes: Iterable[int]) -> Bounds:
        """Bounds of the groups of a value along some axes."""
        axes = tuple(sorted({axis % len(x.shape) for axis in axes}))
        self.divide(x, axes)
        return gather(x, axes)

    def largest_logits(self) -> Sequence[Decimal]:
        """For every head of the latest attention, a bound on the absolute value of its logits."""
        return next(tuple(row.logits) for row in reversed(self.proof.inferences) if row.logits is not None)

    def divide(self, x: Value, axes: tuple[int, ...]) -> None:
        """Add rows for parts of linear maps' outputs, such as heads, if each group of x lies in one part."""
        for whole, parts in parts_of_outputs(x, axes).items():
            name, row = f"{whole}/{parts}", self.proof.rows[whole]
            if name not in self.proof.values:
                *batch, outputs = row.shape
                weight, *bias = (
                    self.prove(claim.measure, *(self.used[each] for each in claim.tensors), **settings)
                    for claim in row.claims
                    for settings in [claim.constants | {"parts": parts}]
                )
                own = (*row.axes[:-1], len(row.shape))
                inputs = [self.proof.values[each] for each in row.inputs]
                shape, constants = (*batch, parts, outputs // parts), {"parts": parts}
                self._add(name, "linear", inputs, shape, constants, [weight, *bias], row.reads, own, row.executed)

    def _add(
        self,
        name: str,
        operation: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        constants: Mapping[str, Any] | None = None,
        claims: Sequence[Claim] = (),
        reads: tuple[tuple[int, ...], ...] = (),
        axes: tuple[int, ...] = (),
        executed: Executed | None = None,
    ) -> Value:
        constants = dict(constants or {})
        for key, number in constants.items():
            for each in number if isinstance(number, list | tuple) else [number]:
                if isinstance(each, float) and not math.isfinite(each):
                    raise self.refuse(f"its constant {key}={number} is not finite; make it so")
        names = tuple(each.name for each in inputs)
        try:
            row = Row(name, operation, names, tuple(shape), constants, tuple(claims), reads, axes, executed)
            return self.proof.add(row)
        except CheckError as error:
            raise self.refuse(f"{error}") from error

    def constant(self, stored: Stored) -> Value:
        """A stored tensor as a value, with a row of its own."""
        self.use(stored)
        if not stored.tensor.dtype.is_floating_point:
            raise self.refuse(f"it adds {stored.name}, which is of {stored.tensor.dtype}; make it a float")
        name, constants = f"={stored.name}", {"tensor": stored.name}
        known = self.proof.rows.get(name)  # a module may be called `=`, and an operation's row then as this one
        if known is not None and (known.operation, known.constants) == ("constant", constants):
            return self.proof.values[name]
        return self._add(name, "constant", (), stored.tensor.shape, constants)

    def in_dtype(self, number: float) -> float:
        """A number as the dtype of the current operation's result holds it."""
        converted = float(torch.tensor(number, dtype=torch.float64).to(self.dtype))
        if math.isinf(converted) and not math.isinf(number):
            raise self.refuse(f"{number:g} is beyond the range of {self.dtype}; write a smaller number")
        self.beside = max(self.beside, abs(number)) if converted != number else self.beside
        return converted

    def computed(
        self,
        name: str,
        tensor: Tensor,
        transpose_of: Stored | None = None,
        rows_of: Stored | None = None,
        made_of: Sequence[Any] = (),
    ) -> Stored:
        """A tensor computed from stored ones, under this name; with a number behind it if the name is taken.

        An operation that computes it from its operands says in `made_of` of which it has all that matters, and
        `certify(original=...)` refuses other values of the others.
        """
        full, number = name, 1
        while full in self.promises or (full in self._computed and not _same(self._computed[full], tensor)):
            number += 1
            full = f"{name}#{number}"
        self._computed[full] = tensor
        made = tuple(each for each in made_of if isinstance(each, Stored))
        return Stored(full, tensor, computed=True, transpose_of=transpose_of, rows_of=rows_of, made_of=made)

    def prove(self, measure: str, *tensors: Stored, **constants: Any) -> Claim:
        """Prove a bound on stored tensors, such as the norm of a weight; the claim goes to `derive`.

        Args:
            measure: The quantity to bound, such as `spectral`; see `proof.claims.MEASURES`.
            tensors: The tensors.
            constants: Settings of the measure, such as `parts=4` for the norms of four heads.

        Raises:
            UncertifiableError: A tensor is empty, or has entries that are not finite.

        Example:
            >>> claim = Ledger(radius=1.0).prove("spectral", Stored("weight", torch.diag(torch.tensor([3.0, 2.0]))))
            >>> 3 <= claim.values[0] < 3 + 1e-6
            True
        """
        for stored in tensors:
            if (promise := self._promise(stored)) is None:
                self.use(stored)
            elif self.used.setdefault(stored.name, stored).computed:
                raise self.refuse(f"two tensors are called {stored.name}; rename one")
            elif stored.name not in self.proof.promises:
                self.proof.promise(promise)
        names = tuple(stored.name for stored in tensors)
        key = (measure, names, tuple(sorted((k, str(v)) for k, v in constants.items())))
        if key not in self._claims:
            try:
                self._claims[key] = self.proof.claim(measure, *names, **constants)
            except CheckError as error:
                remedy = "" if self.proof.promises.keys().isdisjoint(names) else "; certify without `within`"
                raise self.refuse(f"{error}{remedy}") from error
        return self._claims[key]

    def value_of(self, claim: Claim) -> float:
        """The first value of a claim, for a constant of a row."""
        self.constants_of_promises = self.constants_of_promises or not self.promises.keys().isdisjoint(claim.tensors)
        return claim.values[0]

    def use(self, stored: Stored) -> str:
        """Record that a row uses a stored tensor, and check that bounds can be computed from its entries."""
        self.require_stored(stored)
        self.require_known(stored)
        if stored.name in self.used and not _same(self.used[stored.name].tensor, stored.tensor):
            raise self.refuse(f"two tensors are called {stored.name}; rename one")
        if stored.name not in self.used:
            known = stored.tensor.is_floating_point() and stored.tensor.numel()
            if known and not float(torch.linalg.vector_norm(stored.tensor, math.inf)) <= LARGE:
                raise self.refuse(
                    f"{stored.name} has entries that are not finite, or beyond 2^1000, whose bounds no float holds"
                )
            self.used[stored.name] = stored
            self.keep(stored)
        return stored.name

    def keep(self, stored: Stored) -> None:
        """Pass a tensor's bytes to the proof."""
        self.proof.store(stored.name, raw_tensor(stored.tensor))

    def require_stored(self, stored: Stored) -> None:
        """Refuse a tensor of a dtype that no certificate holds."""
        if stored.tensor.dtype not in STORED:
            raise self.refuse(
                f"{stored.name} is of {stored.tensor.dtype}, which no certificate holds; make it a real float of 16 "
                "bits or more, or an integer"
            )

    def unknown(self, operand: Any) -> Stored | None:
        """The parameter with a promise that an operand is, or whose rows it consists of; None for any other."""
        if not isinstance(operand, Stored):
            return None
        parameter = operand.rows_of or operand
        return None if self._promise(parameter) is None else parameter

    def _promise(self, stored: Stored) -> Promise | None:
        """The promise that the proof uses instead of a tensor's entries; None for computed tensors of any name."""
        return None if stored.computed else self.promises.get(stored.name)

    def require_known(self, stored: Stored) -> None:
        """Refuse a tensor with NaN: it is computed from entries that the bound must not depend on.

        Raises:
            UncertifiableError: The tensor has NaN; the message has the remedies.
        """
        if not self.promises or not (stored.tensor.is_floating_point() or stored.tensor.is_complex()):
            return
        wide = torch.promote_types(stored.tensor.dtype, torch.float32)  # `isnan` lacks 8-bit floats
        if bool(stored.tensor.to(wide).isnan().any()):
            remedy = "give what it is made of a constraint that promises a bound for all steps, freeze that,"
            if not stored.computed and stored.name in self.promises and self._promise(stored) is None:
                remedy = "give it a constraint that promises a bound for all steps, freeze it,"
            elif self._promise(stored) is not None:
                remedy = "that norm does not bound what this operation does with it; freeze it,"
            raise self.refuse(
                f"the bound needs entries of {stored.name}, and `within` knows at most a norm; {remedy} remove its "
                "parametrization, if it has one (torch.nn.utils.parametrize.remove_parametrizations), or certify "
                "without `within`"
            )


_EXACT = ("pick", "constant", "rounding", "input", "output", "lipsdp")
"""Rows whose errors follow without a word of how they are executed."""


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))
