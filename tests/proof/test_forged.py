"""Every check of the kernel has a forgery that it alone refuses: with the check dropped, the forgery passes."""

import ast
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from campaigns.mutants import Mutant, checks_of, mutants, within
from tests.proof.forged import BOUNDS_FILE, CASES, FORGED, PARTLY, accepted, results
from wellnormed.proof import CheckError, Report

WITHOUT = {
    "Without it Python or NumPy fails, which `check` turns into a refusal. It says so in a sentence.": """
        check: found is not None
        check: len(inputs) > 0
        claims: claim.measure in MEASURES
        claims: count == 1 + (measure == 'product')
        claims: len(array) % parts == 0
        claims: factors[0].shape[1] == factors[1].shape[1]
        claims: all((i < n for i, n in zip(pair, parts, strict=True)))
        files: bool(kinds)
        files: f'{what} is no intact JSON: {error}'
        files: entry.dtype in _KINDS
        files: f'{path} cannot be read: {error}'
        inference: place < len(self.claims)
        lipsdp: len(total) > 0
        lipsdp: [each.shape for each in given] == widths
        matrices: math.isfinite(largest)
        moves: places.dtype == np.int64
        moves: bool(np.isfinite(executed).all())
        moves: 'it must have either positions, or an offset and tables'
        moves: bool((new != 0).all())
        moves: len(row.inputs) > 0
        moves: max(over) < len(x.shape)
        positions: len(tables) == len(shape)
        products: source is not None
        promises: len(each.shape) == 3
        promises: measure in known
        promises: all((i < n for pair in pairs for i, n in zip(pair, parts, strict=True)))
        proof: name in self.stored
        proof: {name, other} <= self.stored.keys()
        proof: each in self.values
        proof: row.operation in {*MOVES, *RULES}
        proof: len(reads) == len(inputs)
        reading: len(x) == len(readers)
        reading: math.prod(shape) == len(values)
    """,
    "Another check refuses the same, later or after more memory was asked for.": """
        lipsdp: x.shape[-1] <= MOST
        moves: places.shape == row.shape
        positions: fits
        promises: once
    """,
    "`test_limits` has files, shapes or strides that it refuses before time or memory is spent.": """
        files: stat.S_ISREG(status.st_mode)
        matrices: entries <= max(_BLOCK, 16 * w.size)
        moves: needed <= self.room
    """,
    "Without it a loop has no end, or no valid document passes.": """
        files: raise
        matrices: margin <= 1
        reading: f'{what} must be {words}, got {reprlib.repr(x)}'
    """,
}
"""Why a check has no forgery that it alone refuses -> module and condition, or message, of such checks."""


@cache
def alone(number: int) -> frozenset[Mutant]:
    """The checks without which a forgery passes."""
    words, call = CASES[number]
    with pytest.raises(CheckError, match=words) as caught:
        call()
    passed = set()
    for check in checks_of(caught.value):
        with within(check):
            try:
                report = call()
            except Exception:
                continue
        passed.add(check)
        if isinstance(report, Report) and (true := FORGED[number][3:] if number < len(FORGED) else ()):
            assert report.rms_lipschitz < true[0]
    return frozenset(passed)


def differs(call: Callable[[], str], expected: str) -> bool:
    """Whether a mutant gives other digits, or fails."""
    try:
        return call() != expected
    except Exception:
        return True


def condition(check: Mutant) -> str:
    """Its module and condition; its module and message if it is raised."""
    (statement,) = ast.parse(check.before).body
    node = statement.value.args[0] if isinstance(statement, ast.Expr) else statement
    node = node.exc.args[0] if isinstance(node, ast.Raise) and node.exc else node
    return f"{check.module}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", results())
def test_what_is_proved(name: str) -> None:
    assert results()[name]() == json.loads(BOUNDS_FILE.read_text())[name]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{i}: {words}" for i, (words, _) in enumerate(CASES)])
def test_a_forgery_is_refused_by_one_check_alone(number: int) -> None:
    assert alone(number)


@pytest.mark.parametrize(("name", "words", "changes"), PARTLY)
def test_a_forgery_is_refused_by_one_operand(name: str, words: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckError, match=words):
        accepted(name, changes)


def test_every_branch_without_a_bound_of_errors_is_noticed() -> None:
    expected, calls = json.loads(BOUNDS_FILE.read_text()), sorted(results().items())  # those of faults come first
    for mutant in mutants():
        if mutant.after in ("zero(0)", "pass") or re.search(r"fault.* (or|and) |_HERE \*", mutant.before):
            with within(mutant):
                assert any(differs(call, expected[name]) for name, call in calls), mutant


def test_every_check_has_a_forgery_or_a_reason() -> None:
    refused = frozenset().union(*map(alone, range(len(CASES))))
    others = {condition(each) for each in mutants() if each.after == "dropped" and each not in refused}
    assert others == {line.strip() for lines in WITHOUT.values() for line in lines.strip().splitlines()}
