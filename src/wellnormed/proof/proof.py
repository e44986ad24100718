"""A proof under construction: the only place where a bound comes into being."""

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np

from wellnormed.proof import claims, files, promises
from wellnormed.proof.arithmetic import ANY_ORDER, EXACT, FORMATS, UNBOUNDED, Arithmetic
from wellnormed.proof.decimals import ZERO, Decimals, decimals, rounding_up
from wellnormed.proof.gather import collapse, gather, require_few_groups
from wellnormed.proof.inference import Inference, map_of
from wellnormed.proof.matrices import absolute_kernel, absolute_norm
from wellnormed.proof.moves import MOVES, moved
from wellnormed.proof.promises import Promise
from wellnormed.proof.reading import CheckError, arguments, require, word
from wellnormed.proof.rows import Bounds, Claim, Row
from wellnormed.proof.rules import RULES
from wellnormed.proof.value import LARGE, UNIT, Base, Term, Value

_ENTRIES, _HELD, _DECIMAL = 2**26, 5 * 2**27, 112
"""The most entries of a row, the most bytes of positions, factors and bounds of all values, and those of a decimal."""
_SLACK = 1 + Decimal("1e-9")
"""The slack of new errors: another machine, which adds absolute values in another order, proves them."""
_PROMISED = 2**29
"""The most entries of all promised parameters together, each of which has a position."""


