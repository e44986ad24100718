"""What the step rules are, against their formulas and against each other (Norm-Constrained LMOs, sections 2 and 3)."""

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.matrix import REGISTRY

EXACT = wn.Spectral(method="svd")


def layer(seed=0, shape=(6, 4), dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)


def gradients(count, shape=(6, 4), dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def train(optimizer, model, grads):
    for gradient in grads:
        model.weight.grad = gradient.clone()
        optimizer.step()
    return model.weight.detach().clone()


def engine(model, norm=EXACT, **settings):
    return wn.optim.ConditionalGradient(wn.assign_norms(model, overrides={"weight": norm}), **settings)


def test_weight_decay_makes_unconstrained_scg_constrained():
    """LMO section 3: uSCG with decay mu is SCG with radius rho / mu and step gamma mu."""
    rho, mu, gamma = 3.0, 0.5, 0.1
    first, second = layer(), layer()
    one = train(engine(first, lr=gamma, radius=rho, weight_decay=mu), first, gradients(20))
    other = train(engine(second, lr=gamma * mu, radius=rho / mu, step_rule="constrained"), second, gradients(20))
    # SCG takes 1 - 1e-5 of each step of 0.3, on an entry of at most 1; a hundredth of that is left for rounding
    assert (one - other).abs().max() <= 20 * 0.3 * 1.01e-5
    assert float(EXACT.norm(one)) <= rho / mu


def test_almond_averages_the_oracle():
    model = layer()
    w, average = model.weight.detach().clone(), torch.zeros(6, 4, dtype=torch.float64)
    optimizer = engine(model, lr=0.1, momentum=0.75, radius=2.0, step_rule="averaged")
    for gradient in gradients(5):
        average = 0.75 * average + 0.25 * EXACT.dualize(gradient)
        w -= 0.1 * 2.0 * average
    torch.testing.assert_close(train(optimizer, model, gradients(5)), w)
    # without memory, the average of one output is the output
    first, second = layer(), layer()
    torch.testing.assert_close(
        train(engine(first, lr=0.1, momentum=0.0, step_rule="averaged"), first, gradients(4)),
        train(engine(second, lr=0.1, momentum=0.0), second, gradients(4)),
    )


def test_sharp_steps_are_steepest_descent():
    """MD proposition 1: the minimiser of <g, d> + |d|^2 / (2 lr), checked by its value, -lr |g|_dual^2 / 2."""
    model = layer()
    (gradient,) = gradients(1)
    before = model.weight.detach().clone()
    moved = train(engine(model, lr=0.3, momentum=0.0, step_rule="sharp"), model, [gradient]) - before
    value = (gradient * moved).sum() + EXACT.norm(moved) ** 2 / (2 * 0.3)
    torch.testing.assert_close(value, -0.3 / 2 * EXACT.dual_norm(gradient) ** 2)
    assert engine(layer(), lr=0.3, step_rule="sharp").update_norm("weight") is None


@pytest.mark.parametrize("coefficients", REGISTRY)
def test_scg_stays_in_the_ball_for_every_coefficient_set(coefficients):
    """Proved after every tenth of 100 steps, from the boundary; with adversarial gradients alone in the second half."""
    norm, radius = wn.Spectral(coefficients), 0.7
    model = layer(shape=(5, 12), dtype=torch.float32)
    norm.initialize_(model.weight.data).mul_(radius * (1 - 1e-6))
    optimizer = engine(model, norm, lr=0.2, radius=radius, step_rule="constrained", momentum=0.5)
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        outward = -model.weight.detach() + 1e-3 * torch.randn(5, 12, generator=generator)
        model.weight.grad = outward if step % 2 or step > 50 else torch.randn(5, 12, generator=generator)
        optimizer.step()
        if step % 10 == 0:
            assert float(norm.upper_bound(model.weight)) <= radius


@pytest.mark.parametrize("rule", ["unconstrained", "constrained", "averaged"])
def test_update_norm_bounds_the_growth(rule):
    norm = wn.Spectral("jordan-5")
    model = layer(dtype=torch.float32)
    optimizer = engine(model, norm, lr=0.1, step_rule=rule, radius=1.5)
    for gradient in gradients(30, dtype=torch.float32):
        before = float(norm.norm(model.weight.detach()))
        train(optimizer, model, [gradient])
        assert float(norm.norm(model.weight.detach())) <= before + optimizer.update_norm("weight") + 1e-5


def test_momentum_in_the_gradient_is_the_same_optimizer_without_state():
    """LMO's memory-light form: sums instead of averages, which no oracle can tell apart."""
    first, second = layer(), layer()
    plain = engine(first, lr=0.1, momentum=0.9)
    light = engine(second, lr=0.1, momentum=0.9, memory="gradient")
    for gradient in gradients(6):
        first.weight.grad = gradient.clone()
        plain.step()
        light.zero_grad(set_to_none=False)
        (second.weight * gradient).sum().backward()  # accumulates, as training does
        light.step()
    torch.testing.assert_close(second.weight, first.weight)
    assert not light.state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"), ({"lr": float("nan")}, "lr=nan"), ({"momentum": 1.0}, "momentum=1.0"),
        ({"radius": 0.0}, "radius=0.0"), ({"lr": 2.0, "step_rule": "constrained"}, "at most 1"),
        ({"step_rule": "sideways"}, "sideways"), ({"lr_factors": {"nothing": 1.0}}, "matches no trainable parameter"),
        ({"lr_factors": {"weight": -1.0}}, "lr_factors"), ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"weight_decay": 11.0}, "weight_decay=11.0"), ({"weight_decay": 0.1, "step_rule": "constrained"}, "radius"),
        ({"nesterov": True, "step_rule": "averaged"}, "nesterov"),
        ({"nesterov": True, "memory": "gradient"}, "nesterov"), ({"memory": "none"}, "memory='none'"),
        ({"memory": "gradient", "step_rule": "averaged"}, "ALMOND"),
        ({"memory": "gradient", "step_rule": "sharp"}, "length"),
    ],
)  # fmt: skip
def test_settings_out_of_range_and_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        engine(layer(), **{"lr": 0.1, **settings})
