"""Schedule-free training: closed forms, promises of what is evaluated, and a good citizen of torch."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim.lr_scheduler import LinearLR, OneCycleLR

import wellnormed as wn

from .training import INNER, backward, network, same, train

every_optimizer = pytest.mark.parametrize("make", INNER.values(), ids=INNER)
every_beta = pytest.mark.parametrize("beta", [0.0, 0.8])


def followed(optimizer, steps, gradient, weight):
    """All z of a training by `gradient` of the weight, which an optimizer within made."""
    iterates = []
    optimizer.inner.register_step_post_hook(lambda *_: iterates.append(weight.detach().clone()))
    for _ in range(steps):
        weight.grad = gradient(weight.detach())
        optimizer.step()
    return iterates


@every_beta
def test_it_is_schedule_free_gradient_descent(beta):
    """Against the paper's three sequences, written as they are, and the closed form of the average."""
    torch.manual_seed(0)
    weight, target = nn.Parameter(torch.randn(5, dtype=torch.float64)), torch.randn(5, dtype=torch.float64)
    curvature = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    x = z = weight.detach().clone()
    optimizer = wn.Averaged(torch.optim.SGD([weight], lr=0.3), beta=beta)
    iterates = followed(optimizer, 30, lambda y: curvature * (y - target), weight)
    for t, found in enumerate(iterates, 1):
        y = (1 - beta) * z + beta * x
        z = z - 0.3 * curvature * (y - target)
        x = x + 3 / (t + 2) * (z - x)
        torch.testing.assert_close(found, z)
    torch.testing.assert_close(weight.detach(), (1 - beta) * z + beta * x)
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), x)
    t = torch.arange(1, 31, dtype=torch.float64)
    weights = t * (t + 1)
    torch.testing.assert_close(weight.detach(), (weights @ torch.stack(iterates)) / weights.sum())


@every_optimizer
def test_without_beta_the_optimizer_trains_as_it_would_alone(make):
    alone, other = network(), network()
    train(alone, make(alone), 6)
    optimizer = wn.Averaged(make(other), beta=0.0)
    train(other, optimizer, 6)
    assert same(alone, other)
    optimizer.eval()
    assert not same(alone, other)


@every_beta
@every_optimizer
def test_evaluating_changes_no_bit_of_the_training(make, beta):
    plain, watched = network(), network()
    optimizer, other = (wn.Averaged(make(model), beta=beta) for model in (plain, watched))
    for model, each in ((plain, optimizer), (watched, other)):
        for seed in range(6):
            train(model, each, 1, first=seed)
            if each is other:
                before = copy.deepcopy(model)
                each.eval()
                each.eval()
                assert seed == 0 or not same(before, model)
                each.train()
                each.train()
                assert same(before, model)
    assert same(plain, watched)


@pytest.mark.parametrize("mode", ["train", "eval"])
@every_beta
@every_optimizer
def test_a_run_goes_on_from_any_step_with_the_same_bits(make, beta, mode):
    """A state that was saved in one mode is loaded in the other, whatever weights the model was given."""
    whole, resumed = network(), network(seed=1)
    first, second = wn.Averaged(make(whole), beta=beta), wn.Averaged(make(resumed), beta=beta)
    train(whole, first, 3)
    getattr(first, mode)()
    state, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(whole.state_dict())
    if mode == "train":
        resumed.load_state_dict(weights)
        second.eval()
    second.load_state_dict(state)
    first.eval(), second.eval()
    assert same(whole, resumed)
    first.train(), second.train()
    if make is INNER["light"]:  # gradients hold the momentum
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    train(whole, first, 3, first=3)
    train(resumed, second, 3, first=3)
    assert same(whole, resumed)
    assert first.state_dict()["param_groups"] == second.state_dict()["param_groups"]


def test_the_state_of_a_plain_optimizer_begins_an_average():
    model = network()
    plain = wn.Scion(model, lr=0.05)
    train(model, plain, 3)
    twin = copy.deepcopy(model)
    optimizer = wn.Averaged(wn.Scion(twin, lr=0.05))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(model, plain, 1, first=3)
    train(twin, optimizer, 1, first=3)
    assert same(model, twin)  # the first average is the first iterate


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05))
    train(model, optimizer, 2)
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    state["state"][0]["averaged_z"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"average of '0.weight' is of shape \(2,\), not \(8, 6\)"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="dictionary of an optimizer"):
        optimizer.load_state_dict([])
    assert same(before, model)
    train(model, optimizer, 1, first=2)