class Proof:
    """Rows that follow from one another, with their bounds in real arithmetic; only `add` makes a bound.

    Args:
        tensors: Name -> NumPy array or `files.Stored` of the tensors that rows may name; `store` adds more.
        arithmetic: How sums and products are executed; None to leave out rounding errors, which then have no bound.

    Example:
        >>> proof = Proof({"weight": np.diag([3.0, 2.0])})
        >>> domain = {"dtype": "float32", "radius": 1.0}
        >>> _ = proof.add(Row("x", "input", (), (1, 2), domain, axes=(1,)))
        >>> claim = Claim("spectral", ("weight",), (3.000001,))
        >>> _ = proof.add(Row("y", "linear", ("x",), (1, 2), {"parts": 1}, (claim,), reads=((1,),), axes=(1,)))
        >>> round(float(proof.rows["y"].bounds.gain.max() / proof.rows["x"].bounds.gain.max()), 4)
        3.0
        >>> small = Claim("spectral", ("weight",), (2.9,))
        >>> proof.add(Row("z", "linear", ("x",), (1, 2), {"parts": 1}, (small,), reads=((1,),), axes=(1,)))
        Traceback (most recent call last):
            ...
        wellnormed.proof.reading.CheckError: spectral of weight at (2.9,) could not be proved
    """

    def __init__(self, tensors: Mapping[str, Any] | None = None, arithmetic: Arithmetic | None = ANY_ORDER) -> None:
        self.arithmetic = arithmetic
        """How sums and products are executed; None to leave out rounding errors, which then have no bound."""
        self.stored: dict[str, files.Stored] = {}
        """The tensors that rows may name."""
        self.arrays: dict[str, np.ndarray] = {}
        """The tensors that a row has named, in float64 or in integers of 64 bits."""
        self.promises: dict[str, Promise] = {}
        """Name of a parameter -> its promised caps, which are all that is known of it."""
        self.values: dict[str, Value] = {}
        """Name of a row -> its result."""
        self.rows: dict[str, Row] = {}
        """Name -> row, in order, with its proved bounds if it is a primitive."""
        self.inferences: list[Inference] = []
        """The rows of primitives as their rules saw them, in order."""
        self.proved: set[str] = set()
        """Every proved claim, as text."""
        self.other: Proof | None = None
        """A proof of the same rows, whose errors are those of an original: the program executed with other tensors."""
        self.replaced: Mapping[str, str] | None = None
        """If the executed program is an original: name of a tensor -> name of the one in its place."""
        self._arrays, self._held = set[int](), 0
        self._absolute: dict[tuple, list[Decimal]] = {}
        self._changes: dict[str, tuple[list[Decimal], list[Decimal]]] = {}
        for name, tensor in (tensors or {}).items():
            self.store(str(name), tensor)

    def again(self, promises: Mapping[str, Promise]) -> "Proof":
        """A proof without rows, of the same tensors and with what is proved of these, for other promises.

        Args:
            promises: Name -> promise; it has all parameters that this proof has promises for.
        """
        proof = Proof(arithmetic=self.arithmetic)
        proof.stored, proof.arrays = dict(self.stored), dict(self.arrays)
        stated = [claim for row in self.inferences for claim in row.claims]
        proof.proved = {repr(each) for each in stated if self.promises.keys().isdisjoint(each.tensors)}
        for name in self.promises:
            proof.promise(promises[name])
        return proof

    def compare(self, replaced: Mapping[str, str]) -> None:
        """Bound for every row that follows how far an original is from it: the program, executed with other tensors.

        Args:
            replaced: Name -> name of the tensor that the original has in its place; both are stored.
        """
        for name, other in replaced.items():
            require({name, other} <= self.stored.keys(), f"there is no stored tensor {name!r} or {other!r}")
            kinds = [(each.dtype, each.shape) for each in (self.stored[name], self.stored[other])]
            require(kinds[0] == kinds[1], f"{word(name)} and {word(other)} differ in dtype or shape")
        self.other = proof = Proof(arithmetic=self.arithmetic)
        proof.replaced, proof.stored, proof.arrays = replaced, self.stored, self.arrays
        proof.proved, proof.promises = self.proved, self.promises

    def replacing(self, name: str) -> np.ndarray | None:
        """Return the entries that an original has in the place of a stored tensor's; None if they are the same."""
        return None if self.replaced is None or name not in self.replaced else self.tensor(self.replaced[name])

    def executed(self, name: str) -> np.ndarray:
        """Return the entries of the tensor that the executed program has in the place of a stored one."""
        return self.tensor(name) if (other := self.replacing(name)) is None else other

    def changes(self, claim: Claim) -> tuple[list[Decimal], list[Decimal]]:
        """Bound, in the measure of a claim, how far what it is about is from the executed tensors, and the latter.

        The differences of entries are rounded once, and no measure of a matrix with a single entry 1 exceeds 2.
        """
        if all(self.replacing(name) is None for name in claim.tensors):
            return [ZERO] * len(claim.values), [Decimal(each) for each in claim.values]
        if (key := repr(claim)) not in self._changes:
            (ours, slip), (theirs, other) = (claims.scaled(claim.tensors, x) for x in (self.tensor, self.executed))
            difference, alone = theirs - ours, replace(claim, tensors=claim.tensors[:1])
            moved, size = (claims.bound(alone, lambda _, x=x: x).values for x in (difference, theirs))
            rounded = Decimal(float(abs(difference).sum()) * 2 * UNIT * (1 + 1e-6)) + Decimal(slip) + Decimal(other)
            self._changes[key] = [Decimal(x) + rounded for x in moved], [Decimal(x) + Decimal(other) for x in size]
        return self._changes[key]

    def store(self, name: str, tensor: Any) -> None:
        """Add a tensor that rows may name: a NumPy array or a `files.Stored`. It must keep a promise of that name."""
        content = tensor if isinstance(tensor, files.Stored) else files.stored(tensor)
        require(self.stored.get(name, content) == content, f"two tensors are called {word(name)}")
        if name in self.promises and name not in self.stored:
            self.promises[name].require_kept_by(_finite(name, content))
        self.stored.setdefault(name, content)

    def tensor(self, name: str) -> np.ndarray:
        """Return the entries of a stored tensor, which must be finite."""
        require(name not in self.promises, f"only a cap is known of {word(name)}, and not its entries")
        require(name in self.stored, f"there is no stored tensor {name!r}")
        if name not in self.arrays:
            self.arrays[name] = _finite(name, self.stored[name])
        return self.arrays[name]

    def promise(self, promise: Promise) -> None:
        """Let rows rest on a promise for a parameter. A tensor stored under its name, before or later, must keep it."""
        require(promise.name not in self.arrays, f"the entries of {word(promise.name)} are used already")
        require(self.promises.get(promise.name, promise) == promise, f"another promise for {word(promise.name)} stands")
        entries = sum(math.prod(each.shape) for each in {**self.promises, promise.name: promise}.values())
        require(entries <= _PROMISED, f"promises are of {entries} entries, more than {_PROMISED}")
        require(len(promise.blocks) > 0, f"nothing is promised of {word(promise.name)}")  # `blocks` checks the parts
        self.promises[promise.name] = promise
        if promise.name in self.stored:
            promise.require_kept_by(_finite(promise.name, self.stored[promise.name]))

    def absolute(
        self,
        names: tuple[str, ...],
        parts: int = 1,
        transposed: bool = False,
        groups: int | None = None,
        pixels: bool = False,
        ordered: bool = False,
    ) -> list[Decimal]:
        """Return upper bounds of norms of the absolute values of a stored tensor's, or a promised parameter's, entries.

        An original has another tensor in its place, which is then meant.

        Args:
            names: Its name; behind it may stand that of its scale, as in a claim.
            parts: The number of equal parts of the rows of a matrix, each of which has a bound.
            transposed: Whether the transposed matrix is meant.
            groups: The number of groups of channels of a convolution, if the tensor is its kernel.
            pixels: Whether the bound must hold for changes of single pixels.
            ordered: Whether addends count with shares; see `matrices.absolute_norm`.
        """
        promise = self.promises.get(names[0])
        key = names, parts, transposed, groups, pixels, ordered and promise is None
        if key not in self._absolute:
            if promise is not None:
                by_taps = groups is not None
                self._absolute[key] = [promise.absolute_kernel()] if by_taps else promise.absolute(parts, transposed)
                return self._absolute[key]
            array, slip = claims.scaled(names, self.executed)
            if groups is None:
                cut = claims.parts_of(claims.matrix(array if array.ndim > 1 else array[:, None], transposed), parts)
                norms = [absolute_norm(each, ordered) for each in cut]
            else:
                norms = [absolute_kernel(array, groups, pixels, ordered)]
            self._absolute[key] = [each + Decimal(slip) for each in norms]
        return self._absolute[key]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor or of a promised parameter."""
        return self.promises[name].shape if name in self.promises else self.tensor(name).shape

    def add(self, row: Row) -> Value:
        """Check a row, prove its claims, derive its bounds, and return its result.

        Args:
            row: A row whose inputs are names of added rows. Bounds that it states take the place of the derived ones;
                they must not be smaller.

        Raises:
            CheckError: The row does not follow; the message says why.
        """
        with rounding_up():
            self._require_place(row)
            given, exact = row, None if self.replaced is None else EXACT
            row = row if self.arithmetic else replace(row, executed=exact)
            name, shape, inputs = row.name, tuple(row.shape), []
            for each in row.inputs:
                require(each in self.values, f"its input {each!r} is no earlier row")
                inputs.append(self.values[each])
            require(math.prod(shape) <= _ENTRIES, f"it has {math.prod(shape)} entries, more than {_ENTRIES}")
            if row.operation in MOVES:
                bare = not (row.axes or row.reads or row.claims) and row.bounds is None
                require(bare, "a move has no bounds, axes, reads or claims of its own")
                result, bounds = moved(row, inputs, self.tensor, _HELD - self._held, self.replacing), None
                self._hold([each for x in inputs for some in x.gathered.values() for each in some])
            else:
                result, bounds = self._infer(row, inputs, shape)
            self._hold([each for term in result.terms for each in (term.index, term.factor) if each is not None])
            self.values[name] = result
            self.rows[name] = replace(row, bounds=bounds, change=self._change(given))
            return result

    def _change(self, row: Row) -> Decimals | None:
        """The errors of the original at a row, no less than what the row may state."""
        bounds = None
        if row.bounds is not None and row.change is not None:
            bounds = row.bounds._replace(error=row.change)
        stated = row.bounds is not None and self.other is not None
        require((row.change is not None) == stated, "it must state a change if and only if there is an original")
        if self.other is None:
            return None
        self.other.add(replace(row, bounds=bounds, change=None))
        proved = self.other.rows[row.name].bounds
        return None if proved is None else proved.error

    def _hold(self, arrays: list[np.ndarray]) -> None:
        """Refuse arrays of a result that, with those of all earlier ones, need too much memory."""
        for each in arrays:
            size = each.size * _DECIMAL if each.dtype == object else each.nbytes
            self._held += 0 if id(each) in self._arrays else size
            self._arrays.add(id(each))  # which stays taken, as values live as long as the proof
        require(self._held <= _HELD, f"the rows up to it hold {self._held} bytes, more than {_HELD}")

    def _require_place(self, row: Row) -> None:
        """Refuse a row whose name or operation may not stand at this place of the proof."""
        # the empty name stands for none where rounding errors have a bound
        require(row.name.isprintable() and row.name != "", f"the name {row.name!r} is empty or cannot be printed")
        require(row.name not in self.values, f"another row is called {word(row.name)}")
        require(row.operation in {*MOVES, *RULES}, f"nothing is known of {row.operation!r}")
        last = next(reversed(self.rows.values()), None)
        require(last is None or last.operation != "output", "no row follows the output")

    def _infer(self, row: Row, inputs: list[Value], shape: tuple[int, ...]) -> tuple[Value, Bounds]:
        """Check the claims and groups of a primitive's row, and return its result with its bounds."""
        axes, *reads = map(tuple, (row.axes, *row.reads))
        require(len(reads) == len(inputs), "it must say for every input which groups it reads")
        for along, of in [(axes, shape), *((read, x.shape) for read, x in zip(reads, inputs, strict=True))]:
            rising = list(along) == sorted({*along}) and max(along, default=-1) < len(of)
            require(rising, f"{along} are no axes of {of}")
            require_few_groups(of, along)
        rule, of_inputs = RULES[row.operation], list[Bounds]()
        for x, read in zip(inputs, reads, strict=True):
            of_inputs.append(gather(x, read))
            self._hold([*of_inputs[-1]])
        inference = Inference(
            name=row.name, operation=row.operation, inputs=inputs, shape=shape,
            constants=arguments(rule, row.constants, "its constants"),
            claims=[claims.stated(each) for each in row.claims], reads=reads, axes=axes, shape_of=self.shape_of,
            tensor=self.tensor, promised=self.promises, bounds=of_inputs, executed=row.executed, absolute=self.absolute,
            arithmetic=self.arithmetic or ANY_ORDER, changes=self.changes,
            of_original=self.replaced is not None,
        )  # fmt: skip
        bounds = Bounds(*map(collapse, rule(inference, **inference.constants)))
        fault = next((x.fault for x in inputs if x.fault), "")
        named = {name for each in inference.claims for name in each.tensors}
        uncounted = named.intersection(self.replaced or ()) - inference.counted
        if not fault and (inference.faulty or inference.beyond or uncounted or _overflows(row, bounds)):
            fault = row.name
        if fault:
            bounds = bounds._replace(error=np.full_like(bounds.error, UNBOUNDED))
        for claim in inference.claims:
            self._prove(claim)
        if row.bounds is None:
            bounds = bounds._replace(error=collapse(bounds.error * _SLACK))
        else:
            bounds = _stated(row.bounds, bounds, shape, axes)
        self._hold([*bounds])
        linear = row.operation == "linear"
        base = Base(row.name, shape, axes, bounds, inference, divisible=linear and inference.constants["parts"] == 1)
        if linear and not base.divisible:
            self._cut(base)
        self.inferences.append(inference)
        fault = fault or row.name * bool((bounds.error >= UNBOUNDED).any())
        return Value(row.name, shape, (Term(base, base.order),), fault=fault), bounds

    def claim(self, measure: str, *tensors: str, **constants: Any) -> Claim:
        """Make a claim with proved values, or with the least ones that follow from the promises for its tensors.

        Args:
            measure: Name of the number to bound; `proof.claims.MEASURES` has all.
            tensors: Names of stored tensors or of promised parameters.
            constants: Settings of the measure, such as `parts=4` for the norms of four heads.

        Raises:
            CheckError: A tensor is not stored, is empty or has entries that are not finite; or no bound follows.

        Example:
            >>> Proof({"bias": np.array([3.0, 4.0])}).claim("max_abs", "bias").values
            (4.0,)
        """
        complete = claims.complete(Claim(measure, tensors, (), constants))
        values = self._follow(complete)
        proved = claims.bound(complete, self.tensor) if values is None else replace(complete, values=values)
        self.proved.add(repr(proved))
        return Claim(measure, tensors, proved.values, constants)

    def _follow(self, claim: Claim) -> tuple[float, ...] | None:
        """The least values of a claim that follow from promises; None if none of its tensors is promised."""
        if self.promises.keys().isdisjoint(claim.tensors):
            return None
        known = [self.promises[name] if name in self.promises else self.tensor(name) for name in claim.tensors]
        return promises.follow(claim, known)

    def _prove(self, claim: Claim) -> None:
        """Prove a claim, unless it is proved."""
        if repr(claim) in self.proved:
            return
        if (least := self._follow(claim)) is not None:
            enough = all(a <= b for a, b in zip(least, claim.values, strict=True))
            require(enough, f"{claim.measure} at {claim.values[:4]} does not follow from what is promised")
        else:
            claims.prove(claim, self.tensor)
        self.proved.add(repr(claim))

    def _cut(self, cut: Base) -> None:
        """Let a row `NAME/k`, which bounds the k equal parts of the outputs of the linear row NAME, refine that row.

        Args:
            cut: The result of `NAME/k`, of shape `(*batch, k, outputs / k)`.
        """
        name, _, parts = cut.name.rpartition("/")
        require(name in self.values and parts == str(cut.shape[-2]), "its name must be that of a row, /, and its parts")
        base, divided = self.values[name].terms[0].base, cut.inference
        if not isinstance(base, Base) or base.name != name:
            raise CheckError(f"{word(name)} is no row that computes")
        whole = base.inference
        undivided = whole.operation == "linear" and whole.constants["parts"] == 1
        same = undivided and whole.inputs[0] is divided.inputs[0] and whole.reads == divided.reads
        same = same and whole.executed == divided.executed  # as its errors take the place of the row's
        require(same and map_of(whole) == map_of(divided), f"it is not the map of {word(name)}, cut into parts")
        least = (np.minimum(a, b[..., None]) for a, b in zip(cut.bounds, base.bounds, strict=True))
        base.cuts[cut.shape[-2]] = Base(cut.name, cut.shape, cut.axes, Bounds(*least), divided)


