"""Differences of logits: bounded by differences of rows, proved again, and tied to the map that gives the logits."""

import copy

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.certificates import UncertifiableError

from .adversary import Net


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    return model, wn.certify(model, torch.zeros(2, 3, 2, 2), margins=True)


def test_no_pair_of_inputs_moves_a_difference_of_logits_by_more(case):
    model, certificate = case
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 4000, 3, 2, 2, generator=generator, dtype=torch.float64)
    x, y = (each / each.square().mean((1, 2, 3), keepdim=True).sqrt() for each in (x, y))
    wide = copy.deepcopy(model).double().requires_grad_(False)
    moved = wide(x) - wide(y)
    found = (moved.amax(1) - moved.amin(1)) / (x - y).square().sum((1, 2, 3)).sqrt()
    assert 0.3 * certificate.margin < float(found.max()) <= certificate.margin


def test_the_margin_is_that_of_the_largest_difference_of_rows(case):
    model, certificate = case
    weight = model[3].weight.detach().double()
    largest = max(float((a - b).norm()) for a in weight for b in weight)
    before = wn.certify(nn.Sequential(*model[:3]), torch.randn(2, 3, 2, 2)).lipschitz
    assert certificate.margin == pytest.approx(largest * before, rel=1e-6)  # norms are proved with a slack of 1e-9


def test_the_checker_proves_it(case):
    model, certificate = case
    assert float(wn.verify(certificate, model.state_dict()).margin) == pytest.approx(certificate.margin, rel=1e-12)


def test_a_factor_of_one_entry_is_a_number(case):
    model, certificate = case
    halved = Net(lambda s, x: s.model(x) / s.factor, model=model, factor=torch.tensor([-0.5]))
    scaled = wn.certify(halved, torch.zeros(2, 3, 2, 2), margins=True)
    assert scaled.margin == pytest.approx(2 * certificate.margin, rel=1e-6)


def test_a_result_that_is_no_linear_map_has_no_margin(case):
    model, _ = case
    with pytest.raises(UncertifiableError, match="not that of a linear map"):
        wn.certify(nn.Sequential(*model[:3]), torch.zeros(2, 3, 2, 2), margins=True)
