"""Norms that are held at a value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wellnormed as wn
from wellnormed.constraints import FixedNorm, Orthogonal, Sphere

EXACT = wn.Spectral(method="svd")


@given(st.lists(st.floats(0, 2), min_size=1, max_size=6), st.sampled_from([1e-6, 0.3, 1.0, 1e5]), st.booleans())
def test_one_newton_schulz_step_never_ends_above_the_cap(sizes, cap, tall):
    """s (3 - s^2) / 2 of every singular value, in units of the aim: a map of [0, 2] into [0, 1]."""
    weights = torch.diag(torch.tensor(sizes, dtype=torch.float64))
    weights = torch.cat([weights, torch.zeros(3, len(sizes), dtype=torch.float64)])
    weights = cap * (weights if tall else weights.mT)
    after = Orthogonal(cap)._cap(weights, cap, 0.0) / cap
    s = torch.tensor(sizes, dtype=torch.float64).abs().sort(descending=True).values
    expected = (s * (3 - s.square()) / 2).abs().sort(descending=True).values
    found = torch.linalg.svdvals(after)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14 * 100)  # float64, sums of nine terms
    assert float(found.max()) <= 1 + 1e-14 * 100


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
@pytest.mark.parametrize("lr", [0.1, 0.01])
def test_singular_values_stay_within_three_halves_of_the_square_of_a_step(shape, lr):
    below = 0.0  # a step of lr from 1 - below ends at f(1 - below - lr) or above
    for _ in range(60):
        start = 1 - below - lr
        below = 1 - start * (3 - start**2) / 2
    assert below <= 1.5 * lr**2 * (1 + 5 * lr)
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], bias=False)
    optimizer = wn.Scion(wn.assign_norms(layer, overrides={"weight": EXACT}), lr=lr * 2.0, momentum=0.0)
    held = wn.constrain(optimizer, {"weight": Orthogonal(2.0)})
    unit = 2.0 * EXACT.slice_units(layer.weight)[0]
    for step in range(60):
        layer.weight.grad = layer.weight.detach().clone() if step % 2 else torch.randn(shape)
        optimizer.step()
        values = torch.linalg.svdvals(layer.weight.detach().double()) / unit
        assert float(values.min()) >= 1 - below - 3e-5  # the aim is 2e-5 below
        assert held.proved_ratios()["weight"] <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_longest_step_that_is_accepted_keeps_the_promise(dtype):
    """Straight outwards; a step as long as the norm, which rounding carries beyond the map's interval, is refused."""

    def worst(lr: float) -> float:
        layer = nn.Linear(4, 4, bias=False, dtype=dtype)
        norms = wn.assign_norms(layer, overrides={"weight": EXACT})
        optimizer = wn.Scion(norms, lr=lr, momentum=0.0)
        held = wn.constrain(optimizer, {"weight": Orthogonal(1.0)})
        ratios = []
        for _ in range(6):
            layer.weight.grad = -layer.weight.detach().clone()
            optimizer.step()
            ratios.append(held.proved_ratios()["weight"])
        return max(ratios)

    assert worst(0.9999) <= 1
    with pytest.raises(ValueError, match=r"a step of norm 1 .* which bears 0.9999; lower .* or use Stiefel"):
        worst(1.0)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("norm", [wn.norms.BiasRMS(), wn.Sign(ndim=1), wn.norms.Euclidean()], ids=repr)
def test_a_sphere_is_kept_for_every_norm_and_size(norm, size):
    torch.manual_seed(0)
    model = nn.Module()
    model.bias = nn.Parameter(size * torch.randn(7))
    optimizer = wn.Scion(wn.assign_norms(model, overrides={"bias": norm}), lr=0.3)
    held = wn.constrain(optimizer, {"bias": Sphere(0.5)})
    for _ in range(30):
        model.bias.grad = torch.randn(7)
        optimizer.step()
        assert 1 - 3e-5 <= held.proved_ratios()["bias"] <= 1  # the aim is 2e-5 below


@pytest.mark.parametrize("cap", [1e-3, 10.0, 1e30])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e30])
def test_a_sphere_leaves_zero_where_it_is(cap, size):
    layer = nn.Linear(4, 3, bias=False)
    nn.init.constant_(layer.weight, size)
    optimizer = wn.Scion(layer, lr=0.0)
    held = wn.constrain(optimizer, {"weight": Sphere(cap)})
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert bool(layer.weight.isfinite().all())
    assert held.proved_ratios()["weight"] <= 1
    assert bool(layer.weight.any()) == (size > 0)


@pytest.mark.parametrize("size", [1e-28, 1.0, 1e28])
def test_a_frobenius_norm_of_any_size_is_kept_and_a_weight_that_became_zero_stays(size):
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.data.mul_(size)
    before = float(layer.weight.detach().double().norm())
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    wn.constrain(optimizer, {"*": FixedNorm(frobenius=True)}, norms=layer)
    layer.weight.grad = size * torch.ones(3, 4)
    optimizer.step()
    assert float(layer.weight.detach().double().norm()) == pytest.approx(before, rel=1e-6)
    layer.weight.grad = layer.weight.detach().clone()
    optimizer.step()
    assert not layer.weight.any()
