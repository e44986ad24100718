"""Weights that somebody else writes: what `project_` brings back, and what loading leaves as it is."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as set_state

import wellnormed as wn
from wellnormed import constraints as c

KERNEL = wn.norms.SpectralConv(2, "patches")
SPECTRAL = [
    c.HardCap(1.0), c.HardCap(1.0, every=4), c.SpectralNormalize(1.0, every=4), c.SoftCap(1.0),
    c.WeightDecay(1.0), c.ClippedWeightDecay(1.0, 0.25), c.Clip(0.5, 1.0), c.Stiefel(1.0), c.Orthogonal(1.0),
    c.Sphere(1.0), c.Hammer(1.0), c.SpectralWeightDecay(0.1), c.NormSphere(),
]  # fmt: skip
NORMS = {
    "plain": (wn.Spectral(), (12, 8)),
    "fused": (wn.norms.Split((4, 8)), (12, 8)),
    "heads": (wn.norms.PerHead(4), (12, 8)),
    "kernel": (KERNEL, (6, 4, 3, 3)),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def attach(dtype=torch.float32, lr=0.1, kind="scion", chosen=SPECTRAL):
    """One model with weights of every norm under every constraint: the n-th constraint holds the weights `n.*`."""
    torch.manual_seed(0)
    chosen = {str(n): one for n, one in enumerate(chosen) if kind == "scion" or not needs_bounds(one)}
    shapes = {name: shape for name, (_, shape) in NORMS.items()}
    model = nn.ModuleDict({
        n: nn.ParameterDict({name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()})
        for n in chosen
    })  # fmt: skip
    norms = wn.assign_norms(model, overrides={f"*.{name}": norm for name, (norm, _) in NORMS.items()})
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4)  # more than float16 loses
        return model, optimizer, wn.constrain(optimizer, chosen, norms)
    optimizer = wn.Scion(norms, lr=lr)
    return model, optimizer, wn.constrain(optimizer, chosen)


def broken(constraints):
    """The weights whose promise is not proved, with their ratio; and who holds them."""
    ratios = constraints.proved_ratios()
    return {name: (SPECTRAL[int(name.split(".")[0])], ratio) for name, ratio in ratios.items() if not ratio <= 1}


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()
    optimizer.zero_grad()


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def needs_bounds(constraint):
    return isinstance(constraint, c.SoftCap | c.WeightDecay | c.Orthogonal)


def random_of_equal_length(weight):
    """Of rank one, so that all of its length is in one singular value."""
    rows = weight.detach().flatten(1)
    found = torch.ones_like(rows) + 0.1 * torch.randn_like(rows)
    return (found * (rows.float().norm() / found.float().norm())).reshape(weight.shape)


def through_a_vector(weight):
    nn.utils.vector_to_parameters(random_of_equal_length(weight).flatten(), [weight])


def through_numpy(weight):
    view = weight.detach().view(torch.int16).numpy() if weight.dtype == torch.bfloat16 else weight.detach().numpy()
    other = random_of_equal_length(weight)
    np.copyto(view, other.view(torch.int16).numpy() if weight.dtype == torch.bfloat16 else other.numpy())


COUNTED = {  # and seen without a call
    "in place, as by load_state_dict": lambda weight: weight.detach().copy_(random_of_equal_length(weight)),
    "by assignment to data": lambda weight: setattr(weight, "data", random_of_equal_length(weight)),
    "vector_to_parameters": through_a_vector,
    "swapped": lambda weight: torch.utils.swap_tensors(weight, nn.Parameter(random_of_equal_length(weight))),
}
UNCOUNTED = {
    "in place, by data": lambda weight: weight.data.copy_(random_of_equal_length(weight)),
    "a NumPy view": through_numpy,
    "a flat view": lambda weight: weight.data.view(-1).copy_(random_of_equal_length(weight).view(-1)),
}


def write_over(model, ways, turn=0):
    """Write every weight in another way than its neighbours, which share its constraint or its norm."""
    for n, weights in enumerate(model.values()):
        for k, weight in enumerate(weights.values()):
            ways[(n + k + turn) % len(ways)](weight)


def test_what_torch_counts_is_brought_back_before_the_next_step():
    """Every constraint gets every way of writing, on one of its four weights."""
    model, optimizer, constraints = attach()
    train(model, optimizer, 3)
    write_over(model, list(COUNTED.values()))
    for seed in range(3):
        train(model, optimizer, 1, seed)
        assert not broken(constraints)


ALL_WAYS = [*COUNTED.values(), *UNCOUNTED.values()]
TWO_WAYS = [UNCOUNTED["in place, by data"], UNCOUNTED["a NumPy view"]]


@pytest.mark.parametrize(
    ("ways", "turn", "dtype"),
    [
        (ALL_WAYS, 0, torch.float32),
        (ALL_WAYS, 4, torch.float32),  # so that every constraint gets all seven ways on its four weights
        *((TWO_WAYS, 0, dtype) for dtype in DTYPES[1:]),
    ],
)
def test_what_anyone_writes_is_projected(ways, turn, dtype):
    """The old code lost `Orthogonal` by 1.5e6 caps, where lengths stayed equal."""
    model, optimizer, constraints = attach(dtype)
    train(model, optimizer, 3)
    write_over(model, ways, turn)
    constraints.project_()
    assert not broken(constraints)
    once, state = bits(model), constraints.state_dict()
    constraints.project_()
    assert same(bits(model), once)
    assert state.keys() == constraints.state_dict().keys()
    assert all(torch.equal(state[key], now) for key, now in constraints.state_dict().items())
    for seed in range(4):
        train(model, optimizer, 1, seed)
        assert not broken(constraints)
        assert all(p.isfinite().all() for p in model.parameters())


def reaches(constraints) -> dict[str, float]:
    return {key: float(value) for key, value in constraints.state_dict().items() if key.endswith(".reach")}


@pytest.mark.parametrize(
    ("dtype", "kind"), [*((dtype, "scion") for dtype in DTYPES), (torch.float32, "adamw"), (torch.bfloat16, "adamw")]
)
def test_weights_that_keep_their_promise_are_not_moved(dtype, kind):
    model, optimizer, constraints = attach(dtype, kind=kind)
    for steps in range(4):
        train(model, optimizer, steps)
        before, promised, reach = bits(model), constraints.promised(), reaches(constraints)
        constraints.project_()
        assert same(bits(model), before)
        assert constraints.promised().keys() >= promised.keys()
        assert all(constraints.promised()[name] == bound for name, bound in promised.items())
        assert reaches(constraints) == reach


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_holds_a_norm_brings_it_up_again(share, dtype):
    chosen = (c.Sphere(1.2), c.Stiefel(1.2), c.Orthogonal(1.2), c.Clip(1.0, 1.2))
    model, _, constraints = attach(dtype, chosen=chosen)
    for parameter in model.parameters():
        parameter.data.mul_(share)
    constraints.project_()
    for (n, constraint), (name, (norm, _)) in itertools.product(enumerate(chosen), NORMS.items()):
        lower = (1.0 if isinstance(constraint, c.Clip) else 1.2) * (1 - 4 * torch.finfo(dtype).eps - 1e-4)
        assert lower <= float(norm.norm(model[str(n)][name].detach().double())) <= 1.2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("seen", [True, False])
def test_what_nothing_bounds_is_refused_by_name(value, seen):
    model, optimizer, constraints = attach()
    train(model, optimizer, 2)
    for weights in model.values():
        (weights["plain"].detach() if seen else weights["plain"].data)[1, 2] = value
    before = bits(model)
    message = f"constrained weights {', '.join(f'{n}.plain' for n in model)} hold NaN or infinity"
    with pytest.raises(ValueError, match=message):
        constraints.project_()
    if seen:
        with pytest.raises(ValueError, match=message):
            train(model, optimizer, 1)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, bits(model), strict=True))


@pytest.mark.parametrize(("lr", "kind"), [(0.01, "scion"), (0.4, "scion"), (0.4, "adamw")])
def test_the_order_in_which_torch_loads_leaves_the_checkpoint_s_bits(lr, kind):
    """`set_optimizer_state_dict` makes state by a step of rate 0. It moved the weights by up to 2.8e-3."""
    model, optimizer, constraints = attach(lr=lr, kind=kind)
    train(model, optimizer, 6)  # while some caps wait for their next turn
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    saved = copy.deepcopy((model.state_dict(), state, constraints.state_dict()))
    again, its_optimizer, its_constraints = attach(lr=lr, kind=kind)
    set_model_state_dict(again, saved[0])
    set_state(again, its_optimizer, saved[1])
    assert same(bits(again), bits(model))
    its_constraints.load_state_dict(saved[2])
    assert same(bits(again), bits(model))
    for one, its in ((model, optimizer), (again, its_optimizer)):
        train(one, its, 4, seed=9)
    assert same(bits(again), bits(model))


@pytest.mark.parametrize("kind", ["scion", "adamw"])
def test_a_step_of_length_zero_projects_what_was_seen_to_break_its_promise_and_writes_nothing_else(kind):
    model, optimizer, constraints = attach(kind=kind)
    train(model, optimizer, 3)
    for weights in model.values():
        weights["heads"].detach().mul_(3)
    before = {n: weight.detach().clone() for n, weight in model.named_parameters() if not n.endswith("heads")}
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(3):
        train(model, optimizer, 1)
        assert not broken(constraints)
        assert all(torch.equal(model.get_parameter(name), weight) for name, weight in before.items())
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for seed in range(3):
        train(model, optimizer, 1, seed)
        assert not broken(constraints)
