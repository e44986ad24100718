"""Prove a certificate: every row follows from the rows before it, and every claim holds for the stored tensors."""

import decimal
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from wellnormed.checker import files, graph, reading
from wellnormed.checker.graph import Base, Bounds, Term, Value
from wellnormed.checker.products import margin_of
from wellnormed.checker.proofs import prove, read_claim
from wellnormed.checker.reading import UP, CheckError, decimal_number, field, integers, of_type, require, texts, word
from wellnormed.checker.row import Row, weight_of
from wellnormed.checker.rules import LARGEST, ROUNDED, RULES, domain_of, idle_ball

MOVES = ("pick", "times", "add", "constant", "idle_ball", "rounding")
_ENTRIES = (2**27, 2**30)
"""Of one row, and of all together. The checker keeps a position for each: more are too many for a machine."""
_ROUNDED = 1 + Decimal(2) ** -50
"""What a stated result may exceed what follows by: rounding to a float."""
_OTHER_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError, RecursionError)


@dataclass(frozen=True)
class Report:
    """What was proved, of the function that the rows describe, in real arithmetic."""

    inputs: tuple[str, ...]
    """For every certified variable its dtype, name, shape and domain; then the inputs that are fixed."""
    output: str
    lipschitz: Decimal
    """Largest RMS of a change of a group of the output, over the largest RMS of the change of a group of the inputs."""
    l2_lipschitz: Decimal | None
    """The same with Euclidean norms; None where groups of the inputs differ in size."""
    margin: Decimal | None
    """Largest change of the difference of two logits, over the RMS change of the inputs; None without such a row."""
    substitution: Decimal | None
    """What a group of the output changes by in RMS when any tokens are replaced, and what is fixed stays; or None."""
    attention_logits: dict[str, tuple[Decimal, ...]]
    """For every attention and head, what no logit exceeds."""
    rounds: dict[str, tuple[str, ...]]
    """Dtype -> the rows that round to it, which in real arithmetic are the identity."""
    rows: int
    claims: int
    unused: tuple[str, ...]
    """Stored tensors that no row names."""

    def __str__(self) -> str:
        lines = [f"for {each}" for each in self.inputs]
        lines += [
            f"{self.output} is L-Lipschitz with L = {self.lipschitz:.6g}, from the largest RMS to the largest RMS"
        ]
        lines += [] if self.l2_lipschitz is None else [f"and L = {self.l2_lipschitz:.6g} in Euclidean norms"]
        lines += [] if self.margin is None else [f"differences of its entries change by at most {self.margin:.6g}"]
        if self.substitution is not None:
            lines += [f"replacing any tokens changes a group of it by an RMS of at most {self.substitution:.6g}"]
        lines += [f"conversions to {dtype} count as the identity: {len(rows)}" for dtype, rows in self.rounds.items()]
        lines += [f"proved by {self.rows} rows and {self.claims} claims on stored tensors, in real arithmetic"]
        lines += ["of the program that these rows describe, without the rounding errors of its execution in floats"]
        lines += [f"no row uses {', '.join(map(word, self.unused))}"] if self.unused else []
        return "\n".join(lines)


def check_folder(folder: str | os.PathLike[str]) -> Report:
    """Prove `certificate.json` with the tensors of all safetensors files of a folder.

    Raises:
        CheckError: A file is not intact, or the certificate is not proved.
    """
    return check(*files.read_folder(Path(folder)))


def check(document: Any, tensors: Mapping[str, Any]) -> Report:
    """Prove a certificate.

    Args:
        document: The parsed JSON.
        tensors: Name -> NumPy array (or `files.Stored`) of every tensor that the rows name.

    Raises:
        CheckError: The certificate is not proved; says which part failed, and why.
    """
    try:
        with decimal.localcontext(UP):
            return _Check(document, tensors).run()
    except CheckError:
        raise
    except _OTHER_ERRORS as error:
        raise CheckError(f"the certificate is malformed: {error or type(error).__name__}") from error


