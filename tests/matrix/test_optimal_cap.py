import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from wellnormed.matrix.optimal_cap import REACH_LIMIT, optimal_cap
from wellnormed.matrix.soft_cap import soft_cap, soft_cap_strength

from .conftest import with_singular_values

STEPS = (0.001, 0.01, 0.1, 0.3, 0.5, 0.9)


def value(cap, x):
    """The polynomial in units of the cap, in float64."""
    return x * np.polynomial.polynomial.polyval(x * x, np.array(cap.coefficients))


def rounding(cap, x):
    """What evaluating it in float64 may add: some units of the last place of every term."""
    return 2e-15 * x * np.polynomial.polynomial.polyval(x * x, np.abs(cap.coefficients))


def soft(x, step):
    a = soft_cap_strength(1.0, step)
    first = x - a * x**3
    return first + a * first**3


def least(cap):
    """The `M` that the problem minimises."""
    return max(cap.drift, cap.departure)


def grid(low, high, n=5_001):
    return low + (high - low) * (1 - np.cos(np.linspace(0, np.pi, n))) / 2  # dense at both ends


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-30, 1e30), st.floats(0, 3), st.sampled_from(sorted(REACH_LIMIT)))
@example(1.0, 1e-16, 9)
@example(3.0, 1e-13, 21)
@example(1.0, 0.0, 5)
def test_every_value_within_reach_comes_out_below_the_cap_and_none_grows(max_norm, step, degree):
    if 1 + step > REACH_LIMIT[degree]:
        with pytest.raises(ValueError, match=f"holds up to {REACH_LIMIT[degree]} times"):
            optimal_cap(max_norm, step * max_norm, degree)
        return
    cap = optimal_cap(max_norm, step * max_norm, degree)
    inside, outside = grid(0, 1), grid(1, 1 + step)
    assert cap.reach == max_norm + step * max_norm
    assert cap.coefficients[0] == 1
    assert (value(cap, outside) <= 1 + rounding(cap, outside)).all()
    assert (value(cap, outside) >= 1 - cap.departure - rounding(cap, outside)).all()
    left = inside - value(cap, inside)
    power = min(5, degree)
    # 1e-10: the exchange stops within 1e-11 of the step
    assert (left >= -1e-10 * step - rounding(cap, inside)).all()
    assert (left <= cap.drift * inside**power + rounding(cap, inside)).all()
    assert left.max() <= cap.departure + rounding(cap, inside).max()
    seen = max(left.max(), (1 - value(cap, outside)).max())
    assert cap.departure <= seen * (1 + 1e-6) + rounding(cap, outside).max()  # no looser than the grid's spacing


@pytest.mark.parametrize("degree", [5, 9, 13, 21])
@pytest.mark.parametrize("step", [1e-13, 1e-6, 0.01, 0.2, 0.7])
def test_the_cap_holds_in_exact_arithmetic(step, degree):
    cap = optimal_cap(1.0, step, degree)
    for x in np.linspace(1.0, 1 + step, 301):
        t = Fraction(x) ** 2
        assert Fraction(x) * sum(Fraction(c) * t**j for j, c in enumerate(cap.coefficients)) <= 1


@pytest.mark.parametrize("step", STEPS)
def test_no_polynomial_of_that_kind_drifts_less_by_chebyshev(step):
    # With 0 <= h <= M on [0, 1], h(t) <= M (1 + T_2(2t - 1))/2 = M (2t - 1)^2 beyond; p <= 1 needs h >= (x - 1)/x^5
    x = grid(1, 1 + step)
    bound = np.max((x - 1) / (x**5 * (2 * x * x - 1) ** 2))
    drift = optimal_cap(1.0, step).drift
    assert least(optimal_cap(1.0, step)) >= bound * (1 - 1e-12)
    if step <= 0.1:  # until p would fall below 1 - M, at 0.16, this bound is reached: the closed form
        assert drift == pytest.approx(bound, rel=1e-6)  # the grid misses the maximum by its spacing squared
        expected = np.array([1, 0, -1, 4, -4]) * [1, 0, drift, drift, drift]
        np.testing.assert_allclose(optimal_cap(1.0, step).coefficients, expected, rtol=1e-9)