@every_beta
def test_writes_of_others_are_refused_by_name(beta):
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05), beta=beta)
    model.load_state_dict(network(seed=3).state_dict())  # before the first step nothing is known
    train(model, optimizer, 2)
    nn.init.zeros_(model[2].weight)
    for call in (optimizer.step, optimizer.eval, optimizer.train, optimizer.state_dict):
        with pytest.raises(ValueError, match=r"2.weight were written since the last step.*begin a new average"):
            call()
    again = wn.Averaged(optimizer.inner, beta=beta)
    assert float(model[2].weight.detach().abs().max()) == 0
    train(model, again, 1)


def test_a_gradient_that_is_refused_leaves_the_training_whole():
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05))
    train(model, optimizer, 2)
    before = copy.deepcopy(model)
    backward(model, 2)
    model[0].weight.grad[0, 0] = torch.nan
    with pytest.raises(wn.optim.NonFiniteGradientError, match=r"0\.weight"):
        optimizer.step()
    assert same(before, model)
    train(model, optimizer, 1)


CAPS = [
    wn.HardCap(0.9), wn.HardCap(0.9, every=3), wn.SoftCap(0.9),
    wn.constraints.SpectralNormalize(0.9), wn.constraints.Hammer(0.9), wn.constraints.Orthogonal(0.9),
    wn.constraints.Stiefel(0.9), wn.constraints.Sphere(0.9), wn.constraints.SpectralInterval(0.3, 0.9),
]  # fmt: skip


@pytest.mark.parametrize(("beta", "prove"), [(0.8, True), (0.0, False)])
@pytest.mark.parametrize("cap", CAPS, ids=str)
def test_what_is_evaluated_keeps_every_cap(cap, beta, prove):
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.1, momentum=0.5), beta=beta)
    constraints = wn.constrain(optimizer, {"*.weight": cap}, prove=prove)
    for step in range(8):
        train(model, optimizer, 1, first=step)
        optimizer.eval()
        assert max(constraints.proved_ratios().values(), default=0) <= 1
        optimizer.train()


@pytest.mark.parametrize("cap", [wn.HardCap(0.9), wn.constraints.Orthogonal(0.9)], ids=str)
def test_an_average_that_rounding_has_lifted_is_brought_back(cap):
    model = nn.Linear(8, 8, bias=False)
    optimizer = wn.Averaged(wn.Scion(model, lr=0.1), beta=0.8)
    constraints = wn.constrain(optimizer, {"weight": cap})
    train(nn.Sequential(nn.Linear(6, 8), model), optimizer, 2)
    state = optimizer.state_dict()
    average = state["state"][0]["averaged_x"]
    average *= 1.0001 * 0.9 / torch.linalg.matrix_norm(average, 2)
    optimizer.load_state_dict(state)
    optimizer.eval()
    assert constraints.proved_ratios()["weight"] <= 1


@pytest.mark.parametrize("within", [0, 1, 2], ids=["constrained first", "constrained last", "clipped"])
def test_constraints_of_another_optimizer_act_on_its_iterates(within):
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    if within == 0:
        constraints = wn.constrain(inner, {"*.weight": wn.HardCap(0.5)}, norms=model)
    optimizer = wn.Averaged(inner if within < 2 else wn.optim.Clipped(inner, gain=2.0, norms=model))
    if within:
        constraints = wn.constrain(optimizer, {"*.weight": wn.HardCap(0.5)}, norms=model)
    for step in range(4):
        train(model, optimizer, 1, first=step)
        assert max(constraints.norm_ratios().values()) > 0.5  # they act
        optimizer.eval()
        assert max(constraints.proved_ratios().values()) <= 1
        optimizer.train()


def test_no_weight_is_proved_again_in_a_step(monkeypatch):
    """The wrapper writes weights, which would make a constraint prove them, m n^2 each, before every step."""
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05))
    wn.constrain(optimizer, {"*.weight": wn.HardCap(1.0)})
    train(model, optimizer, 2)
    proofs = []
    monkeypatch.setattr(wn.Spectral, "upper_bound", lambda *_: proofs.append(1))
    optimizer.eval()
    optimizer.train()
    train(model, optimizer, 2, first=2)
    assert not proofs


