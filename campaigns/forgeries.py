"""Edits that forge a certificate: of bytes, fields, orders, tensors and configs; each is drawn from a generator.

`follow` is what makes an edit strong: it states after it, for every row, exactly what the checker's own rules ask for,
and for every claim the number itself, so that only the edit can be wrong.
"""

import copy
import decimal
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.random import Generator

from campaigns import statements
from wellnormed.proof import Bounds, CheckError, Claim, Proof, Row, Term, Value, check
from wellnormed.proof import claims as proofs
from wellnormed.proof.decimals import UP, root_down
from wellnormed.proof.files import Stored, stored
from wellnormed.proof.moves import MOVES, moved

Document = dict[str, Any]
Tensors = dict[str, Stored]


@dataclass
class Draft:
    """A certificate that is being forged."""

    document: Document
    tensors: Tensors
    follow: bool = False
    """Whether all that depends on the edit is stated anew."""
    lowered: dict[tuple[str, str], str] = field(default_factory=dict)
    """Name of a row and of a bound -> factor on what follows for it."""

    @property
    def rows(self) -> list[Any]:
        return self.document["rows"]

    def mend(self) -> None:
        """State the digests of the tensors as they are."""
        self.document["tensors"] = {
            n: self.tensors[n].digest for n in self.document["tensors"] if n in self.tensors
        }  # fmt: skip


# What follows from an edit


_KNOWN: dict[str, list[float]] = {}


def honest(claim: Mapping[str, Any], tensors: Tensors, margin: bool = True) -> list[float]:
    """The numbers that a claim bounds; with a margin the least that was found to be proved, in steps of 2%."""
    key = json.dumps([claim["measure"], [tensors[n].digest for n in claim["tensors"]], claim.get("constants"), margin])
    if key not in _KNOWN:
        arrays = {n: tensors[n].array() for n in claim["tensors"]}
        wide = [statements.torch.from_numpy(a.astype(float)) for a in arrays.values()]
        values = statements.norms(claim["measure"], wide, claim.get("constants", {}))
        factors = (1 + 1e-12, 1 + 1e-10, 1 + 1e-8, 1 + 1e-6, *(1.02**i for i in range(1, 60))) if margin else (1.0,)
        for factor in factors:
            _KNOWN[key] = [factor * v for v in values]
            if not margin:
                break
            try:
                own = Claim(claim["measure"], claim["tensors"], _KNOWN[key], claim.get("constants", {}))
                proofs.prove(proofs.complete(own), arrays.__getitem__)
                break
            except CheckError:
                continue
    return list(_KNOWN[key])


class _Following(Proof):
    """A proof that believes every claim and bound: it writes into the document what it would have asked for."""

    def __init__(self, draft: Draft, margin: bool) -> None:
        super().__init__(draft.tensors)
        self.draft, self.margin = draft, margin

    def add(self, row: Row) -> Value:
        entry = next(each for each in self.draft.rows if each["name"] == row.name)
        for claim in entry["claims"]:
            factor = Decimal(self.draft.lowered.get((row.name, "claim"), "1"))
            claim["values"] = [float(Decimal(v) * factor) for v in honest(claim, self.stored, self.margin)]
        claims = tuple(replace(c, values=tuple(e["values"])) for c, e in zip(row.claims, entry["claims"], strict=True))
        if row.operation in MOVES:
            entry["shape"] = list(self._shape(row))
            return super().add(replace(row, claims=claims, shape=tuple(entry["shape"])))
        value = super().add(replace(row, claims=claims, bounds=None))
        base, derived = value.terms[0].base, self.rows[row.name].bounds
        with decimal.localcontext(UP):
            stated = [
                each * Decimal(self.draft.lowered.get((row.name, what), "1"))
                for what, each in zip(Bounds._fields, derived, strict=True)
            ]
        for what, each in zip(Bounds._fields, stated, strict=True):
            entry[what] = {"shape": list(each.shape), "values": [str(v) for v in each.reshape(-1)]}
        lowered = replace(base, bounds=Bounds(*stated), cuts=base.cuts, parts=base.parts)
        self.rows[row.name] = replace(self.rows[row.name], bounds=lowered.bounds)
        self.values[row.name] = Value(row.name, value.shape, (Term(lowered, lowered.order),))
        return self.values[row.name]

    def _shape(self, row: Row) -> tuple[int, ...]:
        """The shape that a move would have asked for, if it has as many entries as the one that is stated."""
        if math.prod(row.shape) > 2**27:
            raise CheckError("its entries are too many")
        inputs = [self.values[name] for name in row.inputs]
        return moved(row.operation, inputs, row.name, tuple(row.shape), row.constants, self.tensor).shape

    def _prove(self, claim: Claim) -> None:
        """Believed."""

    def state_results(self) -> None:
        """Write what follows for the whole into the document."""
        inputs, output = [row for row in self.inferences if row.operation == "input"], self.inferences[-1]
        gain, sizes = self.rows[output.name].bounds.gain.max(), {row.entries() for row in inputs}
        size, document = sizes.pop(), self.draft.document
        with decimal.localcontext(UP):
            for key, entries in (("lipschitz", output.entries()), ("l2_lipschitz", size)):
                document[key] = None if key[0:2] == "l2" and sizes else str(gain / root_down(entries))
            document["attention_logits"] = {
                row.name: [str(v * Decimal(self.draft.lowered.get((row.name, "logits"), "1"))) for v in row.logits]
                for row in self.inferences
                if row.logits is not None
            }


