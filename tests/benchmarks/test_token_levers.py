"""The layers of levers have the constant that they claim, for weights that their constraints hold."""

import pytest
import torch

import wellnormed as wn
from benchmarks.token_levers import LEVERS, LeverConfig, rate_factors
from papers._by_form import Matched, config_of
from wellnormed.models import build


@pytest.mark.parametrize("lever", ["3 pairs with MaxMin", "three kinks a unit",
                                   "later averages, 32 windows"])  # fmt: skip
def test_a_model_with_the_layers_of_a_lever_is_proved_at_its_constant(lever):
    config = LeverConfig(vocabulary_size=5, length=16, token_width=32, attention_blocks=0, lever=lever)
    model = build(config, torch.Generator().manual_seed(0))
    width = config.width + LEVERS[lever].wider
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(5, width) * (5 / width) ** 0.5)  # norm 1
    proved = 10 ** wn.certify(model).log10_lipschitz
    found = wn.lower_bound(model, steps=3, generator=torch.Generator().manual_seed(0)).value
    assert 0 < found <= proved <= config.body_lipschitz * (1 + 1e-4)


def test_what_a_lever_adds_moves_at_the_rates_of_its_like():
    run = config_of(Matched("by position, proved 10", 0.02, 4))
    lever = "later averages, 32 windows"
    model = build(LeverConfig(vocabulary_size=5, length=16, token_width=32, attention_blocks=0, lever=lever))
    factors = rate_factors(model, run)
    assert factors["layers.1.mixing.gain_H"] == factors["mixing.gain_H"]
    assert factors["layers.0.bias"] == factors["layers.2.bias"] == run.bias_rate
