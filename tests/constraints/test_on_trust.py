"""`constrain(..., prove=False)`: what a cap wrote keeps its promise, and nothing is proved to know it."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed import constraints as c
from wellnormed.norms import spectral

CAPS = [c.HardCap(1.2), c.HardCap(1.2, every=4), c.SpectralNormalize(1.2), c.SoftCap(1.2),
        c.WeightDecay(1.2), c.Clip(0.3, 1.2), c.Stiefel(1.2), c.Orthogonal(1.2)]  # fmt: skip
SHAPES = [(1, 1), (1, 9), (9, 1), (12, 8), (8, 12), (33, 33), (80, 72)]


def unproved():
    return mock.patch.object(spectral, "spectral_norm_upper_bound", side_effect=AssertionError("a proof"))


def model_of(scale):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in SHAPES)
    for layer in model:
        wn.Spectral().initialize_(layer.weight.data).mul_(scale)
    return model


@pytest.mark.parametrize("scale", [0.0, 1e-30, 0.5, 1.2, 1.2 * (1 + 1e-6), 1.3, 40.0, 1e20])
@pytest.mark.parametrize("constraint", CAPS, ids=repr)
def test_the_word_of_a_cap_is_what_a_proof_finds(constraint, scale):
    model = model_of(scale)
    optimizer = wn.Scion(model, lr=0.1)
    with unproved():
        constraints = wn.constrain(optimizer, {"*": constraint}, prove=False)
    assert max(constraints.proved_ratios().values()) <= 1
    with unproved():
        for _ in range(3):
            for p in model.parameters():
                p.grad = -p.detach()
            optimizer.step()
    assert max(constraints.proved_ratios().values()) <= 1


def held(constraint):
    model = model_of(1.0)
    optimizer = wn.Scion(model, lr=0.1)
    return model, optimizer, wn.constrain(optimizer, {"*": constraint}, prove=False)


def train(model, optimizer, numbers):
    for number in numbers:
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i))
        optimizer.step()


@pytest.mark.parametrize("constraint", CAPS, ids=repr)
def test_a_state_is_loaded_beside_its_weights_without_a_proof_and_bit_for_bit(constraint):
    with unproved():
        parts = model, optimizer, _ = held(constraint)
        train(model, optimizer, range(2))
        states = copy.deepcopy([each.state_dict() for each in parts])
        again, its_optimizer, _ = twins = held(constraint)
        for each, state in zip(twins, states, strict=True):
            each.load_state_dict(state)
        train(model, optimizer, range(2, 4))
        train(again, its_optimizer, range(2, 4))
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("prove", [True, False])
def test_a_write_that_torch_counts_is_brought_back_in_any_case(prove):
    model = model_of(1.0)
    optimizer = wn.Scion(model, lr=0.01)
    constraints = wn.constrain(optimizer, {"*": wn.HardCap(1.2, every=8)}, prove=prove)
    for p in model.parameters():
        p.detach().mul_(5)
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert max(constraints.proved_ratios().values()) <= 1


def test_what_is_neither_true_nor_false_is_refused():
    with pytest.raises(ValueError, match=r"constrain: prove='no' is of type str; pass True or False"):
        wn.constrain(wn.Scion(model_of(1.0), lr=0.1), {"*": wn.HardCap(1.0)}, prove="no")
