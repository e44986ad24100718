"""The engine, its two compositions, and the contract every torch optimizer keeps."""

import copy

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.optim import NonFiniteGradientError

from .training import OURS, backward, network, train

every_optimizer = pytest.mark.parametrize("make", OURS.values(), ids=OURS)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@every_optimizer
def test_learns(make):
    model = network()
    optimizer = make(model, 0.05)
    start = float(backward(model, 99))
    train(model, optimizer, 60)
    assert float(backward(model, 99)) < 0.5 * start


@every_optimizer
def test_state_is_tensors_per_parameter_and_loads_without_pickled_objects(make, tmp_path):
    model = network()
    optimizer = make(model, 0.05)
    train(model, optimizer, 1)
    state = optimizer.state_dict()["state"]
    assert len(state) == len(list(model.parameters()))
    assert all(isinstance(value, torch.Tensor) for entry in state.values() for value in entry.values())
    if not any(group["step_rule"] == "adamw" for group in optimizer.param_groups):
        assert all(list(entry) == ["momentum_buffer"] for entry in state.values())
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


def test_schedulers_move_every_group():
    model = network()
    optimizer = wn.optim.ConditionalGradient(wn.assign_norms(model), 0.1, lr_factors={"0": 2.0, "2.bias": 0.5})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = [g["lr"] for g in optimizer.param_groups]
    train(model, optimizer, 1)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [lr / 2 for lr in before]
    assert sorted(before) == [0.05, 0.1, 0.2]


@every_optimizer
def test_closure_and_missing_and_zero_gradients(make):
    model = network()
    optimizer = make(model, 0.05)
    assert float(optimizer.step(lambda: backward(model, 0))) > 0
    model.zero_grad()
    optimizer_without_history = make(model, 0.0)
    before = weights(model)
    with pytest.warns(UserWarning, match=r"found no gradient in any parameter.*backward\(\) was not called") as told:
        optimizer_without_history.step()
    assert told[0].filename == __file__  # whose line is to be changed
    optimizer_without_history.step()  # told once
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer_without_history.step()  # zero gradients: the oracle of 0 is 0, never NaN
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@every_optimizer
def test_non_finite_gradients_are_named_and_change_nothing(make):
    model = network()
    optimizer = make(model, 0.05)
    train(model, optimizer, 2)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    model[2].weight.grad[0, 0] = float("nan")
    model[4].bias.grad[0] = float("inf")
    with pytest.raises(NonFiniteGradientError, match=r"(2\.weight, 4\.bias|4\.bias, 2\.weight) .*at step 2"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(state[i][key], after[i][key]) for i in state for key in state[i])


@pytest.mark.parametrize("size", [1e25, 3e38])
def test_a_large_gradient_moves_as_a_small_one(size):  # its squares leave the range of float32, and so does their sum
    small, large = (nn.Linear(4, 4, bias=False) for _ in range(2))
    large.load_state_dict(small.state_dict())
    for model, scale in ((small, 1.0), (large, size)):
        model.weight.grad = torch.eye(4) * scale
        wn.Scion(model, lr=0.1, momentum=0.0).step()
    torch.testing.assert_close(large.weight, small.weight)


def test_one_step_is_the_formula():
    model = nn.Linear(6, 4, bias=False)
    w = model.weight.detach().clone()
    g = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    norm = wn.Spectral(method="svd")
    optimizer = wn.optim.ConditionalGradient(
        wn.assign_norms(model, overrides={"weight": norm}), 0.1, momentum=0.9, nesterov=True, radius=3.0
    )
    model.weight.grad = g
    optimizer.step()
    expected = w - 0.1 * 3.0 * norm.dualize(g)  # the oracle ignores the momentum's scale
    torch.testing.assert_close(model.weight.detach(), expected)


def test_sign_norm_is_signum():
    model = nn.Linear(3, 3, bias=False)
    optimizer = wn.Scion(wn.assign_norms(model, overrides={"weight": wn.Sign()}), lr=0.25, momentum=0.5)
    w, buffer = model.weight.detach().clone(), torch.zeros(3, 3)
    for i in range(4):
        g = torch.randn(3, 3, generator=torch.Generator().manual_seed(i))
        model.weight.grad = g
        optimizer.step()
        buffer = 0.5 * buffer + 0.5 * g
        w -= 0.25 * buffer.sign()
    assert torch.equal(model.weight.detach(), w)  # halves and quarters: exact


@pytest.mark.parametrize("coefficients", ["polar-express-5", "jordan-5", "you-6"])
def test_update_norm_bounds_the_true_step(coefficients):
    model = nn.Linear(24, 40, bias=False)
    norm = wn.Spectral(coefficients)
    optimizer = wn.Scion(wn.assign_norms(model, overrides={"weight": norm}), lr=0.1)
    for i in range(10):
        before = model.weight.detach().clone()
        model.weight.grad = torch.randn(40, 24, generator=torch.Generator().manual_seed(i)) ** 3
        optimizer.step()
        step = float(norm.upper_bound(model.weight.detach() - before))
        assert step <= optimizer.update_norm("weight") * (1 + 1e-4)  # float32 subtraction
