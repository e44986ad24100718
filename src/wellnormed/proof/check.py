"""Prove a certificate again: add the rows of its document to a proof, and compare the results that it states."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from wellnormed.proof import files
from wellnormed.proof.arithmetic import LARGEST, UNBOUNDED, Arithmetic
from wellnormed.proof.decimals import assumed, between, root_down, rounding_up, shown
from wellnormed.proof.inference import Inference
from wellnormed.proof.products import margin_of
from wellnormed.proof.promises import Promise
from wellnormed.proof.proof import Proof
from wellnormed.proof.reading import CheckError, read, require, word
from wellnormed.proof.rows import Document, Row, read_row
from wellnormed.proof.rules import domain_of

_ROUNDED = 1 + Decimal(2) ** -50
"""A stated result may exceed the derived one by this factor, as it does when it was rounded to a float."""
_OTHER_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError, RecursionError)
"""The errors that a malformed document can cause; a `CheckError` is a `ValueError`."""


@dataclass(frozen=True)
class Report:
    """The proved statements about the function that the rows describe, in real arithmetic."""

    each_sample: bool
    """Whether the rows are of one sample, and a batch is that for each; if not, they are of all inputs at once."""
    inputs: tuple[str, ...]
    """For every certified variable its dtype, name, shape and domain; then the inputs that are fixed."""
    output: str
    """The result's name, shape and groups."""
    lipschitz: Decimal
    """Largest Euclidean norm of a change of a group of the output, over the largest of a change of a group of the
    inputs."""
    rms_lipschitz: Decimal
    """The same with root mean squares (RMS) in place of Euclidean norms."""
    margin: Decimal | None
    """Largest change of the difference of two logits, over the largest Euclidean norm of a change of a group of the
    inputs; None without such a row."""
    substitution: Decimal | None
    """Largest Euclidean norm of a change of a group of the output when tokens are replaced and fixed inputs stay; None
    without tokens."""
    attention_logits: dict[str, tuple[Decimal, ...]]
    """For every attention, a bound for each head on the size of its logits."""
    forward_error: Decimal | None
    """Largest Euclidean norm of the rounding errors of a group of the output; None if they have no bound."""
    change: Decimal | None
    """Largest Euclidean norm of the difference of a group of the output and of the original's, both as executed; None
    without an original, or without such a bound."""
    compared: str
    """The statement about the original; empty without one."""
    executed: str
    """How the rows are executed, in words; or, without a bound, the first row whose rounding errors have none."""
    rounds: dict[str, tuple[str, ...]]
    """Dtype -> the rows that round to it, which in real arithmetic are the identity."""
    promises: tuple[str, ...]
    """In words, the caps on parameters that take the place of entries: the proof holds for every weight within them."""
    rows: int
    claims: int
    unused: tuple[str, ...]
    """Stored tensors that no row names: the bound does not depend on them, or does through tensors computed from
    them."""

    def __str__(self) -> str:
        lines = ["each sample of a batch of any size:"] * self.each_sample + [f"for {each}" for each in self.inputs]
        constant, groups = shown(self.lipschitz), "a change of a group of the inputs"
        lines += [f"{self.output} is L-Lipschitz with L = {constant}, in the largest Euclidean norm of {groups}"]
        for bound, words in (
            (self.rms_lipschitz, "and L = {}, from the largest RMS to the largest RMS"),
            (self.margin, "differences of its entries change by at most {} times that norm"),
            (self.substitution, "replacing any tokens changes a group of it by at most {} in the Euclidean norm"),
        ):
            lines += [] if bound is None else [words.format(shown(bound))]
        lines += [f"conversions to {dtype} count as the identity: {len(rows)}" for dtype, rows in self.rounds.items()]
        if self.promises:
            lines.append(f"for every weight within these caps: {'; '.join(self.promises)}")
        lines += [f"proved by {self.rows} rows and {self.claims} claims on stored tensors, in real arithmetic"]
        lines += ["of the program that these rows describe"]
        lines += [of_rounding(self.executed, self.forward_error), *filter(None, [self.compared])]
        if self.unused:
            why = "the bound does not depend on them, or does through tensors that were computed from them"
            lines.append(f"no row reads {', '.join(map(word, self.unused))}: {why}")
        return "\n".join(lines)


def of_rounding(executed: str, error: Decimal | None) -> str:
    """The statement about rounding errors."""
    if error is None:
        return f"no bound of rounding: {executed}; executed, its results may differ from the real ones"
    return f"{executed}, the result is within {shown(error)} of the real one"


