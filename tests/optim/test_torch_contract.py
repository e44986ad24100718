"""A good citizen of torch: groups, names, scalers, clipping, copies, compilation, distributed checkpoints."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import wellnormed as wn
from wellnormed.optim.directions import NorMuon
from wellnormed.optim.settings import EngineSettings

from .training import INNER, OURS, backward, network, same, train

FORMS = {
    "parameters": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "groups": lambda model: [{"params": [p]} for p in model.parameters()],
    "named groups": lambda model: [{"params": list(model.named_parameters()), "momentum": 0.9}],
}


OPTIMIZERS = [
    wn.optim.ConditionalGradient, wn.Scion, wn.Muon, wn.Almond, wn.optim.SpectralDescent, wn.optim.Signum,
    wn.optim.NormalizedSGD, wn.optim.ModularDescent,
]  # fmt: skip
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@every_optimizer
def test_a_model_is_enough(optimizer):
    model = network()
    if optimizer is wn.optim.SpectralDescent:
        with pytest.raises(ValueError, match=r"inverse sharpness.*pass lr="):
            optimizer(model)
        return
    made = optimizer(model)
    train(model, made, 2)
    assert {name for g in made.param_groups for name in g["param_names"]} == {n for n, _ in model.named_parameters()}


@every_optimizer
@pytest.mark.parametrize(
    ("keyword", "remedy"), [("momentun", r" \(did you mean 'momentum'\?\);"), ("betas", r"; .*AdamWSettings\(betas=\(")]
)
def test_unknown_keywords_are_refused_as_python_does(optimizer, keyword, remedy):
    unexpected = rf"{optimizer.__name__}\(\) got an unexpected keyword argument '{keyword}'{remedy}"
    with pytest.raises(TypeError, match=unexpected):
        optimizer(network(), lr=0.1, **{keyword: 0.9})


@every_optimizer
def test_every_shared_keyword_is_accepted_or_refused_by_name(optimizer):
    values = {"momentum": 0.5, "radius": 2.0, "radii": {"0.weight": 3.0}, "weight_decay": 0.0, "memory": "buffer"}
    values |= {"adamw": wn.optim.AdamWSettings(), "process_group": None, "nesterov": False}
    made = optimizer(network(), lr=0.1, **values)
    [first] = [g for g in made.param_groups if "0.weight" in g["param_names"]]
    assert (first["momentum"], first["radius"]) == (0.5, 3.0)
    assert all(g["radius"] == 2.0 for g in made.param_groups if g is not first)
    assert EngineSettings.__annotations__.keys() == {
        *values, "norms", "recipe", "overrides", "per_head", "lr_factors", "step_rule",
        "maximize", "directions",
    }  # fmt: skip


def test_a_model_s_norms_are_chosen_in_the_same_call():
    model = network()
    chosen = {"recipe": "language", "overrides": {"0.weight": wn.norms.RowNorm()}}
    one = wn.Scion(model, **chosen)
    assert str(one.assignment) == str(wn.assign_norms(model, **chosen))
    groups = [{"params": model.parameters(), "lr": 0.5}]
    assert str(wn.Scion(groups, norms=model, **chosen).assignment) == str(one.assignment)
    with pytest.raises(ValueError, match="recipe and overrides= choose the norms of a model"):
        wn.Scion(wn.assign_norms(model), **chosen)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_parameters_is_the_assignment(form):
    one, other = network(), network()
    train(one, wn.Scion(wn.assign_norms(one), lr=0.05), 4)
    train(other, wn.Scion(form(other), lr=0.05, norms=wn.assign_norms(other)), 4)
    assert same(one, other)


def test_settings_of_a_group_are_its_own():
    model = network()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1, "lr": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = wn.Scion(groups, lr=0.25, norms=wn.assign_norms(model), radius=1.0)
    assert [(g["weight_decay"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.1, 0.5, 3),
        (0.0, 0.25, 3),
    ]
    assert optimizer.update_norm("0.bias") == 0.25


def test_adamw_has_settings_of_its_own_for_every_role():
    model = network()
    head, vectors = wn.optim.AdamWSettings(lr=1e-3, betas=(0.8, 0.9)), wn.optim.AdamWSettings(weight_decay=0.1)
    optimizer = wn.Muon(
        model, lr=0.2, recipe="muon", adamw={"4": head, "[02].bias": vectors}, lr_factors={"0": 0.5}
    )  # fmt: skip
    found = {name: g for g in optimizer.param_groups for name in g["param_names"] if g["step_rule"] == "adamw"}
    assert {name: (g["lr"], g["betas"], g["weight_decay"]) for name, g in found.items()} == {
        "0.bias": (0.005, (0.9, 0.95), 0.1),
        "2.bias": (0.01, (0.9, 0.95), 0.1),
        "4.weight": (1e-3, (0.8, 0.9), 0.0),
        "4.bias": (1e-3, (0.8, 0.9), 0.0),
    }
    partly = wn.Muon(model, recipe="muon", adamw={"4.weight": head})
    assert {g["lr"] for g in partly.param_groups if g["step_rule"] == "adamw"} == {1e-3, 0.01}
    with pytest.raises(ValueError, match="the pattern 'lm_head' matches no trainable parameter"):
        wn.Muon(model, recipe="muon", adamw={"lm_head": head})


def test_layer_wise_rates_reach_what_is_left_to_adamw():
    model = network()
    groups = [{"params": list(layer.parameters()), "lr": lr} for layer, lr in ((model[0], 0.1), (model[2], 0.2))]
    groups.append({"params": list(model[4].parameters())})
    optimizer = wn.Muon(
        groups,
        lr=0.2,
        norms=wn.assign_norms(model, recipe="muon"),
        adamw=wn.optim.AdamWSettings(lr=1e-3, weight_decay=0.5),
    )
    found = {name: (g["step_rule"], g["lr"]) for g in optimizer.param_groups for name in g["param_names"]}
    assert found == {
        "0.weight": ("unconstrained", 0.1),
        "0.bias": ("adamw", 5e-4),
        "2.weight": ("unconstrained", 0.2),
        "2.bias": ("adamw", 1e-3),
        "4.weight": ("adamw", 1e-3),
        "4.bias": ("adamw", 1e-3),
    }
    assert optimizer.update_norm("0.bias") is None


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda model: [{"params": list(model.parameters())}, {"params": [model[0].weight]}], "'0.weight' is in two"),
        (lambda model: [*model.parameters(), nn.Parameter(torch.ones(2))], r"shape \(2,\) in group 0"),
        (lambda model: [], "no parameters"),
    ],
)
def test_a_parameter_is_in_one_group_and_has_a_norm(form, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        wn.Scion(form(model), lr=0.1, norms=wn.assign_norms(model))
    with pytest.raises(ValueError, match="which norm they live in"):
        wn.Scion(model.parameters(), lr=0.1)


def test_state_finds_its_parameters_by_name():
    one, other = network(), network()
    first = wn.Scion(wn.assign_norms(one), lr=0.05, lr_factors={"*.bias": 0.5})
    train(one, first, 3)
    other.load_state_dict(one.state_dict())
    groups = [{"params": [p]} for p in reversed(list(other.parameters()))]
    second = wn.Scion(groups, lr=9.0, norms=wn.assign_norms(other))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(one, first, 3, first=3)
    train(other, second, 3, first=3)
    assert same(one, other)
    with pytest.raises(ValueError, match="one group here and 2 in the saved state"):
        wn.Scion(wn.assign_norms(other), lr=1.0).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"the state lacks \['weight'\]"):
        wn.Scion(wn.assign_norms(nn.Linear(2, 2, bias=False)), lr=1.0).load_state_dict(first.state_dict())


EVERY = {
    **OURS,
    "memory-light": lambda model, lr: wn.Scion(model, lr=lr, memory="gradient"),
    "with a state of its own": lambda model, lr: wn.Scion(
        model, lr=lr, nesterov=True, directions={"*": NorMuon(0.9)}, overrides={"0.weight": wn.norms.PerHead(2)}
    ),
    "clipped": lambda model, lr: INNER["clipped"](model),
    **{f"averaged {name}": lambda model, lr, inner=inner: wn.Averaged(inner(model)) for name, inner in INNER.items()},
}


def loaded(make, model, optimizer):
    other = network(seed=1)
    other.load_state_dict(model.state_dict())
    again = make(other, 0.9)  # every setting comes from the state
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors otherwise
    return other, again


def loaded_by_name(make, model, optimizer):
    other = network(seed=1)
    other.load_state_dict(model.state_dict())
    again, state = make(other, 0.9), get_optimizer_state_dict(model, optimizer)
    assert "2.weight" in state["state"]
    set_optimizer_state_dict(other, again, copy.deepcopy(state))  # of DCP; a checkpoint on disk is a copy
    return other, again


@pytest.mark.parametrize("way", [
    lambda _, *both: copy.deepcopy(both), lambda _, *both: pickle.loads(pickle.dumps(both)), loaded, loaded_by_name,
], ids=["copied", "pickled", "loaded", "loaded by name"])  # fmt: skip
@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_a_run_goes_on_with_the_same_bits(make, way):
    model = network()
    optimizer = make(model, 0.05)
    train(model, optimizer, 2)
    other, again = way(make, model, optimizer)
    train(model, optimizer, 2, first=2)
    train(other, again, 2, first=2)
    assert same(model, other)


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_an_overflow_skips_the_step_and_lowers_the_scale(make):
    model = network()
    optimizer, scaler = make(model, 0.05), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        optimizer.zero_grad()
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
        scaler.scale(model(x).square().mean()).backward()
        if seed == 2:
            model[0].weight.grad[0, 0] = torch.inf
            before, scale = copy.deepcopy(model), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < scale
    assert same(before, model)


@pytest.mark.parametrize("averaged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compiled_step_is_the_step_with_its_constraints(averaged):
    """The step of an average compiles that of the optimizer within as well."""

    def make(model):
        return wn.Averaged(wn.Scion(model, lr=0.05)) if averaged else wn.Scion(model, lr=0.05)

    one = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))  # a batch of matrices and one of biases
    other = copy.deepcopy(one)
    first, second = make(one), make(other)
    caps = [wn.constrain(optimizer, {"*.weight": wn.HardCap(1.0, every=4)}) for optimizer in (first, second)]
    compiled = torch.compile(second.step, backend="aot_eager")
    for seed in range(4):
        for model, optimizer, step in ((one, first, first.step), (other, second, compiled)):
            optimizer.zero_grad()
            backward(model, seed)
            step()
        if seed == 3 and averaged:
            first.eval(), second.eval()
        assert all(max(each.proved_ratios().values()) <= 1 for each in caps)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", [wn.Muon, pytest.param(wn.Scion, marks=pytest.mark.slow)])
def test_a_schedule_compiles_nothing_anew(make):
    """Eight parameters of many shapes; the second step compiles the counter as a variable, and none after it."""
    one, other = (nn.Sequential() for _ in range(2))
    for model in (one, other):
        torch.manual_seed(0)
        for width in (4, 6):
            model += nn.Sequential(nn.Linear(width, width + 2), nn.LayerNorm(width + 2))
    first, second = make(one, lr=0.05), make(other, lr=0.05)
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 4) for optimizer in (first, second)]
    compiled = torch.compile(second.step, backend="eager")  # what is compiled anew does not depend on the backend
    for number in range(4):
        stance = "fail_on_recompile" if number > 1 else "default"
        for model, optimizer, step in ((one, first, first.step), (other, second, compiled)):
            optimizer.zero_grad()
            torch.manual_seed(number)
            model(torch.randn(5, 4)).square().sum().backward()
            with torch.compiler.set_stance(stance):
                step()
        for schedule in schedules:
            schedule.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_settings_that_a_scheduler_moves_out_of_range_are_refused_before_the_step():
    model = nn.Linear(4, 4, bias=False)
    for settings in ({"unconstrained": False}, {"weight_decay": 2.0}):
        optimizer = wn.Scion(wn.assign_norms(model), lr=0.4, **settings)
        optimizer.param_groups[0]["lr"] = 1.5
        before = model.weight.detach().clone()
        model.weight.grad = torch.ones(4, 4)
        with pytest.raises(ValueError, match=r"lr=1\.5"):
            optimizer.step()
        assert torch.equal(model.weight, before)


def test_a_group_may_ask_for_adamw():
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    groups = [{"params": [model[0].weight]}, {"params": [model[1].weight], "step_rule": "adamw"}]
    optimizer = wn.Scion(groups, lr=0.1, norms=wn.assign_norms(model), adamw=wn.optim.AdamWSettings(lr=0.01))
    twin = torch.nn.Parameter(model[1].weight.detach().clone())
    peer = torch.optim.AdamW([twin], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for p in (*model.parameters(), twin):
        p.grad = torch.ones(4, 4)
    optimizer.step()
    peer.step()
    assert torch.equal(model[1].weight, twin)
    assert optimizer.update_norm("1.weight") is None
