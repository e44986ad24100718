import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellnormed.matrix import bounds, spectral_norm, spectral_norm_upper_bound
from wellnormed.matrix.bounds import ABOVE, proved_bound, spectral_norm_within

from .conftest import normal, with_singular_values

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64, torch.bfloat16)}


def exactly_at_most(w, bound):
    """Whether bound^2 I - W^T W is positive semidefinite, by LDL^T in exact rational arithmetic."""
    if w.shape[0] < w.shape[1]:
        w = w.mT
    rows = [[Fraction(x) for x in row] for row in w.double().tolist()]
    n = len(rows[0])
    square = Fraction(bound) ** 2
    a = [[(square if i == j else 0) - sum(r[i] * r[j] for r in rows) for j in range(n)] for i in range(n)]
    for k in range(n):
        if a[k][k] < 0 or (a[k][k] == 0 and any(a[i][k] for i in range(k + 1, n))):
            return False
        for i in range(k + 1, n) if a[k][k] else ():
            factor = a[i][k] / a[k][k]
            for j in range(k + 1, n):
                a[i][j] -= factor * a[k][j]
    return True


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(-30, 30), st.integers(0, 999),
    st.sampled_from(["normal", "rank one", "orthogonal", "graded", "integers"]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_bound_holds_in_exact_arithmetic(m, n, exponent, seed, kind, dtype):
    w = normal(m, n, seed=seed, dtype=torch.float64)
    if kind == "rank one":
        w = w[:, :1] @ w[:1]
    elif kind == "orthogonal":
        w = with_singular_values([1.0] * min(m, n), m, n, seed)
    elif kind == "graded":
        w = w * torch.logspace(0, -12, n, dtype=torch.float64)
    elif kind == "integers":
        w = w.mul(3).round()
    w = (w * 10.0**exponent).to(dtype)
    bound = spectral_norm_upper_bound(w)
    assert isinstance(bound, float)
    assert exactly_at_most(w, bound)
    there = float(proved_bound(w))
    assert exactly_at_most(w, there)
    if bound:
        assert not exactly_at_most(w, bound * (1 - 1e-8))  # the promised tightness, in exact arithmetic too
        assert not exactly_at_most(w, there * (1 - ABOVE))
    for method in ("eigenvalue", "products"):
        assert bound * (1 - 2 * EPS[dtype] - ABOVE) <= float(spectral_norm(w, method)) <= bound


@pytest.mark.parametrize("shape", [(768, 300), (3, 64, 64), (20000, 20)])
@pytest.mark.parametrize("kind", ["positive", "normal", "orthogonal", "far"])
def test_a_bound_by_products_is_proved_and_near(shape, kind):
    w = normal(*shape)
    if kind == "positive":
        w = w.abs()
    elif kind == "orthogonal":
        w = torch.linalg.qr(w.double())[0].float()
    elif kind == "far":  # from everything else that is there
        w[..., 0, 0] = 1e6
    proved = torch.as_tensor(spectral_norm_upper_bound(w))
    bound = proved_bound(w)
    assert (bound >= proved * (1 - 1e-8)).all()
    assert (bound <= proved * (1 + ABOVE)).all()


def test_without_a_proof_the_bound_is_the_frobenius_norm(monkeypatch):
    w = normal(2, 8, 6)
    within = bounds._within
    monkeypatch.setattr(bounds, "_within", lambda w, upper: (torch.tensor([True, False]), within(w, upper)[1]))
    near, frobenius = proved_bound(w)
    assert near < 1.001 * torch.linalg.svdvals(w[0])[0]
    assert frobenius == pytest.approx(float(torch.linalg.matrix_norm(w[1])), rel=2e-6)
    assert frobenius > torch.linalg.matrix_norm(w[1].double())


def test_empty_matrices_have_the_bound_zero_and_nan_is_refused():
    assert torch.equal(proved_bound(torch.empty(3, 0, 2)), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="w holds NaN or infinity"):
        proved_bound(torch.tensor([[math.nan]]))
    with pytest.raises(ValueError, match="method='power' is not one of auto, eigenvalue, products"):
        spectral_norm(torch.eye(2), "power")


def test_the_proof_does_not_trust_the_estimate(monkeypatch):
    w = normal(8, 6)
    estimate = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda gram: 0.5 * estimate(gram))
    assert exactly_at_most(w, spectral_norm_upper_bound(w))


