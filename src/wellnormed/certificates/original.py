"""Compare a finished walk with that of an original model: the same rows, with other tensors."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torch import fx, nn

from wellnormed.lowering.ledger import Stored
from wellnormed.lowering.stored import raw_tensor
from wellnormed.lowering.walk import Walk
from wellnormed.program.program import Program
from wellnormed.proof import Row
from wellnormed.proof.arithmetic import Executed

_OF_TENSORS = {"input": ("radius", "low", "high"), "elementwise": ("numbers",)}
"""Primitive -> constants that follow from the claims of its rows: the domain of an embedding, the largest slope."""


def require_same_tensors(model: nn.Module | Program, original: nn.Module | Program) -> None:
    """Refuse an original whose tensors have other names, shapes or dtypes than the model's."""
    ours, theirs = ({name: (each.dtype, tuple(each.shape)) for name, each in _named(m)} for m in (model, original))
    for name in sorted(ours.keys() | theirs.keys()):
        if (a := ours.get(name)) == (b := theirs.get(name)):
            continue
        if a is None or b is None:
            raise ValueError(
                f"certify: original= must be the same model with other weights, and only one of both has {name!r}; "
                "fold layers and parametrizations in both alike"
            )
        remedy = "convert one of both, as by changed.float()" if a[1] == b[1] else "pass models of one size"
        raise ValueError(f"certify: {name!r} is {a[0]} {a[1]}, and in original= it is {b[0]} {b[1]}; {remedy}")


def _named(model: nn.Module | Program) -> list[tuple[str, Any]]:
    if isinstance(model, Program):
        return [(name, each.tensor) for name, each in model.stored.items()]
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def compare(walk: Walk, other: Walk) -> dict[str, str]:
    """Prove a walk's rows again, beside those of the original, and return which tensors the original replaces.

    Args:
        walk: The walk of the changed model; its proof becomes one that bounds the changes of its rows, too.
        other: The walk of the original, which has followed it.

    Returns:
        Name of a tensor -> name of the original's in its place, which `walk.ledger` has now.

    Raises:
        ValueError: The original computes something else; the message names the first row that differs.
    """
    _require_same_operations(walk.program, other.program)
    moved = _moved(walk, other)
    for each in walk.stored.values():
        walk.ledger.keep(each)
    first, names, rows = walk.ledger.proof, dict(other.stored), list[Row]()
    for ours, theirs in zip_longest(first.rows.values(), other.ledger.proof.rows.values()):
        for a, b in _pairs(ours, theirs, moved, walk.ledger.used, other.ledger.used):
            if names.setdefault(a, other.ledger.used[b]).name != b:
                raise _differ(ours.name, f"reads {b}, and {names[a].name} elsewhere, where the model reads {a}")
        if ours.name in moved:
            added = max(row.constants.get("added", 0.0) for row in (ours, theirs))
            ours = replace(ours, constants=ours.constants | {"moved": moved[ours.name], "added": added})
        rows.append(replace(ours, bounds=None, executed=_of_both(ours.executed, theirs.executed)))
    proof, replaced = first.again({}), dict[str, str]()
    for name, stored in names.items():
        raw = raw_tensor(stored.tensor)
        if raw != first.stored[name]:
            replaced[name] = f"original/{name}"
            proof.store(replaced[name], raw)
            walk.ledger.used[replaced[name]] = Stored(replaced[name], stored.tensor, stored.computed)
    proof.compare(replaced)
    for row in rows:
        proof.add(row)
    walk.ledger.proof = proof
    return replaced


def _require_same_operations(program: Program, other: Program) -> None:
    """Refuse an original with another operation, or another argument of one: rows do not read all, such as masks."""
    for nodes in zip_longest(program.nodes, other.nodes):
        (name, ours), (other_name, theirs) = (("", "nothing") if node is None else _call(node) for node in nodes)
        if (name, ours) != (other_name, theirs):
            raise _differ(name or other_name, f"is {theirs}, and in the model {ours}")
    if program.each_sample != other.each_sample:
        raise _differ("output", f"is of {other!r}, and in the model of {program!r}")


