"""Damaged certificates are refused, or prove the same line or a weaker true one.

What is accepted is derived again by the oracle, which shares no rule with the kernel. That claims on tensors are true
is the subject of `test_claims`.
"""

import copy
from decimal import Decimal
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns.oracle import derive
from tests.proof.documents import document_of
from tests.proof.models import small
from wellnormed.proof import Bounds, CheckError, Proof, check, functions
from wellnormed.proof.check import read_row
from wellnormed.proof.decimals import root_down, rounding_up

NAMES = ("mlp", "attention", "convolutions", "encoder", "mixing", "moves", "network")
FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
CLOSE = Decimal("1e-6")
"""The oracle rounds slopes to fewer digits, and doubles the margins for rounding."""
Document, Tensors, Path = dict[str, Any], dict[str, np.ndarray], tuple[Any, ...]


@cache
def _honest(name: str) -> tuple[Document, Tensors, str]:
    document, tensors = document_of(*small(name), joint=name == "network")
    return document, tensors, str(check(document, tensors))


def places(node: Any, path: Path = ()) -> list[Path]:
    """The places of all values in a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [place for key, each in items for place in [(*path, key), *places(each, (*path, key))]]


def at(node: Any, path: Path) -> Any:
    for key in path:
        node = node[key]
    return node


def number(document: Document, tensors: Tensors, data: st.DataObject) -> None:
    """A number becomes another one."""
    numbers = [p for p in places(document) if _numeric(at(document, p))]
    of_functions = [p for p in numbers if p[2:3] == ("constants",)]
    *way, key = data.draw(st.sampled_from(data.draw(st.sampled_from((numbers, of_functions)))))
    node, factor = at(document, tuple(way)), data.draw(st.sampled_from((0, -1, 0.5, 1 - 1e-6, 1 + 1e-6, 2, 10, 1e300)))
    kept = node[key]
    near = {int: lambda: kept + data.draw(st.sampled_from((-2, -1, 1, 2))), str: lambda: str(float(kept) * factor)}
    node[key] = near.get(type(kept), lambda: kept * factor)()


def _numeric(value: Any) -> bool:
    return type(value) in (int, float) or (
        isinstance(value, str) and value.replace(".", "", 1).replace("E", "").isdigit()
    )


def field(document: Document, tensors: Tensors, data: st.DataObject) -> None:
    """A field is left out, or has the content of another place."""
    every = places(document)
    *way, key = data.draw(st.sampled_from(every))
    node = at(document, tuple(way))
    if data.draw(st.booleans()):
        del node[key]
    else:
        node[key] = copy.deepcopy(at(document, data.draw(st.sampled_from(every))))


OF_OTHER_TYPES = (
    None, True, False, 0, -0.0, -1, 0.5, 5e-324, 1e400, float("nan"), 10**400, 2**63, "1", "-1", "NaN", "Infinity",
    "1E+99999999999999999999", "\x1b[2J", [], [[]], [[[[1]]]], {}, {"shape": [1], "values": ["1"]},
)  # fmt: skip


def retyped(document: Document, tensors: Tensors, data: st.DataObject) -> None:
    """A value has another type, alone or in a list or as a string, or stands beside a field that is unknown."""
    *way, key = data.draw(st.sampled_from(places(document)))
    node = at(document, tuple(way))
    kept, bad = node[key], data.draw(st.sampled_from(OF_OTHER_TYPES))
    kind = data.draw(st.sampled_from(("bad", "bad", "string", "list", "flag", "unknown")))
    if kind == "unknown" and isinstance(node, dict):
        node[data.draw(st.sampled_from(("note", "shape", "bounds", "Radius")))] = bad
    else:
        node[key] = {"string": str(kept), "list": [kept], "flag": bool(kept)}.get(kind, copy.deepcopy(bad))


def rows(document: Document, tensors: Tensors, data: st.DataObject) -> None:
    """A row is left out, doubled, moved, or exchanged in the inputs of a later one."""
    lines, kind = document["rows"], data.draw(st.sampled_from(("out", "double", "move", "input")))
    i, j = (data.draw(st.integers(0, len(lines) - 1)) for _ in "ij")
    if kind == "out":
        row = lines.pop(i)
        for each in lines[i:] if row["inputs"] and data.draw(st.booleans()) else ():
            each["inputs"] = [row["inputs"][0] if name == row["name"] else name for name in each["inputs"]]
    elif kind == "double":
        lines.insert(j, {**copy.deepcopy(lines[i]), "name": data.draw(st.sampled_from((lines[i]["name"], "new")))})
    elif kind == "move":
        lines.insert(j, lines.pop(i))
    elif lines[i]["inputs"]:
        lines[i]["inputs"][0] = lines[j]["name"]


def weights(document: Document, tensors: Tensors, data: st.DataObject) -> None:
    """A tensor has other entries, another shape, or the name of another."""
    name, other = (data.draw(st.sampled_from(sorted(tensors))) for _ in "ab")
    kind, kept = data.draw(st.sampled_from(("swap", "scale", "turn", "flip", "entry"))), tensors[name]
    factors = st.sampled_from((0.5, 1.5, -1.0, np.nan, np.inf))
    if kind == "swap":
        tensors[name], tensors[other] = tensors[other], kept
    elif kind == "entry":
        tensors[name] = kept.copy()
        with np.errstate(all="ignore"):
            tensors[name].reshape(-1)[0] = (kept.reshape(-1)[0] * 3 + 1).astype(kept.dtype)
    elif kind == "scale" and kept.dtype.kind == "f":
        tensors[name] = kept * kept.dtype.type(data.draw(factors))
    else:
        tensors[name] = np.ascontiguousarray(kept.T if kind == "turn" else kept[::-1])


def proof_of(document: Document, tensors: Tensors) -> Proof:
    proof = Proof(tensors)
    for row in document["rows"]:
        proof.add(read_row(row))
    return proof


def mend(document: Document, tensors: Tensors) -> None:
    """Drop the digests, derive all bounds anew, and state the results that follow from them, where any do."""
    document.update(tensors={}, computed={})
    for row in document["rows"]:
        row.update(dict.fromkeys(Bounds._fields))
    proof = proof_of(document, tensors)
    with rounding_up():
        gain = next(reversed(proof.rows.values())).bounds.gain.max()
        smallest = min(row.entries() for row in proof.inferences if row.operation == "input")
        document["lipschitz"] = str(gain / root_down(smallest))
        document["rms_lipschitz"] = str(gain / root_down(proof.inferences[-1].entries()))
    document["unbounded_at"] = next(reversed(proof.values.values())).fault
    document["attention_logits"] = {
        row.name: list(map(str, row.logits)) for row in proof.inferences if row.logits is not None
    }


def require_true(document: Document, tensors: Tensors) -> None:
    """Compare all bounds that were accepted with those of the oracle."""
    accepted = proof_of(document, tensors).rows
    certificate = SimpleNamespace(rows=tuple(accepted.values()), computed={}, promises=())
    for name, again in derive(certificate, {key: torch.from_numpy(each) for key, each in tensors.items()}).items():
        for what in again._fields:
            ours, theirs = np.broadcast_arrays(getattr(accepted[name].bounds, what), getattr(again, what))
            assert all(a >= b * (1 - CLOSE) for a, b in zip(ours.flat, theirs.flat, strict=True)), (name, what)


@pytest.mark.parametrize("damage", [number, field, retyped, rows, weights], ids=lambda damage: damage.__name__)
@FEW
@given(data=st.data())
def test_a_damaged_document_is_refused_or_true(damage: Any, data: st.DataObject) -> None:
    honest, tensors, line = _honest(data.draw(st.sampled_from(NAMES)))
    document, tensors = copy.deepcopy(honest), dict(tensors)
    damage(document, tensors, data)
    try:
        if data.draw(st.booleans()):
            mend(document, tensors)
        report = check(document, tensors)
    except CheckError as error:
        assert len(str(error)) > 10  # noqa: PT017
    except (KeyError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, StopIteration):
        with pytest.raises(CheckError):  # what mends the document stumbled; the kernel must not
            check(document, tensors)
    else:
        if str(report) != line:
            require_true(document, tensors)


def test_a_rule_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    document, tensors = (copy.deepcopy(each) for each in _honest("mlp")[:2])
    monkeypatch.setitem(functions.FUNCTIONS, "gelu", ("-0.12", "1.12", "1", "0", None))
    mend(document, tensors)
    check(document, tensors)
    with pytest.raises(AssertionError, match="gain"):
        require_true(document, tensors)
