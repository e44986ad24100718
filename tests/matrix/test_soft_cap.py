import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from papers.published_matrix import soft_cap_strength_as_published
from wellnormed.matrix import soft_cap, soft_cap_strength

from .conftest import with_singular_values


def p(x, a):
    first = x - a * x**3
    return first + a * first**3


def highest(k, a):
    return float(p(torch.linspace(0, k, 200_001, dtype=torch.float64), a).abs().max())


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-30, 1e30), st.floats(0, 1.6), st.floats(0, 0.5))
def test_strength_keeps_the_whole_interval_below_the_cap(cap, step, decay):
    k = (1 - decay) + step
    a = soft_cap_strength(cap, step * cap, decay) * cap * cap
    # 1e-15: the oracle's own evaluation of p in float64
    assert highest(k, a) <= 1 + 1e-15


@pytest.mark.parametrize("step", [0.31, 0.5, 1.0, 1.6])
def test_published_strength_breaks_at_large_steps_and_ours_does_not(step):
    assert highest(1 + step, soft_cap_strength_as_published(1.0, step)) > 1.00001
    assert highest(1 + step, soft_cap_strength(1.0, step)) <= 1 + 1e-15


def test_closed_forms():
    constant = (62 / (81 * math.sqrt(3))) ** 2
    assert soft_cap_strength(1.0, 1.0) == pytest.approx(constant, rel=1e-14)
    assert soft_cap_strength(2.0, 2.0) == pytest.approx(constant / 4, rel=1e-14)
    assert constant == pytest.approx(0.1952954, abs=5e-8)
    # both rules meet at k = 81/62, where the maximum of p is at k
    assert soft_cap_strength(1.0, 19 / 62 - 1e-12) == pytest.approx(constant, rel=1e-9)
    for step in (1e-6, 0.01, 0.3):  # below the limit the published root is right
        published = soft_cap_strength_as_published(1.0, step)
        assert soft_cap_strength(1.0, step) == pytest.approx(published, rel=1e-9)
        assert float(p(torch.tensor(1 + step, dtype=torch.float64), published)) == pytest.approx(1.0, abs=1e-14)


def test_decay_can_make_the_cap_unnecessary():
    assert soft_cap_strength(1.0, 0.01, 0.01) == 0.0
    assert soft_cap_strength(4.0, 0.0) == 0.0
    assert soft_cap_strength(1.0, 0.01, 0.009) > 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1.62), "2.6129 times"), ((0.0, 0.1), "cap=0.0"), ((float("inf"), 0.1), "cap"),
        ((1.0, -0.1), "update_norm"), ((1.0, float("nan")), "update_norm"), ((1.0, 0.1, 1.0), "decay=1.0"),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        soft_cap_strength(*arguments)


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 0.02)]
)
def test_acts_on_singular_values(shape, dtype, tolerance):
    values = torch.linspace(0.1, 1.5, min(shape), dtype=torch.float64)
    w = with_singular_values(values, *shape)
    a = soft_cap_strength(1.0, 0.5)
    # tolerance: some ten roundings of a matrix of norm 1.5; in bfloat16 the input's own rounding
    expected = with_singular_values(p(values, a), *shape)
    assert float((soft_cap(w.to(dtype), a).double() - expected).abs().max()) < tolerance


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_and_batches(scale):
    w = with_singular_values([1.2, 0.5], 4, 2).float().expand(3, 4, 2)
    a = torch.full((3,), soft_cap_strength(scale, 0.2 * scale), dtype=torch.float64)
    # float32 rounding of w * scale and of the product
    torch.testing.assert_close(
        soft_cap(w * scale, a) / scale, soft_cap(w, soft_cap_strength(1.0, 0.2)), atol=1e-6, rtol=0
    )


def test_identity_cases():
    w = with_singular_values([1.2, 0.5, 0.5], 3, 5)
    assert torch.equal(soft_cap(w, 0.0), w)
    assert torch.equal(soft_cap(torch.zeros(2, 0, 3), 0.1), torch.zeros(2, 0, 3))
    for strength in (-0.1, float("nan"), torch.tensor(float("inf")), torch.ones(3)):
        with pytest.raises(ValueError, match="strength"):
            soft_cap(w, strength)
