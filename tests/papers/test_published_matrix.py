"""Published ways to clips and matrix signs: the function that they are of, and where they fail."""

import pytest
import torch

from papers import published_matrix
from tests.matrix.conftest import error, polar, with_singular_values
from wellnormed.matrix import msign, spectral_clip, spectral_hardcap

BOUNDS = {
    "clip": (0.7, 2.0, lambda s: s.clamp(0.7, 2.0)),
    "hardcap": (None, 2.0, lambda s: s.clamp_max(2.0)),
    "relu": (0.7, None, lambda s: s.clamp_min(0.7)),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("method", published_matrix.CLIPS)
@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
def test_clips_are_the_same_function_away_from_the_bounds(name, method, shape):
    lower, upper, scalar = BOUNDS[name]
    w = with_singular_values([3.0, 2.6, 0.3, 0.25, 0.2], *shape)
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    # the coefficient set itself errs by 0.0096 at most in each sign; two or three of them, times norms up to 3
    assert error(published_matrix.clip(w, lower, upper, method), (u * scalar(s)) @ vh) < 0.1


@pytest.mark.parametrize("method", ["nested", "block", "blockwise"])
def test_clips_fail_beside_the_bound_where_the_library_does_not(method):
    """Correction 8: a singular value close to the cap is close to zero for the outer sign."""
    w = with_singular_values(torch.cat((torch.ones(60) * 0.99, torch.tensor([3.0, 1.5, 0.5, 0.1]))), 128, 64).float()
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    truth = (u * s.clamp_max(1.0)) @ vh
    assert error(spectral_hardcap(w, 1.0), truth) < 3e-6
    assert error(published_matrix.clip(w, None, 1.0, method), truth) > 1e-3


@pytest.mark.parametrize("method", published_matrix.SIGNS)
@pytest.mark.parametrize("shape", [(40, 40), (64, 16), (16, 64), (3, 8, 20)])
def test_signs_are_the_polar_factor(method, shape):
    # singular values within the interval on which 8 steps are exact to 1e-9
    x = with_singular_values(torch.linspace(0.1, 1, min(shape[-2:])), *shape[-2:]).expand(shape)
    assert error(published_matrix.SIGNS[method](x), polar(x)) < 1e-8


def test_gram_loses_only_small_singular_values():
    # The documented limit: some percent below sqrt(eps) |x|_F = 3.5e-4, nothing visible above 1e-2.
    values = torch.tensor([1.0, 0.3, 0.1, 0.01, 1e-4, 1e-5, 1e-6], dtype=torch.float64)
    x = with_singular_values(values, 64, 7)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    truth = (u.mT @ msign(x, method="newton-schulz") @ vh.mT).diagonal()
    found = (u.mT @ published_matrix.gram(x.float()).double() @ vh.mT).diagonal()
    relative = ((found - truth) / truth).abs()
    assert relative[:4].max() < 1e-4  # eps / 0.01^2 is 1e-3 of a slope that has saturated
    assert relative.max() < 0.1


def test_eigh_and_inverse_root_on_ill_conditioned_and_deficient_matrices():
    values = torch.tensor([1.0, 1e-2, 1e-4, 1e-6, 0.0], dtype=torch.float64)
    x = with_singular_values(values, 9, 5)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    truth = (u * (s > 1e-9)) @ vh
    # the float64 Gram matrix knows 1e-12 to a few 1e-16, so 1e-6 to some 1e-4
    assert error(published_matrix.eigh(x), truth) < 1e-3
    # its ridge of 1e-15 shrinks s = 1e-6 by a factor 1 / sqrt(1 + 1e-3)
    assert error(published_matrix.inverse_root(x), truth) < 2e-3


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (2, 3, 20, 20)])
def test_sketch_is_the_sign_of_the_leading_part(shape):
    k = min(shape[-2:])
    values = torch.cat((torch.linspace(1, 2, 4), torch.full((k - 4,), 1e-3)))
    x = with_singular_values(values, *shape[-2:]).expand(shape)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    truth = u[..., :4] @ vh[..., :4, :]
    value = published_matrix.sketch(x, rank=4, generator=torch.Generator().manual_seed(0))
    # two power iterations leave (1e-3)^5 of the small singular values
    torch.testing.assert_close(value, truth, atol=1e-10, rtol=0)
    assert torch.linalg.matrix_norm(value, 2).max() <= 1 + 1e-12
    full = published_matrix.sketch(x, rank=k)
    torch.testing.assert_close(full, polar(x), atol=1e-10, rtol=0)  # full rank: nothing is left out
    again = published_matrix.sketch(x, rank=4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(value, again)


def test_published_hard_cap_is_not_idempotent():
    x = torch.linspace(0, 3.5, 100_001, dtype=torch.float64)[:, None, None]  # matrices of one entry
    assert float(published_matrix.hard_cap(x).max()) == pytest.approx(1.0109, abs=5e-5)  # printed digits
    assert float(published_matrix.hard_cap(x[1]) / x[1]) == pytest.approx(0.951, abs=5e-4)  # the slope at zero
    drifting = torch.full((1, 1), 0.2, dtype=torch.float64)
    for _ in range(100):
        drifting = published_matrix.hard_cap(drifting)
    assert float(drifting) < 0.002


@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
def test_published_hard_cap_acts_on_singular_values(shape):
    values = torch.tensor([3.0, 1.0, 0.8, 0.3, 0.1], dtype=torch.float64)
    w = with_singular_values(values, *shape)
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    truth = (u * published_matrix.hard_cap(s[:, None, None])[:, 0, 0]) @ vh
    assert error(published_matrix.hard_cap(w), truth) < 1e-12  # float64 rounding of twelve products


def test_a_clip_lifted_by_identities_holds_for_symmetric_matrices_alone():
    """SC 2.2: the identity does not share the singular vectors of other matrices, and the shape is lost."""
    values = torch.tensor([3.0, 1.5, 1.2, 0.3, 0.2], dtype=torch.float64)
    u, v = (with_singular_values(torch.ones(5), 5, 5, seed) for seed in (0, 1))
    symmetric, other = (u * values) @ u.mT, (u * values) @ v.mT
    clipped = values.clamp(0.5, 2.0)
    assert error(published_matrix.clip_by_identities(symmetric, 0.5, 2.0), (u * clipped) @ u.mT) < 1e-12  # rounding
    failed = published_matrix.clip_by_identities(other, 0.5, 2.0)
    assert error(failed, (u * clipped) @ v.mT) > 1.0
    assert error(spectral_clip(other, 0.5, 2.0), (u * clipped) @ v.mT) < 1e-12
    assert published_matrix.clip_by_identities(torch.ones(3, 7), 0.5, 2.0).shape == (3, 3)


def test_a_sign_by_qr_needs_no_interval_where_a_polynomial_does():
    values = torch.logspace(0, -8, 9, dtype=torch.float64)
    x = with_singular_values(values, 20, 9)
    # the rounding of the given matrix, 1e-16, over its smallest singular value
    assert error(published_matrix.qdwh(x), polar(x)) < 1e-7
    assert error(msign(x, "polar-express-8"), polar(x)) > 0.9  # its slope at zero is 6,363
    # SC's table has it stable from half precision on, where torch has no QR
    with pytest.raises(RuntimeError, match="BFloat16"):
        published_matrix.qdwh(x.bfloat16())
