"""The caps hold after the steps that are really made, whoever changes rates or weights meanwhile; NaN is refused."""

import math

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.constraints.test_moved_by_others import LATE, held, norm, outward
from wellnormed.constraints import EntryCap, HardCap, SoftCap, SpectralNormalize, Sphere

STEPS = 12


def train(weight, optimizer, step=None):
    for _ in range(STEPS):
        weight.grad = outward(weight)
        (step or optimizer.step)()
        assert norm(weight) <= 1


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


class Hurried(wn.Scion):
    """Raises the rate for the length of its step."""

    def step(self, closure=None):
        set_rate(self, 0.5)
        result = super().step(closure)
        set_rate(self, 0.001)
        return result


class Twice(wn.Scion):
    """Two steps in one."""

    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)


class Writing(wn.Scion):
    """Writes the weights before and after its step, as a look-ahead does."""

    @torch.no_grad()
    def step(self, closure=None):
        weights = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_mul_(weights, 1.7)
        result = super().step(closure)
        torch._foreach_mul_(weights, 1.3)
        return result


class Unrelated(wn.Scion):
    """Has nothing of the engine's step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad)


@pytest.mark.parametrize("constraint", LATE, ids=repr)
@pytest.mark.parametrize("kind", [Hurried, Twice, Writing, Unrelated])
@pytest.mark.parametrize("base_first", [False, True])  # torch hooks the `step` of every class that it has seen
def test_a_subclass_with_a_step_of_its_own(kind, constraint, base_first):
    torch.manual_seed(0)
    layer = nn.Linear(32, 32, bias=False)
    if base_first:
        wn.Scion(layer, lr=0.1)
    optimizer = kind(layer, lr=0.001)
    wn.constrain(optimizer, {"*": constraint})
    train(layer.weight, optimizer)


@pytest.mark.parametrize("constraint", LATE, ids=repr)
@pytest.mark.parametrize("early", [False, True])
def test_a_pre_hook_raises_the_rate_and_a_post_hook_puts_it_back(constraint, early):
    torch.manual_seed(0)
    layer = nn.Linear(32, 32, bias=False)
    optimizer = wn.Scion(layer, lr=0.001)
    before = [lambda own, *_: set_rate(own, 0.5), lambda own, *_: set_rate(own, 0.001)]
    if early:
        optimizer.register_step_post_hook(before[1])
    wn.constrain(optimizer, {"*": constraint})
    optimizer.register_step_pre_hook(before[0])
    if not early:
        optimizer.register_step_post_hook(before[1])
        optimizer._optimizer_step_post_hooks.move_to_end(next(reversed(optimizer._optimizer_step_post_hooks)), False)
    train(layer.weight, optimizer)


@pytest.mark.parametrize("constraint", LATE, ids=repr)
def test_a_rate_that_is_a_tensor_and_is_changed_in_place(constraint):
    weight, optimizer, _ = held(constraint)
    rate = torch.tensor(0.001, dtype=torch.float64)
    set_rate(optimizer, rate)

    def closure():
        rate.fill_(0.5)

    train(weight, optimizer, lambda: (rate.fill_(0.001), optimizer.step(closure)))


@pytest.mark.parametrize("constraint", LATE, ids=repr)
def test_weights_that_a_closure_or_a_hook_writes(constraint):
    weight, optimizer, _ = held(constraint)

    def grow(*_):
        weight.detach().mul_(3)

    optimizer.register_step_pre_hook(grow)
    train(weight, optimizer, lambda: optimizer.step(grow))


@pytest.mark.parametrize("constraint", [SoftCap(1.0), wn.constraints.WeightDecay(1.0)])
def test_a_closure_that_makes_the_step_too_long_is_refused_before_it(constraint):
    weight, optimizer, _ = held(constraint)
    before = weight.detach().clone()

    def closure():
        weight.grad = outward(weight)
        set_rate(optimizer, 9.0)

    with pytest.raises(ValueError, match=r"on 'weight': a step of norm"):
        optimizer.step(closure)
    assert torch.equal(weight, before)


def test_steps_that_are_left_out_count_for_nothing():
    weight, optimizer, constraints = held(HardCap(1.0, every=8), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        weight.grad = outward(weight) if step % 2 else torch.full_like(weight, math.inf)
        reach = float(constraints.state_dict()["weight.reach"])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert step % 2 or float(constraints.state_dict()["weight.reach"]) == reach
        assert norm(weight) <= 1


def test_two_optimizers_on_one_model_are_each_bounded_by_their_own_steps():
    model = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)])
    both = [wn.Scion(layer, lr=rate) for layer, rate in zip(model, (0.001, 0.5), strict=True)]
    for optimizer in both:
        wn.constrain(optimizer, {"*": HardCap(1.0, every=8)})
    for _ in range(STEPS):
        for layer in model:
            layer.weight.grad = outward(layer.weight)
        for optimizer in both:
            optimizer.step()
        assert max(norm(layer.weight) for layer in model) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("constraint", "overrides"),
    [
        (wn.ColumnCap(1.0), {"*": wn.norms.ColNorm()}),
        (EntryCap(1.0), {"*": wn.Sign()}),
        (Sphere(1.0), {"*": wn.norms.ColNorm()}),
        (Sphere(1.0), {"*": wn.Sign()}),
        (Sphere(1.0), {"*": wn.Spectral()}),
        (HardCap(1.0, every=8), {"*": wn.Spectral()}),
        (SpectralNormalize(1.0), {"*": wn.Spectral()}),
        (wn.constraints.NormSphere(), {"*": wn.norms.ColNorm()}),
        (wn.constraints.NormSphere(frobenius=True), {"*": wn.Spectral()}),
    ],
)
def test_not_a_number_is_refused_by_name(constraint, overrides, dtype):
    model = nn.ModuleList([nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    wn.constrain(optimizer, {"*": constraint}, norms=wn.assign_norms(model, overrides=overrides))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[1].weight.grad[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"after the step 1\.weight hold NaN or infinity.*last good weights"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_direction_that_gives_infinity_is_refused_by_name(dtype):
    class Exploding(wn.optim.Direction):
        def __call__(self, seen):
            return seen.momentum / 0

    layer = nn.Linear(8, 8, dtype=dtype)
    optimizer = wn.Scion(layer, lr=0.1, directions={"bias": Exploding()})
    wn.constrain(optimizer, {"bias": wn.ColumnCap(1.0)})
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"after the step bias hold NaN or infinity"):
        optimizer.step()
