"""One line makes an optimizer: recipes and radii by name, a table of what will be used, errors with remedies."""

import copy
import inspect
import re

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.optim.settings import GROUP_DEFAULTS, EngineSettings
from wellnormed.routing.recipes import RECIPES


@pytest.mark.parametrize(("recipe", "lr"), [(name, recipe.lr) for name, recipe in RECIPES.items()])
def test_the_learning_rate_of_a_recipe_is_the_default(recipe, lr):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    rates = {g["lr"] for g in wn.Scion(model, recipe=recipe).param_groups if g["step_rule"] != "adamw"}
    assert rates == {lr}


@pytest.mark.parametrize(
    ("recipe", "radii"),
    [
        ("scion-gpt", (50.0, 50.0, 3000.0)),
        ("scion-shakespeare", (1.0, 3.0, 10.0)),
        ("scion-mlp", (1.0, 1.0, 1024.0)),
        ("scion-cnn", (8.0, 8.0, 128.0)),
    ],
)
def test_published_radii_come_with_their_recipe_and_yield_to_what_is_given(recipe, radii):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))

    def found(**settings):
        optimizer = wn.Scion(model, recipe=recipe, **settings)
        owner = {name: g["radius"] for g in optimizer.param_groups for name in g["param_names"]}
        assert optimizer.update_norm("0.weight") == owner["0.weight"] * RECIPES[recipe].lr
        return owner["0.weight"], owner["1.weight"], owner["3.weight"]

    assert found() == radii
    assert found(radii={"3.weight": 7.0}) == (*radii[:2], 7.0)
    assert found(radius=2.0) == (2.0, 2.0, 2.0)
    assert found(radius=2.0, radii={"0": 5.0}) == (5.0, 2.0, 2.0)


