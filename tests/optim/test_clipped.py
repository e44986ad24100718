"""Optimizers whose steps are brought into a ball: the published rule, the bound, constraints, states."""

import copy
import math

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.optim import Clipped


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({
        "table": nn.Embedding(5, 6), "kernel": nn.Conv2d(3, 4, 3), "hidden": nn.Linear(6, 8), "norm": nn.LayerNorm(8),
        "fused": nn.MultiheadAttention(8, 2),
    })  # fmt: skip


def gradients(module: nn.Module, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * size


INNER = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def test_it_is_the_published_rule_with_its_cap():
    """SPECTRA, algorithm 1: `x <- (1 - lambda eta) x - eta clip_c(U)`, where U is AdamW's update."""
    layer = nn.Linear(6, 4, bias=False, dtype=torch.float64)
    twin = copy.deepcopy(layer)
    inner = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.0)
    optimizer = Clipped(
        inner, 1.5, norms=wn.assign_norms(layer, overrides={"weight": wn.Spectral(units="l2")}), weight_decay=0.4
    )
    other = torch.optim.AdamW(twin.parameters(), lr=0.05, weight_decay=0.0)
    for seed in range(4):
        gradients(layer, seed)
        twin.weight.grad = layer.weight.grad.clone()
        before = twin.weight.detach().clone()
        optimizer.step()
        other.step()
        u, s, vh = torch.linalg.svd((twin.weight.detach() - before) / 0.05, full_matrices=False)
        assert s.max() > 1.5
        with torch.no_grad():
            twin.weight.copy_((1 - 0.4 * 0.05) * before + 0.05 * (u * s.clamp(max=1.5)) @ vh)
        torch.testing.assert_close(
            layer.weight, twin.weight, rtol=1e-5, atol=2e-5
        )  # it aims 2e-5 below 1.5, 4 times: 6e-6


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e20])
def test_no_step_is_longer_than_its_bound_and_short_ones_stay(name, size):
    module = model()
    optimizer = Clipped(INNER[name](module.parameters()), 0.5, norms=module)
    bounds = optimizer.update_norms()
    norms = {a.name: a for a in optimizer.assignment}
    for seed in range(3):
        before = {n: p.detach().double() for n, p in module.named_parameters()}
        gradients(module, seed, size)
        optimizer.step()
        for n, p in module.named_parameters():
            step = float(norms[n].norm.norm(p.detach().double() - before[n]))
            rounding = float(norms[n].norm.norm(before[n].abs() * 2.0**-24))  # of the weight
            assert step <= bounds[n] + rounding, n
    assert bool(module["hidden"].weight.any())
    short = nn.Linear(4, 4)
    twin = copy.deepcopy(short)
    for layer, own in ((short, True), (twin, False)):
        one = INNER[name](layer.parameters())
        gradients(layer, 0)
        (Clipped(one, 1e6, norms=layer) if own else one).step()
    torch.testing.assert_close(short.weight, twin.weight, rtol=1e-6, atol=1e-7)  # one rounding


@pytest.mark.parametrize(("name", "decay"), [*((name, 0.0) for name in INNER), ("AdamW", 0.5)])
def test_every_constraint_holds_for_another_librarys_optimizer(name, decay):
    module = model()
    optimizer = Clipped(INNER[name](module.parameters()), 2.0, norms=module, weight_decay=decay)
    caps = {
        "hidden.weight": wn.SoftCap(1.0),
        "fused.*_proj_weight": wn.constraints.SpectralNormalize(1.0),
        "kernel.weight": wn.HardCap(1.5, every=8),
        "*bias": wn.ColumnCap(1.0),
    }
    constraints = wn.constrain(optimizer, caps)
    for seed in range(9):
        gradients(module, seed)
        optimizer.step()
        ratios = constraints.proved_ratios()
        assert max(ratios.values()) <= 1
    assert ratios["hidden.weight"] > 0.5
    certificate = wn.certify(module["hidden"], torch.randn(2, 6), within=constraints)
    assert certificate.rms_lipschitz == pytest.approx(1.0, rel=1e-6)


class Pulled(torch.optim.SGD):
    """Moves weights that have no gradient as well, as a pull towards a teacher's weights does."""

    def __init__(self, parameters, write):
        super().__init__(parameters, lr=0.1)
        self.write = write

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.write(parameter)


def by_gradient(parameter):
    parameter.grad = torch.ones_like(parameter)
    parameter.add_(3 * torch.ones_like(parameter))


