"""A step whose gradients are not finite, on a device that is not asked: it moves nothing, and the next one says so.

The CPU stands for that device here, so that it does what a GPU would do.
"""

import copy

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.optim import NonFiniteGradientError
from wellnormed.optim.finite import GradientCheck


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    def before_step(self, gradients, among, placement, step):
        return self._skipping(gradients, torch.device("cpu"), step)

    monkeypatch.setattr(GradientCheck, "before_step", before_step)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 9))


def backward(model, optimizer, number):
    optimizer.zero_grad()
    torch.manual_seed(number)
    model(torch.randint(9, (5, 7))).square().mean().backward()


class Mixed(wn.optim.Direction):
    """Keeps a tensor, and returns the weight."""

    keeps, sees, returns = ("mean",), ("gradient", "weight"), "weight"

    def __call__(self, seen):
        seen.state["mean"] = 0.5 * seen.state["mean"] + seen.gradient
        return 0.9 * seen.weight - seen.length * seen.norm.dualize(seen.state["mean"] + seen.momentum)


OPTIMIZERS = {
    "Scion": lambda model: wn.Scion(model, lr=0.05),
    "Muon": lambda model: wn.Muon(model, lr=0.05),
    "Nesterov, decay": lambda model: wn.Scion(model, lr=0.05, nesterov=True, weight_decay=0.1),
    "cautious decay": lambda model: wn.Scion(model, lr=0.05, cautious_decay=True, weight_decay=0.1),
    "NorMuon": lambda model: wn.Scion(model, lr=0.05, normuon=0.95),
    "constrained": lambda model: wn.Scion(model, lr=0.05, unconstrained=False),
    "averaged": lambda model: wn.optim.ConditionalGradient(model, lr=0.05, step_rule="averaged"),
    "a direction": lambda model: wn.Scion(model, lr=0.05, directions={"[13].weight": Mixed()}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("entry", [float("nan"), float("inf")])
def test_a_spoilt_step_changes_nothing_and_the_next_one_names_it(name, entry):
    models = [network(), network()]
    whole, spoilt = (OPTIMIZERS[name](model) for model in models)
    for number in range(6):
        for model, optimizer in zip(models, (whole, spoilt), strict=True):
            backward(model, optimizer, number)
            optimizer.step()
        if number == 3:  # one more step for one of them
            backward(models[1], spoilt, 99)
            models[1][1].weight.grad[2, 3] = entry
            before = copy.deepcopy((models[1].state_dict(), spoilt.state_dict()["state"]))
            spoilt.step()
            after = models[1].state_dict(), spoilt.state_dict()["state"]
            torch.testing.assert_close(after, before, rtol=0, atol=0)
            backward(models[1], spoilt, 100)
            with pytest.raises(NonFiniteGradientError, match=r"gradient of 1\.weight holds .* at step 4; nothing was"):
                spoilt.step()
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)
    assert spoilt.param_groups[0]["steps"] == whole.param_groups[0]["steps"] == 6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_steps_are_those_that_are_asked(name, monkeypatch):
    unasked = network()
    optimizer = OPTIMIZERS[name](unasked)
    for number in range(3):
        backward(unasked, optimizer, number)
        optimizer.step()
    monkeypatch.undo()
    asked = network()
    optimizer = OPTIMIZERS[name](asked)
    for number in range(3):
        backward(asked, optimizer, number)
        optimizer.step()
    # an average is computed by other operations, and a matrix sign enlarges the roundings of small singular values
    torch.testing.assert_close(asked.state_dict(), unasked.state_dict(), rtol=1e-4, atol=1e-5)


def test_large_gradients_are_finite():
    model = nn.Linear(4, 4)
    optimizer = wn.Scion(model, lr=0.1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3e38)
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_memory_light_weights_stay():
    model = network()
    optimizer = wn.Scion(model, lr=0.05, memory="gradient")
    backward(model, optimizer, 0)
    optimizer.step()
    model[3].bias.grad[0] = float("inf")
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(NonFiniteGradientError, match=r"3\.bias"):
        optimizer.step()
