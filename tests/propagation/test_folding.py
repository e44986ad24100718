"""Folding changes no value: factors beside a weight are gone, all others stay."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.nn import BallProjection, ConvexPotential
from wellnormed.propagation.capture import capture, capture_any_batch, functional
from wellnormed.propagation.folding import fold, plain
from wellnormed.propagation.in_double import run_in_double

TOLERANCE = 1e-6
"""Of the largest output: every weight is rounded once, by 6e-8 of itself."""
_VECTOR, _IMAGE = (2, 6), (2, 4, 9, 9)


class Net(nn.Module):
    """Layers to write a formula with, a vector and a temperature that are learned."""

    def __init__(self, formula, **layers: nn.Module) -> None:
        super().__init__()
        self.formula = formula
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(6, 4, 3, groups=2)
        self.back = nn.ConvTranspose2d(6, 4, 3)
        self.norm = nn.LayerNorm(6)
        self.normalized = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.vector = nn.Parameter(torch.rand(6) + 0.5)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.table = nn.Embedding(6, 6)
        self.ball, self.potential = BallProjection(0.1), ConvexPotential(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


FOLDED = {
    "after a linear map": (lambda m, x: 3.0 * m.a(x), _VECTOR),
    "before a linear map": (lambda m, x: m.a(x * 3.0), _VECTOR),
    "a quotient": (lambda m, x: m.a(x) / 7.0, _VECTOR),
    "twice": (lambda m, x: 0.1 * m.b(0.3 * torch.relu(0.7 * m.a(x))), _VECTOR),
    "one": (lambda m, x: (1.0 * x).tanh(), _VECTOR),
    "negative": (lambda m, x: -2.0 * m.a(x), _VECTOR),
    "through moves": (lambda m, x: 3.0 * m.a(x).view(2, 2, 3).transpose(1, 2)[:, :2].flatten(1), _VECTOR),
    "through zeros around": (lambda m, x: 3.0 * F.pad(m.a(x), (1, 2)), _VECTOR),
    "through a sum": (lambda m, x: 0.5 * (m.a(x) + m.b(x.tanh())), _VECTOR),
    "through a sum with a stored tensor": (lambda m, x: 0.5 * (m.a(x) - m.vector), _VECTOR),
    "through a product": (lambda m, x: 0.5 * (m.a(x) * m.b(x).sigmoid()), _VECTOR),
    "forward through a product": (lambda m, x: m.c(0.5 * x * m.b(x).sigmoid()), _VECTOR),
    "side by side": (lambda m, x: 0.5 * torch.cat([m.a(x), m.b(x)], -1), _VECTOR),
    "into several maps": (lambda m, x: (lambda y: m.a(y) + m.b(y) + m.c(y.relu()))(x.tanh() * 0.5), _VECTOR),
    "a vector after a map": (lambda m, x: m.vector * m.a(x), _VECTOR),
    "a vector before a map": (lambda m, x: m.a(x.tanh() * m.vector), _VECTOR),
    "a vector through another": (lambda m, x: m.a(x.tanh() * m.vector / m.vector.exp()), _VECTOR),
    "a learned temperature": (lambda m, x: m.a(x) * m.temperature.exp(), _VECTOR),
    "a product with a matrix": (lambda m, x: 0.5 * (x @ m.a.weight.t()), _VECTOR),
    "a product and a sum": (lambda m, x: 0.5 * torch.addmm(m.a.bias, x, m.a.weight), _VECTOR),
    "a matrix from the left": (lambda m, x: 0.5 * (m.a.weight @ x.t()), _VECTOR),
    "a normalization": (lambda m, x: 0.5 * m.norm(x) * m.vector, _VECTOR),
    "a computed weight": (lambda m, x: 0.5 * m.normalized(x), _VECTOR),
    "attention": (
        lambda m, x: 0.5 * F.scaled_dot_product_attention(m.a(x)[:, None], m.b(x)[:, None], m.c(x)[:, None]),
        _VECTOR,
    ),
    "after a convolution": (lambda m, x: 0.5 * m.conv(x), _IMAGE),
    "before a convolution": (lambda m, x: m.conv(x / 255), _IMAGE),
    "channels": (lambda m, x: m.vector[:, None, None] * m.conv(x), _IMAGE),
    "before groups": (lambda m, x: m.grouped(0.5 * m.conv(x).tanh()), _IMAGE),
    "through pooling": (lambda m, x: 0.5 * F.max_pool2d(m.conv(x), 2).mean((2, 3)), _IMAGE),
    "a transposed convolution": (lambda m, x: 0.5 * m.back(m.conv(x).tanh() * 3), _IMAGE),
    "channels before a transposed convolution": (
        lambda m, x: m.back(m.conv(x).tanh() * m.vector[:, None, None]),
        _IMAGE,
    ),
}
STAYS = {
    "a residual": (lambda m, x: x + 0.5 * x.tanh(), 1),
    "a tied weight": (lambda m, x: F.linear(0.5 * m.a(x).tanh(), m.a.weight), 1),
    "a tied weight of a slice": (lambda m, x: 0.5 * m.a(x) + F.linear(x, m.a.weight[:6] + 0), 1),
    "a value that is used twice": (lambda m, x: (lambda y: 0.5 * y + y.tanh())(m.a(x)), 1),
    "a product with itself": (lambda m, x: (lambda y: 0.5 * (y * y))(m.a(x)), 2),
    "one whose value gives a shape alone": (lambda m, x: (lambda y: m.b(m.vector.expand_as(y)))(0.5 * x), 1),
    "a user's user": (lambda m, x: (lambda y: m.a(y) + y.tanh())(0.5 * x), 1),
    "a negative factor through a bend": (lambda m, x: -0.5 * m.a(x).relu(), 1),
    "one pad": (lambda m, x: 0.5 * F.pad(m.a(x), (1, 2), value=1.0), 1),
    "one bend": (lambda m, x: 0.5 * m.a(x).sigmoid(), 1),
    "one added": (lambda m, x: 0.5 * (m.a(x) + 1.0), 1),
    "one matrix of factors": (lambda m, x: m.a(x) * torch.arange(12.0).view(2, 6), 1),
    "one too large for the weight": (lambda m, x: 1e60 * m.a(x), 1),
    "one too small for the weight": (lambda m, x: 1e-42 * m.a(x), 1),
    "an embedding": (lambda m, x: 0.5 * m.table(x.long().clamp(0, 5)), 1),
    "a ball": (lambda m, x: m.a(m.ball(x)), 2),
    "a convex potential": (lambda m, x: m.potential(x), 1),
    "a gate": (lambda m, x: m.a(x * (1 + torch.erf(x / 2**0.5)) * 0.5), 3),
}
"""Name -> formula, and how many products and quotients are left."""


def scales(module):
    return [node for node in module.graph.nodes if str(node.target).startswith(("aten.mul.", "aten.div."))]


def both(model, x, any_batch=False):
    """Outputs in float64 before and after, and the folded module."""
    captured = functional(capture(model, x))
    larger = capture_any_batch(model, captured) if any_batch else captured
    assert larger is not None
    folded = fold(functional(larger))
    inputs = [each for _, each in captured.inputs.values()]
    before, after = (run_in_double(lambda p=each: p(*inputs), inputs) for each in (plain(captured), folded))
    assert before is not None
    return before, after, folded


@pytest.mark.parametrize("name", FOLDED)
def test_a_factor_beside_a_weight_is_folded(name):
    torch.manual_seed(0)
    formula, shape = FOLDED[name]
    before, after, folded = both(Net(formula).eval(), torch.randn(shape))
    assert (after - before).abs().max() <= TOLERANCE * before.abs().max()
    left = [node for node in scales(folded) if name not in ("through a product", "forward through a product")]
    assert not left, folded.graph
    assert before.abs().max() > 0.01


@pytest.mark.parametrize("name", STAYS)
def test_a_factor_that_no_weight_can_take_stays(name):
    torch.manual_seed(0)
    formula, count = STAYS[name]
    before, after, folded = both(Net(formula).eval(), torch.randn(_VECTOR))
    assert len(scales(folded)) == count, folded.graph
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_weight_is_rounded_once_however_often_it_is_scaled():
    model = Net(lambda m, x: m.a(x) / 3.0 * 0.1 * 30.0)
    *_, folded = both(model, torch.randn(_VECTOR))
    assert torch.equal(folded.get_parameter("a.weight_folded"), model.a.weight)
    assert not scales(folded)


def test_the_model_keeps_its_weights():
    model = Net(lambda m, x: 5.0 * m.a(x))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    both(model, torch.randn(_VECTOR))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_a_weight_is_computed_from_is_gone():
    *_, folded = both(Net(lambda m, x: m.normalized(x)).eval(), torch.randn(_VECTOR))
    assert set(folded.state_dict()) == {"normalized.weight_folded", "normalized.bias"}
    assert isinstance(folded.get_parameter("normalized.weight_folded"), nn.Parameter)
    assert [str(node.target) for node in folded.graph.nodes if node.op == "call_function"] == ["aten.linear.default"]


def test_a_table_that_is_larger_than_its_source_is_computed_still():
    *_, folded = both(Net(lambda m, x: (m.vector.exp()[:, None] * m.vector).sum() + m.a(x)), torch.randn(_VECTOR))
    assert sum(tensor.numel() for tensor in folded.state_dict().values()) <= 6 * 6 + 6 + 1
    *_, folded = both(Net(lambda m, x: m.a(x)[..., None] + m.vector.exp()[:, None] * m.vector), torch.randn(_VECTOR))
    assert {name for name in folded.state_dict() if name.startswith("vector")} == {"vector", "vector_folded"}


def test_overwriting_is_taken_out_first():
    before, after, folded = both(Net(lambda m, x: m.a(x).mul_(0.5).relu_()), torch.randn(_VECTOR))
    assert (after - before).abs().max() <= TOLERANCE * before.abs().max()
    assert not scales(folded)


def test_any_batch_stays_any_batch():
    model = Net(lambda m, x: 0.5 * m.a(x).view(x.shape[0], 2, 3).flatten(1))
    before, after, folded = both(model, torch.randn(1, 6), any_batch=True)
    assert (after - before).abs().max() <= TOLERANCE * before.abs().max()
    assert not scales(folded)
    assert folded(torch.randn(7, 6)).shape == (7, 6)