def arithmetic_of(rows: Iterable[Row], arithmetic: Arithmetic | None, unbounded_at: str) -> str:
    """How rows are executed, in words, or the row whose rounding errors have no bound."""
    rows = list(rows)
    if arithmetic is None:
        return "left out as asked for"
    if unbounded_at:
        return ", ".join([word(unbounded_at), *(word(row.operation) for row in rows if row.name == unbounded_at)])
    dtypes = dict.fromkeys(row.executed.dtype for row in rows if row.executed is not None)
    return f"executed in {' and '.join(dtypes) or 'any floats'}, {arithmetic}"


def change_of(rows: Sequence[Row], arithmetic: Arithmetic | None, what: str = "output") -> Decimal | None:
    """How far the results of a row are from the original's: from both executed ones, or in real arithmetic.

    None without such a row, without an original, or without a bound.
    """
    row = next((row for row in rows if row.operation == what), None)
    if row is None or row.bounds is None or row.change is None:
        return None
    with rounding_up():
        change = row.change.max() + (row.bounds.error.max() if arithmetic else 0)
    return None if change >= UNBOUNDED else change


def of_change(rows: Sequence[Row], arithmetic: Arithmetic | None) -> str:
    """The statement about the original; empty without one."""
    if rows[-1].change is None:
        return ""
    if (change := change_of(rows, arithmetic)) is None:
        unbounded = [row.name for row in rows if row.change is not None and (row.change >= UNBOUNDED).any()]
        return f"no bound of the change: {', '.join(map(word, unbounded[:1])) or 'rounding errors have none'}"
    how = "in real arithmetic"
    if arithmetic:
        how = f"{arithmetic_of(rows, arithmetic, '')}, rounding errors of both counted"
    return f"{how}, the result and that of the original differ by at most {shown(change)}"


def check(certificate: Any, tensors: Mapping[str, Any] | None = None) -> Report:
    """Prove a certificate.

    Args:
        certificate: The path of a folder, whose `certificate.json` is proved with the tensors of all its safetensors
            files; or the parsed JSON of such a file.
        tensors: With JSON, name -> NumPy array (or `files.Stored`) of every tensor that the rows name.

    Raises:
        CheckError: The certificate is not proved, or a file is not intact; the message names the part that failed, and
            the reason.
    """
    if isinstance(certificate, str | os.PathLike):
        require(tensors is None, "a folder has its tensors; pass it alone, or the parsed JSON and tensors")
        return check(*files.read_folder(Path(certificate)))
    where = ""
    try:
        document = read(Document, certificate, "the certificate")
        proof = Proof(tensors, document.execution)
        for name, digest in [*document.tensors.items(), *document.computed.items()]:
            if name not in proof.stored:  # as in a file that has a tied tensor under another of its names
                found = next((each for each in proof.stored.values() if each.digest == digest), None)
                require(found is not None, f"there is no stored tensor {name!r}, nor one of its digest")
                proof.store(name, found)
            same = proof.stored[name].digest == digest
            require(same, f"{word(name)} is not the certified tensor: its SHA-256 differs")
        for promise in document.promises:
            proof.promise(read(Promise, promise, "the promise"))
        if document.original is not None:
            for name in document.tensors.keys() - document.original.keys():  # the original has the same tensor
                given = proof.stored.pop(f"original/{name}", proof.stored[name])
                same = given.digest == document.tensors[name]
                require(same, f"{word(f'original/{name}')} is not the certified tensor: its SHA-256 differs")
            proof.compare(document.original)
        for number, content in enumerate(document.rows):
            where = f"row {number}: "
            row = read_row(content)
            where = f"row {number} ({word(row.name)}, {word(row.operation)}): "
            proof.add(row)
        where = ""
        return conclude(document, proof)
    except _OTHER_ERRORS as error:
        raise CheckError(f"{where}{error or type(error).__name__}") from error


