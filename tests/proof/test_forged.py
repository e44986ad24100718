"""Every check of the kernel has a forgery that it alone refuses: with the check dropped, the forgery passes."""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from campaigns.mutants import UNNOTICED, Mutant, checks_of, mutants, within
from tests.proof.forged import BOUNDS_FILE, CASES, FORGED, PARTS, results
from wellnormed.proof import CheckError, Report


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


@pytest.mark.parametrize("name", results())
def test_what_is_proved(name: str) -> None:
    assert results()[name]() == json.loads(BOUNDS_FILE.read_text())[name]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{i}: {words}" for i, (words, _) in enumerate(CASES)])
def test_a_forgery_is_refused_by_one_check_alone(number: int) -> None:
    assert alone(number)


@pytest.mark.parametrize(("words", "call"), PARTS)
def test_a_forgery_is_refused_by_one_operand(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(CheckError, match=words):
        call()


def test_every_branch_without_a_bound_of_errors_is_noticed() -> None:
    expected, calls = json.loads(BOUNDS_FILE.read_text()), sorted(results().items())  # those of faults come first
    for mutant in mutants():
        if mutant.after in ("zero(0)", "pass") or re.search(r"fault.* (or|and) |_HERE \*", mutant.before):
            with within(mutant):
                assert any(differs(call, expected[name]) for name, call in calls), mutant


def test_every_check_has_a_forgery_or_a_reason() -> None:
    refused = frozenset().union(*map(alone, range(len(CASES))))
    others = {str(each) for each in mutants() if each.after == "dropped" and each not in refused}
    assert others == {each for each in UNNOTICED if each.endswith("  ->  dropped")}


def test_every_mutant_that_is_listed_exists() -> None:
    assert {*map(str, mutants())} >= UNNOTICED
