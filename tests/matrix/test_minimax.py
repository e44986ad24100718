import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wellnormed.matrix.coefficients import REGISTRY
from wellnormed.matrix.minimax import best_cubic, best_quintic, optimal_coefficients
from wellnormed.matrix.msign import msign

from .conftest import with_singular_values

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def value(step, x):
    a, b, c = step
    return x * (a + x * x * (b + c * x * x))


def compose(chosen, x):
    for step in chosen.steps:
        x = value(step, x)
    return x


def error(chosen):
    return max(chosen.maximum - 1, 1 - chosen.minimum)


def dense(low, high):
    x = np.concatenate([np.linspace(low, high, 200_001), np.geomspace(max(low, 1e-15), high, 100_001)])
    return x.clip(low, high)


def extrema(step, low, high):
    a, b, c = step
    t = np.roots([5 * c, 3 * b, a] if c else [3 * b, a])
    return np.sort(np.concatenate([[low, high], np.sqrt(t.real)]))


@settings(max_examples=100, deadline=None)
@given(st.floats(-15, -1e-5).map(lambda e: 10**e), st.floats(0.1, 10))
@example(1e-15, 1.0)
@example(1 - 2e-5, 1.0)
def test_best_approximations_equioscillate(ratio, high):
    # Chebyshev: alternating errors of one size at one point more than there are coefficients, none larger between
    for best, count in ((best_quintic, 4), (best_cubic, 3)):
        step = best(ratio * high, high)
        if 1 - ratio < 1e-5 and best is best_quintic:
            continue  # Newton-Schulz: the error is below rounding
        errors = 1 - value(step, extrema(step, ratio * high, high))
        rounding = 4e-16 * sum(abs(c) * high**p for c, p in zip(step, (1, 3, 5), strict=True))
        assert len(errors) == count
        assert (errors[::2] >= -rounding).all()
        assert (errors[1::2] <= rounding).all()
        np.testing.assert_allclose(np.abs(errors), np.abs(errors[0]), rtol=1e-9, atol=2 * rounding)
        inside = np.linspace(ratio * high, high, 1001)
        assert np.abs(1 - value(step, inside)).max() <= np.abs(errors).max() + rounding


def test_newton_schulz_is_the_limit_of_the_best_quintics():
    for best, limit in ((best_quintic, (1.875, -1.25, 0.375)), (best_cubic, (1.5, -0.5, 0.0))):
        # first order in 1 - l: the centre of the interval moves by half of it
        np.testing.assert_allclose(best(1 - 1e-4, 1.0), limit, rtol=3e-4)
        np.testing.assert_allclose(best(1 - 1e-9, 1.0), limit, rtol=1e-8)


def test_the_published_table_is_this_construction():
    # Algorithm 1 of The Polar Express: l = 1e-3, a cushion, and the image brought back around 1; the damping by
    # 1.01 was applied to the finished table
    low, high = 1e-3, 1.0
    for index, published in enumerate(REGISTRY["polar-express-8"].steps[:7]):
        step = np.array(best_quintic(max(low, 0.02407327424182761 * high), high))
        step = step * 2 / (value(step, low) + value(step, high))
        # The last was computed in closed form by its authors: Newton-Schulz to eleven digits
        np.testing.assert_allclose(published * 1.01 ** np.array([1, 3, 5]), step, rtol=1e-14 if index < 6 else 1e-10)
        low = value(step, low)
        high = 2 - low


@pytest.mark.parametrize("degree", [3, 5])
@pytest.mark.parametrize(
    ("lower", "dtype"),
    [
        *((lower, torch.float32) for lower in (1e-12, 1e-6, 1e-3, 0.03, 0.5, 0.999)),
        *((1e-3, dtype) for dtype in DTYPES),  # which moves `upper` alone
    ],
)
def test_facts_are_those_of_the_composition(lower, degree, dtype):
    for steps in (1, 2, 5, 9, 30):
        chosen = optimal_coefficients(lower, steps, degree, dtype)
        below, inside = compose(chosen, dense(0.0, chosen.upper)), compose(chosen, dense(lower, chosen.upper))
        # tolerances: this test's own float64; in the dips it cancels numbers near 1 to a multiple of lower
        assert below.max() <= chosen.maximum + 1e-14
        assert chosen.maximum <= max(below.max(), chosen.minimum) + 1e-6  # the grid's spacing
        assert chosen.minimum * (1 - 1e-14 / lower) <= inside.min() + 1e-14
        assert inside.min() <= chosen.minimum + 1e-4
        assert below.min() >= 0
        assert chosen.slope == pytest.approx(compose(chosen, 1e-200) / 1e-200, rel=1e-12)
        assert len(chosen.steps) == steps
        assert chosen.upper > 1 + torch.finfo(dtype).eps or dtype == torch.float64
        assert chosen.overshoot >= 1


