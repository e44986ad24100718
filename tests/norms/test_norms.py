"""Laws that every norm obeys, over one table of norms and nasty shapes and scales."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wellnormed as wn
from wellnormed.norms import MatrixNorm, Norm

EXACT = wn.Spectral(method="svd")  # the oracle itself, without Newton-Schulz
NORMS: dict[str, tuple[Norm, tuple[int, ...]]] = {
    "spectral tall": (EXACT, (12, 5)),
    "spectral wide": (EXACT, (5, 12)),
    "spectral row": (EXACT, (1, 7)),
    "per head": (wn.PerHead(3, EXACT), (12, 5)),
    "columns": (wn.ColNorm(), (6, 4)),
    "embedding": (wn.ColNorm(input_axis=0), (6, 4)),
    "sign": (wn.Sign(), (3, 4)),
    "bias": (wn.BiasRMS(), (7,)),
}
every_norm = pytest.mark.parametrize(("norm", "shape"), NORMS.values(), ids=NORMS.keys())
scales = st.sampled_from([1e-30, 1e-12, 1.0, 1e12, 1e30])


@every_norm
@given(scale=scales, seed=st.integers(0, 2**20))
def test_oracle_attains_the_dual_norm_inside_the_ball(norm, shape, scale, seed):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    d = norm.dualize(g)
    torch.testing.assert_close((g * d).sum(), norm.dual_norm(g), rtol=1e-9, atol=0)  # float64 SVD, scale-free
    assert float(norm.norm(d)) <= 1 + 1e-6  # spectral_norm is an estimate


@every_norm
@given(seed=st.integers(0, 2**20))
def test_dual_norm_is_the_largest_pairing(norm, shape, seed):
    gen = torch.Generator().manual_seed(seed)
    g, w = (torch.randn(shape, generator=gen, dtype=torch.float64) for _ in range(2))
    pairing = (g * w).sum() / norm.upper_bound(w)
    assert float(pairing) <= float(norm.dual_norm(g)) * (1 + 1e-9)


@every_norm
def test_initialization_lies_on_the_sphere(norm, shape, generator):
    w = norm.initialize_(torch.empty(shape), generator)
    assert float(norm.upper_bound(w)) == pytest.approx(1, rel=1e-5)  # float32 entries


@every_norm
@given(scale=scales, seed=st.integers(0, 2**20))
def test_upper_bound_is_above_the_float64_norm(norm, shape, scale, seed):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    bound = float(norm.upper_bound(w))
    # matrix norms: against an SVD of the scaled matrix, whose own error is about 1e-15
    true = float(norm.norm(w.double() / scale))
    if isinstance(norm, MatrixNorm):
        slices = norm.matrices(w.double() / scale)
        true = float(torch.linalg.svdvals(slices).amax()) / norm.unit(w)
    assert true * (1 - 1e-13) <= bound / scale <= true * (1 + 1e-7)


@every_norm
def test_zero_maps_to_zero(norm, shape):
    zero = torch.zeros(shape)
    assert torch.equal(norm.dualize(zero), zero)
    assert float(norm.norm(zero)) == 0
    assert float(norm.upper_bound(zero)) == 0


@every_norm
def test_a_batch_is_treated_entry_by_entry(norm, shape, generator):
    batch = torch.randn((3, *shape), generator=generator, dtype=torch.float64)
    for function in (norm.norm, norm.dual_norm, norm.dualize, norm.upper_bound):
        together = function(batch)
        alone = torch.stack([torch.as_tensor(function(w)) for w in batch])
        torch.testing.assert_close(together, alone, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("coefficients", ["polar-express-5", "jordan-5", "you-6"])
def test_declared_overshoot_bounds_the_iterated_oracle(coefficients, generator):
    norm = wn.Spectral(coefficients)
    for scale in (1.0, 1e-20, 1e20):
        d = norm.dualize(torch.randn(48, 32, generator=generator) * scale)
        assert float(norm.upper_bound(d)) <= norm.overshoot * (1 + 1e-4)  # float32 iteration


def test_whole_matrix_norm_understates_heads_by_up_to_sqrt_heads():
    heads, width = 4, 16
    w = torch.eye(width)
    assert float(wn.Spectral().upper_bound(w)) == pytest.approx(1)
    assert float(wn.PerHead(heads).upper_bound(w)) == pytest.approx(math.sqrt(heads))


def test_rare_symbols_are_inflated_at_most_as_asked():
    g = torch.tensor([[1.0, 1.0], [1e-4, 1e-4]])
    d = wn.ColNorm(input_axis=0, max_inflation=16).dualize(g)
    assert d[0].tolist() == [1, 1]
    assert d[1].tolist() == pytest.approx([16e-4] * 2)


@pytest.mark.parametrize("make", [lambda: wn.ColNorm(input_axis=2), lambda: wn.ColNorm(max_inflation=0.5)])
def test_bad_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"input_axis|max_inflation"):
        make()
