"""A certificate's document: its fields as JSON holds them, and back. The kernel reads rows and promises."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from wellnormed._files import read_bytes
from wellnormed.lowering.stored import raw_tensor
from wellnormed.program.comparing import CIRCUMSTANCES, Comparison
from wellnormed.program.domain import DTYPES
from wellnormed.proof import Bounds, Row
from wellnormed.proof.arithmetic import Executed
from wellnormed.proof.decimals import Decimals
from wellnormed.proof.promises import Promise
from wellnormed.proof.reading import read
from wellnormed.proof.rows import Document, read_row

FORMAT_VERSION = 7
ARITHMETIC = "real numbers, tensors as stored"


def read_computed(path: Path, digests: dict[str, str]) -> dict[str, Tensor]:
    """Read the tensors beside a certificate, which must have the digests that it states."""
    if not digests:
        return {}
    try:
        tensors = load_tensors(read_bytes(path, "it is written with the certificate"))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if {name: raw_tensor(tensor).digest for name, tensor in tensors.items()} != digests:
        raise ValueError(f"{path} holds other tensors than were written")
    return tensors


def row_document(row: Row) -> dict[str, Any]:
    """Write a row as JSON holds it."""
    return {
        "name": row.name,
        "operation": row.operation,
        "inputs": list(row.inputs),
        "shape": list(row.shape),
        "constants": row.constants,
        "claims": [asdict(claim) for claim in row.claims],
        "reads": [list(axes) for axes in row.reads],
        "axes": list(row.axes),
        **({} if row.executed is None else {"executed": _executed_document(row.executed)}),
        **({} if row.change is None else {"change": _array_document(row.change)}),
        **{what: None if row.bounds is None else _array_document(getattr(row.bounds, what)) for what in Bounds._fields},
    }


def _executed_document(executed: Executed) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return {key: each for key, each in asdict(executed).items() if each is not None and (key, each) != ("beside", 0.0)}


def _array_document(array: Decimals) -> dict[str, Any]:
    return {"shape": list(array.shape), "values": [str(each) for each in array.reshape(-1)]}


def fields_of(document: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of a certificate from its document; the computed tensors are in another file."""
    read_document = read(Document, document, "the certificate")
    return {
        "rows": tuple(map(read_row, read_document.rows)),
        "promises": tuple(read(Promise, each, "the promise") for each in read_document.promises),
        "comparison": _comparison(read_document.comparison),
        **{key: getattr(read_document, key) for key in _AS_READ},
    }


_AS_READ = (
    "tensors", "fixed", "attention_logits", "each_sample", "execution", "unbounded_at", "lower_bound", "arithmetic",
    "versions", "original",
)  # fmt: skip


def _comparison(document: dict[str, Any] | None) -> Comparison | None:
    """Read the comparison that `certify` made; a file cannot put it into words of its own."""
    if document is None:
        return None
    comparison = read(Comparison, document, "the comparison")
    if comparison.arithmetic not in DTYPES or not {*CIRCUMSTANCES}.issuperset(comparison.circumstances):
        raise ValueError("it names circumstances of a comparison that are not known")
    return comparison