def small() -> nn.Module:
    """Two layers whose outputs start with an RMS of 1/4 and of 1, and a norm layer."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(64) / 4)
        model[2].weight.copy_(torch.eye(64))
    return model


def radii_in(optimizer: wn.optim.ConditionalGradient) -> dict[str, float]:
    """By name, as far as they are not 1, and as `update_norm` has them."""
    bounds = {name: bound / 0.02 for name, bound in optimizer.update_norms().items() if name.endswith("bias")}
    return {name: radius for name, radius in bounds.items() if radius != 1}


def test_vectors_move_by_their_size_at_the_start_unless_a_radius_is_given():
    """Without it a network that starts with small weights is drowned by its biases."""
    by_start = {"0.bias": 0.25, "1.bias": 0.125}
    for make in (wn.Scion, wn.Muon, wn.optim.Almond):
        assert radii_in(make(small(), lr=0.02)) == by_start
        assert radii_in(make(small(), lr=0.02, radius=1.0)) == {}
    assert radii_in(wn.Scion(small(), lr=0.02, radii={"0": 3.0})) == {"0.bias": pytest.approx(3.0), "1.bias": 0.125}
    # the ball of SCG holds the weight itself, and is no step: its radius does not depend on the start
    assert radii_in(wn.Scion(small(), lr=0.02, unconstrained=False)) == {}
    for recipe in ("language", "image", "sign-only"):
        assert radii_in(wn.Scion(small(), lr=0.02, recipe=recipe)) == {}
    printed = {line.split()[0]: line for line in str(wn.Scion(small(), lr=0.02)).splitlines()}
    assert " 0.25 " in printed["0.bias"]
    assert " 0.125 " in printed["1.bias"]


def test_a_resumed_run_keeps_the_sizes_of_its_first_start():
    """The optimizer of a resumed run is made beside trained weights, and takes the sizes from the saved state."""
    first = wn.Scion(small(), lr=0.02)
    trained = small()
    with torch.no_grad():
        trained[0].weight.mul_(4)
        trained[2].weight.div_(8)
    again = wn.Scion(trained, lr=0.02)
    assert radii_in(again) != radii_in(first)
    again.load_state_dict(first.state_dict())
    assert radii_in(again) == radii_in(first)
    early = first.state_dict()  # as saved before vectors had sizes
    for group in early["param_groups"]:
        del group["vector_radii"]
    again.load_state_dict(early)
    assert radii_in(again) == {}


def test_printing_shows_what_will_be_used():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 8), nn.Linear(8, 5, bias=False))
    model[1].bias.requires_grad_(False)
    groups = [{"params": [model[1].weight], "momentum": 0.5, "lr": 0.25}, {"params": [m.weight for m in model[::2]]}]
    optimizer = wn.Scion(groups, lr=0.5, norms=model, overrides={"0": None}, radii={"2": 3000}, lr_factors={"1": 0.5})
    lines = [re.split(r"\s{2,}", line) for line in str(optimizer).splitlines()]
    spectral = "Spectral"
    assert lines[0] == ["Scion()"]
    assert lines[1] == ["parameter", "shape", "norm", "radius", "lr", "differs", "why"]
    assert lines[2] == ["0.weight", "(5, 4)", "AdamW", "0.01", "override '0'"]
    assert lines[3] == ["1.weight", "(8, 4)", spectral, "1", "0.125", "momentum=0.5", "nn.Linear"]
    assert lines[4] == ["2.weight", "(5, 8)", spectral, "3000", "0.5", "nn.Linear"]
    assert lines[5][:2] == ["1.bias", "frozen"]
    for group in optimizer.param_groups:
        group["lr"] = 0.01  # as a scheduler moves it
    assert str(optimizer).startswith("Scion(lr=0.01)\n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m: wn.Scion(m, overrides={"0": wn.Spectral}),
            r"overrides\['0'\] must be a norm, got the class Spectral; pass Spectral\(\)",
        ),
        (lambda m: wn.Scion(m, overrides={"0": "Spectral"}), r"overrides\['0'\] must be .* got 'Spectral'; pass one"),
        (lambda m: wn.assign_norms(m.parameters()), "model is of type generator; pass the model itself"),
        (lambda m: wn.Scion(m, radii={"hed": 3.0}), r"radii: the pattern 'hed'.*nearest names are head"),
        (lambda m: wn.Scion(m, radii={"head": -3.0}), "radius=-3.0 must be positive"),
        (lambda m: wn.Muon(m, recipe="muon", radii={"0.bias": 3.0}), "AdamW moves '0.bias'"),
        (lambda m: wn.Scion(m, overrides={"hed": None, "0.wieght": None}), r"(?s)'hed'.*head.*'0.wieght'.*0.weight"),
    ],
)
def test_mistakes_are_named_with_their_remedy(make, message):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.head = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=message):
        make(model)


def test_all_parameters_without_a_norm_are_named_at_once():
    model = nn.Sequential(nn.Bilinear(2, 3, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 4, bias=False))
    with pytest.raises(ValueError, match=r"(?s)'0.weight' .*'2.weight' .*overrides=.*for each"):
        wn.Scion(model)


def test_an_optimizer_prints_in_80_columns_what_is_capped_and_what_differs():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 10))
    optimizer = wn.Muon(model, lr=0.1)
    wn.constrain(optimizer, {"3.weight": wn.SoftCap(2.0), "0.weight": wn.constraints.Hammer(1.0)})
    first, *lines = str(optimizer).splitlines()
    assert first == "Muon(lr=0.1, momentum=0.95, nesterov=True, coefficients=jordan-5)"
    assert max(map(len, lines)) <= 80
    assert [line.split()[-3:] for line in lines if line.startswith("3.weight")] == [["SoftCap", "2", "nn.Linear"]]
    assert [line.split()[-2:] for line in lines if line.startswith("0.weight")] == [["Hammer", "nn.Conv2d"]]


@pytest.mark.parametrize("optimizer", [wn.Scion, wn.Muon, wn.Almond, wn.optim.Signum, wn.optim.ModularDescent])
def test_signature_and_help_show_every_keyword_that_is_taken_with_its_default(optimizer):
    shown, taken = inspect.signature(optimizer).parameters, EngineSettings.__annotations__.keys() - optimizer.decides
    assert shown.keys() == taken | inspect.signature(optimizer.__init__).parameters.keys() - {"self", "settings"}
    made = optimizer(nn.Linear(2, 2, bias=False), lr=0.1).defaults
    assert all(shown[key].default == made[key] for key in GROUP_DEFAULTS.keys() & taken)
    assert all((f"\n    {key}: " in optimizer.__doc__) == (key in taken) for key in EngineSettings.__annotations__)
    assert [*inspect.signature(type("D", (optimizer,), {"__init__": lambda self, x: None})).parameters] == ["x"]


def test_a_scheduler_that_raises_the_rate_of_adamw_is_warned_of():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = wn.Muon(model, recipe="muon", lr=0.02, adamw=wn.optim.AdamWSettings(lr=3e-4))
    each = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], total_steps=8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(4):
        optimizer.step()
        each.step()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8)
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    with pytest.warns(UserWarning, match=r"AdamW, .* has the rate 0.02 now, and was made with 0.0003.*one for each"):
        optimizer.step()


def test_a_state_that_was_capped_is_not_loaded_without_a_word():
    def made(capped):
        optimizer = wn.Scion(model, lr=0.1)
        return optimizer, wn.constrain(optimizer, {"0.weight": wn.SoftCap(2.0)}) if capped else None

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    state = made(True)[0].state_dict()
    assert state["param_groups"][0]["capped"] == {"0.weight": "SoftCap 2"}
    made(True)[0].load_state_dict(copy.deepcopy(state))
    optimizer, _ = made(False)
    with pytest.warns(UserWarning, match=r"constraints on 1 parameters .* such as 0.weight \(SoftCap 2\): call"):
        optimizer.load_state_dict(copy.deepcopy(state))
    assert "capped" not in optimizer.state_dict()["param_groups"][0]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"use_muon": False}, "a group has 'use_muon'.* overrides={NAME: None}"),
        ({"algorithm": "adamw"}, "a group has 'algorithm'"),
        ({"momentumm": 0.8}, "a group has 'momentumm'.* momentum,"),
        ({"betas": (0.9, 0.99)}, "a group has betas, which AdamW takes.* 'weight', have a norm"),
    ],
)
def test_settings_of_a_group_that_nothing_reads_are_refused(group, message):
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=message):
        wn.Scion([{"params": layer.parameters(), **group}], norms=layer)
    optimizer = wn.Scion(nn.ModuleList([layer, nn.Linear(4, 4).requires_grad_(False)]))
    with pytest.raises(ValueError, match="a group has"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))], "norm": wn.Spectral(), **group})


def test_groups_may_hold_what_schedulers_and_people_write_there():
    layer = nn.Linear(4, 4)
    groups = [{"params": layer.parameters(), "name": "all", "initial_lr": 0.1}]
    assert wn.Scion(groups, norms=layer).param_groups[0]["name"] == "all"
    mixed = [{"params": layer.parameters(), "betas": (0.5, 0.9)}]
    groups = wn.Scion(mixed, norms=layer, overrides={"bias": None}, recipe="modular").param_groups
    assert groups[1]["betas"] == (0.5, 0.9)


@pytest.mark.parametrize("own", [{}, {"lr": 0.1}])
def test_the_scale_of_a_group_s_rate_reaches_its_norms_and_adamw_once(own):
    """As timm's layer decay writes it, whose schedulers multiply by it once more where they find it."""
    layer, settings = nn.Linear(4, 4), {"lr": 0.02, "overrides": {"bias": None}}
    rates = [
        [
            g["lr"]
            for g in wn.Scion([{"params": layer.parameters(), **own, **scale}], norms=layer, **settings).param_groups
        ]
        for scale in ({"lr_scale": 0.5}, {})
    ]
    assert rates[0] == [0.5 * rate for rate in rates[1]]
    optimizer = wn.Scion(nn.ModuleList([nn.Linear(4, 4), layer.requires_grad_(False)]), lr=0.02)
    optimizer.add_param_group({"params": layer.requires_grad_(True).parameters(), "lr_scale": 0.5})
    assert optimizer.update_norm("1.weight") == 0.5 * optimizer.update_norm("0.weight")
    assert all("lr_scale" not in group for group in optimizer.param_groups)
    with pytest.raises(ValueError, match="lr_scale=-1 must"):
        wn.Scion([{"params": layer.parameters(), "lr_scale": -1}], norms=layer)


def test_a_state_of_many_steps_without_any_tensor_is_refused():
    def stepped():
        layer = nn.Linear(4, 4)
        optimizer = wn.Scion(layer)
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return layer, optimizer

    state = {**stepped()[1].state_dict(), "state": {}}
    _, optimizer = stepped()
    with pytest.raises(ValueError, match=r"after 1 steps, and holds no tensor.*set_state_dict"):
        optimizer.load_state_dict(state)
    wn.Scion(nn.Linear(4, 4)).load_state_dict(wn.Scion(nn.Linear(4, 4)).state_dict())


def test_an_eps_that_is_zero_in_16_bits_is_refused_when_the_optimizer_is_made():
    layer = nn.Linear(4, 4).half()
    with pytest.raises(ValueError, match=r"eps=1e-08 is 0.*float32.*AdamWSettings"):
        wn.Scion(layer, recipe="muon")
    wn.Scion(layer, recipe="muon", adamw=wn.optim.AdamWSettings(eps=1e-4))
    wn.Scion(nn.Linear(4, 4).bfloat16(), recipe="muon")
