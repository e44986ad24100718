"""Routing is total, printable and loud, whatever the recipe."""

import re

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.routing.modules import made
from wellnormed.models import GPT, GPTConfig
from wellnormed.norms import RowNorm, SpectralConv, Split
from wellnormed.routing.recipes import RECIPES

every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))


def tied_model() -> nn.Module:
    model = language_model()
    model.append(nn.Linear(4, 5, bias=False))
    model[4].weight = model[0].weight
    return model


@every_recipe
def test_routing_is_total_and_in_order(recipe):
    model = language_model()
    assignment = wn.assign_norms(model, recipe)
    assert [a.name for a in assignment] == [name for name, _ in model.named_parameters()]
    assert all((a.norm is None) <= (recipe == "muon") for a in assignment)
    assert (str(wn.assign_norms(model)) == str(assignment)) == (recipe == "modular")  # the default


def test_printing_shows_every_parameter_the_frozen_ones_and_the_totals():
    model = language_model()
    model[1].bias.requires_grad_(False)
    text = str(wn.assign_norms(model, "muon"))
    rows, totals = text.splitlines()[:5], text.splitlines()[5:]
    spectral = "Spectral"
    assert [re.split(r"\s{2,}", row) for row in rows] == [
        ["0.weight", "(5, 4)", "AdamW", "nn.Embedding"],
        ["1.weight", "(8, 4)", spectral, "nn.Linear"],
        ["3.weight", "(5, 8)", "AdamW", "last nn.Linear"],
        ["3.bias", "(5,)", "AdamW", "bias"],
        ["1.bias", "frozen", "requires_grad is False"],
    ]
    assert len({row.rindex(re.split(r"\s{2,}", row)[-1]) for row in rows}) == 1  # aligned
    assert totals == ["65 entries in 3 x AdamW", f"32 entries in 1 x {spectral}"]
    assert str(wn.assign_norms(nn.ReLU())) == "no parameters"


def test_overrides_by_pattern_and_by_module_name():
    by_module = {a.name: a.norm for a in wn.assign_norms(language_model(), overrides={"0": wn.Sign()})}
    assert by_module["0.weight"] == wn.Sign()
    assignment = wn.assign_norms(language_model(), overrides={"*.weight": RowNorm(), "3.bias": None})
    assert all(a.norm == RowNorm() for a in assignment if a.name.endswith("weight"))
    assert next(a for a in assignment if a.name == "3.bias").norm is None
    assert "3.bias    (5,)    AdamW" in str(assignment)


def test_layers_decide_for_their_own_parameters_but_muon_takes_only_matrices():
    model = GPT(GPTConfig(width=8, heads=2, blocks=1))
    norms = {a.name: a.norm for a in wn.assign_norms(model)}
    assert norms["layers.1.block.query.weight"] == wn.norms.PerHead(2)
    assert norms["layers.1.block.attend.bias_HT"] == wn.Sign()
    muon = {a.name: a.norm for a in wn.assign_norms(model, "muon")}
    assert muon["layers.1.block.query.weight"] == wn.norms.PerHead(2)
    assert muon["layers.1.block.attend.bias_HT"] is None
    assert muon["embedding.weight"] is None


@pytest.mark.parametrize(
    ("recipe", "norm", "radius"),
    [
        ("modular", wn.ColNorm(0, 16), 1), ("language", wn.ColNorm(0), 1), ("image", wn.ColNorm(0), 1),
        ("sign-only", wn.Sign(normalized=True), 1), ("scion-gpt", wn.Sign(normalized=True), 3000), ("muon", None, 1),
    ],
)  # fmt: skip
def test_a_tied_table_is_an_embedding_where_nothing_else_is_published(recipe, norm, radius):
    assignment = wn.assign_norms(tied_model(), recipe)
    [tied] = [a for a in assignment if a.name == "0.weight"]
    assert (tied.norm, tied.radius, tied.aliases) == (norm, radius, ("4.weight",))
    assert tied.reason.startswith("tied: nn.Embedding and ")
    assert "4.weight" not in str(assignment)