def follow(draft: Draft, margin: bool = True) -> None:
    """State in a draft what follows from its rows; a `CheckError` where the rules refuse them.

    Without `margin`, claims are the numbers themselves, which is less than can be proved.
    """
    following = _Following(draft, margin)

    def conclude(document: Document, proof: Proof) -> None:
        following.state_results()

    with (
        patch("wellnormed.proof.check.Proof", lambda *_: following),
        patch("wellnormed.proof.check._bounds", lambda *_: None),
        patch("wellnormed.proof.check.conclude", conclude),
    ):
        check(draft.document, draft.tensors)


# Edits of one draft

FACTORS = (0.5, 0.9, 0.999, 1 - 1e-6, 1 - 1e-9, 1 + 1e-9, 1.01, 2.0, 100.0, -1.0, 0.0, 1e-300, 1e300)
ODD: tuple[Any, ...] = (
    None, True, False, "", "x", "1", "-1", "NaN", "sNaN", "Infinity", "1e999999999999", "0E-999999999999999999", "1_0",
    "0x10", " 1", "\u0661", "\ud800", "a\nb", [], {}, [[]], [None], [1, "1"], -1, 0, 1, 2, 2.0, 1.5, 1e308, 5e-324,
    -0.0, 10**12, 2**40 - 1, 2**40, 2**63, -(2**63), 10**30, 10**400, math.nan, math.inf,
)  # fmt: skip


def pick(rng: Generator, things: Any) -> Any:
    """One of several, whatever they are."""
    things = list(things)
    if not things:
        raise LookupError("there is nothing of the kind to edit")
    return things[int(rng.integers(len(things)))]


