"""Constraints on optimizers within wrappers that know nothing of torch's hooks, as those of accelerate and opacus."""

import pytest
import torch
from torch import nn

import wellnormed as wn


class Accelerated(torch.optim.Optimizer):
    """As accelerate's `AcceleratedOptimizer`: it has no attributes of torch's class, and steps the one within."""

    name = "optimizer"
    state, param_groups, defaults = (
        property(lambda self, key=key: getattr(vars(self)[self.name], key))
        for key in ("state", "param_groups", "defaults")
    )

    def __init__(self, optimizer):
        setattr(self, self.name, optimizer)

    def zero_grad(self, set_to_none=True):
        vars(self)[self.name].zero_grad(set_to_none)

    def step(self, closure=None):
        vars(self)[self.name].step(closure)


class Private(Accelerated):
    """As opacus' `DPOptimizer`: it calls the one within by another name."""

    name = "original_optimizer"


class Hooked(torch.optim.Optimizer):
    """A wrapper whose class calls torch's `__init__`, with hooks of its own."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.within = optimizer

    def step(self, closure=None):
        self.within.step(closure)


class Bare(torch.optim.Optimizer):
    """An optimizer that has forgotten to call torch's `__init__`."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    def step(self, closure=None):
        raise AssertionError


WITHIN = {
    "AdamW": (lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), wn.HardCap(0.5)),
    "Scion": (lambda m: wn.Scion(m, lr=0.1), wn.SoftCap(0.5)),
    "clipped": (lambda m: wn.optim.Clipped(torch.optim.AdamW(m.parameters(), lr=0.1), 1.0, norms=m), wn.SoftCap(0.5)),
    "averaged": (lambda m: wn.Averaged(wn.Scion(m, lr=0.1)), wn.SoftCap(0.5)),
}


@pytest.mark.parametrize(("make", "cap"), WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("wrap", [Accelerated, Private, lambda o: Accelerated(Private(o)), Hooked])
def test_the_optimizer_within_is_constrained(make, cap, wrap):
    torch.manual_seed(0)
    layer = nn.Linear(6, 6, bias=False)
    optimizer = wrap(make(layer))
    if wrap is Hooked and not isinstance(optimizer.within, wn.Averaged):
        cap = wn.HardCap(0.5)  # it gives no bound on its steps
    constraints = wn.constrain(optimizer, {"weight": cap}, norms=layer)
    for _ in range(4):
        optimizer.zero_grad()
        layer(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        assert constraints.proved_ratios()["weight"] <= 1


class Lookahead(Accelerated):
    """As it is usually written: the weights move back towards those that it remembers, after the step within."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # and not the others of torch, as timm

    def step(self, closure=None):
        super().step(closure)
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            p.data.lerp_(slow, 0.5)  # which torch does not count


@pytest.mark.parametrize("scheduled", ["before", "after"])
def test_what_a_wrapper_without_hooks_writes_is_brought_back(scheduled):
    torch.manual_seed(0)
    schedule = torch.optim.lr_scheduler.ConstantLR
    for round_ in range(2):
        layer = nn.Linear(6, 6, bias=False)
        nn.init.constant_(layer.weight, 3.0)
        optimizer = Lookahead(torch.optim.AdamW(layer.parameters(), lr=0.1))
        if scheduled == "before":
            schedule(optimizer)
        constraints = wn.constrain(optimizer, {"weight": wn.HardCap(0.5)}, norms=layer)
        if scheduled == "after":
            schedule(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            assert constraints.proved_ratios()["weight"] <= 1
        constraints.remove()
        optimizer.step()
        assert constraints.proved_ratios()["weight"] > 1
        if not round_:
            optimizer.__setstate__({})  # by which torch makes a class without hooks look as if it had them


class SAM(torch.optim.Optimizer):
    """As published: the optimizer within is made of the groups, and of the keywords, which are in the groups, too."""

    def __init__(self, params, base_optimizer, rho=0.05, own=(), **keywords):
        super().__init__(params, {"rho": rho, **dict(own), **keywords})
        self.base_optimizer = base_optimizer(self.param_groups, **keywords)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (p.square() if group.get("adaptive") else 1), alpha=group["rho"])
        closure()
        for p, state in self.state.items():
            p.data = state["old_p"]
        self.base_optimizer.step()


@pytest.mark.parametrize("held", [lambda o: o, lambda o: o.base_optimizer], ids=["around", "within"])
@pytest.mark.parametrize("of_sam", [{"adaptive": False}, {}])
@pytest.mark.parametrize("make", [wn.Scion, wn.Muon, torch.optim.SGD])
def test_sam_makes_the_optimizer_within_of_its_groups(make, of_sam, held):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    own = {} if make is torch.optim.SGD else {"norms": model}
    optimizer = SAM(model.parameters(), make, rho=0.5, lr=0.1, own=of_sam, **own)
    assert {group["rho"] for group in optimizer.param_groups} == {0.5}
    constraints = wn.constrain(held(optimizer), {"*weight": wn.HardCap(0.7)}, norms=model)

    def closure():
        optimizer.zero_grad()
        model(torch.randn(8, 6)).sin().sum().backward()

    for _ in range(4):
        optimizer.step(closure)
        assert max(constraints.proved_ratios().values()) <= 1


def test_an_average_of_a_wrapped_optimizer_knows_its_constraints():
    torch.manual_seed(0)
    layer = nn.Linear(6, 6, bias=False)
    optimizer = wn.Averaged(Accelerated(torch.optim.AdamW(layer.parameters(), lr=0.1)))
    constraints = wn.constrain(optimizer, {"weight": wn.HardCap(0.5)}, norms=layer)
    assert optimizer.attached == [constraints]
    within = torch.optim.SGD(layer.parameters(), lr=0.1)
    wn.constrain(Private(within), {"weight": wn.HardCap(0.5)}, norms=layer)
    with pytest.raises(ValueError, match="the optimizer within has constraints"):
        wn.optim.Clipped(Private(within), 1.0, norms=layer).step()


@pytest.mark.parametrize("wrap", [Bare, lambda p: Accelerated(Bare(p))])
def test_an_optimizer_without_hooks_is_refused_before_anything_is_written(wrap):
    layer = nn.Linear(6, 6, bias=False)
    nn.init.constant_(layer.weight, 3.0)
    optimizer = wrap(layer.parameters())
    before, attributes = layer.weight.detach().clone(), dict(vars(optimizer))
    for asked in ({"constraints": {"weight": wn.HardCap(0.5)}}, {"lipschitz": 1.0, "example_input": torch.randn(2, 6)}):
        with pytest.raises(ValueError, match=r"Bare runs no hooks of torch.*pass the optimizer that it wraps"):
            wn.constrain(optimizer, norms=layer, **asked)
    assert torch.equal(layer.weight, before)
    assert vars(optimizer) == attributes


def test_scalars_find_the_optimizer_within():
    layer = nn.Linear(6, 6)
    optimizer = wn.Scion(layer, lr=0.1)
    assert wn.optim.scalars(Accelerated(wn.Averaged(optimizer))) == wn.optim.scalars(optimizer)