def conclude(certificate: Document, proof: Proof) -> Report:
    """Report the results of a proof, which must be those that the certificate states.

    Raises:
        CheckError: The certificate states another result, or the last row is no output.
    """
    with rounding_up():
        rows, last = proof.inferences, next(reversed(proof.rows.values()), None)
        if last is None or last.operation != "output" or last.bounds is None:
            raise CheckError("the last row is not the output")
        output, gain, inputs = rows[-1], last.bounds.gain.max(), [row for row in rows if row.operation == "input"]
        require(len(inputs) > 0, "there is no input")
        # gains are over the largest RMS of a change d of n entries, and |d| / sqrt(n) is at most |d| / sqrt(least n)
        smallest = min(row.entries() for row in inputs)
        _require_result("lipschitz", certificate.lipschitz, gain, smallest)
        _require_result("rms_lipschitz", certificate.rms_lipschitz, gain, output.entries())
        margins = [row for row in rows if row.operation == "margin"]
        distances = [Decimal(row.claims[1].values[0]) / root_down(row.entries()) for row in inputs if row.claims]
        margin = max((margin_of(row, output.inputs[0]) for row in margins), default=None)
        others = [] if proof.other is None else proof.other.inferences
        _ = [margin_of(row, others[-1].inputs[0]) for row in others if row.operation == "margin"]
        fixed, fault = certificate.fixed, proof.values[last.name].fault
        require(proof.arithmetic == certificate.execution, "it is of another arithmetic")
        require(fault == certificate.unbounded_at, f"rounding errors have no bound at {word(fault)!r} first")
        require(set(fixed) <= proof.stored.keys(), "an input that it fixes is not stored")
        named = proof.arrays.keys() | proof.promises.keys() | {*fixed}
        read = {id(each) for name, each in proof.stored.items() if name in named}  # one tensor may have several names
        rounds: dict[str, tuple[str, ...]] = {}
        for row in (each for each in proof.rows.values() if each.operation == "rounding"):
            rounds[row.constants["dtype"]] = (*rounds.get(row.constants["dtype"], ()), row.name)
        return Report(
            each_sample=certificate.each_sample,
            inputs=(
                *map(_domain, inputs),
                *(f"{word(name)} as stored, lookups apart" for name in fixed),
            ),
            output=f"{word(output.name)} of shape {output.shape}, in {_groups(output)},",
            lipschitz=certificate.lipschitz,
            rms_lipschitz=certificate.rms_lipschitz,
            margin=None if margin is None else margin / root_down(smallest),
            substitution=min(gain * max(distances), 2 * last.bounds.radius.max()) if distances else None,
            attention_logits=_logits(certificate, rows),
            forward_error=None if fault else last.bounds.error.max(),
            change=change_of([*proof.rows.values()], proof.arithmetic),
            compared=of_change([*proof.rows.values()], proof.arithmetic),
            executed=arithmetic_of(proof.rows.values(), proof.arithmetic, fault),
            rounds=rounds,
            promises=tuple(map(str, proof.promises.values())),
            rows=len(proof.rows),
            claims=len(proof.proved),
            unused=tuple(sorted(name for name, each in proof.stored.items() if id(each) not in read)),
        )


def _require_result(key: str, stated: Decimal, gain: Decimal, entries: int) -> None:
    """Refuse a stated result that is less than `gain / sqrt(entries)`, or exceeds it by more than a rounding."""
    derived = gain / root_down(entries)
    require(derived <= stated <= derived * _ROUNDED, f"{key}={stated:.20g} is not what follows, {derived:.20g}")


def _logits(certificate: Document, rows: list[Inference]) -> dict[str, tuple[Decimal, ...]]:
    """Return the stated bounds of the logits of every attention, none of which may be less than the derived one."""
    stated = certificate.attention_logits
    derived = {row.name: row.logits for row in rows if row.logits is not None}
    require(stated.keys() == derived.keys(), "attention_logits must name the rows of attention")
    for name, least in derived.items():
        enough = len(stated[name]) == len(least) and all(a >= b for a, b in zip(stated[name], least, strict=True))
        require(enough, f"the attention_logits of {word(name)} are less than what follows")
    return stated


def _domain(row: Inference) -> str:
    """The domain of an input, in words, from its numbers."""
    dtype, limits = row.constants["dtype"], [row.constants[key] for key in ("radius", "low", "high")]
    box, radius = domain_of(*limits)
    if box is None:
        words = f"RMS <= {assumed(float(radius))}"
    elif box[0] <= -LARGEST[dtype] and LARGEST[dtype] <= box[1]:
        words = "any finite entries (executed, large ones may overflow)"
    else:
        words = f"entries {between(*box)}"
    looked_up = f", rows of {word(row.claims[0].tensors[0])} among them" if row.claims else ""
    return f"{dtype} {word(row.name)} of shape {row.shape} with {words} in {_groups(row)}{looked_up}"


def _groups(row: Inference) -> str:
    """The groups of a row's result, in words."""
    if row.axes == (len(row.shape) - 1,):
        return f"every vector of {row.shape[-1]} entries"
    samples = row.axes == tuple(range(1, len(row.shape)))
    return f"every sample of {row.entries()} entries" if samples else f"every group along the axes {row.axes}"