def places(node: Any, path: tuple = ()) -> list[tuple]:
    """The places in a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [place for key, each in items for place in ((*path, key), *places(each, (*path, key)))]


def at(node: Any, path: tuple) -> Any:
    for key in path:
        node = node[key]
    return node


def changed(value: Any, rng: Generator) -> Any:
    """Another value in a place: near the one that is there, or of another kind."""
    if rng.random() < 0.35:
        return copy.deepcopy(pick(rng, ODD))
    if isinstance(value, bool):
        return pick(rng, (not value, int(value), str(value)))
    if isinstance(value, int):
        return pick(
            rng, (value + 1, value - 1, -value, 2 * value, float(value), str(value), value * 10**6, value + 0.5)
        )
    if isinstance(value, float):
        near = [math.nextafter(value, s) for s in (-math.inf, math.inf)]
        return pick(rng, (*near, value * pick(rng, FACTORS), str(value), [value], int(value)))
    if isinstance(value, str):
        try:
            number = Decimal(value)
        except ArithmeticError:
            return pick(rng, (value + "x", value[:-1], value.upper(), value + "/2", value[::-1]))
        near = [number.next_plus(), number.next_minus(), number * Decimal(pick(rng, FACTORS))]
        return pick(rng, (*map(str, near), f"{number:e}", "-" + value, value + "0" * 50, value + "e9", float(number)))
    if isinstance(value, list):
        return pick(rng, (value[::-1], value[:-1], [*value, *value[:1]], [value], value * 2, [*value, None]))
    return pick(
        rng, ({}, {**value, "more": 1}, list(value.items()), dict(list(value.items())[:-1])) if value else ({1: 2}, [])
    )


def fields(draft: Draft, rng: Generator) -> None:
    """One to three places of the document, dropped, changed, or nested deeply."""
    for _ in range(int(rng.integers(1, 4))):
        *way, key = pick(rng, places(draft.document))
        node, kind = at(draft.document, tuple(way)), rng.random()
        if kind < 0.1:
            del node[key]
        elif kind < 0.13:
            deep: Any = node[key]
            for _ in range(int(pick(rng, (10, 200, 3000)))):
                deep = [deep]
            node[key] = deep
        elif kind < 0.2 and isinstance(node, list):
            node.insert(int(rng.integers(len(node) + 1)), copy.deepcopy(node[key]))
        elif kind < 0.3:
            node[key] = copy.deepcopy(at(draft.document, pick(rng, places(draft.document))))
        else:
            node[key] = changed(node[key], rng)


def lowered(draft: Draft, rng: Generator) -> None:
    """One number of one row is less than what follows, and all that comes after is consistent."""
    row = pick(rng, [row for row in draft.rows if row["radius"] is not None])
    kinds = ["radius", "gain", "largest", *(["claim"] if row["claims"] else [])]
    kinds += ["logits"] if row["operation"] == "attention" else []
    draft.lowered[row["name"], pick(rng, kinds)] = pick(rng, ("0.5", "0.9", "0.99", "0.9999", "0.999999", "0", "1e-9"))
    draft.follow = True


def _rename(draft: Draft, old: str, new: str) -> None:
    for row in draft.rows:
        row["inputs"] = [new if each == old else each for each in row["inputs"]]


def orders(draft: Draft, rng: Generator) -> None:
    """Rows and what they refer to, in another order: moved, dropped, doubled, renamed, redirected."""
    rows, kind = draft.rows, int(rng.integers(9))
    i = int(rng.integers(len(rows)))
    row = rows[i]
    if kind == 0:
        j = int(rng.integers(len(rows)))
        rows[i], rows[j] = rows[j], rows[i]
    elif kind == 1:  # consumers take what it took
        if row["inputs"]:
            _rename(draft, row["name"], pick(rng, row["inputs"]))
        rows.pop(i)
    elif kind == 2:
        twin = copy.deepcopy(row)
        twin["name"] += pick(rng, ("#", "/2", ""))
        rows.insert(i + 1, twin)
        if rng.random() < 0.7 and (after := [r for r in rows[i + 2 :] if row["name"] in r["inputs"]]):
            later = pick(rng, after)
            later["inputs"] = [twin["name"] if each == row["name"] else each for each in later["inputs"]]
    elif kind == 3:
        new = pick(rng, (row["name"] + "x", pick(rng, rows)["name"], "output", row["name"] + "/2"))
        _rename(draft, row["name"], new)
        row["name"] = new
    elif kind == 4 and len(row["inputs"]) > 1:
        order = list(rng.permutation(len(row["inputs"])))
        row["inputs"] = [row["inputs"][j] for j in order]
        if rng.random() < 0.5 and len(row["reads"]) == len(order):
            row["reads"] = [row["reads"][j] for j in order]
    elif kind in (5, 6, 7) and row["inputs"]:  # to a row of the same shape, mostly
        j = int(rng.integers(len(row["inputs"])))
        shape = next((r["shape"] for r in rows if r["name"] == row["inputs"][j]), None)
        alike = [r["name"] for r in rows[:i] if r["shape"] == shape or rng.random() < 0.1]
        row["inputs"][j] = pick(rng, alike or [row["name"]])
    elif row["inputs"]:
        row["inputs"] = pick(rng, ([], row["inputs"] * 2, row["inputs"][:-1], [*row["inputs"], rows[0]["name"]]))


def constants(draft: Draft, rng: Generator) -> None:
    """A row's constants: numbers, sizes, functions, tables, flags."""
    row = pick(rng, [row for row in draft.rows if row["constants"]])
    key = pick(rng, row["constants"])
    value = row["constants"][key]
    if key == "function":
        row["constants"][key] = pick(rng, statements._FUNCTIONS)
        if rng.random() < 0.5:
            row["constants"]["numbers"] = [float(rng.normal()) for _ in range(int(rng.integers(4)))]
    elif key == "tables":
        table = pick(rng, range(len(value)))
        if isinstance(value[table], list):
            value[table][pick(rng, range(len(value[table])))] = int(rng.integers(-1, 9))
        else:
            value[table] = pick(rng, (0, -value[table], 1, value[table] * 2, pick(rng, row["shape"])))
            if rng.random() < 0.3:
                row["constants"]["offset"] = int(rng.integers(0, 40))
        if rng.random() < 0.3:
            i, j = (pick(rng, range(len(value))) for _ in "ab")
            value[i], value[j] = value[j], value[i]
    elif isinstance(value, list) and value and all(type(each) is int for each in value):
        value[pick(rng, range(len(value)))] += pick(rng, (-1, 1, 2))
    elif isinstance(value, float):
        row["constants"][key] = value * pick(rng, FACTORS)
    elif isinstance(value, str):
        row["constants"][key] = pick(rng, draft.tensors)
    elif isinstance(value, int):
        row["constants"][key] = pick(rng, (value + 1, max(1, value - 1), 2 * value, 0, value == 1))
    if rng.random() < 0.1:
        extra = {"adjoint": True, "padding": [1, 1], "divisor": 2.0, "parts": 2, "transposed": True, "positions": "x"}
        name = pick(rng, extra)
        row["constants"][name] = extra[name]