@pytest.mark.parametrize(("degree", "peak"), [(3, 1.5), (5, 1.25)])
def test_single_terms_have_closed_forms(degree, peak):
    for step in (0.01, 0.1, 0.2, 0.24):
        x = min(1 + step, peak)  # where (x - 1)/x^degree is largest
        assert optimal_cap(1.0, step, degree).drift == pytest.approx((x - 1) / x**degree, rel=1e-9)


@pytest.mark.parametrize("degree", [7, 9, 11, 13])
@pytest.mark.parametrize("step", [0.01, 0.2, 0.5, 0.8, 1.4])
def test_weak_duality_certifies_the_drift(degree, step):
    # Independent of the solver: read the active constraints off the polynomial, solve for their multipliers, and
    # check that these have one sign. Then no other polynomial has a smaller M.
    cap = optimal_cap(1.0, step, degree)
    m = (degree - 5) // 2
    h = np.polynomial.Polynomial([-c for c in cap.coefficients[2:]])
    inside, outside = grid(0, 1), grid(1, 1 + step)
    rows = []
    for x, over, weight in ((inside, 0 * inside, 1 + 0 * inside), (outside, outside - 1, outside**-5)):
        # over/x^5 <= h <= over/x^5 + M weight, which is how p <= c and p >= c - M c^5 read
        low = over * weight
        powers = np.vander(x * x, m + 1, increasing=True)
        rows += [np.append(-powers[i], 0.0) for i in _touching(h(x * x) - low)]
        rows += [np.append(powers[i], -weight[i]) for i in _touching(low + least(cap) * weight - h(x * x))]
    matrix = np.array(rows).T / np.linalg.norm(rows, axis=1)
    target = -np.append(np.zeros(m + 1), 1.0)
    multipliers = _nonnegative(matrix, target)
    assert np.abs(matrix @ multipliers - target).max() < 1e-3  # grid places instead of exact ones
    assert (multipliers >= 0).all()


def _touching(gap, tolerance=1e-7):
    padded = np.concatenate([[np.inf], gap, [np.inf]])
    return [i for i in np.flatnonzero(gap < tolerance) if padded[i] >= gap[i] <= padded[i + 2]]


def _nonnegative(matrix, target):
    """Least squares with nonnegative unknowns, by dropping columns (enough for a handful of them)."""
    kept = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            out = np.zeros(matrix.shape[1])
            out[kept] = found.clip(0)
            return out
        kept.pop(int(found.argmin()))


@pytest.mark.parametrize("step", STEPS)
def test_it_keeps_more_than_the_soft_cap_at_every_value_and_after_every_number_of_applications(step):
    cap = optimal_cap(1.0, step)
    x = grid(0, 1)
    assert (value(cap, x) >= soft(x, step) - rounding(cap, x)).all()
    above = grid(1, 1 + step)
    assert value(cap, 1.0) > soft(1.0, step)
    assert value(cap, above).min() > soft(above, step).min()
    assert cap.drift < 3 * soft_cap_strength(1.0, step) ** 2  # the drift of the soft cap, at x = 0
    ours, theirs = x, x
    for _ in range(100):
        ours, theirs = value(cap, ours), soft(theirs, step)
    assert (ours >= theirs - 1e-13).all()  # some hundred roundings


def test_a_value_pushed_by_every_step_settles_near_the_cap():
    for step in (0.01, 0.1, 0.3, 0.6, 1.0):
        cap, x, seen = optimal_cap(1.0, step), 0.5, []
        for _ in range(1000):
            x = min(value(cap, x + step), 1.0)
            seen.append(x)
        assert max(seen[-50:]) - min(seen[-50:]) < 1e-6
        assert x >= 1 - cap.departure


def test_it_costs_what_the_soft_cap_costs():
    w = torch.randn(40, 24)
    with FlopCounterMode(display=False) as ours:
        optimal_cap(1.0, 0.1)(w)
    with FlopCounterMode(display=False) as theirs:
        soft_cap(w, 0.1)
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


