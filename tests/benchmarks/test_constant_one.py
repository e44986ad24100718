"""The jobs for networks of constant 1 measure what they say."""

import pytest
import torch
from torch import nn

from benchmarks.constant_one import rectangle, surface, wasserstein
from benchmarks.trained_models import shipped


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def test_the_exact_functions_make_no_error():
    assert wasserstein(Of(lambda x: x.norm(dim=1)), 1.0)["proved_error"] == pytest.approx(0, abs=1e-6)
    assert wasserstein(Of(lambda x: 2 * x.norm(dim=1)), 2.0)["error"] == pytest.approx(1, abs=1e-6)
    found = surface(Of(rectangle), 1.0, side=101)
    assert found["error"] == found["overshoot"] == 0
    x, y = 2 * torch.rand(2, 1000, 2) - 1
    assert ((rectangle(x) - rectangle(y)).abs()[:, 0] <= (x - y).norm(dim=1) + 1e-6).all()


def test_what_is_proved_between_the_points_of_a_grid_holds_there():
    """A function of slope 1 whose largest overshoot lies in the middle of four points."""
    middle = torch.tensor([[0.91, 0.91]])
    peak = Of(lambda x: rectangle(x) + (0.01 - (x - middle).norm(dim=1, keepdim=True)).clamp(min=0))
    assert surface(peak, 2.0, side=101)["proved_overshoot"] >= float(peak(middle) - rectangle(middle)) > 0


def test_a_package_that_is_missing_is_named():
    with pytest.raises(ValueError, match="the package no_such_package is not installed"):
        shipped("no_such_package.model")