def claims(draft: Draft, rng: Generator) -> None:
    """Which tensors a row's claims speak of, how cut, and whether they are there."""
    row = pick(rng, [row for row in draft.rows if row["claims"]])
    claim, kind = pick(rng, row["claims"]), int(rng.integers(8))
    if kind < 3:
        shape = draft.tensors[claim["tensors"][0]].shape
        alike = [n for n, t in draft.tensors.items() if t.shape in (shape, shape[::-1]) or rng.random() < 0.2]
        claim["tensors"][pick(rng, range(len(claim["tensors"])))] = pick(rng, alike)
    elif kind == 3:
        row["claims"] = pick(rng, (row["claims"][::-1], row["claims"][:-1], row["claims"][:1] * 2, row["claims"][1:]))
    elif kind == 4:
        claim["measure"] = pick(rng, proofs.MEASURES)
    elif kind == 5:
        claim["constants"]["transposed"] = pick(rng, (True, False, [True, False], [True, True]))
    elif kind == 6:
        claim["constants"]["parts"] = pick(rng, (1, 2, 4, [2, 1], [4, 4]))
        if rng.random() < 0.7:
            row["constants"]["parts"] = claim["constants"]["parts"]
    else:
        key = pick(rng, [key for key, each in claim["constants"].items() if isinstance(each, list)])
        each = pick(rng, range(len(claim["constants"][key])))
        claim["constants"][key][each] = changed(claim["constants"][key][each], rng)


def groups(draft: Draft, rng: Generator) -> None:
    """The axes along which a row's groups extend, or the sizes of rows."""
    row, kind = pick(rng, [row for row in draft.rows if row["axes"]]), rng.random()
    rank = len(row["shape"])
    axes = sorted({int(a) for a in rng.integers(0, rank, int(rng.integers(0, rank + 1)))})
    if kind < 0.4:
        row["axes"] = axes
        if rng.random() < 0.8:
            row["reads"] = [axes for _ in row["reads"]]
    elif kind < 0.5 and row["reads"]:
        row["reads"][pick(rng, range(len(row["reads"])))] = axes
    elif kind < 0.7:  # in all rows alike, so that they may fit
        axis, size = 0, pick(rng, (2, 3, 5, 50, 10**8, 10**12))
        for each in draft.rows:
            if len(each["shape"]) >= rank - 1 and rng.random() < 0.98:
                each["shape"][axis] = size
    elif kind < 0.85:
        old, new = pick(rng, row["shape"]), pick(rng, (1, 2, 3, 4, 8, 100, 10**8, 10**12))
        for each in draft.rows:
            each["shape"] = [new if n == old else n for n in each["shape"]]
    else:
        row["shape"] = changed(row["shape"], rng)