def test_more_accurate_than_every_published_set_with_as_many_steps():
    for entry in REGISTRY.values():
        for dtype in DTYPES:
            ours = optimal_coefficients(entry.lower, len(entry.steps), dtype=dtype)
            assert error(ours) < error(entry)


@pytest.mark.parametrize("dtype", DTYPES)
def test_monotone_in_steps_interval_and_degree(dtype):
    rounding = 4e-15  # of the bounds, which are rounded outwards once a step
    for lower in (1e-4, 1e-2, 0.3):
        errors = [error(optimal_coefficients(lower, steps, dtype=dtype)) for steps in range(1, 12)]
        assert all(b < a or b < rounding for a, b in itertools.pairwise(errors))
        assert errors[-1] < 1e-8
    for degree in (3, 5):
        errors = [error(optimal_coefficients(lower, 6, degree, dtype)) for lower in np.geomspace(1e-10, 0.9, 9)]
        assert all(b <= a + rounding for a, b in itertools.pairwise(errors))
    for steps in (1, 4, 8):
        assert error(optimal_coefficients(0.01, steps, 5, dtype)) <= error(optimal_coefficients(0.01, steps, 3, dtype))


def test_safe_dtypes_are_those_asked_for_and_wider_ones():
    for index, dtype in enumerate(DTYPES):
        assert optimal_coefficients(1e-3, 5, 5, dtype).safe_dtypes >= set(DTYPES[: index + 1])
    assert torch.bfloat16 not in optimal_coefficients(1e-3, 5).safe_dtypes
    assert torch.bfloat16 in optimal_coefficients(0.1, 5).safe_dtypes  # nothing to dip into


@settings(max_examples=40, deadline=None)
@given(st.floats(-3, -0.5).map(lambda e: 10**e), st.integers(1, 8), st.sampled_from([3, 5]), st.integers(0, 1000))
def test_msign_is_within_the_stated_error_of_the_polar_factor(lower, steps, degree, seed):
    # singular values over the Frobenius norm, all at least `lower`, some of them large
    generator = torch.Generator().manual_seed(seed)
    values = lower ** torch.rand(3, dtype=torch.float64, generator=generator)
    values = values / values.norm() * (1 + 1e-12)
    x = with_singular_values(values, 7, 3, seed)
    polar = with_singular_values([1.0, 1.0, 1.0], 7, 3, seed)
    smallest = float(values.min())
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-3)):
        chosen = optimal_coefficients(min(lower, smallest), steps, degree, dtype)
        got = msign(x.to(dtype), chosen, "newton-schulz").double()
        # tolerance: roundings, magnified by the slope of at most 1e3
        assert float(torch.linalg.matrix_norm(got - polar, 2)) <= error(chosen) + tolerance
        assert float(torch.linalg.matrix_norm(got, 2)) <= chosen.overshoot + tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("degree", [3, 5])
@pytest.mark.parametrize("steps", [3, 5, 8])
def test_low_precision_keeps_the_bound_and_turns_nothing_over(dtype, degree, steps):
    # Values all over (0, 1), so that some fall into every dip
    eps, generator = torch.finfo(dtype).eps, torch.Generator().manual_seed(steps)
    chosen = optimal_coefficients(1e-3, steps, degree, dtype)
    for shape in ((2, 2), (5, 3), (12, 12)):
        u, v = (
            torch.linalg.qr(torch.randn(100, n, shape[1], dtype=torch.float64, generator=generator))[0] for n in shape
        )
        values = torch.rand(100, shape[1], dtype=torch.float64, generator=generator)
        x = ((u * values[:, None]) @ v.mT).to(dtype)
        u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
        got = msign(x, chosen, "newton-schulz").double()
        assert float(torch.linalg.matrix_norm(got, 2).max()) <= chosen.maximum * (1 + 2 * eps)
        signs = (u.mT @ got @ vh.mT).diagonal(dim1=-2, dim2=-1)
        assert bool((signs > 0)[s >= 8 * eps * s.norm(dim=-1, keepdim=True)].all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 5), "lower=0.0 must lie strictly between"), ((1.0, 5), "lower=1.0"), ((-0.1, 5), "lower=-0.1"),
        ((math.nan, 5), "lower=nan"), (("a", 5), "lower='a' is of type str"),
        ((0.01, 0), "steps=0 must be positive"), ((0.01, 2.5), "steps=2.5"), ((0.01, 5, 7), "degree=7 is not one"),
        ((0.01, 5, 5, torch.int32), "dtype=torch.int32"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        optimal_coefficients(*arguments)