def test_weights_that_were_loaded_before_the_first_step_are_projected():
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05))
    constraints = wn.constrain(optimizer, {"*.weight": wn.HardCap(1.0)})
    with torch.no_grad():
        model[2].weight.mul_(100)
    train(model, optimizer, 1)
    optimizer.eval()
    assert max(constraints.proved_ratios().values()) <= 1


def test_print_says_what_the_weights_are_and_what_averages_do_not_keep():
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05, momentum=0.5))
    wn.constrain(optimizer, {"0.weight": wn.HardCap(1.0), "2.weight": wn.constraints.Orthogonal(1.0)})
    lines = str(optimizer).splitlines()
    assert lines[:2] == [
        "Averaged(beta=0.8): the weights are y, at which gradients are taken",
        "Scion(lr=0.05, momentum=0.5)",
    ]
    said = "2.weight: averages keep Orthogonal(cap=1.0) from above, and eval() brings them back to it"
    assert [line for line in lines if "averages" in line] == [said]
    optimizer.eval()
    assert str(optimizer).startswith("Averaged(beta=0.8): the weights are the average x\n")


def test_settings_out_of_range_and_weights_of_16_bits_are_refused():
    model = network()
    for settings, message in (
        ({"beta": 1.0}, r"beta=1.0 must lie in \[0, 1\)"),
        ({"beta": "0.8"}, "beta='0.8' is of type str"),
    ):
        with pytest.raises(ValueError, match=message):
            wn.Averaged(wn.Scion(model), **settings)
    for other in (model, wn.Averaged(wn.Scion(model))):
        with pytest.raises(ValueError, match="must be an optimizer of torch"):
            wn.Averaged(other)
    with pytest.raises(ValueError, match=r"a step of LBFGS needs closure"):
        wn.Averaged(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"0.weight' is of torch.bfloat16, in which an average stands still"):
        wn.Averaged(wn.Scion(model.bfloat16()))


@every_optimizer
def test_schedulers_and_closures(make):
    """A closure is called at the point of the gradients."""
    model, other = network(), network()
    optimizer, peer = wn.Averaged(make(model)), wn.Averaged(make(other))
    rates = [group["lr"] for group in optimizer.param_groups]
    schedules = [LinearLR(each, 0.1, 1.0, 3) for each in (optimizer, peer)]
    for seed in range(3):
        assert float(optimizer.step(lambda seed=seed: (optimizer.zero_grad(), backward(model, seed))[1])) > 0
        train(other, peer, 1, first=seed)
        assert same(model, other)
        for schedule in schedules:
            schedule.step()
    assert [group["lr"] for group in optimizer.inner.param_groups] == pytest.approx(rates)


def test_a_shallow_copy_of_the_optimizer_has_its_mode_and_its_weights():
    """As Lightning's wrapper, on which a module calls `eval` and `train`, and the trainer steps the optimizer."""
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05))
    wrapper = copy.copy(optimizer)
    wrapper.__dict__ = dict(vars(optimizer))
    train(model, optimizer, 2)
    before = copy.deepcopy(model)
    wrapper.eval()
    with pytest.raises(ValueError, match=r"step\(\) after eval\(\).*call train\(\)"):
        optimizer.step()
    wrapper.train()
    assert same(before, model)
    wrapper.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 1, first=2)
    wrapper.eval()


def test_one_cycle_sets_the_rates_and_momentum_of_the_optimizer_within():
    optimizer = wn.Averaged(INNER["momentum"](network()))
    OneCycleLR(optimizer, max_lr=0.3, total_steps=10)
    assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.3 / 25)
    assert optimizer.inner.param_groups[0]["momentum"] == 0.95


def test_a_layer_that_joins_has_an_average_of_its_own():
    model = network()
    model[0].requires_grad_(False)
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05))
    train(model, optimizer, 3)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, 1, first=3)
    optimizer.eval()
    z = optimizer.state[model[0].weight]["averaged_z"]
    torch.testing.assert_close(model[0].weight.detach(), z)  # of one iterate
    assert not torch.allclose(model[2].weight.detach(), optimizer.state[model[2].weight]["averaged_z"])


