"""Prove a certificate again: add the rows of its document to a proof, and compare the results that it states."""

import decimal
import os
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from wellnormed.proof import files
from wellnormed.proof.decimals import assumed, between, decimals, root_down, rounding_up, shown
from wellnormed.proof.inference import Inference
from wellnormed.proof.products import margin_of
from wellnormed.proof.promises import read_promise
from wellnormed.proof.proof import Proof
from wellnormed.proof.reading import CheckError, decimal_number, field, integers, of_type, require, texts, word
from wellnormed.proof.rows import Bounds, Claim, Row
from wellnormed.proof.rules import LARGEST, domain_of

_ROUNDED = 1 + Decimal(2) ** -50
"""A stated result may exceed the derived one by this factor, as it does when it was rounded to a float."""
_OTHER_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError, RecursionError)
"""The errors that a malformed document can cause besides a `CheckError`."""


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
    """Largest RMS of a change of a group of the output, over the largest RMS of the change of a group of the inputs."""
    l2_lipschitz: Decimal | None
    """The same with Euclidean norms; None where groups of the inputs differ in size."""
    margin: Decimal | None
    """Largest change of the difference of two logits, over the RMS change of the inputs; None without such a row."""
    substitution: Decimal | None
    """Largest RMS change of a group of the output when tokens are replaced and fixed inputs stay; None without tokens.
    """
    attention_logits: dict[str, tuple[Decimal, ...]]
    """For every attention, a bound for each head on the size of its logits."""
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
        lines = ["each sample of a batch of any size:"] if self.each_sample else []
        lines += [f"for {each}" for each in self.inputs]
        constant = f"L = {shown(self.lipschitz)}"
        lines += [f"{self.output} is L-Lipschitz with {constant}, from the largest RMS to the largest RMS"]
        for bound, words in (
            (self.l2_lipschitz, "and L = {} in Euclidean norms"),
            (self.margin, "differences of its entries change by at most {}"),
            (self.substitution, "replacing any tokens changes a group of it by an RMS of at most {}"),
        ):
            lines += [] if bound is None else [words.format(shown(bound))]
        lines += [f"conversions to {dtype} count as the identity: {len(rows)}" for dtype, rows in self.rounds.items()]
        if self.promises:
            lines.append(f"for every weight within these caps: {'; '.join(self.promises)}")
        lines += [f"proved by {self.rows} rows and {self.claims} claims on stored tensors, in real arithmetic"]
        lines += ["of the program that these rows describe, without the rounding errors of its execution in floats"]
        if self.unused:
            why = "the bound does not depend on them, or does through tensors that were computed from them"
            lines.append(f"no row reads {', '.join(map(word, self.unused))}: {why}")
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
        document: The parsed JSON of its file.
        tensors: Name -> NumPy array (or `files.Stored`) of every tensor that the rows name.

    Raises:
        CheckError: The certificate is not proved; the message names the part that failed, and the reason.
    """
    try:
        proof = Proof(dict(tensors))
        _require_intact(of_type(document, dict, "the certificate"), proof)
        for each in of_type(document.get("promises", []), list, "promises"):
            proof.promise(read_promise(each))
        for number, row in enumerate(of_type(field(document, "rows", "the certificate"), list, "rows")):
            name = of_type(field(row, "name", f"row {number}"), str, "the name of a row")
            try:
                proof.add(read_row(row))
            except _OTHER_ERRORS as error:
                raise CheckError(f"row {number} ({word(name)}): {error or type(error).__name__}") from error
        return conclude(document, proof)
    except CheckError:
        raise
    except _OTHER_ERRORS as error:
        raise CheckError(f"the certificate is malformed: {error or type(error).__name__}") from error


def _require_intact(document: dict[str, Any], proof: Proof) -> None:
    """Refuse another format, and tensors that are not those of the certificate."""
    require(type(document.get("format")) is int and document["format"] == 6, "format must be 6")
    require(document.get("arithmetic") == "real numbers, tensors as stored", "the arithmetic is unknown")
    for key in ("tensors", "computed"):
        for name, digest in of_type(document.get(key, {}), dict, key).items():
            require(name in proof.stored, f"there is no stored tensor {name!r}")
            same = proof.stored[name].digest == digest
            require(same, f"{word(name)} is not the certified tensor: its SHA-256 differs")


def read_row(document: Any) -> Row:
    """Read a row of a document, whose fields have their types from here on; those of its constants belong to rules."""
    name, operation = (of_type(field(document, key, "the row"), str, key) for key in ("name", "operation"))
    constants = of_type(field(document, "constants", "the row"), dict, "constants")
    inputs = texts(_list(document, "inputs"), "inputs")
    shape, axes = integers(_list(document, "shape"), "shape", 1), integers(_list(document, "axes"), "axes")
    reads = tuple(integers(each, "reads") for each in _list(document, "reads"))
    claims = tuple(map(_claim, _list(document, "claims")))
    return Row(name, operation, inputs, shape, constants, claims, reads, axes, _bounds(document))


def _claim(document: Any) -> Claim:
    measure, constants = (field(document, key, "a claim") for key in ("measure", "constants"))
    return Claim(measure, _list(document, "tensors"), _list(document, "values"), constants)


def _list(document: Any, key: str) -> tuple[Any, ...]:
    return tuple(of_type(field(document, key, "a row or claim"), list, key))


def _bounds(document: dict[str, Any]) -> Bounds | None:
    """Read the bounds that a row states, if it states any; a move has none."""
    arrays = [field(document, key, "the row") for key in Bounds._fields]
    return None if all(each is None for each in arrays) else Bounds(*map(_array, arrays, Bounds._fields))


def _array(document: Any, what: str) -> Any:
    """Read an array of decimals that are not negative."""
    values = [decimal_number(each, what) for each in of_type(field(document, "values", what), list, what)]
    return decimals(values).reshape(integers(field(document, "shape", what), what, 1))


def conclude(document: dict[str, Any], proof: Proof) -> Report:
    """Report the results of a proof, which must be those that the document states.

    Raises:
        CheckError: The document states another result, or the last row is no output.
    """
    with rounding_up():
        rows, last = proof.inferences, next(reversed(proof.rows.values()), None)
        if last is None or last.operation != "output" or last.bounds is None:
            raise CheckError("the last row is not the output")
        output, gain, inputs = rows[-1], last.bounds.gain.max(), [row for row in rows if row.operation == "input"]
        require(len(inputs) > 0, "there is no input")
        lipschitz, sizes = _result(document, "lipschitz", gain, output.entries()), {row.entries() for row in inputs}
        l2 = _result(document, "l2_lipschitz", gain, sizes.pop()) if len(sizes) == 1 else None
        null = l2 is not None or document.get("l2_lipschitz") is None
        require(null, "l2_lipschitz must be null: groups of inputs differ")
        margins = [row for row in rows if row.operation == "margin"]
        require(len(margins) < 2, "there are two rows of margins")
        distances = [Decimal(row.claims[1].values[0]) / root_down(row.entries()) for row in inputs if row.claims]
        twice = 2 * last.bounds.radius.max() / root_down(output.entries())
        fixed = texts(document.get("fixed", []), "fixed")
        require(set(fixed) <= proof.stored.keys(), "an input that it fixes is not stored")
        rounds: dict[str, tuple[str, ...]] = {}
        for row in proof.rows.values():
            if row.operation == "rounding":
                rounds[row.constants["dtype"]] = (*rounds.get(row.constants["dtype"], ()), row.name)
        return Report(
            each_sample=of_type(field(document, "each_sample", "the certificate"), bool, "each_sample"),
            inputs=(*map(_domain, inputs), *(f"{word(name)} as stored, lookups apart" for name in fixed)),
            output=f"{_shown(output)}, in {_groups(output)},",
            lipschitz=lipschitz,
            l2_lipschitz=l2,
            margin=max((margin_of(row, output.inputs[0]) for row in margins), default=None),
            substitution=min(lipschitz * max(distances), twice) if distances else None,
            attention_logits=_logits(document, rows),
            rounds=rounds,
            promises=tuple(map(str, proof.promises.values())),
            rows=len(proof.rows),
            claims=len(proof.proved),
            unused=tuple(sorted(proof.stored.keys() - proof.arrays.keys() - proof.promises.keys() - {*fixed})),
        )


def _result(document: dict[str, Any], key: str, gain: Decimal, entries: int) -> Decimal:
    """Return the result that the document states, if it is `gain / sqrt(entries)` or exceeds it by a rounding only."""
    stated = decimal_number(document.get(key), key)
    low, high = (decimal.Context(200, way, decimal.MIN_EMIN, decimal.MAX_EMAX) for way in _DIRECTIONS)
    enough = low.multiply(low.multiply(stated, stated), entries) >= high.multiply(gain, gain)
    derived = gain / root_down(entries)
    require(enough and stated <= derived * _ROUNDED, f"{key}={stated:.20g} is not what follows, {derived:.20g}")
    return stated


_DIRECTIONS = (decimal.ROUND_FLOOR, decimal.ROUND_CEILING)


def _logits(document: dict[str, Any], rows: list[Inference]) -> dict[str, tuple[Decimal, ...]]:
    """Return the bounds that the document states for the logits of every attention; none is less than the derived."""
    stated = of_type(document.get("attention_logits", {}), dict, "attention_logits")
    derived = {row.name: row.logits for row in rows if row.logits is not None}
    require(stated.keys() == derived.keys(), "attention_logits must name the rows of attention")
    logits = {}
    for name, least in derived.items():
        heads = tuple(decimal_number(each, name) for each in of_type(stated[name], list, "attention_logits"))
        enough = len(heads) == len(least) and all(a >= b for a, b in zip(heads, least, strict=True))
        require(enough, f"the attention_logits of {word(name)} are less than what follows")
        logits[name] = heads
    return logits


def _shown(row: Inference) -> str:
    return f"{word(row.name)} of shape {row.shape}"


def _domain(row: Inference) -> str:
    """The domain of an input, in words, from its numbers."""
    (box, radius), dtype = domain_of(row), row.constants["dtype"]
    if box is None:
        words = f"RMS <= {assumed(float(radius))}"
    elif box[0] <= -LARGEST[dtype] and LARGEST[dtype] <= box[1]:
        words = "any finite entries (executed, large ones may overflow)"
    else:
        words = f"entries {between(*box)}"
    looked_up = f", rows of {word(row.claims[0].tensors[0])} among them" if row.claims else ""
    return f"{dtype} {_shown(row)} with {words} in {_groups(row)}{looked_up}"


def _groups(row: Inference) -> str:
    if row.axes == (len(row.shape) - 1,):
        return f"every vector of {row.shape[-1]} entries"
    samples = row.axes == tuple(range(1, len(row.shape)))
    return f"every sample of {row.entries()} entries" if samples else f"every group along the axes {row.axes}"
