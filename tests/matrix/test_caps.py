import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellnormed.matrix import caps, spectral_hardcap, spectral_norm, spectral_norm_upper_bound, spectral_normalize

from .conftest import with_singular_values

METHODS = ("gram", "svd")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def clipped(w, bound):
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    return (u * s.clamp_max(bound)[..., None, :]) @ vh


def norm(w):
    return torch.linalg.matrix_norm(w.double(), 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(40, 40), (96, 24), (24, 96), (2, 3, 8, 12)])
@pytest.mark.parametrize("outlier", [1.0, 1.01, 3.0, 1000.0])
def test_hardcap_in_float32(method, shape, outlier):
    w = normal(*shape)
    w = w / norm(w).amax() * outlier
    value = spectral_hardcap(w, 1.0, method)
    assert norm(value).max() <= 1.0 + 1e-12  # the bound itself; 1e-12 is the oracle's own error
    assert norm(value.double() - clipped(w, 1.0)).max() <= 1e-5 * outlier  # contract; measured about 1e-6


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 5), (5, 1), (2, 0, 3), (0, 4), (3, 4, 2), (2, 1, 3, 3)]),
    st.integers(-30, 30),
    st.floats(0.01, 100.0),
    st.sampled_from([spectral_hardcap, spectral_normalize]),
)
def test_caps_hold_at_every_scale_and_do_nothing_twice(shape, exponent, ratio, cap):
    w = normal(*shape) * 10.0**exponent
    bound = ratio * 10.0**exponent
    once = cap(w, bound)
    assert once.shape == w.shape
    if w.numel():
        assert (norm(once) <= bound * (1 + 1e-12)).all()
    assert torch.equal(cap(once, bound), once)


@pytest.mark.parametrize("cap", [spectral_hardcap, spectral_normalize])
def test_inside_the_ball_is_bit_for_bit(cap):
    w = normal(3, 7, 5)
    w[1] *= 100
    value = cap(w, 20.0)
    assert torch.equal(value[0], w[0])
    assert torch.equal(value[2], w[2])
    assert norm(value[1]) <= 20.0
    assert torch.equal(cap(torch.zeros(3, 2), 1.0), torch.zeros(3, 2))


@pytest.mark.parametrize("shape", [(128, 128), (512, 64), (64, 512)])
def test_normalize_ends_at_or_below_the_cap_by_proof(shape):
    w = with_singular_values(torch.ones(64), *shape, dtype=torch.float32) * 3
    w = w + 1e-3 * normal(*shape)
    value = spectral_normalize(w, 1.0)
    assert spectral_norm_upper_bound(value) <= 1.0 + 1e-8  # excess of the proof itself; the contract allows 1e-6
    assert norm(value) >= 1.0 - 2e-6  # no shrinkage beyond u sqrt(n) = 7e-7 and rounding


@pytest.mark.parametrize("method", METHODS)
def test_hardcap_laws(method):
    w = normal(12, 7, dtype=torch.float64)
    q, p = (torch.linalg.qr(normal(k, k, seed=k, dtype=torch.float64))[0] for k in (12, 7))
    value = spectral_hardcap(w, 2.0, method)
    # float64, condition below 1e2: 1e-11 is ample for the Gram form
    torch.testing.assert_close(spectral_hardcap(q @ w @ p, 2.0, method), q @ value @ p, atol=1e-11, rtol=0)
    torch.testing.assert_close(spectral_hardcap(w.mT, 2.0, method), value.mT, atol=1e-11, rtol=0)
    torch.testing.assert_close(spectral_hardcap(3 * w, 6.0, method), 3 * value, atol=1e-11, rtol=0)
    before, after = torch.linalg.svdvals(w), torch.linalg.svdvals(value)
    torch.testing.assert_close(after, before.clamp_max(2.0), atol=1e-11, rtol=0)


def test_bounds_per_matrix_of_the_batch():
    w = normal(2, 6, 4)
    value = spectral_hardcap(w, torch.tensor([0.5, 1.5]))
    # singular values of both matrices exceed 1.5; the cap is lowered by at most 1e-6
    torch.testing.assert_close(spectral_norm(value), torch.tensor([0.5, 1.5]), rtol=2e-6, atol=0)
    with pytest.raises(ValueError, match="does not broadcast"):
        spectral_hardcap(w, torch.ones(3))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "values",
    [(3.0, 2.0, 0.7), (2.0, 2.0, 2.0), (0.5, 0.5, 0.5), (3.0, 3.0, 0.5), (2.0, 0.5, 0.0), (3.0, 0.0, 0.0)],
)
@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 6)])
def test_hardcap_gradient(method, values, shape):
    w = with_singular_values(values, *shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: spectral_hardcap(x, 1.0, method), w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [spectral_hardcap, spectral_normalize])
def test_half_precision(dtype, cap):
    value = cap(normal(64, 32, dtype=dtype), 1.0)
    assert value.dtype == dtype
    # lowered by 4 u; rounding noise of a 64 x 32 matrix stays near 2 u
    assert norm(value) <= 1.0


@pytest.mark.parametrize("cap", [spectral_hardcap, spectral_normalize])
def test_bad_arguments_are_refused(cap):
    for bound in (0.0, -1.0, float("nan"), torch.tensor([1.0, 0.0])):
        with pytest.raises(ValueError, match="max_norm"):
            cap(torch.ones(2, 3, 3), bound)
    with pytest.raises(ValueError, match="NaN or infinity"):
        cap(torch.tensor([[float("inf")]]), 1.0)
    with pytest.raises(ValueError, match="method="):
        spectral_hardcap(torch.eye(2), 1.0, "newton-schulz")


@pytest.mark.parametrize("shape", [(2048, 128), (128, 512), (64, 64), (300, 7)])
@pytest.mark.parametrize("largest", [1.001, 1.3, 1.9])
def test_float32_products_serve_a_matrix_near_its_cap(shape, largest):
    """The usual case after a training step takes the float32 path; it keeps the promises of the float64 one."""
    w = with_singular_values(torch.linspace(0.05, largest, min(shape)), *shape).float()
    bound = torch.ones(1, 1, dtype=torch.float64)
    fast = caps._hardcap_single(w if shape[0] >= shape[1] else w.mT, bound)
    assert fast is not None
    capped = spectral_hardcap(w, 1.0).double()
    exact = spectral_hardcap(w.double(), 1.0, method="svd")
    # aims 5e-6 below the cap; eigenvalues of a float32 Gram matrix add some 2e-6
    assert torch.linalg.matrix_norm(capped - exact, 2) <= 1e-5 * largest
    assert torch.linalg.matrix_norm(capped, 2) <= 1
    undecided = w / torch.linalg.matrix_norm(w.double(), 2).float()
    tall = undecided if shape[0] >= shape[1] else undecided.mT
    assert caps._hardcap_single(tall, bound) is None  # float32 cannot tell on which side it lies
