"""Every constraint holds its promise after every step, proved, or refuses before the step."""

import copy
import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wellnormed as wn
from wellnormed.constraints import HardCap, Orthogonal, SpectralNormalize, Sphere, WeightDecay


@dataclass(frozen=True, repr=False)
class HardCapByProducts(HardCap):
    """As on a GPU."""

    _method = "products"


@dataclass(frozen=True, repr=False)
class SpectralNormalizeByProducts(SpectralNormalize):
    """As on a GPU."""

    _method = "products"


BEAR_ANY_STEP = [HardCap, SpectralNormalize, HardCapByProducts, SpectralNormalizeByProducts]


@pytest.mark.parametrize("kind", [*BEAR_ANY_STEP, wn.SoftCap, WeightDecay, Orthogonal, Sphere])
@given(
    shape=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    cap=st.sampled_from([1e-3, 0.7, 5.0, 1e4]),
    every=st.integers(1, 30),
    rates=st.lists(st.sampled_from([0.0, 1e-8, 1e-3, 0.05, 0.3, 0.85, 3.0]), min_size=1, max_size=5),
    decay=st.sampled_from([0.0, 0.3]),
    aligned=st.booleans(),
    coefficients=st.sampled_from(["polar-express-5", "jordan-5", "you-6"]),
)
@settings(max_examples=8)
def test_the_cap_is_proved_after_every_step(kind, shape, cap, every, rates, decay, aligned, coefficients):
    model = nn.Linear(shape[1], shape[0], bias=False)
    norms = wn.assign_norms(model, overrides={"weight": wn.Spectral(coefficients)})
    optimizer = wn.Scion(norms, lr=0.0, momentum=0.0, weight_decay=decay)
    waits = {"every": every} if kind in (*BEAR_ANY_STEP, wn.SoftCap) else {}
    constraints = wn.constrain(optimizer, {"weight": kind(cap, **waits)})
    generator = torch.Generator().manual_seed(0)
    for i in range(20):
        rate = rates[i % len(rates)]
        optimizer.param_groups[0]["lr"] = min(cap, 1.0) * (rate if kind in BEAR_ANY_STEP else min(rate, 0.8))
        # the worst case pushes every singular value outward, or the longest alone; the other is noise
        u, s, vh = torch.linalg.svd(model.weight.detach(), full_matrices=False)
        outward = (u * (s >= (s[0] if i % 2 else 0))) @ vh
        model.weight.grad = -outward if aligned else torch.randn(shape, generator=generator)
        optimizer.step()
        assert constraints.proved_ratios()["weight"] <= 1


@pytest.mark.parametrize("settings", [{"weight_decay": 0.5}, {"step_rule": "constrained", "radius": 1.5}], ids=str)
def test_a_cap_undoes_the_step_less_its_decay(settings):
    """So a weight that is pushed outwards stays at its cap, as without a decay."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    norms = wn.assign_norms(model, overrides={"*": wn.Spectral(method="svd")})  # whose steps are as long as their bound
    optimizer = wn.optim.ConditionalGradient(norms, lr=0.1, **settings)
    constraints = wn.constrain(optimizer, {"*": wn.SoftCap(1.0)})
    for _ in range(100):
        model.weight.grad = -torch.eye(8)
        optimizer.step()
        assert constraints.proved_ratios()["weight"] <= 1
    assert constraints.norms()["weight"] > 1 - 1e-4  # 4e-5 below, for the aim and its slack


def test_a_decay_that_holds_a_weight_alone_leaves_nothing_to_a_soft_cap():
    weights = []
    for cap in (None, wn.SoftCap(1.0)):
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        wn.Spectral().initialize_(model.weight.data)
        optimizer = wn.Scion(wn.assign_norms(model), lr=0.1, weight_decay=2.0)
        if cap is not None:
            wn.constrain(optimizer, {"weight": cap})
        for step in range(20):
            model.weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        weights.append(model.weight.detach())
    # a step counts as one of 2e-5 of the cap, for rounding, which the strength 2.6e-3 undoes; norms are about 0.3 here
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("constraint", "least"), [(wn.ColumnCap(1.0), 1.0), (wn.constraints.Sphere(1.0), 0.0)], ids=["4.4", "F"]
)
def test_embeddings_are_capped_or_normalised_after_every_step(constraint, least):
    """LT normalises embeddings in every step by its appendix F, and caps them by section 4.4 and its code."""
    torch.manual_seed(1)
    table = nn.Embedding(7, 4)
    optimizer = wn.Scion(wn.assign_norms(table, overrides={"*": wn.ColNorm(0)}), lr=0.3, momentum=0.0)
    table.weight.data[6] = 0
    wn.constrain(optimizer, {"*": constraint})
    before = table.weight.detach().clone()
    table.weight.grad = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    table.weight.grad[6] = 0
    moved = before - 0.3 * table.weight.grad / table.weight.grad.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    optimizer.step()
    sizes = moved.square().mean(-1, keepdim=True).sqrt()
    assert 0 < int((sizes > 1).sum()) < 6  # both kinds are there
    torch.testing.assert_close(table.weight.detach(), moved / sizes.clamp(min=least or 1e-30), rtol=1e-4, atol=0)


def test_weight_decay_holds_a_step_below_its_cap():
    """`w = (1 - u/M) (w + u)` has the solution `M - u`; before the decay it is the cap."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    exact = wn.assign_norms(model, overrides={"*": wn.Spectral(method="svd")})
    optimizer = wn.Scion(exact, lr=0.2, momentum=0.0)
    wn.constrain(optimizer, {"*": wn.constraints.WeightDecay(4.0)})
    for _ in range(300):
        model.weight.grad = -torch.ones(1, 1, dtype=torch.float64)
        optimizer.step()
    step, norm = optimizer.update_norm("weight"), float(model.weight.detach())
    # 2e-5 of the weight more is taken for rounding in every step, which adds up to 4^2 2e-5 / 0.2
    assert norm == pytest.approx(4.0 - step, abs=0.0017)