class _Check:
    """A certificate at work: values and bases by name, claims that were proved, tensors that were used."""

    def __init__(self, document: Any, tensors: Mapping[str, Any]) -> None:
        self.document = of_type(document, dict, "the certificate")
        given = {str(name): each for name, each in dict(tensors).items()}
        self.stored = {n: t if isinstance(t, files.Stored) else files.stored(t) for n, t in given.items()}
        self.arrays: dict[str, np.ndarray] = {}
        self.values: dict[str, Value] = {}
        self.rows: list[Row] = []
        self.proved: set[str] = set()
        self.rounded: dict[str, str] = {}

    def tensor(self, name: Any) -> np.ndarray:
        """A stored tensor, which must be finite."""
        require(of_type(name, str, "the name of a tensor") in self.stored, f"there is no stored tensor {name!r}")
        if name not in self.arrays:
            array = self.stored[name].array()
            require(
                array.size > 0 and bool(np.isfinite(array).all()), f"{word(name)} is empty or has entries not finite"
            )
            exact = array.dtype != np.int64 or bool((abs(array) < 2**53).all())
            require(exact, f"{word(name)} has integers that float64 does not hold")
            self.arrays[name] = array
        return self.arrays[name]

    def run(self) -> Report:
        """Prove everything."""
        document = self.document
        require(type(document.get("format")) is int and document["format"] == 4, "format must be 4")
        require(document.get("arithmetic") == "real numbers, tensors as stored", "the arithmetic is unknown")
        for key in ("tensors", "computed"):
            for name, digest in of_type(document.get(key, {}), dict, key).items():
                require(name in self.stored, f"there is no stored tensor {name!r}")
                require(
                    self.stored[name].digest == digest, f"{word(name)} is not the certified tensor: its SHA-256 differs"
                )
        rows = of_type(field(document, "rows", "the certificate"), list, "rows")
        require(len(rows) > 0, "there are no rows")
        entries = [math.prod(integers(field(row, "shape", "a row"), "shape", 1)) for row in rows]
        few = max(entries) <= _ENTRIES[0] and sum(entries) <= _ENTRIES[1]
        require(few, f"a row has {max(entries)} entries, all rows {sum(entries)}, which are too many")
        for number, row in enumerate(rows):
            name = of_type(field(row, "name", f"row {number}"), str, "the name of a row")
            require(name.isprintable(), f"the name {name!r} cannot be printed")
            try:
                self._row(name, row, last=number == len(rows) - 1)
            except _OTHER_ERRORS as error:
                raise CheckError(f"row {number} ({word(name)}): {error or type(error).__name__}") from error
        return self._report(len(rows))

    def _row(self, name: str, row: dict[str, Any], last: bool) -> None:
        require(name not in self.values, "another row has this name")
        operation = of_type(field(row, "operation", "the row"), str, "operation")
        require((operation == "output") == last, "the last row, and no other, is the output")
        names = texts(field(row, "inputs", "the row"), "inputs")
        for each in names:
            require(each in self.values, f"its input {each!r} is no earlier row")
        inputs = [self.values[each] for each in names]
        shape = integers(field(row, "shape", "the row"), "shape", 1)
        constants = of_type(field(row, "constants", "the row"), dict, "constants")
        axes, *reads = (
            integers(each, "axes or reads")
            for each in [field(row, "axes", "the row"), *of_type(field(row, "reads", "the row"), list, "reads")]
        )
        claims = [read_claim(each) for each in of_type(field(row, "claims", "the row"), list, "claims")]
        if operation in MOVES:
            bare = not (axes or reads or claims) and all(row.get(key) is None for key in Bounds._fields)
            require(bare, "a move has no bounds, axes, reads or claims of its own")
            value = self._move(name, operation, inputs, shape, constants)
            require(value.shape == shape, f"its shape must be {value.shape}")
            self.values[name] = Value(name, shape, value.terms)
            return
        require(operation in RULES, f"nothing is known of the operation {operation!r}")
        require(len(reads) == len(inputs), "it must say for every input which groups it reads")
        for own, whole in [(axes, shape), *((r, x.shape) for r, x in zip(reads, inputs, strict=True))]:
            require(list(own) == sorted({*own}) and max(own, default=-1) < len(whole), f"{own} are no axes of {whole}")
        gathered = [graph.gather(x, read) for x, read in zip(inputs, reads, strict=True)]
        step = Row(name, operation, inputs, shape, constants, claims, reads, axes, self.tensor, gathered)
        derived, stated = RULES[operation](step), self._stated(row, shape, axes)
        for claim in claims:
            if repr(claim) not in self.proved:
                prove(claim, self.tensor)
                self.proved.add(repr(claim))
        for what, needed, given in zip(Bounds._fields, derived, stated, strict=True):
            enough = bool((np.broadcast_to(needed, np.broadcast_shapes(needed.shape, given.shape)) <= given).all())
            require(enough, f"its {what} {given.max():.20g} is less than what follows, up to {needed.max():.20g}")
        base = Base(name, shape, axes, stated, step)
        if operation == "linear" and constants["parts"] > 1:
            self._cut(base)
        self.rows.append(step)
        self.output = stated
        self.values[name] = Value(name, shape, (Term(base, base.order),))

    def _move(self, name: str, operation: str, inputs: list[Value], shape: tuple[int, ...], c: dict[str, Any]) -> Value:
        if operation == "constant":
            require(not inputs and ("tensor" in c) != ("number" in c), "a constant is a tensor or a number")
            content = self.tensor(c["tensor"]) if "tensor" in c else np.array(reading.number(c["number"], "number"))
            index = np.arange(content.size).reshape(content.shape)
            return Value(name, content.shape, (Term(content.astype(float).reshape(-1), index),))
        if operation == "add":
            require(len(inputs) > 0, "it adds nothing")
            return graph.add(inputs, name, shape)
        require(len(inputs) == 1, f"it has {len(inputs)} inputs instead of 1")
        if operation == "idle_ball":
            idle_ball(inputs[0], c)
            return inputs[0]
        if operation == "rounding":
            known = c.keys() == {"dtype"} and c["dtype"] in ROUNDED
            require(
                known, f"it rounds to {str(c.get('dtype'))[:60]!r}; only {', '.join(ROUNDED)} count as the identity"
            )
            self.rounded[name] = c["dtype"]
            return graph.rounded(inputs[0], name)
        if operation == "times":
            return graph.times(inputs[0], name, shape, c, self.tensor)
        return graph.pick(inputs[0], name, shape, c, self.tensor)

    def _stated(self, row: dict[str, Any], shape: tuple[int, ...], axes: tuple[int, ...]) -> Bounds:
        """The bounds that the row states."""
        arrays = []
        for what in Bounds._fields:
            given = field(row, what, "the row")
            own = integers(field(given, "shape", what), what, 1)
            values = [decimal_number(each, what) for each in of_type(field(given, "values", what), list, what)]
            fits = len(own) == len(shape) and all(
                n == 1 or (n == m and axis not in axes) for axis, (n, m) in enumerate(zip(own, shape, strict=True))
            )
            require(
                fits and len(values) == math.prod(own), f"its {what} has a shape {own} that does not fit its groups"
            )
            array = np.empty(len(values), dtype=object)
            array[:] = values
            arrays.append(array.reshape(own))
        return Bounds(*arrays)

    def _cut(self, cut: Base) -> None:
        """Lend the bounds of equal parts of the outputs of a linear row to that row, whose name is before the slash."""
        name, _, parts = cut.name.rpartition("/")
        require(name in self.values and parts == str(cut.shape[-2]), "its name must be that of a row, /, and its parts")
        base, own = self.values[name].terms[0].base, cut.row
        if not isinstance(base, Base) or base.name != name:
            raise CheckError(f"{word(name)} is no row that computes")
        whole = base.row
        same = (
            whole.operation == "linear" and whole.inputs[0] is own.inputs[0] and whole.reads == own.reads
            and weight_of(whole) == weight_of(own) and whole.constants["parts"] == 1
            and [claim.tensors for claim in whole.claims] == [claim.tensors for claim in own.claims]
        )  # fmt: skip
        require(same, f"it is not the map of {word(name)}, cut into parts")
        least = (np.minimum(a, b[..., None]) for a, b in zip(cut.bounds, base.bounds, strict=True))
        base.cuts[cut.shape[-2]] = Base(cut.name, cut.shape, cut.axes, Bounds(*least), own)

    def _report(self, count: int) -> Report:
        inputs, output = [row for row in self.rows if row.operation == "input"], self.rows[-1]
        require(len(inputs) > 0, "there is no input")
        gain = self.output.gain.max()
        sizes = {row.entries() for row in inputs}
        lipschitz = self._result("lipschitz", gain, output.entries())
        l2 = None
        if len(sizes) == 1:
            l2 = self._result("l2_lipschitz", gain, sizes.pop())
        else:
            require(self.document.get("l2_lipschitz") is None, "l2_lipschitz must be null: groups of inputs differ")
        stated = of_type(self.document.get("attention_logits", {}), dict, "attention_logits")
        known = {row.name: row.logits for row in self.rows if row.logits is not None}
        require(stated.keys() == known.keys(), "attention_logits must name the rows of attention")
        logits = {}
        for name, needed in known.items():
            own = tuple(decimal_number(each, name) for each in of_type(stated[name], list, "attention_logits"))
            enough = len(own) == len(needed) and all(a >= b for a, b in zip(own, needed, strict=True))
            require(enough, f"the attention_logits of {word(name)} are less than what follows")
            logits[name] = own
        margins = [row for row in self.rows if row.operation == "margin"]
        require(len(margins) < 2, "there are two rows of margins")
        margin = max((margin_of(row, output.inputs[0]) for row in margins), default=None)
        fixed = texts(self.document.get("fixed", []), "fixed")
        require(set(fixed) <= self.stored.keys(), "an input that it fixes is not stored")
        unused = tuple(sorted(self.stored.keys() - self.arrays.keys() - {*fixed}))
        distances = [Decimal(row.claims[1].values[0]) / _root_down(row.entries()) for row in inputs if row.claims]
        most = 2 * self.output.radius.max() / _root_down(output.entries())
        substitution = min(lipschitz * max(distances), most) if distances else None
        rounds: dict[str, tuple[str, ...]] = {}
        for name, dtype in self.rounded.items():
            rounds[dtype] = (*rounds.get(dtype, ()), name)
        domains = (
            *(_domain(row) for row in inputs),
            *(f"{word(name)} as stored, lookups apart" for name in fixed),
        )
        shown = f"{_shown(output)}, in {_groups(output)},"
        return Report(
            domains, shown, lipschitz, l2, margin, substitution, logits, rounds, count, len(self.proved), unused
        )

    def _result(self, key: str, gain: Decimal, entries: int) -> Decimal:
        """What the document states for `gain / sqrt(entries)`; not less, and not more by more than a rounding."""
        stated = decimal_number(self.document.get(key), key)
        low, high = (
            decimal.Context(200, way, decimal.MIN_EMIN, decimal.MAX_EMAX) for way in ("ROUND_FLOOR", "ROUND_CEILING")
        )
        enough = low.multiply(low.multiply(stated, stated), entries) >= high.multiply(gain, gain)
        needed = gain / _root_down(entries)
        require(enough and stated <= needed * _ROUNDED, f"{key}={stated:.20g} is not what follows, {needed:.20g}")
        return stated


def _root_down(entries: int) -> Decimal:
    return UP.next_minus(UP.sqrt(Decimal(entries)))


def _shown(row: Row) -> str:
    return f"{word(row.name)} of shape {row.shape}"


def _domain(row: Row) -> str:
    """The inputs of a row, in words, from its numbers."""
    (box, radius), dtype = domain_of(row), row.constants["dtype"]
    if box is None:
        words = f"RMS <= {float(radius)}"
    else:
        whole = box[0] <= -LARGEST[dtype] and LARGEST[dtype] <= box[1]
        words = (
            "any finite entries (executed, large ones may overflow)" if whole else f"entries from {box[0]} to {box[1]}"
        )
    looked_up = f", rows of {word(row.claims[0].tensors[0])} among them" if row.claims else ""
    return f"{dtype} {_shown(row)} with {words} in {_groups(row)}{looked_up}"


def _groups(row: Row) -> str:
    if row.axes == (len(row.shape) - 1,):
        return f"every vector of {row.shape[-1]} entries"
    samples = row.axes == tuple(range(1, len(row.shape)))
    return f"every sample of {row.entries()} entries" if samples else f"every group along the axes {row.axes}"