def test_a_tied_parameter_whose_places_no_recipe_reconciles_is_refused_with_a_remedy():
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'0.weight' is tied.*as 1.weight; pass overrides=\{'0.weight': ...\}"):
        wn.assign_norms(model, "language")
    assert wn.assign_norms(model, "language", {"0.weight": wn.ColNorm(0)})


def test_an_override_on_any_name_of_a_tied_tensor_counts_for_all():
    model = tied_model()
    for name in ("0.weight", "4.weight", "4"):
        [tied] = [a for a in wn.assign_norms(model, overrides={name: wn.Sign()}) if a.name == "0.weight"]
        assert tied.norm == wn.Sign()
        optimizer = wn.Scion(model, lr=0.5, lr_factors={name: 0.5}, radii={name: 3.0})
        assert optimizer.update_norm("0.weight") == 0.5 * 0.5 * 3.0
        assert wn.constrain(optimizer, {name: wn.ColumnCap(1.0)}).names == ["0.weight"]
    with pytest.raises(ValueError, match="matches both '0' and '4'"):
        wn.assign_norms(model, overrides={"0": wn.Sign(), "4": wn.ColNorm()})
    twice = wn.assign_norms(model, overrides={"0": wn.Sign(), "4": wn.Sign()})  # which is no contradiction
    assert next(a.norm for a in twice if a.name == "0.weight") == wn.Sign()


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_the_prefixes_of_wrappers_may_be_left_out_of_patterns(prefix):
    model = language_model()
    for part in reversed(prefix.split(".")[:-1]):
        model = made(**{part: model})
    for name in ("1", "1.*", prefix + "1", "_orig_mod.1.weight"):
        assigned = {a.name: a.norm for a in wn.assign_norms(model, overrides={name: None})}
        assert assigned[prefix + "1.weight"] is None
        assert assigned[prefix + "0.weight"] == wn.ColNorm(0, 16)
    plain = wn.assign_norms(model, "language")
    assert [a.norm for a in plain] == [a.norm for a in wn.assign_norms(language_model(), "language")]
    assert wn.assign_norms(language_model(), overrides={prefix + "1.weight": None})


def test_matrices_tied_to_each_other_agree():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    first = next(iter(wn.assign_norms(model, "language")))
    assert first.norm == wn.Spectral()
    assert first.reason == "tied: nn.Linear"


def test_a_pattern_passes_by_what_its_norm_does_not_fit_and_says_so():
    first, second = wn.assign_norms(nn.Sequential(nn.Linear(4, 3)), overrides={"0": wn.Sign()})
    assert (first.norm, first.reason) == (wn.Sign(), "override '0'")
    assert (second.norm, second.reason) == (wn.norms.BiasRMS(), "bias; override '0' does not fit")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nothing": wn.Sign()}, "matches no trainable parameter"),
        ({"weight": wn.Sign()}, r"the pattern 'weight' stands for whole names alone; pass '\*\.weight'"),
        ({"1.*": wn.Sign(), "1.weight": wn.Spectral()}, "matches both"),
        ({"1.bias": wn.Spectral()}, "2-dimensional"),
        ({"1.weight": wn.norms.PerHead(3)}, "do not divide"),
        ({"1.weight": Split((3, 4))}, "do not add up"),
        ({"1.weight": SpectralConv()}, "4-dimensional"),
    ],
)
def test_bad_overrides_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        wn.assign_norms(language_model(), overrides=overrides)
    with pytest.raises(ValueError, match="recipe='sign-head' is not one of modular"):
        wn.assign_norms(language_model(), recipe="sign-head")


@every_recipe
def test_a_parameter_without_a_rule_is_refused_or_left_to_adamw(recipe):
    model = made(table=torch.zeros(2, 3, 4))
    if recipe == "muon":
        [table] = wn.assign_norms(model, recipe)
        assert (table.norm, table.reason) == (None, "no norm for it in Module")
    else:
        with pytest.raises(ValueError, match=r"'table'.*has no norm"):
            wn.assign_norms(model, recipe)


def test_a_lazy_parameter_is_refused_with_a_remedy():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"'0.weight' is not initialized; run the model once"):
        wn.assign_norms(model)
    model(torch.zeros(1, 3))
    assert len(wn.assign_norms(model)) == 2
