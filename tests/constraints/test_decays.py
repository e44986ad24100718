from functools import partial

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.constraints import ClippedWeightDecay


def attached(lr, upper=1.0, decay=0.25, size=(6, 9), start=None, before=False):
    model = nn.Linear(*size, bias=False)
    if start is not None:
        model.weight.data.mul_(start / wn.Spectral().norm(model.weight.detach()))
    optimizer = wn.Scion(wn.assign_norms(model), lr=lr, momentum=0.0)
    return model.weight, optimizer, wn.constrain(optimizer, {"weight": ClippedWeightDecay(upper, decay, before)})


def push_outward(weight, optimizer, steps):
    for _ in range(steps):
        u, _, vh = torch.linalg.svd(weight.detach(), full_matrices=False)
        weight.grad = -(u @ vh)
        optimizer.step()


@pytest.mark.parametrize(("before", "order"), [(False, "step-then-project"), (True, "project-then-step")])
@pytest.mark.parametrize("start", [0.1, 8.0])
def test_the_promise_tends_to_the_equilibrium_from_any_start(start, before, order):
    weight, optimizer, constraints = attached(lr=0.2, start=start, before=before)
    assert constraints.promised()["weight"] == pytest.approx(start, rel=1e-6)  # proved, not projected
    push_outward(weight, optimizer, 80)
    held = wn.matrix.clipped_weight_decay_equilibrium(1.0, 0.25, optimizer.update_norm("weight"), order)
    assert constraints.promised()["weight"] == pytest.approx(held, rel=1e-4)
    # the oracle reaches its overshoot at some singular values only
    assert 0.8 < constraints.proved_ratios()["weight"] <= 1


@pytest.mark.parametrize("before", [False, True])
def test_a_decay_acts_after_the_step_or_before_it(before):
    """SC 3.4 has both orders; the gradient is of the weight before either."""
    weight, optimizer, _ = attached(lr=0.3, upper=0.5, start=2.0, before=before)
    start, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    decayed = partial(wn.matrix.spectral_clipped_weight_decay, upper=0.5 * (9 / 6) ** 0.5, decay=0.25)
    step = 0.3 * next(iter(optimizer.assignment)).norm.dualize(weight.grad)
    optimizer.step()
    expected = decayed(start) - step if before else decayed(start - step)
    torch.testing.assert_close(weight.detach(), expected)


def test_the_promise_sinks_to_the_threshold_with_the_learning_rate():
    weight, optimizer, constraints = attached(lr=0.5)
    push_outward(weight, optimizer, 30)
    assert constraints.promised()["weight"] > 2
    for i in range(100):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - i / 100)
        push_outward(weight, optimizer, 1)
        assert constraints.proved_ratios()["weight"] <= 1
    optimizer.param_groups[0]["lr"] = 1e-9  # a step of length 0 writes nothing
    push_outward(weight, optimizer, 40)
    assert constraints.promised()["weight"] == pytest.approx(1.0, rel=1e-4)


def test_below_the_threshold_it_does_nothing():
    model = nn.Linear(5, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    constraints = wn.constrain(optimizer, {"weight": ClippedWeightDecay(50.0, 0.5)}, norms=wn.assign_norms(model))
    model.weight.grad = torch.ones(5, 5)
    expected = model.weight.detach() - 0.01
    optimizer.step()
    assert torch.equal(model.weight.detach(), expected)
    assert constraints.promised() == {}  # the optimizer declares no steps
    assert constraints.norm_ratios() == constraints.proved_ratios() == {}


def test_a_weight_of_zeros_has_ratios_below_a_clipped_decay():
    layer = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(layer.weight)
    constraints = wn.constrain(wn.Scion(layer, lr=0.1), {"weight": ClippedWeightDecay(1.0, 0.5)})
    assert constraints.proved_ratios() == constraints.norm_ratios() == {"weight": 0.0}


def test_weights_that_a_decay_has_decayed_before_the_step_are_left_as_they_are_after_it():
    """Slices of a kernel of 1 x 1 are views of it, which torch refuses to copy onto it."""
    layer = nn.Conv2d(4, 4, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    wn.constrain(optimizer, {"*": ClippedWeightDecay(9.0, 0.5, before=True)}, norms=layer)
    layer.weight.grad = torch.ones_like(layer.weight)
    expected = layer.weight.detach() - 0.1
    optimizer.step()
    assert torch.equal(layer.weight.detach(), expected)