def attention(draft: Draft, rng: Generator) -> None:
    """What the sharper bounds of attention rest on."""
    row = pick(rng, [row for row in draft.rows if row["operation"] == "attention"])
    kind = int(rng.integers(5))
    if kind == 0:
        row["inputs"], row["reads"], row["claims"] = row["inputs"][:3], row["reads"][:3], []
    elif kind == 1:
        row["claims"] = row["claims"][:2]
        row["constants"].pop("query", None)
    elif kind == 2:
        i, j = rng.permutation(3)[:2]
        row["inputs"][i], row["inputs"][j] = row["inputs"][j], row["inputs"][i]
    elif kind == 3:
        row["inputs"][int(rng.integers(len(row["inputs"])))] = pick(rng, draft.rows)["name"]
    else:
        source = next(r for r in draft.rows if r["name"] == row["inputs"][int(rng.integers(3))])
        tables = source["constants"]["tables"]
        i, j = (pick(rng, range(len(tables))) for _ in "ab")
        tables[i] = pick(rng, (tables[j], [tables[j]] * source["shape"][i], -tables[j], 0))
    if rng.random() < 0.7:  # what it says of heads follows from the rows
        for key in ("key", "value", "query"):
            row["constants"].pop(key, None)


def insert(draft: Draft, rng: Generator) -> None:
    """A new row between two, of any primitive or move, perhaps with a new tensor."""
    i = int(rng.integers(1, len(draft.rows)))
    source = draft.rows[int(rng.integers(i))]
    shape, rank, name = list(source["shape"]), len(source["shape"]), f"new {i}"
    last = shape[-1]
    if max(shape) > 64:
        raise LookupError("its tensors would be large")
    axes = sorted({*(int(a) for a in rng.integers(0, rank, rank // 2)), rank - 1})
    tensor = _new_tensor(draft, pick(rng, ([last, last], [last], shape, [2, last // 2 or 1, last], [1])), rng)
    square = _new_tensor(draft, pick(rng, ([last, last], [1, last, last], [last, 1, last])), rng)
    lines = [shape[-2], shape[-2]] if rank > 1 else [1, 1]
    share = _new_tensor(draft, pick(rng, (lines, [1, *lines], [lines[0], 1, lines[0]])), rng)
    number = float(rng.normal())
    options: dict[str, tuple[Document, list[Document], int]] = {
        "times": ({pick(rng, ("factor", "divisor")): pick(rng, (number, tensor))}, [], 1),
        "constant": (pick(rng, ({"number": number}, {"tensor": tensor})), [], 0),
        "add": ({}, [], 2),
        "idle_ball": ({"scale": pick(rng, (1e-4, 0.01, 0.3, 1.0)), "over": axes}, [], 1),
        "rounding": ({"dtype": pick(rng, ("bfloat16", "float32", "float8_e4m3fn"))}, [], 1),
        "pick": ({"offset": 0, "tables": [pick(rng, (0, 1, n)) for n in shape]}, [], 1),
        "contraction": ({}, [], 1),
        "linear": ({"parts": pick(rng, (1, 2))}, [{"measure": "spectral", "tensors": [square]}], 1),
        "average": (
            {"parts": [1] * (rank - 2)},
            [{"measure": pick(rng, ("spectral", "row_sum")), "tensors": [share]}], 1,
        ),
        "elementwise": ({"function": pick(rng, statements._FUNCTIONS), "numbers": []}, [], 1),
        "ball": ({"scale": abs(number), "over": axes}, [], 1),
        "unit": ({"eps": abs(number), "over": axes}, [], 1),
        "normalization": ({"eps": abs(number), "over": axes}, [], 1),
        "softmax": ({"over": axes[0]}, [], 1),
        "log_softmax": ({"over": axes[0]}, [], 1),
        "product": ({}, [], 2),
        "convex_potential": (
            {"factor": number},
            [{"measure": "spectral", "tensors": [square]}], 1,
        ),
    }  # fmt: skip
    operation = pick(rng, options)
    c, own, count = options[operation]
    parts = c["parts"] if operation == "linear" else 1
    for claim in own:
        claim["constants"] = {"parts": parts} if operation == "linear" else {}
        claim["values"] = [1.0]
    alike = [r["name"] for r in draft.rows[:i] if r["shape"] == shape]
    inputs = [source["name"], pick(rng, alike)][:count]
    if parts > 1:
        shape, name = [*shape[:-1], parts, last // parts], pick(rng, (name, f"{source['name']}/{parts}"))
    move = operation in MOVES
    row = {
        "name": name, "operation": operation, "inputs": inputs, "shape": shape, "constants": c, "claims": own,
        "reads": [] if move else [axes] * count, "axes": [] if move else axes if parts == 1 else [*axes[:-1], rank],
        "radius": None, "gain": None, "largest": None,
    }  # fmt: skip
    if operation == "constant":
        row["shape"] = [] if "number" in c else list(draft.tensors[tensor].shape)
    for later in draft.rows[i:]:
        if source["name"] in later["inputs"] and (rng.random() < 0.7 or count == 0):
            later["inputs"] = [name if each == source["name"] else each for each in later["inputs"]]
            break
    draft.rows.insert(i, copy.deepcopy(row))


def _new_tensor(draft: Draft, shape: list[int], rng: Generator) -> str:
    """The name of a random tensor that is added."""
    name = f"random {len(draft.tensors)}"
    draft.tensors[name] = stored(rng.normal(size=shape).astype(pick(rng, ("f4", "f8"))))
    return name


def tensors(draft: Draft, rng: Generator) -> None:
    """A stored tensor's content, dtype or shape; one is exchanged with another, or left out."""
    name = pick(rng, draft.tensors)
    one = draft.tensors[name]
    array, kind = one.array(), int(rng.integers(9))
    if kind == 0:
        array = array * pick(rng, FACTORS)
    elif kind == 1:
        array.reshape(-1)[int(rng.integers(array.size))] += pick(rng, (1.0, -1.0, 1e-6, 100.0))
    elif kind == 2:
        content = bytearray(one.content)
        content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
        draft.tensors[name] = replace(one, content=bytes(content))
    elif kind == 3:
        twin = pick(rng, [n for n, t in draft.tensors.items() if t.shape == one.shape])
        draft.tensors[name], draft.tensors[twin] = draft.tensors[twin], one
    elif kind == 4:
        array = array.T.copy() if rng.random() < 0.5 else array[::-1].copy()
    elif kind == 5:
        size = array.size
        ways = [(size,), (1, *one.shape), (*one.shape, 1), (*one.shape[:-1], 1, *one.shape[-1:])]
        ways += [(n, size // n // m, m) for n in (2, 3, 4, 8) for m in (1, 2, 4, 8) if size % (n * m) == 0]
        draft.tensors[name] = replace(one, shape=pick(rng, ways))
    elif kind == 6:
        with np.errstate(all="ignore"):
            array = array.astype(pick(rng, ("f2", "f4", "f8", "i8", "i4", "u1", "?")))
    elif kind == 7:
        array.reshape(-1)[int(rng.integers(array.size))] = pick(rng, (math.nan, math.inf, 1e308, 0.0, -1e-310))
    else:
        del draft.tensors[name]
    if kind in (0, 1, 4, 6, 7):
        with np.errstate(all="ignore"):
            array = array if kind == 6 else array.astype("f8" if one.dtype == "F64" else "f4")
        draft.tensors[name] = stored(array)


STRUCTURE = (orders, constants, claims, groups, attention, insert, insert, tensors)


def structure(draft: Draft, rng: Generator) -> None:
    """One edit of what is computed, sometimes two, with all that follows."""
    for _ in range(1 if rng.random() < 0.75 else 2):
        pick(rng, STRUCTURE)(draft, rng)
    draft.follow = True


def spans(content: bytes, rng: Generator) -> bytes:
    """Some bytes flipped, set, dropped, doubled or moved."""
    for _ in range(int(rng.integers(1, 4))):
        i, kind = int(rng.integers(len(content) + 1)), int(rng.integers(6))
        j = min(len(content), i + int(pick(rng, (1, 1, 2, 8, 100))))
        span = content[i:j]
        if kind == 0 and span:
            span = bytes([span[0] ^ (1 << int(rng.integers(8)))]) + span[1:]
        elif kind == 1:
            span = rng.integers(0, 256, len(span), dtype=np.uint8).tobytes()
        elif kind == 2:
            span = b""
        elif kind == 3:
            span = span * 2
        elif kind == 4:
            span = pick(rng, (b"0", b"9", b"-", b"e", b'"', b"[", b"}", b",", b"null", b"\xff", b"\\ud800"))
        else:
            k = int(rng.integers(len(content) + 1))
            span = content[k : k + len(span)]
        content = content[:i] + span + content[j:]
    return content
