"""What people do with torch optimizers in the middle of training, and what is refused by name."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wellnormed as wn
from tests.parallel.training import OPTIMIZERS
from tests.parallel.training import network as uneven

from .training import network, same, train


@pytest.mark.parametrize("make", [wn.Scion, wn.Muon, wn.optim.Signum])
def test_a_layer_that_is_unfrozen_joins_with_its_norm(make):
    model = network()
    model[0].requires_grad_(False)
    optimizer = make(model, lr=0.05)
    constraints = [] if make is wn.optim.Signum else [wn.constrain(optimizer, {"2": wn.HardCap(1.0)})]
    train(model, optimizer, 2)
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": [(f"0.{n}", p) for n, p in model[0].named_parameters()], "lr": 0.025})
    whole = make(network(), lr=0.025)
    if make is not wn.optim.Signum:
        constraints.append(wn.constrain(optimizer, {"0": wn.HardCap(1.0)}))
    train(model, optimizer, 3, first=2)
    assert not torch.equal(model[0].weight, before)
    assert optimizer.update_norm("0.weight") == whole.update_norm("0.weight")  # the same norm at the same rate
    assert "0.weight" in str(optimizer)
    assert "in no group" not in str(optimizer)
    assert all(ratio <= 1 for c in constraints for ratio in c.proved_ratios().values())
    again = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(again)


@pytest.mark.parametrize(
    "settings",
    [{"recipe": "scion-gpt"}, {"recipe": "scion-gpt", "radius": 3.0}, {"radii": {"*.weight": 7.0}},
     {"lr_factors": {"*.weight": 0.5}, "recipe": "scion-mlp"}],
)  # fmt: skip
def test_a_layer_that_is_unfrozen_has_the_radius_and_the_rate_it_would_have_had(settings):
    model = network()
    model[0].requires_grad_(False)
    optimizer = wn.Scion(model, lr=0.05, **settings)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    assert optimizer.assignment.frozen == ()
    whole = wn.Scion(network(), lr=0.05, **settings)
    for name, _ in model.named_parameters():
        assert optimizer.update_norm(name) == whole.update_norm(name), name


def test_a_group_may_bring_its_norm_or_ask_for_adamw():
    model = network()
    model[0].requires_grad_(False)
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.1, adamw=wn.optim.AdamWSettings(lr=0.01))
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"which norm parameter '0' of shape \(8, 6\) lives in.*key 'norm'"):
        optimizer.add_param_group({"params": [model[0].weight]})
    optimizer.add_param_group({"params": [("first", model[0].weight)], "norm": wn.Sign(normalized=True), "lr": 0.3})
    optimizer.add_param_group({"params": [model[0].bias], "norm": None})
    assert optimizer.update_norm("first") == 0.3
    [last] = [g for g in optimizer.param_groups if any(p is model[0].bias for p in g["params"])]
    assert (last["step_rule"], last["lr"]) == ("adamw", 0.01)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(ValueError, match=r"norm=Sign\(\) in a group is for parameters that come later"):
        wn.Scion([{"params": model.parameters(), "norm": wn.Sign()}], lr=0.1, norms=wn.assign_norms(model))
    with pytest.raises(ValueError, match="norm must be a norm, got 'Sign'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "norm": "Sign"})
    with pytest.raises(ValueError, match=r"norm on 2-dimensional weights"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "norm": wn.Sign()})


@pytest.mark.parametrize("make", [wn.Scion, wn.Muon, wn.optim.Signum])
@pytest.mark.parametrize("group", [{}, {"norm": wn.Sign()}])
def test_a_parameter_whose_name_is_taken_joins_by_the_name_that_it_is_given(make, group):
    model = network()
    optimizer = make(model, lr=0.05)
    model[2] = nn.Linear(8, 8, bias=False)
    with pytest.raises(ValueError, match=r"'2.weight' is in this optimizer already; pass \('another name'"):
        optimizer.add_param_group({"params": [("2.weight", model[2].weight)], **group})
    optimizer.add_param_group({"params": [("second", model[2].weight)], **group})
    assert optimizer.update_norm("second") == 0.05 * optimizer.assignment.assigned[-1].norm.overshoot
    before = model[2].weight.detach().clone()
    train(model, optimizer, 1)
    assert not torch.equal(before, model[2].weight)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("make", [wn.Scion, wn.Muon, wn.Almond, wn.optim.SpectralDescent, wn.optim.Signum])
def test_maximize_is_descent_of_the_negative(make):
    one, other = network(), network()
    recipe = {"recipe": "muon"} if make is wn.Muon else {}  # AdamW's part climbs as well
    first, second = make(one, lr=0.05, **recipe), make(other, lr=0.05, maximize=True, **recipe)
    for seed in range(4):
        for model, optimizer, sign in ((one, first, 1), (other, second, -1)):
            optimizer.zero_grad()
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
            (sign * model(x).square().mean()).backward()
            optimizer.step()
    assert same(one, other)


def test_meta_and_sparse_and_empty_are_refused_by_name():
    with torch.device("meta"):
        model = network()
    with pytest.raises(ValueError, match=r"0.weight, .* are on the meta device.*to_empty"):
        wn.Scion(model, lr=0.1)
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = wn.Scion(table, lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of 'weight' is sparse.*sparse=False"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"parameter '0' of shape \(0, 3\) is empty.*requires_grad_\(False\)"):
        wn.optim.Signum([nn.Parameter(torch.ones(0, 3))], lr=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("norm", ["Spectral", None])
def test_a_model_that_was_cast_after_a_step_is_refused_with_the_remedy(norm: str | None, dtype: torch.dtype):
    layer = nn.Linear(3, 2, bias=False)
    overrides = {"weight": wn.norms.Spectral() if norm else None}
    optimizer = wn.Scion(layer, lr=0.1, overrides=overrides)

    def step() -> None:
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()

    step()
    layer.to(dtype)
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=f"parameter 'weight' is of {dtype}, and its .* of torch.float32: .* cast"):
        step()
    assert torch.equal(layer.weight, before)
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    assert layer.weight.dtype == dtype
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_default_device_does_not_matter(make):
    ends = []
    for there in ("cpu", "meta"):
        model = uneven()
        with torch.device(there):
            wn.initialize_(model, generator=torch.Generator().manual_seed(0))
            optimizer = make(wn.assign_norms(model))
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = parameter.detach() + 1
                optimizer.step()
            wn.optim.scalars(optimizer)
            copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())
        ends.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_adamw_settings_are_no_dictionary():
    for given in ({"lr": 1e-3, "eps": 1e-7}, 1e-3, wn.optim.AdamWSettings):
        with pytest.raises(ValueError, match=r"adamw must be an AdamWSettings, or .*; pass adamw=AdamWSettings\("):
            wn.Scion(network(), lr=0.1, adamw=given)
    with pytest.raises(ValueError, match=r"AdamWSettings\(lr=0.001, eps=1e-07\)"):
        wn.Muon(network(), lr=0.1, adamw={"lr": 1e-3, "eps": 1e-7})


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")  # of FSDP1 itself, which asks for an accelerator
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: wn.Scion(model, lr=0.1),
        lambda model: wn.Scion(wn.assign_norms(model), lr=0.1),
        lambda model: wn.optim.Signum(model.parameters(), lr=0.1),
    ],
)
def test_fsdp1_is_refused_by_name(make, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    with pytest.raises(ValueError, match=r"parameter '.*' belongs to FullyShardedDataParallel \(FSDP1\).*fully_shard"):
        make(model)


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # in the import of torch's own module
def test_zero_redundancy_is_refused_by_name():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    norms = wn.assign_norms(model)
    with pytest.raises(ValueError, match=r"'norms', which is of the whole.*ZeroRedundancyOptimizer.*process_group="):
        ZeroRedundancyOptimizer(model.parameters(), wn.Scion, lr=0.1, norms=norms)
    other = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer sends its weights.*process_group="):
        wn.constrain(other, {"0": wn.HardCap(1.0)}, norms=norms)


@pytest.mark.parametrize("duplicate", [lambda *all: copy.deepcopy(all), lambda *all: pickle.loads(pickle.dumps(all))])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_copy_keeps_its_constraints(duplicate, foreign):
    model = network()
    norms = wn.assign_norms(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if foreign else wn.Scion(norms, lr=0.2)
    constraints = wn.constrain(optimizer, {"0": wn.HardCap(0.8, every=4), "2": wn.constraints.Hammer(0.8)}, norms=norms)
    train(model, optimizer, 3)
    twin, twin_optimizer, twin_constraints = duplicate(model, optimizer, constraints)
    train(model, optimizer, 3, first=3)
    train(twin, twin_optimizer, 3, first=3)
    assert same(model, twin)  # bit for bit, so what constraints remember went along
    assert twin_constraints.proved_ratios() == constraints.proved_ratios()
    assert twin_constraints.proved_ratios()["0.weight"] <= 1
    [alone] = duplicate(constraints)  # which bring their optimizer
    assert alone.proved_ratios() == constraints.proved_ratios()
    if not foreign:  # torch copies no hooks
        alone_model, alone = duplicate(model, optimizer)  # without naming them
        train(model, optimizer, 1, first=6)
        train(alone_model, alone, 1, first=6)
        assert same(model, alone_model)
    twin_constraints.remove()
    train(twin, twin_optimizer, 5, first=6)
    assert twin_constraints.proved_ratios()["0.weight"] > 1
    assert constraints.proved_ratios()["0.weight"] <= 1


GROWN = {
    "scion": (lambda m: wn.Scion(m, lr=0.1), r"'2.weight' has shape \(12, 8\), and its momentum_buffer \(8, 8\)"),
    "light": (lambda m: wn.Scion(m, lr=0.1, memory="gradient"), r"gradient of '2.weight' has shape \(8, 8\)"),
    "adamw": (lambda m: wn.Muon(m, recipe="muon", overrides={"*": None}), r"'2.weight' has shape .* exp_avg"),
    "clipped": (
        lambda m: wn.optim.Clipped(torch.optim.AdamW(m.parameters(), lr=0.1), 1.0, norms=m),
        r"'2.weight' has shape .* exp_avg",
    ),
    "averaged": (lambda m: wn.Averaged(torch.optim.SGD(m.parameters(), lr=0.1)), "shape .* were written since"),
    "split": (
        lambda m: wn.Scion(m, lr=0.1, overrides={"2.weight": wn.norms.Split((3, 5))}, memory="gradient"),
        "2.weight.*3.*5",
    ),
}


@pytest.mark.parametrize(("make", "message"), GROWN.values(), ids=GROWN)
def test_a_weight_that_grew_in_place_is_refused_before_anything_moves(make, message):
    model = network()
    optimizer = make(model)
    train(model, optimizer, 1)
    weight, stale = model[2].weight, "gradient" in message
    weight.data = torch.ones(12, 8)
    for p in model.parameters():
        if p is not weight or not stale:
            p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "constraint", [wn.HardCap(1.0, every=4), wn.constraints.Hammer(1.0), wn.constraints.ClippedWeightDecay(1.0, 1.0),
                   wn.constraints.SpectralWeightDecay(0.1), wn.constraints.FixedNorm()], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("norm", [wn.Spectral(), wn.norms.PerHead(4)])
def test_a_constraint_begins_anew_with_a_weight_that_grew(constraint, norm):
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    constraints = wn.constrain(optimizer, {"*": constraint}, wn.assign_norms(layer, overrides={"*": norm}))
    for shape in ((8, 8), (12, 8), (12, 10)):
        layer.weight.grad = None
        layer.weight.data = torch.ones(shape)
        layer.weight.grad = torch.ones(shape)
        optimizer.step()
        assert max(constraints.proved_ratios().values(), default=0) <= 1
