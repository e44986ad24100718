"""A proof under construction: the only place where a bound comes into being."""

import decimal
import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wellnormed.proof import claims, files, promises
from wellnormed.proof.decimals import UP, decimals
from wellnormed.proof.gather import collapse, gather
from wellnormed.proof.inference import Inference, weight_of
from wellnormed.proof.moves import MOVES, moved
from wellnormed.proof.promises import Promise
from wellnormed.proof.reading import CheckError, integers, of_type, require, texts, word
from wellnormed.proof.rows import Bounds, Claim, Row
from wellnormed.proof.rules import RULES
from wellnormed.proof.value import Base, Term, Value

_ENTRIES = (2**27, 2**30)
"""Of one row, and of all together. A position is kept for each: more are too many for a machine."""


class Proof:
    """Rows that follow from one another, with their bounds, in real arithmetic; `add` is the only way to a bound.

    Args:
        tensors: Name -> NumPy array, or `files.Stored`, of tensors that rows may name; `store` gives more.
        earlier: A proof on some of the same tensors: a claim that it proved of the same object needs no second proof.

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

    def __init__(self, tensors: Mapping[str, Any] | None = None, earlier: "Proof | None" = None) -> None:
        self.stored: dict[str, files.Stored] = {}
        """The tensors that rows may name."""
        self.arrays: dict[str, np.ndarray] = {}
        """Those that a row named, in float64, or in integers of 64 bits."""
        self.promises: dict[str, Promise] = {}
        """Parameters of which nothing but a cap is known, by name."""
        self.values: dict[str, Value] = {}
        """The result of every row."""
        self.rows: dict[str, Row] = {}
        """Every row by name, in order, with its bounds if it is no move."""
        self.inferences: list[Inference] = []
        """The rows that compute, at work."""
        self.proved: dict[str, tuple[files.Stored | None, ...]] = {}
        """Every claim that was proved, with the stored tensors that it is of; None for one that is promised alone."""
        self._earlier = {} if earlier is None else earlier.proved
        self._entries = 0
        for name, tensor in (tensors or {}).items():
            self.store(str(name), tensor)

    def store(self, name: str, tensor: Any) -> None:
        """Give a tensor that rows may name: a NumPy array or a `files.Stored`."""
        own = tensor if isinstance(tensor, files.Stored) else files.stored(tensor)
        require(self.stored.get(name, own) == own, f"two tensors are called {word(name)}")
        if name in self.promises and name not in self.stored:
            self.promises[name].require_kept_by(_finite(name, own))
        self.stored.setdefault(name, own)

    def tensor(self, name: Any) -> np.ndarray:
        """A stored tensor, which must be finite."""
        require(name not in self.promises, f"only a cap is known of {word(str(name))}, and not its entries")
        require(of_type(name, str, "the name of a tensor") in self.stored, f"there is no stored tensor {name!r}")
        if name not in self.arrays:
            self.arrays[name] = _finite(name, self.stored[name])
        return self.arrays[name]

    def promise(self, promise: Promise) -> None:
        """Let rows rest on a promise for a parameter; a stored tensor of that name, also a later one, must keep it."""
        require(promise.name not in self.arrays, f"the entries of {word(promise.name)} are used already")
        require(self.promises.get(promise.name, promise) == promise, f"another promise for {word(promise.name)} stands")
        require(len(promise.blocks) > 0, f"nothing is promised of {word(promise.name)}")  # `blocks` checks the parts
        self.promises[promise.name] = promise
        if promise.name in self.stored:
            promise.require_kept_by(_finite(promise.name, self.stored[promise.name]))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor or of a promised parameter."""
        return self.promises[name].shape if name in self.promises else self.tensor(name).shape

    def add(self, row: Row) -> Value:
        """Check a row, prove its claims, derive its bounds, and return its result.

        Args:
            row: Its inputs are names of rows that were added. Where it states bounds, these take the place of the
                derived ones, which they must not be less than.

        Raises:
            CheckError: The row does not follow; says why.
        """
        with decimal.localcontext(UP):
            name, inputs = self._named(row), []
            for each in texts(row.inputs, "inputs"):
                require(each in self.values, f"its input {each!r} is no earlier row")
                inputs.append(self.values[each])
            shape = integers(row.shape, "shape", 1)
            constants = of_type(row.constants, dict, "constants")
            self._entries += math.prod(shape)
            few = math.prod(shape) <= _ENTRIES[0] and self._entries <= _ENTRIES[1]
            require(few, f"it has {math.prod(shape)} entries, all rows so far {self._entries}, which are too many")
            if row.operation in MOVES:
                bare = not (row.axes or row.reads or row.claims) and row.bounds is None
                require(bare, "a move has no bounds, axes, reads or claims of its own")
                result = moved(row.operation, inputs, name, shape, constants, self.tensor)
                require(result.shape == shape, f"its shape must be {result.shape}")
                result, bounds = Value(name, shape, result.terms), None
            else:
                result, bounds = self._infer(row, inputs, shape, constants)
            self.values[name] = result
            self.rows[name] = replace(row, bounds=bounds)
            return result

    def _named(self, row: Row) -> str:
        name = of_type(row.name, str, "the name of a row")
        require(name.isprintable(), f"the name {name!r} cannot be printed")
        require(name not in self.values, f"another row is called {word(name)}")
        require(of_type(row.operation, str, "operation") in {*MOVES, *RULES}, f"nothing is known of {row.operation!r}")
        last = next(reversed(self.rows.values()), None)
        require(last is None or last.operation != "output", "no row follows the output")
        return name

    def _infer(
        self, row: Row, inputs: list[Value], shape: tuple[int, ...], constants: dict[str, Any]
    ) -> tuple[Value, Bounds]:
        axes, *reads = (integers(each, "axes or reads") for each in (row.axes, *row.reads))
        require(len(reads) == len(inputs), "it must say for every input which groups it reads")
        for own, whole in [(axes, shape), *((r, x.shape) for r, x in zip(reads, inputs, strict=True))]:
            require(list(own) == sorted({*own}) and max(own, default=-1) < len(whole), f"{own} are no axes of {whole}")
        complete = [claims.complete(each) for each in row.claims]
        read = [gather(x, each) for x, each in zip(inputs, reads, strict=True)]
        inference = Inference(
            row.name, row.operation, inputs, shape, constants, complete, reads, axes, self.shape_of, read
        )
        bounds = Bounds(*map(collapse, RULES[row.operation](inference)))
        for claim in complete:
            self._prove(claim)
        if row.bounds is not None:
            bounds = _stated(row.bounds, bounds, shape, axes)
        linear = row.operation == "linear"
        base = Base(row.name, shape, axes, bounds, inference, divisible=linear and constants["parts"] == 1)
        if linear and not base.divisible:
            self._cut(base)
        self.inferences.append(inference)
        return Value(row.name, shape, (Term(base, base.order),)), bounds

    def claim(self, measure: str, *tensors: str, **constants: Any) -> Claim:
        """A claim that is proved, or that follows from what is promised of its tensors.

        Args:
            measure: What is bounded; `proof.claims.MEASURES` has all.
            tensors: Names of stored tensors or of promised parameters.
            constants: Settings of the measure, such as `parts=4` for the norms of four heads.

        Raises:
            CheckError: A tensor is not stored, or is empty, or has entries that are not finite; or no bound follows.

        Example:
            >>> Proof({"bias": np.array([3.0, 4.0])}).claim("max_abs", "bias").values
            (4.0,)
        """
        complete = claims.complete(Claim(measure, tensors, (0.0,), constants))
        values = self._follow(complete)
        if values is None:
            proved = claims.bound(complete, self.tensor)
            self.proved[repr(proved)] = tuple(self.stored[name] for name in tensors)
            values = proved.values
        return Claim(measure, tensors, values, constants)

    def _follow(self, claim: Claim) -> tuple[float, ...] | None:
        """The least values of a claim on promised parameters; None if it is of none."""
        if self.promises.keys().isdisjoint(claim.tensors):
            return None
        known = [self.promises[name] if name in self.promises else self.tensor(name) for name in claim.tensors]
        return promises.follow(claim, known)

    def _prove(self, claim: Claim) -> None:
        if repr(claim) in self.proved:
            return
        own = tuple(self.stored.get(name) for name in claim.tensors)
        if (needed := self._follow(claim)) is not None:
            enough = len(needed) == len(claim.values) and all(map(operator.le, needed, claim.values))
            require(enough, f"{claim.measure} at {claim.values[:4]} does not follow from what is promised")
        elif None in own or self._earlier.get(repr(claim)) != own:
            claims.prove(claim, self.tensor)
        self.proved[repr(claim)] = own

    def _cut(self, cut: Base) -> None:
        """Lend the bounds of equal parts of the outputs of a linear row to that row, whose name is before the slash."""
        name, _, parts = cut.name.rpartition("/")
        require(name in self.values and parts == str(cut.shape[-2]), "its name must be that of a row, /, and its parts")
        base, own = self.values[name].terms[0].base, cut.inference
        if not isinstance(base, Base) or base.name != name:
            raise CheckError(f"{word(name)} is no row that computes")
        whole = base.inference
        same = (
            whole.operation == "linear" and whole.inputs[0] is own.inputs[0] and whole.reads == own.reads
            and weight_of(whole) == weight_of(own) and whole.constants["parts"] == 1
            and [claim.tensors for claim in whole.claims] == [claim.tensors for claim in own.claims]
        )  # fmt: skip
        require(same, f"it is not the map of {word(name)}, cut into parts")
        least = (np.minimum(a, b[..., None]) for a, b in zip(cut.bounds, base.bounds, strict=True))
        base.cuts[cut.shape[-2]] = Base(cut.name, cut.shape, cut.axes, Bounds(*least), own)


def _finite(name: str, stored: files.Stored) -> np.ndarray:
    array = stored.array()
    finite = array.size > 0 and bool(np.isfinite(array).all())
    require(finite, f"{word(name)} is empty or has entries that are not finite")
    exact = array.dtype != np.int64 or bool((abs(array) < 2**53).all())
    require(exact, f"{word(name)} has integers that float64 does not hold")
    return array


def _stated(stated: Bounds, derived: Bounds, shape: tuple[int, ...], axes: tuple[int, ...]) -> Bounds:
    """The bounds that a row states, if they are of its groups and not less than what follows."""
    for what, needed, given in zip(Bounds._fields, derived, stated, strict=True):
        sizes = list(zip(given.shape, shape, strict=False))
        fits = given.ndim == len(shape) and all(n == 1 or (n == m and i not in axes) for i, (n, m) in enumerate(sizes))
        require(fits, f"its {what} has a shape {given.shape} that does not fit its groups")
        enough = bool((np.broadcast_to(needed, np.broadcast_shapes(needed.shape, given.shape)) <= given).all())
        require(enough, f"its {what} {given.max():.20g} is less than what follows, up to {needed.max():.20g}")
    return Bounds(*(decimals(each) for each in stated))
