"""Signals `(batch, channels, length)` are one vector; tokens that are transposed before a convolution stay tokens."""

import math

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.certificates.adversary import Net

FUNCTIONS = {
    "convolution": (lambda m, x: m.conv(x), True),
    "scaled, padded and centred": (lambda m, x: m.conv(nn.functional.pad(x / 2 - 1, (2, 2))), True),
    "batch norm": (lambda m, x: m.conv(m.norm(x)), True),
    "circular": (lambda m, x: m.circular(x), True),
    "some channels": (lambda m, x: m.conv(torch.cat([x[:, 2:], x[:, :2]], 1)), True),
    "a spectrogram": (lambda m, x: m.image(x[:, None]).flatten(1), True),
    "transposed convolution": (lambda m, x: m.back(x), True),
    "means": (lambda m, x: m.conv(nn.functional.avg_pool1d(x, 3)), True),
    "means over equal windows": (lambda m, x: m.conv(nn.functional.adaptive_avg_pool1d(x, 3)), True),
    "maxima": (lambda m, x: m.conv(nn.functional.max_pool1d(x, 2)), True),
    "maxima over equal windows": (lambda m, x: m.conv(nn.functional.adaptive_max_pool1d(x, 3)), True),
    "means over tokens": (lambda m, x: nn.functional.avg_pool1d(x.mT, 2).flatten(1), False),
    "tokens": (lambda m, x: m.conv(x[..., :4].mT).mT, False),
    "tokens by a linear map": (lambda m, x: m.conv((x @ m.weight)[..., :4].mT).mT, False),
    "vectors": (lambda m, x: torch.relu(x @ m.weight), False),
}


def model_of(function) -> nn.Module:
    torch.manual_seed(0)
    return Net(
        function, conv=nn.Conv1d(4, 6, 3, padding=1), norm=nn.BatchNorm1d(4), weight=nn.Parameter(torch.eye(9)),
        circular=nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), image=nn.Conv2d(1, 2, 3),
        back=nn.ConvTranspose1d(4, 3, 2),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_input_is_a_signal_where_windows_slide_along_its_last_axis(name):
    function, signal = FUNCTIONS[name]
    program = wn.capture(model_of(function), torch.zeros(2, 4, 9))
    assert len(program.signals) == signal
    certificate = wn.certify(program)
    (row,) = certificate.inputs
    assert row.axes == ((1, 2) if signal else (2,))
    assert wn.lower_bound(program, steps=5).value <= certificate.lipschitz
    weights = {name: each.tensor.detach() for name, each in program.stored.items()}
    assert wn.certificates.verify(certificate, weights).lipschitz == certificate.lipschitz.exact


def test_the_constant_of_a_signal_is_that_of_its_convolution_and_true():
    """By channels it was 3.5 to 7 times as large, and of another change than the sentence says."""
    model = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3)).double()
    x = torch.zeros(1, 4, 9, dtype=torch.float64)
    certificate = wn.certify(model, x, radius=math.inf)
    jacobian = torch.autograd.functional.jacobian(lambda t: model[0](t), x).reshape(54, 36)
    norm = float(torch.linalg.matrix_norm(jacobian, 2)) * float(torch.linalg.matrix_norm(model[3].weight.detach(), 2))
    assert norm <= certificate.lipschitz <= 1.1 * norm
    assert str(certificate).startswith("An input moved by d in l2 moves the result by at most")
