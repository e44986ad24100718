"""What is printed is proved: a claimed bound, read back, is not less, and what it assumes is not more."""

import re
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wellnormed as wn
from wellnormed.certificates.sizes import entries_of, largest_rms, short, slope
from wellnormed.proof.decimals import assumed, between, shown
from wellnormed.proof.promises import Parts, Promise

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
BOUNDS = st.one_of(
    st.decimals(0, allow_nan=False, allow_infinity=False),
    st.tuples(st.integers(0, 10**40), st.integers(-600, 600)).map(lambda pair: Decimal(pair[0]).scaleb(pair[1])),
)


HAIRS = st.tuples(st.integers(1, 999), st.integers(-40, 40), st.integers(1, 10**30), st.integers(-90, -13)).map(
    lambda drawn: Decimal(drawn[0]).scaleb(drawn[1]) * (1 + Decimal(drawn[2]).scaleb(drawn[3] - 30))
)
"""Bounds a little above a number of three digits."""


def read(text: str) -> Fraction:
    """The number that is printed, exactly: `1.5`, or `1 + 1e-27`."""
    return sum(map(Fraction, text.split(" + ")), Fraction(0))


@given(st.one_of(BOUNDS, HAIRS), st.sampled_from([".6g", ".5g", ".4g", ".4e", ".4f"]))
def test_bounds_are_rounded_up(bound: Decimal, form: str) -> None:
    above, below = read(shown(bound, form)), read(shown(bound, form, up=False))
    assert below <= Fraction(bound) <= above
    assert above - below <= (Fraction(1, 1000) * Fraction(bound) if form != ".4f" else Fraction(1, 10**4))
    assert Fraction(bound) <= read(short(bound)) <= Fraction(bound) * Fraction(10002, 10000)


def test_a_hair_above_a_short_number_is_printed_as_one() -> None:
    one, hundred = Decimal("1.00000000000000000000000000003"), Decimal("100.000000000000000000000000003")
    assert (shown(one), shown(hundred), shown(one, ".4e")) == ("1 + 3e-29", "100 + 3e-27", "1.0000e+0 + 3e-29")
    assert shown(Decimal("3e-29"), ".4f") == "3e-29"
    assert (shown(Decimal(1)), shown(Decimal("1.0000001"))) == ("1", "1.00001")
    assert shown(one, up=False) == "1.00000"
    model = nn.Identity()
    assert "L = 1 + 1e-29," in str(wn.verify(wn.certify(model, torch.zeros(1, 3)), {}))


@given(FLOATS, FLOATS)
def test_domains_are_rounded_inwards(a: float, b: float) -> None:
    assert Decimal(assumed(a)) <= Decimal(a)
    assert float(assumed(a)) == pytest.approx(a, rel=1e-15, abs=1e-300)
    low, high = map(Decimal, between(min(a, b), max(a, b)).removeprefix("from ").split(" to "))
    assert Decimal(min(a, b)) <= low
    assert high <= Decimal(max(a, b))


@given(st.floats(0, 2.0**1000))
def test_promised_caps_are_rounded_down(size: float) -> None:
    text = str(Promise("w", (2, 3), (Parts((1, 2, 3), size, 0, (0, 3, 1)),)))
    assert Decimal(text.rpartition(" ")[2]) <= Decimal(size)


def test_no_number_of_a_certificate_is_less_than_its_bound() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 5))
        certificate = wn.certify(model, torch.zeros(1, 3), radius=0.3, margins=True)
        report = wn.verify(certificate, model.state_dict())
        lines = str(report).splitlines()
        for words, bound in (
            ("L-Lipschitz with L = ", report.lipschitz),
            ("and L = ", report.rms_lipschitz),
            ("change by at most ", report.margin),
        ):
            (line,) = [each for each in lines if words in each]
            assert bound is not None
            assert read(re.split(r",| in | times ", line.partition(words)[2])[0]) >= Fraction(bound)
        table = str(certificate)
        assert read(re.findall(r"Lipschitz bound (.+?)  ", table)[0]) >= Fraction(certificate.lipschitz.exact)
        assert Decimal(re.findall(r"log10 (\S+);", table)[0]) >= Decimal(certificate.lipschitz.log10)
        for line, row in zip(table.splitlines()[-len(certificate.layers) :], certificate.layers, strict=True):
            radius, gain = map(read, re.split("  +", line)[-2:])
            assert radius >= Fraction(largest_rms(row, "radius"))
            assert gain >= Fraction(slope(row, entries_of(certificate.rows, "euclidean")))
        assert "RMS <= 0.29999999999999998" in table
        assert "RMS <= 0.29999999999999998" in str(report)
