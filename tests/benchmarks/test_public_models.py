"""What is measured of a public model, on a small one."""

import torch
from torch import nn

from benchmarks.public_models import measure
from tests.certificates.adversary import Net


def test_a_constant_or_the_reason_of_a_refusal():
    found = measure(lambda: (nn.Linear(3, 2), torch.randn(1, 3), None, 1.0))
    assert found["rows"] > 0
    assert found["parameters"] == 8
    assert "round" in measure(lambda: (Net(lambda _, x: x.round()), torch.randn(1, 3), None, 1.0))["refused"]
