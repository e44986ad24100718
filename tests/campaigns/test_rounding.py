"""A few models of the attack on rounding errors, and that it would find a bound that is too small."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from campaigns.random_models import Drawn
from campaigns.random_models.draw import Layer
from campaigns.rounding.__main__ import summary
from campaigns.rounding.attack import examine
from campaigns.rounding.cases import draw_case
from campaigns.rounding.executions import compiled
from campaigns.rounding.pairs import pairs
from wellnormed.certificates import capture
from wellnormed.certificates.certificate import Certificate
from wellnormed.nn import Rotary
from wellnormed.proof import arithmetic, functions


@pytest.mark.parametrize("number", [1, 4, 5, 6, 10, 15, 19])
def test_nothing_executed_lies_beyond_the_certified_error(number: int) -> None:
    outcome = examine(draw_case(3, number))
    assert (outcome.status, outcome.reason) == ("within", "")
    assert outcome.adverse > 0.02
    assert summary([vars(outcome)], [])["status"] == {"within": 1}


def test_errors_that_are_too_small_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    silu, linear = (Drawn(1, m, torch.zeros(1, 32), 1.0, ("alone",)) for m in (nn.SiLU(), nn.Linear(32, 4, False)))
    assert examine(silu).status == examine(linear).status == "within"
    monkeypatch.setitem(functions.ERRORS, "silu", (0, 0, 0))
    monkeypatch.setattr(arithmetic.Arithmetic, "depth", lambda self, addends: 1)
    assert examine(silu).status == examine(linear).status == "beyond"


def test_an_onnx_file_of_another_function_is_no_execution() -> None:
    """Torch writes the root of an attention's factor, here of a negative one, into the file."""
    model = Layer(lambda s, x: F.scaled_dot_product_attention(x, x, x, scale=-0.5))
    outcome = examine(Drawn(10, model, torch.zeros(1, 6, 2), 1.0, ("alone",)))
    assert (outcome.status, outcome.reason) == ("within", "")


def test_a_compiler_gets_the_constants_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the sines of positions by another function, which a certificate excludes."""
    program, x = capture(Rotary(2), torch.zeros(1, 6, 2)), torch.randn(1, 6, 2)
    monkeypatch.setattr(torch, "compile", lambda module: module)
    module = compiled(program)
    before, after = ({str(node.target) for node in each.graph.nodes} for each in (program.module, module))
    assert "aten.sin.default" in before - after
    assert torch.equal(module(x), program(x))


def test_no_pair_within_a_radius_has_two_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pairs(1)
    assert not found.broken
    assert 1 < found.least < 1.1
    radius = Certificate.certified_radius
    monkeypatch.setattr(Certificate, "certified_radius", lambda self, logits: 1.1 * radius(self, logits))
    assert pairs(1).broken == ["radius"]
