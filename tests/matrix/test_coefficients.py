import math

import pytest
import torch

from wellnormed.matrix import REGISTRY, CoefficientSet, coefficients, msign


def compose(entry, x):
    parts = []
    for part in x.split(50_000):  # what fits into a cache
        for a, b, c in entry.steps:
            square = part * part
            part = part * (a + square * (b + c * square))
        parts.append(part)
    return torch.cat(parts)


def dense(low, high):
    # 2 million linear points, and logarithmic ones for the peaks close to zero (watermark-10 peaks at 3.5e-5)
    linear = torch.linspace(low, high, 2_000_001, dtype=torch.float64)
    return torch.cat([linear, torch.logspace(-9, math.log10(high), 500_001, dtype=torch.float64).clamp(low, high)])


@pytest.mark.parametrize("name", REGISTRY)
def test_facts_are_those_of_the_composition(name):
    entry = REGISTRY[name]
    highest = float(compose(entry, dense(0.0, entry.upper)).max())
    inside = compose(entry, dense(entry.lower, entry.upper))
    lowest = float(inside.min())
    # a grid of two million points misses an extremum by a relative 1e-13 of its curvature, here at most 1e6
    image = coefficients.image(entry.steps, entry.lower, entry.upper)
    assert image == pytest.approx((lowest, float(inside.max())), abs=1e-6)
    assert highest <= entry.maximum <= highest + 2e-6  # stored rounded up at the sixth digit (1.20237 at the fifth)
    assert highest <= entry.overshoot
    assert entry.minimum <= lowest <= entry.minimum + 2e-4  # stored rounded down at the fourth digit
    slope = float(compose(entry, torch.tensor([1e-12], dtype=torch.float64))) / 1e-12
    assert entry.slope == pytest.approx(slope, rel=1e-9)  # p(x)/x - slope is of order slope^3 x^2


@pytest.mark.parametrize(
    ("name", "maximum", "slope"),
    [
        ("jordan-5", 1.20237, 485), ("you-6", 0.99933, 1137), ("you-5-nanogpt", 1.14502, 493),
        ("polar-express-8", 1.0, 6363), ("polar-express-5", 1.12356, 976), ("polar-express-5-modded", 1.14113, 990),
        ("spectral-clipping-6", 1.0096, 492),
    ],
)  # fmt: skip
def test_facts_are_the_published_ones(name, maximum, slope):
    assert REGISTRY[name].maximum == pytest.approx(maximum, abs=5e-5)  # published to four or five digits
    assert REGISTRY[name].slope == pytest.approx(slope, rel=1.1e-3)


def test_unknown_name_proposes_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean .jordan-5"):
        coefficients.get("jordan5")


def test_a_scale_that_leaves_the_interval_is_refused():
    with pytest.raises(ValueError, match="scale of at least 1"):
        CoefficientSet("mine", "-", ((1.5, -0.5, 0.0),), 1.0, 0.0, scale=0.5)
    with pytest.raises(ValueError, match="at least one"):
        CoefficientSet("mine", "-", (), 1.0, 0.0)


def test_unsafe_dtype_is_refused():
    mine = CoefficientSet("mine", "-", ((1.5, -0.5, 0.0),), 1.0, 0.0, safe_dtypes=frozenset({torch.float32}))
    with pytest.raises(ValueError, match="not safe in torch"):
        msign(torch.eye(2, dtype=torch.bfloat16), mine, "newton-schulz")
    assert msign(torch.eye(2), mine).isfinite().all()


def test_false_facts_are_refused():
    """A set that claims less than it reaches would make every cap and certificate that rests on it false."""
    steps = ((3.4445, -4.7750, 2.0315),) * 5
    with pytest.raises(ValueError, match=r"maximum=1.1 .* reaches 1.2023"):
        CoefficientSet("mine", "-", steps, 1.1, 0.68)
    with pytest.raises(ValueError, match=r"minimum=0.7 .* falls to 0.68"):
        CoefficientSet("mine", "-", steps, 1.21, 0.7)
    with pytest.raises(ValueError, match=r"maximum=1.1 .* reaches inf"):
        CoefficientSet("mine", "-", ((1e300, 0.0, 0.0), (1e300, 0.0, 1e300)), 1.1, 0.0)
    with pytest.raises(ValueError, match=r"steps=.*nan.* of finite numbers"):
        CoefficientSet("mine", "-", ((math.nan, 0.0, 0.0),), 1.1, 0.0)
    with pytest.raises(ValueError, match="maximum=nan"):
        CoefficientSet("mine", "-", steps, float("nan"), 0.68)