@pytest.mark.parametrize("write", [lambda p: p.add_(3), lambda p: p.data.add_(3), by_gradient])
@pytest.mark.parametrize(
    "cap", [wn.SoftCap(1.0), wn.HardCap(1.0), wn.HardCap(1.0, every=8), wn.constraints.Sphere(1.0)]
)
def test_what_the_optimizer_within_moves_without_a_gradient_is_clipped_and_held(cap, write):
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    optimizer = Clipped(Pulled(layer.parameters(), write), 2.0, norms=layer)
    constraints = wn.constrain(optimizer, {"weight": cap})
    for _ in range(4):
        before = {name: p.detach().double() for name, p in layer.named_parameters()}
        optimizer.zero_grad()
        optimizer.step()
        for a in optimizer.assignment:
            if a.name == "bias":  # no constraint moves it
                step = float(a.norm.norm(a.parameter.detach().double() - before[a.name]))
                assert 0.19 < step <= optimizer.update_norms()[a.name] * (1 + 1e-6)
        assert constraints.proved_ratios()["weight"] <= 1


def test_a_subclass_that_writes_weights_after_its_step_is_swept():
    class Careless(Clipped):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(10)

    layer = nn.Linear(4, 4, bias=False)
    optimizer = Careless(torch.optim.AdamW(layer.parameters(), lr=0.1), 2.0, norms=layer)
    constraints = wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)})
    gradients(layer, 0)
    optimizer.step()
    assert constraints.proved_ratios()["weight"] <= 1


def test_what_is_not_finite_is_refused_before_anything_changes():
    layer = nn.Linear(4, 4)
    optimizer = Clipped(INNER["AdamW"](layer.parameters()), 2.0, norms=layer)
    gradients(layer, 0)
    layer.weight.grad[0, 0] = math.nan
    before = layer.weight.detach().clone()
    with pytest.raises(wn.optim.NonFiniteGradientError, match="weight"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
    assert not optimizer.state


def test_a_step_of_the_optimizer_within_to_nan_is_refused_and_taken_back():
    """A cap that waits looked at no weight, and took the bound of the step for one of its length."""
    layer = nn.Linear(4, 4)
    optimizer = Clipped(torch.optim.AdamW(layer.parameters(), eps=0.0), 2.0, norms=layer)  # 0 / 0
    wn.constrain(optimizer, {"bias": wn.ColumnCap(1.0, every=8)})
    gradients(layer, 0)
    layer.bias.grad[0] = 0.0
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"AdamW moved bias to NaN or infinity, .* were put back\. .* larger eps"):
        optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


def test_frozen_parameters_of_the_optimizer_are_left_alone():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    optimizer = Clipped(INNER["AdamW"](module.parameters()), 2.0, norms=module)
    gradients(module[0], 0)
    optimizer.step()
    assert optimizer.update_norms().keys() == {"0.weight", "0.bias"}


def test_a_rate_of_zero_moves_nothing_and_a_closure_is_called():
    layer = nn.Linear(4, 4)
    optimizer = Clipped(INNER["AdamW"](layer.parameters()), 2.0, norms=layer)
    gradients(layer, 0)
    before = layer.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.update_norms()["weight"] == 0.0
    assert optimizer.step(lambda: 7.0) == 7.0
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("own", [True, False])
def test_constraints_on_the_optimizer_within_would_not_hold_and_are_refused(own):
    """In 40 steps of random gradients a weight left its cap of 1 by a ninth."""
    layer = nn.Linear(6, 6, bias=False)
    within = wn.Scion(layer, lr=1.0) if own else torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer = Clipped(within, 0.3, norms=layer)
    before = wn.constrain(within, {"*": wn.HardCap(1.0)}, norms=layer)
    start = layer.weight.detach().clone()
    gradients(layer, 0)
    with pytest.raises(ValueError, match=r"would act before its step is clipped .* and constrain this optimizer"):
        optimizer.step()
    assert torch.equal(layer.weight, start)
    before.remove()
    wn.constrain(optimizer, {"*": wn.HardCap(1.0)}, norms=layer)
    for seed in range(10):
        gradients(layer, seed, size=3.0)
        optimizer.step()
        assert float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) <= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o, m: Clipped(m, 1.0, norms=m), "optimizer must be an optimizer of torch"),
        (
            lambda o, m: Clipped(torch.optim.LBFGS(m.parameters()), 1.0, norms=m),
            r"Clipped: a step of LBFGS needs closure, .* without; pass one whose gradients are made before its step",
        ),
        (lambda o, m: Clipped(o, 0.0, norms=m), "gain=0.0 must be positive"),
        (lambda o, m: Clipped(o, 1.0, norms=m, weight_decay=-1.0), "weight_decay=-1.0 must"),
        (lambda o, m: Clipped(o, 1.0, norms=nn.Linear(2, 2)), "is not in norms="),
        (lambda o, m: Clipped(o, 1.0, norms=o), "norms must be the model"),
        (lambda o, m: Clipped(wn.Averaged(o), 1.0, norms=m), r"pass Averaged\(Clipped\(...\)\) instead"),
        (lambda o, m: Clipped(o, 1.0, norms=m).add_param_group({"params": []}), "make both again"),
    ],
)
def test_mistakes_are_named_with_their_remedy(make, message):
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=message):
        make(torch.optim.AdamW(layer.parameters()), layer)
