"""The figures of a logger."""

import pytest
import torch
from torch import Tensor, nn

import wellnormed as wn
from wellnormed.optim import scalars


@pytest.fixture
def optimizer():
    torch.manual_seed(0)
    layers = [nn.Embedding(5, 8), nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.LayerNorm(12)]
    model = nn.Sequential(*layers)
    optimizer = wn.Scion(model, lr=0.1, overrides={"3.weight": wn.norms.Split(3), "2.bias": None})
    wn.constrain(optimizer, {"1.weight": wn.HardCap(2.0), "0": wn.ColumnCap(1.5)})
    return optimizer


def test_figures_are_their_definitions(optimizer):
    found = scalars(optimizer)
    for entry in optimizer.assignment:
        name, weight, norm = entry.name, entry.parameter.detach(), entry.norm
        if norm is None:
            assert not any(key.endswith(f"/{name}") for key in found)
            continue
        size = float(norm.norm(weight))
        assert found[f"norm/{name}"] == pytest.approx(size)
        step = optimizer.update_norm(name)
        assert found.get(f"update_over_weight/{name}") == (None if size == 0 else pytest.approx(step / size))
        parts = {"3.weight": weight.chunk(3)}.get(name, [weight])
        if name in ("1.weight", "2.weight", "3.weight"):
            values = [torch.linalg.svdvals(part.double()) for part in parts]
            ranks = [float(v.square().sum() / v[0].square()) for v in values]
            assert found[f"stable_rank/{name}"] == pytest.approx(sum(ranks) / len(ranks), rel=1e-5)  # of float32 norms
        else:
            assert f"stable_rank/{name}" not in found
    over = {key: value for key, value in found.items() if key.startswith("norm_over_cap/")}
    assert over == {
        "norm_over_cap/1.weight": pytest.approx(found["norm/1.weight"] / 2.0),
        "norm_over_cap/0.weight": pytest.approx(found["norm/0.weight"] / 1.5),
    }


def test_all_numbers_come_in_one_transfer(optimizer, monkeypatch):
    lists, transfer = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: lists.append(x.shape) or transfer(x))
    scalars(optimizer)
    assert lists == [(len([a for a in optimizer.assignment if a.norm is not None]), 2)]


def test_weights_of_zeros_and_an_optimizer_of_none():
    layer = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(layer.weight)
    assert scalars(wn.Scion(layer, lr=0.1)) == {"norm/weight": 0.0}
    assert scalars(wn.Scion(layer, lr=0.1, overrides={"weight": None})) == {}


def test_an_optimizer_of_another_library_is_refused():
    with pytest.raises(ValueError, match=r"AdamW has no norms; .*`constraints.norms\(\)`"):
        scalars(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
