"""Products with a sigmoid, a tanh, a sine or a cosine, mixtures by a sigmoid, and the recurrent cells made of these."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.certificates.adversary import Net, attack, bounds_of, random_weights
from wellnormed.certificates import certify
from wellnormed.proof.functions import COUPLINGS

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "sin": torch.sin, "cos": torch.cos,
}  # fmt: skip


def _gate(name: str, size: float) -> nn.Module:
    """One entry of the input, far from 0, is multiplied by a function of the other: its derivatives meet in the worst
    way somewhere in the domain."""
    return Net(lambda _, x: GATES[name](size * x[..., :1]) * (4 * x[..., 1:] + 10))


@pytest.mark.parametrize(("name", "size", "share"), [("sigmoid", 2.0, 0.75), ("tanh", 2.0, 0.6), ("sin", 0.5, 0.9)])
def test_a_search_comes_near_to_the_bound_of_a_product(name, size, share):
    found = attack(_gate(name, size), torch.zeros(1, 1, 2), 2.0, steps=60, restarts=4)
    assert share <= found <= 1


def test_a_search_comes_near_to_the_bound_of_a_mixture():
    def mixture(_: nn.Module, x: Tensor) -> Tensor:
        a, b, gate = x.unbind(1)
        return (a - b) * torch.sigmoid(4 * gate) + b

    assert bounds_of(Net(mixture), torch.zeros(1, 3, 1)).largest.max() == 1
    assert 0.94 <= attack(Net(mixture), torch.zeros(1, 3, 1), steps=60, restarts=4) <= 1


@pytest.mark.parametrize("function", [
    lambda x: torch.nn.functional.pad(torch.sigmoid(3 * x), (1, 1)) * torch.nn.functional.pad(x, (0, 2)),
    lambda x: torch.sigmoid(3 * x[..., :1]) * x.flip(1),
    lambda x: (torch.tanh(3 * x) * x.flip(-1)) * torch.sigmoid(5 * x),
    lambda x: torch.cos(3 * x) * torch.sin(2 * x.flip(1)),
    lambda x: (2 * torch.sigmoid(3 * x)) * x,
    lambda x: (torch.sigmoid(3 * x) + torch.sigmoid(x)) * x,
], ids=["padded", "one gate for all", "two", "of tokens", "twice", "sum"])  # fmt: skip
def test_a_search_exceeds_no_bound_of_moved_gates(function):
    for radius in (0.3, 2.0):
        attack(Net(lambda _, x: function(x)), torch.zeros(1, 3, 4), radius, steps=30, restarts=3)


def test_a_factor_is_not_taken_for_a_gate():
    """Twice a sigmoid, a sum, and a rounded one are no results of a function of the table."""
    x = torch.zeros(1, 1, 4)

    def gain(function: Callable[[Tensor], Tensor]) -> float:
        return certify(Net(lambda _, x: function(x) * x.flip(-1)), x).lipschitz

    alone = gain(torch.sigmoid)
    assert gain(lambda x: 2 * torch.sigmoid(x)) > 2 * alone
    assert gain(lambda x: torch.sigmoid(x).bfloat16().float()) > alone
    assert alone == pytest.approx(math.sqrt(1 + float(COUPLINGS["sigmoid"]) / 4), rel=1e-6)


def _cell(kind: type[nn.Module], inputs: int, width: int, size: float, **settings: bool) -> nn.Module:
    cell = random_weights(kind(inputs, width, batch_first=True, **settings), size, seed=width)
    return Net(lambda self, x: self.cell(x)[0], cell=cell)


@pytest.mark.parametrize(("kind", "length", "most"), [(nn.LSTM, 5, 52.0), (nn.GRU, 1, 0.74), (nn.GRU, 5, 58.0)])
def test_recurrent_cells_have_this_bound(kind, length, most):
    """Of 16 units on 8 inputs as torch draws them. Products of maxima gave 171, 0.83 and 343."""
    torch.manual_seed(0)
    cell = kind(8, 16, batch_first=True).eval()
    assert certify(Net(lambda s, x: s.cell(x)[0], cell=cell), torch.zeros(1, length, 8)).rms_lipschitz <= most


def _hand_written(self: nn.Module, x: Tensor) -> Tensor:
    """A cell with a minimal gate (Zhou et al., 2016) and a peephole, in other operations than torch's own cells."""
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        z = torch.sigmoid(self.gate(x[:, t]) + self.back(h))
        h = torch.tanh(self.value(x[:, t]) + self.own(z * h)) * (1 - z) + z * h
    return torch.cos(h) * torch.tanh(self.gate(h))


def _minimal(size: float) -> nn.Module:
    layers = {name: nn.Linear(3, 3) for name in ("gate", "back", "value", "own")}
    return random_weights(Net(_hand_written, **layers), size)


@pytest.mark.parametrize(("model", "shape"), [
    (_cell(nn.LSTM, 3, 4, 0.5), (1, 4, 3)), (_cell(nn.LSTM, 2, 2, 3.0, bidirectional=True), (1, 3, 2)),
    (_cell(nn.GRU, 3, 4, 0.5), (1, 4, 3)), (_cell(nn.GRU, 1, 1, 4.0), (1, 3, 1)), (_minimal(1.0), (1, 3, 3)),
], ids=["lstm", "steep lstm both ways", "gru", "gru of one unit", "hand-written"])  # fmt: skip
def test_a_search_exceeds_no_bound_of_a_cell(model, shape):
    attack(model, torch.zeros(shape), steps=8, restarts=2)
