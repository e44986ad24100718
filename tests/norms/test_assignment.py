import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.models import GPT, GPTConfig


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))


def test_routing_is_total_and_in_order():
    model = language_model()
    assignment = wn.assign_norms(model)
    assert [a.name for a in assignment] == [name for name, _ in model.named_parameters()]
    kinds = [type(a.norm).__name__ for a in assignment]
    assert kinds == ["ColNorm", "Spectral", "BiasRMS", "Spectral", "BiasRMS"]


def test_printing_shows_every_parameter_and_the_frozen_ones():
    model = language_model()
    model[1].bias.requires_grad_(False)
    text = str(wn.assign_norms(model))
    for name, _ in model.named_parameters():
        assert name in text
    assert "frozen" in text


def test_sign_head_recipe_takes_the_last_linear_only():
    norms = {a.name: a.norm for a in wn.assign_norms(language_model(), recipe="sign-head")}
    assert norms["3.weight"] == wn.Sign()
    assert norms["1.weight"] == wn.Spectral()


def test_overrides_by_pattern_and_by_module_name():
    by_module = {a.name: a.norm for a in wn.assign_norms(language_model(), overrides={"0": wn.Sign()})}
    assert by_module["0.weight"] == wn.Sign()
    assignment = wn.assign_norms(language_model(), overrides={"*.weight": wn.Sign()})
    assert all(a.norm == wn.Sign() for a in assignment if a.name.endswith("weight"))


def test_layers_decide_for_their_own_parameters():
    norms = {a.name: a.norm for a in wn.assign_norms(GPT(GPTConfig(width=8, heads=2, blocks=1)))}
    assert norms["layers.1.block.query.weight"] == wn.PerHead(2)
    assert norms["layers.1.block.attend.bias_HT"] == wn.Sign()


def test_tied_parameters_appear_once():
    model = language_model()
    model.append(nn.Linear(4, 5, bias=False))
    model[4].weight = model[0].weight
    assert [a.name for a in wn.assign_norms(model)].count("0.weight") == 1
    assert "4.weight" not in str(wn.assign_norms(model))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nothing": wn.Sign()}, "matches no trainable parameter"),
        ({"1.*": wn.Sign(), "1.weight": wn.Sign()}, "matches both"),
        ({"1.bias": wn.Spectral()}, "2-dimensional"),
        ({"1.weight": wn.PerHead(3)}, "do not divide"),
    ],
)
def test_bad_overrides_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        wn.assign_norms(language_model(), overrides=overrides)


def test_a_parameter_without_a_rule_is_refused():
    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"'table'.*has no norm"):
        wn.assign_norms(model)