def test_a_step_of_length_zero_counts_nothing():
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05))
    state = get_optimizer_state_dict(model, optimizer)  # which makes such a step
    assert float(state["state"]["2.weight"]["averaged_steps"]) == 0
    assert same(model, network())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_weights_that_are_loaded_after_the_state_are_y_or_refused(mode):
    """As `set_state_dict` loads them; a model that was saved after `eval` holds averages."""
    one, other = network(), network(seed=1)
    first, second = (wn.Averaged(wn.Scion(model, lr=0.05)) for model in (one, other))
    train(one, first, 3)
    getattr(first, mode)()
    saved = copy.deepcopy(get_state_dict(one, first))
    set_state_dict(other, second, model_state_dict=saved[0], optim_state_dict=saved[1])
    if mode == "eval":
        with pytest.raises(ValueError, match=r"load the model's weights before the optimizer's state"):
            train(other, second, 1, first=3)
        set_optimizer_state_dict(other, second, saved[1])
        first.train()
    train(one, first, 2, first=3)
    train(other, second, 2, first=3)
    assert same(one, other)


@pytest.mark.parametrize(("mode", "duplicate"), [("train", lambda *both: both), ("eval", lambda *b: copy.deepcopy(b))])
@pytest.mark.parametrize("cap", [*CAPS, wn.constraints.ClippedWeightDecay(0.5, 0.25)], ids=str)
def test_weights_that_constraints_place_begin_a_new_average_there(cap, duplicate, mode):
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.1, momentum=0.5))
    train(model, optimizer, 4)
    getattr(optimizer, mode)()
    constraints = wn.constrain(optimizer, {"*.weight": cap})
    for step in range(3):
        model, optimizer, constraints = duplicate(model, optimizer, constraints)
        if step == 1:
            model[2].weight.data.mul_(10)  # which torch does not count
            constraints.project_()
        if step == 2:
            constraints.project_()
        assert max(constraints.proved_ratios().values(), default=0) <= 1
        optimizer.train()
        assert max(constraints.proved_ratios().values(), default=0) <= 1
        train(model, optimizer, 1, first=step)
        for name, bound in constraints.promised().items():
            parameter = model.get_parameter(name)
            assert float(wn.Spectral().upper_bound(optimizer.state[parameter]["averaged_z"])) <= bound
            assert float(wn.Spectral().upper_bound(parameter.detach())) <= bound or cap.bound is None
        getattr(optimizer, mode)()
    assert all(float(optimizer.state[p]["averaged_steps"]) == 4 + 3 for p in model.parameters() if p.ndim == 1)


@pytest.mark.parametrize(
    "asked", [{"constraints": {"*": wn.HardCap(0.5)}}, {"lipschitz": 0.1, "example_input": torch.zeros(1, 6)}]
)
def test_an_average_that_is_loaded_begins_anew_where_constraints_do_not_allow_it(asked):
    def averaged(model, **asked):
        optimizer = wn.Averaged(wn.Scion(model, lr=0.3, momentum=0.0))
        return optimizer, wn.constrain(optimizer, **asked)

    one, other = network(), network(seed=1)
    first, _ = averaged(one, constraints={"*": wn.HardCap(4.0)})
    train(one, first, 8)
    second, constraints = averaged(other, **asked)
    other.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(3):
        train(other, second, 1, first=step)
        assert max(constraints.proved_ratios().values()) <= 1


def test_averages_keep_no_bound_that_sinks_with_the_rate():
    model = network()
    optimizer = wn.Averaged(wn.Scion(model, lr=1.0, momentum=0.0))
    constraints = wn.constrain(optimizer, {"0.weight": wn.constraints.ClippedWeightDecay(0.5, 1.0, before=True)})
    assert constraints.promised()
    train(model, optimizer, 4)
    optimizer.param_groups[0]["lr"] = 1e-3
    train(model, optimizer, 1)
    assert wn.Spectral().norm(model[0].weight.detach()) > 0.51  # the bound of the iterate
    assert constraints.promised() == constraints.proved_ratios() == {}
    assert "0.weight: averages keep no bound of ClippedWeightDecay(" in str(optimizer)


def test_memory_is_two_more_copies():
    model = network()
    optimizer = wn.Averaged(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 2)
    optimizer.eval()
    entries = sum(t.numel() for entry in optimizer.state.values() for t in entry.values() if t.ndim)
    assert entries == 2 * sum(p.numel() for p in model.parameters())
