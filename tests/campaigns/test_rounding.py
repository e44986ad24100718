"""A few models of the attack on rounding errors, and that it would find a bound that is too small."""

import pytest
import torch
from torch import nn

from campaigns.random_models import Drawn
from campaigns.rounding.__main__ import summary
from campaigns.rounding.attack import examine
from campaigns.rounding.cases import draw_case
from campaigns.rounding.pairs import pairs
from wellnormed.certificates.certificate import Certificate
from wellnormed.proof import arithmetic, functions


@pytest.mark.parametrize("number", [1, 4, 5, 6, 10, 15, 19])
def test_nothing_executed_lies_beyond_the_certified_error(number: int) -> None:
    outcome = examine(draw_case(3, number))
    assert (outcome.status, outcome.reason) == ("within", "")
    assert outcome.adverse > 0.02
    assert summary([vars(outcome)], [])["status"] == {"within": 1}


def test_errors_that_are_too_small_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    silu, linear = (
        Drawn(1, model, torch.zeros(1, 32), 1.0, ("alone",)) for model in (nn.SiLU(), nn.Linear(32, 4, bias=False))
    )
    assert examine(silu).status == examine(linear).status == "within"
    monkeypatch.setitem(functions.ERRORS, "silu", (0, 0, 0))
    monkeypatch.setattr(arithmetic.Arithmetic, "depth", lambda self, addends: 1)
    assert examine(silu).status == examine(linear).status == "beyond"


def test_no_pair_within_a_radius_has_two_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pairs(1)
    assert not found.broken
    assert 1 < found.least < 1.1
    radius = Certificate.certified_radius
    monkeypatch.setattr(Certificate, "certified_radius", lambda self, logits: 1.1 * radius(self, logits))
    assert pairs(1).broken == ["radius"]
