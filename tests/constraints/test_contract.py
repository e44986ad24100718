"""What every constraint owes: one line of the table for each, the laws below for all."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import wellnormed as wn
from wellnormed import constraints as c


@dataclass(frozen=True)
class Case:
    constraint: c.Constraint
    promises: bool = True  # to optimizers that declare their steps
    any_optimizer: bool = True  # runs where steps are not declared
    promises_any: bool = True  # and promises there too


CASES = {
    "HardCap": Case(c.HardCap(1.2)),
    "SpectralNormalize": Case(c.SpectralNormalize(1.2)),
    "HardCap, waiting": Case(c.HardCap(1.2, every=4)),
    "SpectralNormalize, waiting": Case(c.SpectralNormalize(1.2, every=4)),
    "SoftCap": Case(c.SoftCap(1.2), any_optimizer=False),
    "SoftCap, waiting": Case(c.SoftCap(1.2, every=4), any_optimizer=False),
    "WeightDecay": Case(c.WeightDecay(1.2), any_optimizer=False),
    "SpectralInterval": Case(c.SpectralInterval(0.3, 1.2)),
    "SpectralInterval of one value": Case(c.SpectralInterval(1.2, 1.2)),
    "Stiefel": Case(c.Stiefel(1.2)),
    "Stiefel, overshooting": Case(c.Stiefel(1.2, "jordan-5")),
    "Stiefel, nearly exact": Case(c.Stiefel(1.2, "polar-express-8")),
    "Stiefel, exact": Case(c.Stiefel(1.2, method="svd")),
    "ClippedWeightDecay": Case(c.ClippedWeightDecay(0.9, 0.25), promises_any=False),
    "ClippedWeightDecay, before": Case(c.ClippedWeightDecay(0.9, 0.25, before=True), promises_any=False),
    "ClippedWeightDecay, whole": Case(c.ClippedWeightDecay(0.9, 1.0)),
    "Hammer": Case(c.Hammer(1.2), promises=False, promises_any=False),
    "SpectralWeightDecay": Case(c.SpectralWeightDecay(0.1), promises=False, promises_any=False),
    "Orthogonal": Case(c.Orthogonal(1.2), any_optimizer=False),
    "Sphere": Case(c.Sphere(1.2)),
    "ColumnCap": Case(c.ColumnCap(1.2)),
    "ColumnCap, rows and biases": Case(c.ColumnCap(1.3)),
    "EntryCap": Case(c.EntryCap(1.2)),
    "FixedNorm": Case(c.FixedNorm(), promises=False, promises_any=False),
    "FixedNorm, Frobenius": Case(c.FixedNorm(frobenius=True), promises=False, promises_any=False),
    "QKClip, without a record": Case(c.QKClip(), promises=False, promises_any=False),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def build(case):
    """Two weights of equal shape and one of another, so that batches and single weights both occur; one is per head."""
    torch.manual_seed(0)
    if isinstance(case.constraint, c.ColumnCap):
        model = nn.ModuleDict({"a": nn.Embedding(6, 8), "b": nn.Embedding(6, 8), "c": nn.Embedding(3, 4)})
    else:
        model = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in SIZES.items()})
    return model, norms_of(case, model)


def norms_of(case, model):
    """What the constraint of a case acts on."""
    if case.constraint == c.ColumnCap(1.3):
        return wn.assign_norms(model, overrides={"c": wn.norms.Euclidean(ndim=2), "[!c]*": wn.norms.RowNorm()})
    if isinstance(case.constraint, c.ColumnCap):
        return wn.assign_norms(model)
    if isinstance(case.constraint, c.EntryCap):
        return wn.assign_norms(model, overrides={"c": wn.Sign(), "[!c]*": wn.Sign(normalized=True)})
    return wn.assign_norms(model, overrides={"heads.weight": wn.norms.PerHead(4)})


SIZES = {"a": (8, 12), "b": (8, 12), "c": (7, 3), "heads": (8, 8)}


def attach(case, kind="scion", lr=0.1):
    model, norms = build(case)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        return model, optimizer, wn.constrain(optimizer, {"*": case.constraint}, norms=norms)
    optimizer = wn.Scion(norms, lr=lr)
    return model, optimizer, wn.constrain(optimizer, {"*": case.constraint})


def attach_all(kind, lr=0.1):
    """One model and optimizer for all cases that the optimizer serves: the n-th case holds the weights `n.*`."""
    served = {str(n): case for n, case in enumerate(CASES.values()) if case.any_optimizer or kind != "adamw"}
    built = {n: build(case) for n, case in served.items()}
    model = nn.ModuleDict({n: part for n, (part, _) in built.items()})
    overrides = {f"{n}.{one.name}": one.norm for n, (_, norms) in built.items() for one in norms}
    norms = wn.assign_norms(model, overrides=overrides)
    chosen = {n: case.constraint for n, case in served.items()}
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        return served, model, optimizer, wn.constrain(optimizer, chosen, norms=norms)
    optimizer = {"scion": wn.Scion, "muon": wn.Muon}[kind](norms, lr=lr)
    return served, model, optimizer, wn.constrain(optimizer, chosen)


def draw_gradients(model, generator, outward=False):
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = -parameter.detach().clone() if outward else noise


def require_promises(constraints, promising):
    """Every weight of a case that promises has a proved ratio of at most 1, and no other weight has one."""
    ratios = constraints.proved_ratios()
    assert ratios.keys() == {name for name in constraints.norms() if name.split(".")[0] in promising}
    assert not {name: ratio for name, ratio in ratios.items() if not ratio <= 1}


@pytest.mark.parametrize("kind", ["scion", "muon"])
def test_the_promise_is_proved_after_every_step(kind, generator):
    cases, model, optimizer, constraints = attach_all(kind)
    promising = {n for n, case in cases.items() if case.promises}
    require_promises(constraints, promising)  # before the first step, too
    for i in range(10):
        draw_gradients(model, generator, outward=i % 3 == 0)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - i / 10)
        optimizer.step()
        require_promises(constraints, promising)
    assert constraints.norm_ratios().keys() == constraints.proved_ratios().keys()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_with_adamw_it_holds_or_is_refused_or_promises_nothing(generator):
    for case in CASES.values():
        if not case.any_optimizer:
            with pytest.raises(ValueError, match="needs a bound on the step's norm"):
                attach(case, "adamw")
    cases, model, optimizer, constraints = attach_all("adamw")
    for _ in range(6):
        draw_gradients(model, generator)
        optimizer.step()
        require_promises(constraints, {n for n, case in cases.items() if case.promises_any})


@pytest.mark.parametrize("kind", ["scion", "adamw"])
def test_a_default_device_does_not_matter(kind):
    """As `torch.set_default_device("cuda")`, which is for the user's tensors; here the one without values."""
    ends = []
    for there in ("cpu", "meta"):
        _, model, optimizer, constraints = attach_all(kind)
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            draw_gradients(model, generator)
            with torch.device(there):
                optimizer.step()
        with torch.device(there):
            constraints.project_()
            constraints.load_state_dict(constraints.state_dict())
            ratios = constraints.proved_ratios()
        ends.append([*model.parameters(), *(torch.tensor(ratio) for ratio in ratios.values())])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_zero_weights_and_zero_gradients_stay_zero():
    _, model, optimizer, constraints = attach_all("scion")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert all(not parameter.any() for parameter in model.parameters())
    assert all(ratio <= 1 for ratio in constraints.proved_ratios().values())
    assert all(tensor.isfinite().all() for tensor in constraints.state_dict().values())