def _overflows(row: Row, bounds: Bounds) -> bool:
    """Whether an entry of a row's result may exceed the largest number of its dtype."""
    largest = FORMATS["float64" if row.executed is None else row.executed.dtype].largest
    return bool((bounds.largest.max() + bounds.error.max()) > largest)


def _finite(name: str, stored: files.Stored) -> np.ndarray:
    """Return the entries of a tensor; refuse one without entries, or with entries whose sums float64 may not hold."""
    array = stored.array()
    moderate = array.size > 0 and bool((abs(array) <= LARGE).all())
    require(moderate, f"{word(name)} is empty or has entries that are not finite, or beyond 2^1000")
    exact = array.dtype != np.int64 or bool((abs(array) < 2**53).all())
    require(exact, f"{word(name)} has integers that float64 does not hold")
    return array


def _stated(stated: Bounds, derived: Bounds, shape: tuple[int, ...], axes: tuple[int, ...]) -> Bounds:
    """Return the bounds that a row states, if they have the shape of its groups and are not less than the derived."""
    for what, least, bound in zip(Bounds._fields, derived, stated, strict=True):
        sizes = list(zip(bound.shape, shape, strict=False))
        require(all(each.is_finite() for each in bound.flat), f"its {what} is not finite")
        fits = bound.ndim == len(shape) and all(n == 1 or (n == m and i not in axes) for i, (n, m) in enumerate(sizes))
        require(fits, f"its {what} has a shape {bound.shape} that does not fit its groups")
        enough = bool((np.broadcast_to(least, np.broadcast_shapes(least.shape, bound.shape)) <= bound).all())
        require(enough, f"its {what} {bound.max():.20g} is less than what follows, up to {least.max():.20g}")
    return Bounds(*(decimals(each) for each in stated))
