"""A few models of `make soundness`, and that it would find a bound that is too small."""

import pytest

from campaigns.random_models import LAYERS, draw_model
from campaigns.soundness import examine, summary
from wellnormed.proof import functions


@pytest.mark.parametrize("number", range(18, 30))
def test_no_search_exceeds_a_bound(number):
    outcome = examine(draw_model(0, number))
    assert outcome.status == "sound", outcome.reason
    assert 0 <= outcome.share <= 1 + 1e-9
    assert summary([vars(outcome)], 0, "")["sound"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LAYERS)), ids=list(LAYERS))
def test_no_search_exceeds_the_bounds_of_a_layer_alone(number):
    outcome = examine(draw_model(0, 4 * number + 3))
    assert outcome.status == "sound", outcome.reason


def test_a_bound_that_is_too_small_is_found(monkeypatch):
    number = 4 * list(LAYERS).index("activation: relu") + 3
    assert examine(draw_model(0, number)).status == "sound"
    monkeypatch.setitem(functions.FUNCTIONS, "relu", ("0", "0.999", "1", "0", None))
    assert examine(draw_model(0, number)).status == "violated"


def test_a_number_is_one_model():
    first, again = draw_model(3, 5), draw_model(3, 5)
    assert (first.layers, first.radius) == (again.layers, again.radius)
    states = first.model.state_dict(), again.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(states[0][name].equal(states[1][name]) for name in states[0])