def test_a_weight_that_took_no_step_is_left_alone(generator):
    _, model, optimizer, constraints = attach_all("scion")
    draw_gradients(model, generator)
    optimizer.step()
    before, state = [p.detach().clone() for p in model.parameters()], constraints.state_dict()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="no gradient"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(state[key], now) for key, now in constraints.state_dict().items())


@every_case
def test_a_frozen_weight_has_no_constraint(case):
    model, _ = build(case)
    model["a"].weight.requires_grad_(False)
    optimizer = wn.Scion(norms_of(case, model), lr=0.1)
    assert "a.weight" not in wn.constrain(optimizer, {"*": case.constraint}).norms()
    with pytest.raises(ValueError, match="matches no trainable parameter"):
        wn.constrain(optimizer, {"a": case.constraint})


@every_case
def test_a_weight_in_a_batch_is_treated_as_alone(case, generator):
    together, optimizer, _ = attach(case)
    draw_gradients(together, generator)
    gradients = {name: p.grad.clone() for name, p in together.named_parameters()}
    optimizer.step()
    for name, parameter in together.named_parameters():
        model, norms = build(case)
        alone = wn.Scion(norms, lr=0.1)
        wn.constrain(alone, {name: case.constraint})
        own = model.get_parameter(name)
        own.grad = gradients[name]
        alone.step()
        torch.testing.assert_close(own, parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        *((lambda kind=kind, cap=cap: kind(cap), r"cap=.*must be positive and finite")
          for kind in (c.HardCap, c.SoftCap, c.SpectralNormalize, c.WeightDecay, c.ColumnCap, c.EntryCap,
                       c.Hammer)
          for cap in (0.0, -1.0, float("nan"), float("inf"))),
        (lambda: c.Stiefel(0.0), "Stiefel: cap=0.0"),
        (lambda: c.Stiefel(1.0, "you-7"), "did you mean"),
        (lambda: c.SpectralInterval(0.1, 0.0), "SpectralInterval: upper=0.0"),
        (lambda: c.SpectralInterval(2.0, 1.0), "lower=2.0"),
        (lambda: c.SpectralInterval(-0.1, 1.0), "lower=-0.1"),
        (lambda: c.SpectralInterval(float("nan"), 1.0), "lower=nan"),
        (lambda: c.ClippedWeightDecay(0.0, 0.1), "upper=0.0"),
        (lambda: c.ClippedWeightDecay(1.0, 0.0), "decay=0.0"),
        (lambda: c.ClippedWeightDecay(1.0, 1.5), "decay=1.5"),
        (lambda: c.SpectralWeightDecay(0.0), "decay=0.0"),
        (lambda: c.SpectralWeightDecay(float("nan")), "decay=nan"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_a_state_has_the_names_of_the_model_without_its_wrappers():
    states = []
    for wrap in (lambda layer: layer, checkpoint_wrapper, lambda layer: torch.compile(layer, backend="eager")):
        model = nn.Sequential(wrap(nn.Linear(4, 4, bias=False)))
        constraints = wn.constrain(wn.Scion(model, lr=0.1), {"*": c.HardCap(1.0, every=3)})
        states.append(constraints.state_dict())
        constraints.load_state_dict(states[0])
    assert [list(state) for state in states] == [["0.weight.reach"]] * 3


def test_states_of_other_constraints_and_sizes_are_refused():
    _, _, hammer = attach(CASES["Hammer"])
    state = hammer.state_dict()
    _, _, cap = attach(CASES["HardCap"])
    with pytest.raises(ValueError, match=r"has unknown \['a.weight.vector'"):
        cap.load_state_dict(state)
    with pytest.raises(ValueError, match=r"lacks \['a.weight.vector'"):
        hammer.load_state_dict({})
    with pytest.raises(ValueError, match=r"'a.weight.vector' has shape \(3,\), not \(8,\)"):
        hammer.load_state_dict(state | {"a.weight.vector": torch.ones(3)})
    assert all(torch.equal(state[key], tensor) for key, tensor in hammer.state_dict().items())