def _call(node: fx.Node) -> tuple[str, str]:
    """The name of a node, and what it computes, in words."""
    arguments = [str(each) for each in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
    return node.name, f"{node.target}({', '.join(arguments)})" if arguments else str(node.target)


def _pairs(
    ours: Row | None, theirs: Row | None, moved: Mapping[str, float], *used: Mapping[str, Stored]
) -> Iterable[tuple[str, str]]:
    """Yield the tensors that two rows read, in pairs; refuse rows that differ otherwise."""
    if ours is None or theirs is None:
        raise _differ("output", "follows from more or fewer rows")
    for what in ("name", "operation", "inputs", "shape", "reads", "axes"):
        a, b = getattr(ours, what), getattr(theirs, what)
        if a != b:
            raise _differ(ours.name, f"has {what} {b!r}, and in the model {a!r}")
    claims = [[(each.measure, each.constants) for each in row.claims] for row in (ours, theirs)]
    if claims[0] != claims[1]:
        raise _differ(ours.name, f"rests on {claims[1]}, and in the model on {claims[0]}")
    of_tensors = _OF_TENSORS.get(ours.operation, ()) if ours.claims else ()
    for key in {**ours.constants, **theirs.constants}:
        a, b = (row.constants.get(key) for row in (ours, theirs))
        if isinstance(a, str) and isinstance(b, str) and a in used[0] and b in used[1]:
            yield a, b
        elif a != b and key not in of_tensors and not (key == "added" and ours.name in moved):
            raise _differ(ours.name, f"has {key}={b!r}, and in the model {key}={a!r}")
    for each in zip(ours.claims, theirs.claims, strict=True):
        yield from zip(*(claim.tensors for claim in each), strict=True)


def _of_both(ours: Executed | None, theirs: Executed | None) -> Executed | None:
    """How both rows are executed, if they differ only in the sizes of constants that the dtype does not hold."""
    if ours is None or theirs is None:
        return None
    both = replace(ours, beside=max(ours.beside, theirs.beside))
    return both if replace(theirs, beside=both.beside) == both else None


def _moved(walk: Walk, other: Walk) -> dict[str, float]:
    """Row of an attention -> how far the constants differ that are added to its logits, of which it reads none.

    Other values of all other tensors that no row reads are refused: a row holds whatever stands in these, and so does
    not know that it is something else.
    """
    rows, moved = walk.ledger.proof.rows, dict[str, float]()
    for node, (stored, own) in walk.constants.items():
        read = {name for row in own for each in (row.name, *row.inputs) for name in _names(rows[each])}
        last = next((row.name for row in reversed(own) if row.bounds is not None), "")
        for ours, theirs in zip(stored, other.constants[node][0], strict=True):
            known = any(ours in each for name in read if (each := walk.ledger.used.get(name)) is not None)
            if known or raw_tensor(ours.tensor) == raw_tensor(theirs.tensor):
                continue
            factors = [abs(factor) for each, factor in walk.ledger.biases.get(last, ()) if each is ours]
            apart = (ours.tensor.double() - theirs.tensor.double()).abs()
            most = float(apart.where(ours.tensor != theirs.tensor, 0.0).max()) * sum(factors)
            if not factors or not most < math.inf or not ours.tensor.is_floating_point():
                raise _differ(node, f"has other values of {ours.name}, which its bound does not read")
            for row in own:
                if row.name in walk.ledger.biases:
                    moved[row.name] = moved.get(row.name, 0.0) + most * (1 + 2.0**-40)
    return moved


def _names(row: Row) -> Iterable[str]:
    """The texts of a row that may name tensors."""
    yield from (each for each in row.constants.values() if isinstance(each, str))
    yield from (name for claim in row.claims for name in claim.tensors)


def _differ(name: str, words: str) -> ValueError:
    return ValueError(
        f"certify: original= must compute the same as the model but for its weights, and its {name!r} {words}; "
        "build both by the same code with the same settings, and load their weights"
    )
