"""Forged certificates are refused, or true; and the search that says so finds what is planted."""

import copy
import json
import math
from collections import Counter

import numpy as np
import pytest

from campaigns import mutations, statements
from campaigns.forgeries import Draft, follow
from campaigns.mutations import NAMES, case_of, run
from wellnormed.proof import CheckError, check, claims
from wellnormed.proof.files import stored

MANY = 60
"""Twenty of each case, among them every kind; `make mutations` makes 10,500."""


def test_no_forgery_is_a_false_statement_and_none_ends_in_an_exception() -> None:
    outcomes = [run(number, seed=1) for number in range(MANY)]
    content = mutations.summary([mutations.asdict(each) for each in outcomes], 1, "python")
    assert content["mutations"] == sum(row["mutations"] for row in content["rows"])
    json.dumps(content, allow_nan=False)
    wrong = [each for each in outcomes if each.status in ("false", "raw")]
    assert not wrong, wrong
    count = Counter(each.status for each in outcomes)
    assert count["refused"] > MANY / 3
    assert count["another"] > MANY / 20


def test_a_mutation_repeats_itself() -> None:
    first, second = (run(number=5, seed=1, kind="structure") for _ in "ab")
    assert (first.status, first.reason) == (second.status, second.reason)


def named(case: mutations.Case) -> dict[str, np.ndarray]:
    return {name: each.array() for name, each in case.tensors.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_search_finds_nothing_in_what_is_true(name: str) -> None:
    case = case_of(name)
    assert statements.broken(case.document, named(case), None, 0, set(), lambda _: True) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_search_sees_a_bound_that_was_halved(name: str) -> None:
    """Of every row but attention, whose bound is further from what a search finds."""
    case = case_of(name)
    for row in case.document["rows"]:
        if row["radius"] is None or row["operation"] in ("input", "attention", "convex_potential"):
            continue
        for what in ("radius", "gain"):
            document = copy.deepcopy(case.document)
            (forged,) = [each for each in document["rows"] if each["name"] == row["name"]]
            forged[what]["values"] = [str(float(each) / 2) for each in forged[what]["values"]]
            found = statements.broken(document, named(case), None, 0, set(), lambda each, own=row["name"]: each == own)
            assert any(what in each and row["name"] in each for each in found), (row["name"], what)


def test_claims_that_are_not_proved_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "prove", lambda *_: None)
    status = {run(number, seed=1, kind="lowered").status for number in range(30)}
    assert "false" in status


def _row(name: str, operation: str, inputs: list[str], shape: list[int], axes: list[int], **more: object) -> dict:
    bare = {"constants": {}, "claims": [], "reads": [axes] * len(inputs), "axes": axes}
    return {
        "name": name, "operation": operation, "inputs": inputs, "shape": shape, **bare,
        **dict.fromkeys(statements.KINDS), **more,
    }  # fmt: skip


def _draft(*rows: dict, **tensors: np.ndarray) -> Draft:
    document = {"format": 5, "arithmetic": "real numbers, tensors as stored", "tensors": {}}
    return Draft({**document, "rows": list(rows)}, {name: stored(each) for name, each in tensors.items()})


def test_an_average_has_the_norm_of_the_matrix_that_is_applied() -> None:
    """A tensor of three axes unfolds into several matrices, of other norms."""
    claim = {"measure": "spectral", "tensors": ["shares"], "values": [1.0], "constants": {"parts": 1}}
    draft = _draft(
        _row("x", "input", [], [1, 1, 2], [1, 2], constants={"dtype": "float32", "radius": 1.0}),
        _row("y", "average", ["x"], [1, 4, 2], [1, 2], constants={"parts": [1]}, claims=[claim]),
        _row("output", "output", ["y"], [1, 4, 2], [1, 2]),
        shares=np.eye(2)[..., None],
    )
    with pytest.raises(CheckError, match="one below another"):
        follow(draft)
    draft.tensors["shares"] = stored(np.eye(2).reshape(4, 1))
    follow(draft)
    assert float(check(draft.document, draft.tensors).lipschitz) == pytest.approx(math.sqrt(0.5), rel=0.02)


@pytest.mark.parametrize("spoiled", ["factors", "vectors", "nothing"])
def test_a_margin_is_of_one_vector_with_one_factor(spoiled: str) -> None:
    """Two equal rows of a weight have no difference, unless one is negated or they are of different tokens."""
    norm, difference = (
        {"measure": measure, "tensors": ["weight"], "values": [1.0], "constants": {}}
        for measure in ("spectral", "row_difference")
    )
    signs = "signs" if spoiled == "factors" else -1.0
    shape = [1, 4] if spoiled == "vectors" else [1, 2, 2]
    steps = [0, 1] if spoiled == "vectors" else [0, 2, 1]
    axes = [len(shape) - 1]
    draft = _draft(
        _row("x", "input", [], [1, 2, 3], [2], constants={"dtype": "float32", "radius": 1.0}),
        _row("y", "linear", ["x"], [1, 2, 2], [2], constants={"parts": 1}, claims=[norm]),
        _row("margin", "margin", ["x"], [1, 2, 1], [2], constants={"factor": 1.0}, claims=[difference]),
        _row("z", "times", ["y"], [1, 2, 2], [], reads=[], constants={"factor": signs}),
        _row("flat", "pick", ["z"], shape, [], reads=[], constants={"offset": 0, "tables": steps}),
        _row("output", "output", ["flat"], shape, axes),
        weight=np.ones((2, 3)),
        signs=np.array([1.0, -1.0]),
    )
    follow(draft)
    if spoiled == "nothing":
        assert check(draft.document, draft.tensors).margin == 0
    else:
        with pytest.raises(CheckError, match=spoiled):
            check(draft.document, draft.tensors)


def test_shapes_that_would_take_a_machine_s_memory_are_refused() -> None:
    long, wide = [2**20, 1], [1, 2**20]
    for shape in ([1, 1], [2**20, 2**20]):
        draft = _draft(
            _row("x", "input", [], long, [1], constants={"dtype": "float32", "radius": 1.0}),
            _row("y", "input", [], wide, [1], constants={"dtype": "float32", "radius": 1.0}),
            _row("z", "add", ["x", "y"], shape, [], reads=[]),
            _row("output", "output", ["z"], shape, [1]),
        )
        with pytest.raises(CheckError, match=r"its shape must be|too many"):
            follow(draft)


def test_names_that_cannot_be_printed_are_refused() -> None:
    for name in ("\ud800", "x\noutput is L-Lipschitz with L = 0"):
        draft = _draft(
            _row(name, "input", [], [1, 2], [1], constants={"dtype": "float32", "radius": 1.0}),
            _row("output", "output", [name], [1, 2], [1]),
        )
        with pytest.raises(CheckError, match="cannot be printed"):
            follow(draft)
