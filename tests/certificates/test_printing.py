"""What a certificate says first, and why a bound is large."""

import re

import pytest
import torch
from torch import nn

import wellnormed as wn


def block():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, norm_first=True).eval()


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (nn.Linear(4, 2), torch.rand(2, 4), "An input moved by d in l2 moves the result by at most {l2} d."),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
            torch.rand(2, 1, 4, 4),
            "An image moved by d in l2 moves the result by at most {l2} d.",
        ),
        (
            nn.Linear(4, 2),
            torch.rand(2, 5, 4),
            "A sample whose tokens move by an RMS of at most d has a result whose tokens move by an RMS of at most "
            "{rms} d.",
        ),
    ],
)
def test_a_certificate_begins_with_its_sentence(model, example, says):
    certificate = wn.certify(model, example)
    first, second = str(certificate).splitlines()[:2]
    numbers = {"l2": certificate.l2_lipschitz, "rms": certificate.lipschitz}
    before, _, after = re.split(r"(\{\w+\})", says)
    said = first.removeprefix(before).removesuffix(after)
    key = says[len(before) + 1 : -len(after) - 1]
    assert numbers[key] <= float(said) <= numbers[key] * 1.001  # five digits, rounded up
    assert second.startswith("Lipschitz bound ")
    assert repr(certificate) == str(certificate)
    assert len(repr(wn.lower_bound(certificate.program, steps=2))) < 80


def test_a_whole_batch_is_said_to_be_one():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0, keepdim=True)

    certificate = wn.certify(Centred(), torch.rand(4, 3), radius=1.0)
    assert not certificate.each_sample
    assert str(certificate).startswith("The whole batch moved by d in l2 moves the result")


def test_a_bound_that_is_large_by_its_normalization_layers_says_so():
    model = nn.Sequential(block(), block())
    text = str(wn.certify(model, torch.randn(1, 5, 16), radius=1.0))
    said = r"large: 4 normalization layers multiply it by about 10\^([\d.]+), .* makes 10\^(-?\d+\.\d)"
    found = re.search(said, text)
    assert found is not None
    assert float(found[1]) == pytest.approx(4 * 2.5, abs=0.1)  # each 1 / sqrt(1e-5)
    log10 = float(re.search(r"log10 ([\d.]+)", text)[1])
    assert float(found[1]) + float(found[2]) == pytest.approx(log10, abs=0.11)  # three rounded numbers
    assert "why it is large" not in str(wn.certify(nn.Linear(2, 2), torch.rand(1, 2)))