def test_wrong_constraints_and_patterns_are_refused():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    assignment = wn.assign_norms(model)
    optimizer = wn.Scion(assignment, lr=0.1)
    with pytest.raises(ValueError, match=r"'0' serves none .*: 0\.weight: HardCap does not act on ColNorm"):
        wn.constrain(optimizer, {"0": wn.HardCap(1.0)})
    with pytest.raises(ValueError, match="matches no trainable parameter"):
        wn.constrain(optimizer, {"blocks.*": wn.HardCap(1.0)})
    with pytest.raises(ValueError, match="matches both"):
        wn.constrain(optimizer, {"1": wn.HardCap(1.0), "1.weight": wn.HardCap(2.0)})
    adamw = torch.optim.AdamW(model.parameters())
    for norms, words in ((None, "pass norms="), ({"1": 1}, r"the model or its Assignment, got .*; pass norms=model")):
        with pytest.raises(ValueError, match=words):
            wn.constrain(adamw, {"1": wn.HardCap(1.0)}, norms=norms)
    with pytest.raises(ValueError, match="needs a bound on the step's norm"):
        wn.constrain(adamw, {"1": wn.SoftCap(1.0)}, norms=assignment)
    partial = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not in this optimizer"):
        wn.constrain(partial, {"1": wn.HardCap(1.0)}, norms=assignment)


def test_removed_constraints_no_longer_act():
    model = nn.Linear(4, 4, bias=False)
    optimizer = wn.Scion(wn.assign_norms(model), lr=1.0)
    constraints = wn.constrain(optimizer, {"weight": wn.HardCap(0.1)})
    for _ in range(2):  # to remove them again changes nothing
        constraints.remove()
    model.weight.grad = torch.eye(4)
    optimizer.step()
    assert constraints.proved_ratios()["weight"] > 1


def test_estimates_agree_with_proofs(generator):
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 9, bias=False))
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.1)
    constraints = wn.constrain(optimizer, {"*": wn.HardCap(0.5)})
    assert constraints.norm_ratios() == pytest.approx(constraints.proved_ratios(), rel=1e-3)  # an estimate


def test_a_step_measured_in_another_norm_is_unknown():
    model = nn.Linear(64, 4, bias=False)
    norms = wn.assign_norms(model)
    optimizer = wn.Muon(norms, lr=0.1, adjust_lr_fn="original")
    with pytest.raises(ValueError, match="bound on the step's norm"):
        wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)}, norms=norms)
    wn.constrain(optimizer, {"weight": wn.HardCap(1.0)}, norms=norms)  # needs none


def test_no_parameter_gets_two_constraints_by_two_calls():
    model = nn.Linear(4, 4, bias=False)
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.1)
    first = wn.constrain(optimizer, {"weight": wn.HardCap(1.0)})
    with pytest.raises(ValueError, match="earlier `constrain`"):
        wn.constrain(optimizer, {"weight": wn.constraints.SpectralInterval(2.0, 3.0)})
    first.remove()
    wn.constrain(optimizer, {"weight": wn.constraints.SpectralInterval(2.0, 3.0)})


def test_parameters_that_join_later_are_said_to_have_no_constraint():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    optimizer = wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, {"*.weight": wn.HardCap(1.0)})
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.warns(UserWarning, match="a parameter joined the optimizer after `constrain`, and has no constraint"):
        optimizer.step()
    optimizer.step()  # once is enough
    assert "a parameter joined the optimizer" in str(constraints)
    assert "a parameter joined the optimizer" in str(copy.deepcopy((model, optimizer, constraints))[2])
    others = wn.constrain(optimizer, {"0.weight": wn.HardCap(1.0)})
    assert "joined" not in str(constraints) + str(others)


@pytest.mark.parametrize("make", [wn.SoftCap, wn.constraints.WeightDecay])
def test_a_refused_step_is_never_printed_below_the_limit_that_is_printed(make):
    """Rounded to nearest, a step a hair too long reads as a step of just the length that is borne."""
    constraint = make(1.0)
    constraint.check(wn.Spectral(), 0.999 * constraint.longest_step, "weight")
    step = constraint.longest_step * (1 + 1e-7) + 1e-12
    with pytest.raises(ValueError, match=r"step of norm .*; lower the learning rate") as refused:
        constraint.check(wn.Spectral(), step, "weight")
    printed, *borne = map(float, re.findall(r"(?:step of norm|bears) (\d+(?:\.\d+)?)", str(refused.value)))
    assert printed >= step
    assert all(limit <= constraint.longest_step for limit in borne)