def check_excess(w):
    bound = spectral_norm_upper_bound(w)
    truth = float(torch.linalg.svdvals(w.double())[0])
    assert truth * (1 - 1e-12) <= bound <= truth * (1 + 1e-8)  # 1e-12: the oracle's own error


@pytest.mark.parametrize("shape", [(64, 64), (512, 128), (128, 512)])
def test_excess_is_below_1e_8(shape):
    check_excess(normal(*shape))
    flat = with_singular_values(torch.ones(64), *shape, dtype=torch.float32)  # the worst case of Gram iteration
    check_excess(flat)


def test_batches_zero_and_empty():
    w = normal(2, 3, 4, 5)
    w[1, 2] = 0
    bounds = spectral_norm_upper_bound(w)
    assert bounds.shape == (2, 3)
    assert bounds.dtype == torch.float64
    assert bounds[1, 2] == 0
    assert float(bounds[0, 1]) == spectral_norm_upper_bound(w[0, 1])
    assert spectral_norm_upper_bound(torch.zeros(3, 2)) == 0.0
    assert spectral_norm_upper_bound(torch.zeros(0, 2)) == 0.0
    assert spectral_norm_upper_bound(torch.zeros(2, 0, 3)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("function", [spectral_norm, spectral_norm_upper_bound])
def test_bad_input_is_refused(function):
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinity"):
            function(torch.tensor([[1.0, bad]]))
    with pytest.raises(ValueError, match="shape"):
        function(torch.ones(3))


@pytest.mark.parametrize("shape", [(5, 5), (2, 9, 4), (3, 1, 6)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("method", ["eigenvalue", "products"])
def test_estimate_and_its_gradient(shape, scale, method):
    norm = partial(spectral_norm, method=method)
    w = normal(*shape) * scale
    # one is rounded down to float32 and one to the nearest: 1.2e-7 apart
    torch.testing.assert_close(
        norm(w) / scale, torch.linalg.matrix_norm(w.double(), 2).float() / scale, rtol=4e-7, atol=0
    )
    x = normal(*shape, dtype=torch.float64).requires_grad_()
    torch.testing.assert_close(norm(x), norm(x.detach()), rtol=1e-13, atol=0)  # eigh against eigvalsh
    assert torch.autograd.gradcheck(norm, x)
    zero = torch.zeros(2, 3, requires_grad=True)
    norm(zero).backward()
    assert (zero.grad == 0).all()
    assert norm(zero) == 0


@pytest.mark.parametrize(("spread", "below"), [(0.0, 1e-6), (1e-4, ABOVE), (1e-1, 1e-6)])
def test_the_estimate_by_products_where_singular_values_are_close(spread, below):
    """At 1e-4 no gap is a thousandth of the norm, and the estimate is 1.8e-6 too low."""
    u, v = (torch.linalg.qr(normal(n, 64, dtype=torch.float64))[0] for n in (200, 64))
    w = (u * torch.linspace(1 - spread, 1, 64, dtype=torch.float64)) @ v.mT
    assert 1 - below <= float(spectral_norm(w, "products")) <= 1 + 1e-12


@pytest.mark.parametrize("largest", [2.0**1000, 1e303, 1e308])
def test_nothing_is_proved_of_a_smaller_bound_at_the_end_of_float64(largest):
    w = largest * torch.eye(3, 2, dtype=torch.float64)
    assert not spectral_norm_within(w, largest * 0.999)
    assert not spectral_norm_within(w, largest / 1e5)
    assert spectral_norm_within(w, min(largest * 1.001, 1.797e308))


def test_a_norm_beyond_its_dtype_is_infinite():
    w = torch.full((64, 64), 30000.0, dtype=torch.float16)
    assert spectral_norm(w) == math.inf
    assert spectral_norm(w / 64) == 30000.0
