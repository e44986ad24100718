"""What is printed is proved: a claimed bound, read back, is not less, and what it assumes is not more."""

import re
from decimal import Decimal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wellnormed as wn
from wellnormed.certificates.sizes import largest_rms, short
from wellnormed.proof.decimals import assumed, between, shown
from wellnormed.proof.promises import Parts, Promise

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
BOUNDS = st.one_of(
    st.decimals(0, allow_nan=False, allow_infinity=False),
    st.tuples(st.integers(0, 10**40), st.integers(-600, 600)).map(lambda pair: Decimal(pair[0]).scaleb(pair[1])),
)


@given(BOUNDS, st.sampled_from([".6g", ".5g", ".4g", ".4e", ".4f"]))
def test_bounds_are_rounded_up(bound: Decimal, form: str) -> None:
    above, below = Decimal(shown(bound, form)), Decimal(shown(bound, form, up=False))
    assert below <= bound <= above
    assert above - below <= (Decimal("1e-3") * bound if form != ".4f" else Decimal("1e-4"))
    assert bound <= Decimal(short(bound)) <= bound * Decimal("1.0002")


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
            ("and L = ", report.l2_lipschitz),
            ("change by at most ", report.margin),
        ):
            (line,) = [each for each in lines if words in each]
            assert bound is not None
            assert Decimal(line.partition(words)[2].split()[0].rstrip(",")) >= bound
        table = str(certificate)
        assert Decimal(re.findall(r"Lipschitz bound (\S+)", table)[0]) >= certificate.exact_lipschitz
        assert Decimal(re.findall(r"log10 (\S+);", table)[0]) >= Decimal(certificate.log10_lipschitz)
        for line, row in zip(table.splitlines()[-len(certificate.layers) :], certificate.layers, strict=True):
            radius, gain = map(Decimal, line.split()[-2:])
            assert radius >= largest_rms(row, "radius")
            assert gain >= largest_rms(row, "gain")
        assert "RMS <= 0.29999999999999998" in table
        assert "RMS <= 0.29999999999999998" in str(report)