def test_nearer_with_the_degree_and_further_with_the_step():
    for step in (0.001, 0.01, 0.1, 0.5):
        errors = [least(optimal_cap(1.0, step, degree)) for degree in (5, 7, 9, 11, 13, 15, 17, 19, 21)]
        assert errors == sorted(errors, reverse=True)
    for degree in (3, 9, 17):
        errors = [least(optimal_cap(1.0, step, degree)) for step in (0.0, 1e-9, 1e-3, 0.1, 0.15, 0.4, 0.8, 1.2)]
        # 1e-9: from 0.08 to 0.16 the optimum of degree 9 is one polynomial, to the tolerance of the exchange
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("degree", sorted(REACH_LIMIT))
def test_the_whole_reach_of_every_degree_is_solved(degree):
    cap = optimal_cap(1.0, REACH_LIMIT[degree] - 1 - 1e-12, degree)
    x = grid(0, cap.reach)
    assert (np.abs(value(cap, x)) <= 1 + rounding(cap, x)).all()
    assert least(cap) == pytest.approx(0.5, rel=5e-3)  # the table is rounded down at the third digit


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (2, 3, 5, 4)])
@pytest.mark.parametrize("degree", sorted(REACH_LIMIT))
def test_acts_on_singular_values(shape, degree):
    cap = optimal_cap(1.0, 0.5, degree)
    values = torch.linspace(0.1, 1.5, min(shape[-2:]), dtype=torch.float64)
    w = with_singular_values(values, *shape[-2:]).expand(shape)
    expected = with_singular_values(value(cap, values.numpy()), *shape[-2:]).expand(shape)
    # ten roundings times the size of the terms, which alternate in sign
    tolerance = 10 * float(rounding(cap, np.array(1.5)))
    assert float((cap(w) - expected).abs().max()) < tolerance


@settings(max_examples=40, deadline=None)
@given(
    st.floats(-30, 30), st.floats(0, 0.8), st.integers(1, 12), st.integers(1, 12), st.sampled_from([3, 5, 9, 13, 21])
)
def test_norm_stays_below_the_cap_at_every_scale(exponent, step, m, n, degree):
    max_norm = 10.0**exponent
    cap = optimal_cap(max_norm, step * max_norm, degree)
    values = torch.linspace(0.3, 1 + step, min(m, n), dtype=torch.float64).flip(0)
    w = with_singular_values(values * max_norm, m, n)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        # The rounding of w itself must not leave the reach, where p is steep
        out = cap((w * (1 - 2 * torch.finfo(dtype).eps)).to(dtype))
        assert out.dtype == dtype
        assert float(torch.linalg.matrix_norm(out.double(), 2)) <= max_norm * (1 + tolerance)


def test_no_update_means_the_identity():
    for degree in REACH_LIMIT:
        cap = optimal_cap(3.0, 0.0, degree)
        assert (cap.departure, cap.drift, cap.reach) == (0.0, 0.0, 3.0)
        w = with_singular_values([3.0, 0.7], 4, 2)
        assert torch.equal(cap(w), w)
    assert torch.equal(optimal_cap(1.0, 0.1)(torch.zeros(2, 0, 3)), torch.zeros(2, 0, 3))
    assert torch.equal(optimal_cap(1.0, 0.1)(torch.zeros(3, 2)), torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.1), "cap=0.0"),
        ((math.inf, 0.1), "cap"),
        ((math.nan, 0.1), "cap"),
        ((1.0, -0.1), "update_norm"),
        ((1.0, math.nan), "update_norm"),
        ((1.0, 1e308), "lower the learning rate"),
        ((1.0, 2.5), "3.115 times"),
        ((1.0, 0.1, 8), "degree=8 must be an odd integer"),
        ((1.0, 0.1, 1), "degree=1"),
        ((1.0, 0.1, 23), "degree=23"),
    ],
)
def test_what_cannot_hold_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimal_cap(*arguments)
