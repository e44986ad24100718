import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellnormed.matrix import (
    coefficients,
    leading,
    leading_singular_triplet,
    spectral_hammer,
    spectral_weight_decay,
    stiefel_project,
)
from wellnormed.matrix.leading import Triplet

from .conftest import normal, with_singular_values

SPECTRA = {
    "gaussian-like": torch.linspace(1, 0.01, 48).square().tolist(),
    "one outlier": [5.0, *torch.linspace(1, 0.1, 47).tolist()],
    "clustered top": [*torch.linspace(1, 0.999, 12).tolist(), *torch.linspace(0.5, 0, 36).tolist()],
    "all equal": [1.0] * 48,
    "rank one": [3.0],
}


@pytest.fixture
def count_products(monkeypatch):
    """How many iterations a call took: one product with W and one with its transpose each."""
    counted = []
    remainder = leading._remainder
    monkeypatch.setattr(leading, "_remainder", lambda *a: counted.append(1) or remainder(*a))

    def count(*args, **kwargs):
        counted.clear()
        triplet = leading_singular_triplet(*args, **kwargs)
        return len(counted), triplet

    return count


@pytest.mark.parametrize("shape", [(48, 48), (96, 48), (48, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_triplet_is_singular_and_leading(shape, dtype):
    for spectrum in SPECTRA.values():
        w = with_singular_values(spectrum, *shape, dtype=dtype)
        u, s, v = leading_singular_triplet(w)
        rounding = 20 * torch.finfo(dtype).eps * spectrum[0]
        assert float((w @ v - s * u).norm()) <= rounding
        assert float((w.mT @ u - s * v).norm()) <= 1.1e-3 * spectrum[0]  # the default tolerance
        assert spectrum[0] * (1 - 1e-3) <= float(s) <= spectrum[0] + rounding  # from below
        assert float(u.norm()) == pytest.approx(1, abs=1e-6)
        assert float(v.norm()) == pytest.approx(1, abs=1e-6)


@given(
    shape=st.sampled_from([(1, 1), (1, 7), (7, 1), (5, 9), (9, 5), (2, 3, 6, 4), (3, 1, 5), (2, 0, 3), (4, 0)]),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_every_shape_scale_and_dtype(shape, exponent, dtype):
    w = (normal(*shape, dtype=torch.float64) * 10.0**exponent).to(dtype)
    u, s, v = leading_singular_triplet(w, tolerance=1e-4)
    assert (u.shape, s.shape, v.shape) == ((*shape[:-2], shape[-2]), shape[:-2], (*shape[:-2], shape[-1]))
    assert u.dtype == s.dtype == v.dtype == dtype
    if w.numel():
        rtol = max(1e-5, 2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(s.double(), torch.linalg.matrix_norm(w.double(), 2), rtol=rtol, atol=0)
    for one in (spectral_hammer(w, 2.0 * 10.0**exponent), spectral_weight_decay(w, 0.5), stiefel_project(w)):
        assert one.shape == w.shape
        assert one.dtype == dtype
        assert one.isfinite().all()


@pytest.mark.parametrize("start", [None, torch.zeros(3, 4), torch.ones(3, 4), torch.full((3, 4), 1e30)])
def test_zero_matrices_and_any_start(start):
    w = torch.zeros(3, 5, 4)
    w[1, 2, 3] = 7.0
    u, s, v = leading_singular_triplet(w, start)
    assert torch.equal(s[[0, 2]], torch.zeros(2))
    assert not u[[0, 2]].any()
    assert not v[[0, 2]].any()
    assert float(s[1]) == pytest.approx(7)
    assert torch.equal(spectral_hammer(w, 1.0)[0], w[0])


def test_a_start_that_is_another_singular_vector_is_left():
    w = torch.diag(torch.tensor([1.0, 2.0, 0.5, 0.1]))
    assert float(leading_singular_triplet(w, torch.tensor([1.0, 0, 0, 0])).s) == pytest.approx(2)
    # among many values, though the products leave the start almost where it is
    spectrum = [1.1, 1.0, *torch.linspace(0.8, 0, 126).tolist()]
    w = with_singular_values(spectrum, 128, 128, dtype=torch.float32)
    second = torch.linalg.svd(w)[2][1]
    assert float(leading_singular_triplet(w, second).s) == pytest.approx(1.1, rel=1e-4)


def test_iterations_cold_and_warm(count_products):
    """The counts that the docstring states, with room for other arithmetic."""
    w = normal(256, 256)
    w = w / torch.linalg.matrix_norm(w, 2)
    cold, triplet = count_products(w)
    assert cold <= 40
    step = 1e-3 * normal(256, 256, seed=1) / 32  # spectral norm 1e-3
    warm, moved = count_products(w + step, triplet.v)
    assert warm <= 8
    assert float(moved.s) == pytest.approx(float(torch.linalg.matrix_norm(w + step, 2)), rel=1e-4)
    outlier = with_singular_values([2.0, *torch.linspace(1, 0, 99).tolist()], 100, 100, dtype=torch.float32)
    assert count_products(outlier)[0] <= 12
    assert count_products(w, max_iterations=2)[0] == 2


def test_refused_arguments():
    w = normal(4, 5)
    with pytest.raises(ValueError, match=r"start has shape \(4,\)"):
        leading_singular_triplet(w, torch.ones(4))
    with pytest.raises(ValueError, match="start holds NaN"):
        leading_singular_triplet(w, torch.full((5,), torch.nan))
    with pytest.raises(ValueError, match="tolerance=0"):
        leading_singular_triplet(w, tolerance=0)
    with pytest.raises(ValueError, match="max_iterations=0"):
        leading_singular_triplet(w, max_iterations=0)
    with pytest.raises(ValueError, match=r"max_iterations=1\.5 is of type float; pass a whole number"):
        leading_singular_triplet(w, max_iterations=1.5)
    with pytest.raises(ValueError, match="w holds NaN"):
        leading_singular_triplet(w * torch.inf)
    with pytest.raises(ValueError, match="upper=-1"):
        spectral_hammer(w, -1.0)
    with pytest.raises(ValueError, match=r"upper has shape \(3,\)"):
        spectral_hammer(w, torch.ones(3))
    with pytest.raises(ValueError, match=r"decay=1\.5"):
        spectral_weight_decay(w, 1.5)
    with pytest.raises(ValueError, match="scale=0"):
        stiefel_project(w, 0.0)


@pytest.mark.parametrize("shape", [(8, 5), (5, 8)])
def test_hammer_and_decay_move_the_largest_value_alone(shape):
    w = with_singular_values([4.0, 3.0, 2.0, 1.0, 0.5], *shape)
    tight = leading_singular_triplet(w, tolerance=1e-12)
    for moved, expected in (
        (spectral_hammer(w, 2.5, tight), [3.0, 2.5, 2.0, 1.0, 0.5]),
        (spectral_weight_decay(w, 0.25, tight), [3.0, 3.0, 2.0, 1.0, 0.5]),
    ):
        assert torch.linalg.svdvals(moved).tolist() == pytest.approx(expected, abs=1e-10)
    assert torch.equal(spectral_hammer(w, 6.0), w)
    transposed = spectral_hammer(w.mT, 2.5, Triplet(tight.v, tight.s, tight.u)).mT
    torch.testing.assert_close(transposed, spectral_hammer(w, 2.5, tight))


def test_an_unconverged_vector_never_lengthens():
    w = normal(40, 40)
    loose = leading_singular_triplet(w, max_iterations=1)
    top = torch.linalg.matrix_norm(w, 2)
    hammered = spectral_hammer(w, 1.0, loose)
    assert torch.linalg.matrix_norm(hammered, 2) <= top * (1 + 1e-6)
    assert float((hammered @ loose.v).norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's own forward-mode rules
@pytest.mark.parametrize(
    ("shape", "function"),
    [
        ((5, 4), lambda w, t: spectral_hammer(w, 0.5, t)),
        ((4, 5), lambda w, t: spectral_hammer(w, 50.0, t)),
        ((2, 3, 4), lambda w, t: spectral_weight_decay(w, 0.3, t)),
    ],
)
def test_gradients_are_those_of_the_exact_map(shape, function):
    values = [1.01, 1.0, 1.0, 1e-3][: min(shape[-2:])]
    clustered = with_singular_values(values, *shape[-2:]).expand(shape).clone()
    for w in (normal(*shape, dtype=torch.float64), clustered):

        def mapped(w):
            return function(w, leading_singular_triplet(w.detach(), tolerance=1e-13, max_iterations=500))

        assert torch.autograd.gradcheck(mapped, w.requires_grad_(), check_forward_ad=True, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("w", [torch.zeros(4, 3), torch.eye(4), torch.ones(3, 5), -2 * torch.eye(1)])
def test_gradients_are_finite_at_repeated_and_zero_tops(w, dtype):
    for function in (lambda w: spectral_hammer(w, 0.5), lambda w: spectral_weight_decay(w, 0.5), stiefel_project):
        x = w.to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(function(x).square().sum() + function(x).sum(), x)
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 1e3


@pytest.mark.parametrize("shape", [(12, 12), (30, 8), (2, 8, 30)])
@pytest.mark.parametrize("name", ["you-6", "polar-express-8"])
def test_stiefel_brings_every_value_to_the_scale(shape, name):
    values = torch.linalg.svdvals(stiefel_project(normal(*shape), 3.0, name))
    chosen = coefficients.get(name)
    assert values.max() <= 3 * chosen.overshoot * (1 + 1e-5)
    assert values.min() >= 3 * 0.995
    exact = torch.linalg.svdvals(stiefel_project(normal(*shape), 3.0, method="svd"))
    torch.testing.assert_close(exact, torch.full_like(exact, 3.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_finds_its_triplet_in_float32(dtype):
    """80000 is the norm, which float16 cannot hold; the results can be held."""
    w = torch.full((4, 4), 2e4, dtype=dtype)
    # one rounding of the result, half a unit in the last place
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(spectral_weight_decay(w, 0.5).double(), w.double() / 2, rtol=half_unit, atol=0)
    # the triplet is accurate to 1e-3 of 80000 at worst, here to rounding; then one rounding of the result
    hammered = spectral_hammer(w, 1e3).double()
    torch.testing.assert_close(hammered, torch.full_like(hammered, 250.0), rtol=half_unit, atol=0.01)
