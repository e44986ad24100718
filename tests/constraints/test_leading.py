import pytest
import torch
from torch import nn

import wellnormed as wn
from papers._caps_as_published import HammerAsPublished
from wellnormed.constraints import Hammer, SpectralInterval, SpectralWeightDecay, Stiefel


def singular_values(weight):
    return torch.linalg.svdvals(weight.detach().double())


def test_the_hammer_holds_against_steps_of_rank_one(generator):
    """The case that it is for: one direction grows."""
    model = nn.Linear(20, 20, bias=False)
    nn.init.orthogonal_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wn.constrain(optimizer, {"weight": Hammer(1.0)}, norms=wn.assign_norms(model))
    direction = torch.outer(torch.randn(20, generator=generator), torch.randn(20, generator=generator))
    direction /= direction.norm()
    for _ in range(60):
        model.weight.grad = -direction
        optimizer.step()
    values = singular_values(model.weight)
    assert values[0] == pytest.approx(1.0, abs=2e-3)
    assert values[0] <= 1 + 1e-4


def test_the_hammer_exceeds_where_many_values_grow():
    """Why it promises nothing (LT figure 4)."""
    model = nn.Linear(20, 20, bias=False)
    nn.init.orthogonal_(model.weight, 0.9)
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.1, momentum=0.0)
    constraints = wn.constrain(optimizer, {"weight": Hammer(1.0)})
    for _ in range(10):
        model.weight.grad = -model.weight.detach().clone()
        optimizer.step()
    assert constraints.norms()["weight"] > 1.2


@pytest.mark.parametrize(("hammer", "norm"), [(Hammer(2.0), 0.5), (HammerAsPublished(2.0), 2.0)], ids=str)
def test_only_the_published_hammer_raises(hammer, norm):
    model = nn.Linear(6, 6, bias=False)
    nn.init.orthogonal_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    constraints = wn.constrain(optimizer, {"weight": hammer}, norms=wn.assign_norms(model))
    model.weight.grad = torch.ones(6, 6)
    optimizer.step()
    assert constraints.norms()["weight"] == pytest.approx(norm, rel=1e-4)


def test_spectral_weight_decay_takes_from_the_largest_in_every_head():
    model = nn.Linear(6, 8, bias=False)
    norm = wn.norms.PerHead(2)
    with torch.no_grad():
        for head, size in zip(model.weight.view(2, 4, 6), (1.0, 3.0), strict=True):
            head.zero_()
            head[0, 0], head[1, 1] = size, size / 2
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    norms = wn.assign_norms(model, overrides={"weight": norm})
    wn.constrain(optimizer, {"weight": SpectralWeightDecay(0.25)}, norms=norms)
    model.weight.grad = torch.zeros(8, 6)
    optimizer.step()
    first, second = model.weight.view(2, 4, 6)
    torch.testing.assert_close(singular_values(first)[:2], torch.tensor([0.75, 0.5]).double())
    torch.testing.assert_close(singular_values(second)[:2], torch.tensor([2.25, 1.5]).double())


@pytest.mark.parametrize("size", [(8, 8), (12, 5)])
def test_stiefel_and_clip_hold_every_singular_value_from_both_sides(size, generator):
    for constraint, low in ((Stiefel(1.5), 1.49), (SpectralInterval(0.4, 1.5), 0.4 - 1e-5)):
        model = nn.Linear(*size, bias=False)
        optimizer = wn.Scion(wn.assign_norms(model), lr=0.3)
        constraints = wn.constrain(optimizer, {"weight": constraint})
        unit = wn.Spectral().unit_of(*model.weight.shape)
        for _ in range(20):
            model.weight.grad = torch.randn(model.weight.shape, generator=generator)
            optimizer.step()
            assert singular_values(model.weight)[-1] / unit >= low
            assert constraints.proved_ratios()["weight"] <= 1
