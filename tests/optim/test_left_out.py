"""Parameters that an optimizer does not hold: those of a part are others', and those that join later are named."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import wellnormed as wn

from .training import backward, network, same, train

OPTIMIZERS = {
    "scion": lambda model: wn.Scion(model, lr=0.05),
    "assignment": lambda model: wn.Scion(wn.assign_norms(model), lr=0.05),
    "muon": lambda model: wn.Muon(model, lr=0.05, recipe="muon"),
    "signum": lambda model: wn.optim.Signum(model, lr=0.01),
    "averaged": lambda model: wn.Averaged(wn.Scion(model, lr=0.05)),
    "clipped": lambda model: wn.optim.Clipped(torch.optim.SGD(trained(model), lr=0.05), 1.0, norms=model),
}


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def folded(model):
    parametrize.remove_parametrizations(model[0], "weight")


CHANGES = {
    "unfrozen": (lambda m: m[0].requires_grad_(False), lambda m: m[0].requires_grad_(True), "0.weight, 0.bias", ""),
    "folded": (lambda m: parametrizations.weight_norm(m[0]), folded, "0.weight", "0.parametrizations.weight.original0"),
    "new head": (lambda m: None, lambda m: m.__setitem__(4, nn.Linear(8, 3)), "4.weight, 4.bias", "4.weight, 4.bias"),
    "late tie": (lambda m: None, lambda m: setattr(m[2], "weight", nn.Parameter(torch.eye(8))), "2.weight", "2.weight"),
    "weight norm": (
        lambda m: None,
        lambda m: parametrizations.weight_norm(m[0]),
        "0.parametrizations.weight.original0, 0.parametrizations.weight.original1",
        "0.weight",
    ),
    "one more": (lambda m: None, lambda m: m.append(nn.Linear(3, 3)), "5.weight, 5.bias", ""),
}


@pytest.mark.parametrize("way", ["as it is", "deepcopy"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("first", "later", "joined", "gone"), CHANGES.values(), ids=CHANGES)
def test_a_parameter_that_joins_the_model_later_is_named_once(first, later, joined, gone, make, way):
    model = network()
    first(model)
    optimizer = make(model)
    train(model, optimizer, 1)
    if way == "deepcopy":
        model, optimizer = copy.deepcopy((model, optimizer))
    later(model)
    with pytest.warns(UserWarning, match=f"the model's {joined} have a gradient and are in no group") as told:
        train(model, optimizer, 1, first=1)
    assert [w.filename for w in told] == [train.__code__.co_filename]
    train(model, optimizer, 2, first=2)  # once is enough
    if isinstance(optimizer, wn.optim.Clipped):
        return  # it prints the optimizer within
    printed = str(optimizer).splitlines()
    assert f"in no group of this optimizer: {joined}" in printed
    assert [line for line in printed if line.startswith("no longer in the model")] == (
        [f"no longer in the model: {', '.join(printed_names(optimizer, model))}"] if gone else []
    )


def printed_names(optimizer, model):
    here = set(model.parameters())
    groups = optimizer.param_groups
    return [n for g in groups for n, p in zip(g["param_names"], g["params"], strict=True) if p not in here]


def test_a_weight_that_is_tied_away_is_named_in_print():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    optimizer = wn.Scion(model, lr=0.05)
    model[1].weight = model[0].weight
    assert "no longer in the model: 1.weight" in str(optimizer).splitlines()


@pytest.mark.parametrize("split", ["parts", "one for each"])
def test_optimizers_of_parts_move_what_one_of_all_would(split):
    model, twin = network(), network()
    norms = wn.assign_norms(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    parts = [matrices, others] if split == "parts" else [[p] for p in model.parameters()]
    optimizers = [wn.Scion(part, lr=0.05, norms=norms) for part in parts]
    assert [set(map(id, (a.parameter for a in o.assignment))) for o in optimizers] == [set(map(id, p)) for p in parts]
    constraints = wn.constrain(optimizers[0], {"*": wn.HardCap(1.0)})
    whole = wn.Scion(twin, lr=0.05)
    wn.constrain(whole, dict.fromkeys(constraints.names, wn.HardCap(1.0)))
    for seed in range(3):
        model.zero_grad()
        backward(model, seed)
        for optimizer in optimizers:
            optimizer.step()
        train(twin, whole, 1, first=seed)
    assert same(model, twin)
    assert "in no group of this optimizer: " in str(optimizers[0])
    for duplicate in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        assert duplicate(optimizers[0]).update_norms() == optimizers[0].update_norms()


def test_the_model_of_an_assignment_is_not_kept_alive_nor_copied():
    model = network()
    parameters = list(model.parameters())
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.05)
    assert optimizer.model is model
    assert pickle.loads(pickle.dumps(optimizer)).model is copy.deepcopy(optimizer).model is None
    twin, other = copy.deepcopy((model, optimizer))
    assert other.model is twin
    del model
    gc.collect()
    assert optimizer.model is None
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert str(optimizer)
