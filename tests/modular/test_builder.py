"""Trees of torch models: names, rules, refusals, and optimizers that use them."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.models import GPT, GPTConfig
from wellnormed.modular import Atom, Bond, attention, builder, compose, modular_rule, modular_tree, residual

CONFIG = GPTConfig(vocabulary_size=7, length=5, width=8, heads=2, blocks=2, output_factor=1 / 3, logit_scale=4.0)


@pytest.fixture
def mlp():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    for parameter in model.parameters():
        parameter.detach().fill_(0.5)  # on positive inputs every unit is alive
    return model


def test_gpt_equals_the_tree_written_by_hand(generator):
    model = GPT(CONFIG, generator)
    norms = {a.name: a.norm for a in wn.assign_norms(model)}

    def atom(name, sensitivity=1.0):
        return Atom(name, norms[name], sensitivity=sensitivity)

    def with_bias(name):
        return atom(f"{name}.weight") + atom(f"{name}.bias", 0.0)

    parts = []
    for i in (1, 5):
        q, k, v = (atom(f"layers.{i}.block.{name}.weight") for name in ("query", "key", "value"))
        attend = attention(q, k, v, CONFIG.attention_scale, atom(f"layers.{i}.block.attend.bias_HT", 0.0))
        block = CONFIG.output_factor * (atom(f"layers.{i}.block.output.weight") @ attend)
        parts.append(residual(block, CONFIG.residual_strength))
        name = f"layers.{i + 2}.block"
        parts.append(residual(atom(f"{name}.output.weight") @ with_bias(f"{name}.input"), CONFIG.residual_strength))
    position = 0.5 * Bond("x") + 0.5 * atom("position.weight", 0.0)
    head = CONFIG.logit_scale * with_bias("head")
    by_hand = compose(head, *reversed(parts), position, atom("embedding.weight"))
    tree = modular_tree(model)
    assert tree.lr_factors() == pytest.approx(by_hand.lr_factors())
    assert tree.sensitivity == pytest.approx(by_hand.sensitivity)
    # at norm 1 the factor 1/3 cancels attention's sensitivity 3: depth costs nothing
    assert tree.sensitivity == pytest.approx(CONFIG.logit_scale * CONFIG.token_share)


def test_projections_of_the_stream_stand_in_the_tree(generator):
    model = GPT(GPTConfig(width=8, heads=2, blocks=1, stream_radius=1.0), generator)
    assert str(modular_tree(model)).count("ball projection") == 3


def test_every_rule_known_by_name_names_a_class_that_exists():
    ours = [name for name in builder.RULES if name.startswith(("wellnormed.nn.", "wellnormed.models."))]
    assert len(ours) > 5
    for name in ours:
        module, _, cls = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), cls), nn.Module)


def test_biases_see_no_input(mlp):
    tree = modular_tree(mlp)
    assert tree.sensitivity == 1
    assert tree.lr_factors() == pytest.approx({"0.weight": 1 / 3, "0.bias": 1 / 3, "2.weight": 1 / 3})


def test_frozen_parameters_become_bonds(mlp):
    mlp[0].requires_grad_(False)
    tree = modular_tree(mlp)
    assert tree.lr_factors() == {"2.weight": 1.0}
    assert "0.weight (frozen)" in str(tree)


def test_tied_and_repeated_modules_count_at_every_place():
    layer, relu = nn.Linear(2, 2, bias=False), nn.ReLU()
    model = nn.Sequential(layer, relu, wn.nn.Scale(0.5), layer, relu)
    tree = modular_tree(model)
    assert [place.name for place in tree.places()] == ["0.weight", "0.weight"]
    assert tree.mass == 2
    assert tree.lr_factors() == {"0.weight": 0.5}  # the last place has half the mass and nothing after it


def test_convolutions_pooling_and_flattening():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2), nn.MaxPool2d((1, 4)), nn.Flatten(), nn.Linear(8, 2)
    )
    tree = modular_tree(model, wn.assign_norms(model, overrides={"0.weight": wn.norms.SpectralConv()}))
    assert tree.sensitivity == 2
    assert tree.lr_factors()["0.weight"] == pytest.approx(1 / 4 / 2)
    assert tree.lr_factors()["5.weight"] == pytest.approx(1 / 4)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_torch_optimizers_take_the_groups(mlp, optimizer):
    tree = modular_tree(mlp).with_masses({"0.bias": 0.0, "2": 3.0})
    groups = {name: g["lr"] for g in tree.param_groups(mlp, lr=0.1) for name, _ in g["params"]}
    assert groups == pytest.approx({"0.weight": 0.025, "0.bias": 0.0, "2.weight": 0.075})
    before = {name: p.detach().clone() for name, p in mlp.named_parameters()}
    opt = optimizer(tree.param_groups(mlp, lr=0.1))
    mlp(torch.ones(1, 3)).square().sum().backward()
    opt.step()
    moved = {name for name, p in mlp.named_parameters() if not torch.equal(p.detach(), before[name])}
    assert "0.bias" not in moved
    assert "2.weight" in moved


def test_groups_are_total(mlp):
    tree = modular_tree(mlp)
    with pytest.raises(ValueError, match=r"lacks extra\.weight"):
        tree.param_groups(nn.ModuleDict({"0": mlp[0], "2": mlp[2], "extra": nn.Linear(1, 1, bias=False)}), lr=0.1)
    with pytest.raises(ValueError, match=r"lack 0\.weight, 0\.bias, 2\.weight"):
        tree.param_groups(nn.Linear(1, 1), lr=0.1)
    with pytest.raises(ValueError, match="lr=-1"):
        tree.param_groups(mlp, lr=-1)


def test_masses_and_tare_by_pattern(generator):
    tree = modular_tree(GPT(CONFIG, generator)).with_masses({"*bias*": 0.0}).tare(32, "layers")
    # LT's split: the blocks 32, embedding, positions and head 1 each
    assert tree.mass == pytest.approx(35)
    assert tree.lr_factors()["head.bias"] == 0
    assert tree.lr_factors()["head.weight"] == pytest.approx(1 / 35 / CONFIG.logit_scale)


def test_printed_tree_is_in_the_order_of_data_flow(mlp):
    text = str(modular_tree(mlp)).splitlines()
    assert text[0].split() == ["module", "mass", "sensitivity", "share", "lr", "factor", "norm"]
    order = [next(i for i, line in enumerate(text) if name in line) for name in ("0.weight", "0.bias", "relu", "2.w")]
    assert order == sorted(order)
    assert "33.33%" in text[-1]
    assert "Spectral(" in text[-1]


class Unknown(nn.Module):
    def forward(self, x):
        return x


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def parameter_norms(self):
        return {"weight": wn.Spectral()}

    def modular_tree(self, builder):
        return Bond("forgot")


class Subclass(nn.Linear):
    """May override anything, so it has no rule."""


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Unknown(), r"'1' \(Unknown\) has no modular rule. Register a rule with `modular_rule\(Unknown\)`"),
        (Subclass(2, 2), r"'1' \(Subclass\) has no modular rule"),
        (nn.LayerNorm(2), r"'1' \(LayerNorm\) has no modular rule"),
        (Forgetful(), r"give no place to 1\.weight"),
        (nn.Dropout(0.5), r"p=0\.5.*model\.eval"),
        (nn.Embedding(3, 2, max_norm=1.0), r"max_norm=1\.0"),
        (nn.AvgPool2d(2, divisor_override=1), "divisor_override"),
    ],
)
def test_what_no_rule_describes_is_refused_by_name(layer, message):
    with pytest.raises(ValueError, match=message):
        modular_tree(nn.Sequential(nn.ReLU(), layer))
    assert modular_tree(nn.Sequential(nn.Dropout(0.5)).eval()).sensitivity == 1


def test_what_is_no_model_or_no_assignment_is_refused(mlp):
    with pytest.raises(ValueError, match="pass the model itself"):
        modular_tree(type(mlp))
    with pytest.raises(ValueError, match=r"pass the result of assign_norms\(model\)"):
        modular_tree(mlp, torch.zeros(2, 3))


def test_an_assignment_of_another_model_is_refused(mlp):
    with pytest.raises(ValueError, match="not in the assignment"):
        modular_tree(mlp, wn.assign_norms(nn.Linear(2, 2)))


def test_a_parameter_without_a_norm_is_refused(mlp):
    assignment = wn.assign_norms(mlp)
    first, *others = assignment
    without = type(assignment)((replace(first, norm=None), *others))
    with pytest.raises(ValueError, match=r"'0\.weight' has no norm"):
        modular_tree(mlp, without)


def test_a_registered_rule_serves_its_exact_class(monkeypatch):
    monkeypatch.setattr(builder, "RULES", dict(builder.RULES))

    @modular_rule(Subclass)
    def rule(module, builder):
        return 2.0 * builder.atom("weight") + builder.atom("bias", sensitivity=0.0)

    assert modular_tree(Subclass(2, 2)).sensitivity == 2


def test_rule_may_be_a_method():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)

        def modular_tree(self, builder):
            return 0.5 * builder.child("a")

    assert modular_tree(nn.Sequential(Gated())).lr_factors() == {"0.a.weight": 2.0}
