"""Small models of operations that `campaigns.random_models` has not: nothing that a search finds exceeds a bound.

The layers there are attacked one by one in `tests/campaigns/test_soundness.py`.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from wellnormed.certificates import capture, certify, lower_bound
from wellnormed.program.errors import UncertifiableError
from wellnormed.proof.functions import FUNCTIONS, SETTINGS, shape_of

from .adversary import Net, attack, bounds_of, walked

Case = tuple[Callable[..., Tensor], tuple[int, ...], float]


def _random(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _turned(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0 / 3**i for i in range(half)]).repeat(2)
    return x * angle.cos().to(x) + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin().to(x)


class _Maps(nn.Module):
    """A linear map for every name, with a bias where asked."""

    def __init__(self, function: Callable[..., Tensor], bias: bool = False, **shapes: tuple[int, int]) -> None:
        super().__init__()
        self.function = function
        for number, (name, (inputs, outputs)) in enumerate(shapes.items()):
            layer = nn.Linear(inputs, outputs, bias=bias)
            layer.weight.data = _random(outputs, inputs, seed=number)
            if bias:
                layer.bias.data = _random(outputs, seed=10 + number, size=2.0)
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _attend(s: Any, x: Tensor, heads: int = 2, **settings: Any) -> Tensor:
    q, k, v = (_heads(layer(x), heads) for layer in (s.q, s.k, s.v))
    return _joined(F.scaled_dot_product_attention(q, k, v, **settings))


def _fused(s: Any, x: Tensor) -> Tensor:
    q, k, v = (_heads(t, 2) for t in s.qkv(x).chunk(3, -1))
    return _joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _fused_by_head(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).unflatten(-1, (2, 3, 2)).permute(3, 0, 2, 1, 4)
    return _joined(F.scaled_dot_product_attention(q, k, v))


def _grouped(s: Any, x: Tensor) -> Tensor:
    q, k, v = _heads(s.q(x), 4), _heads(s.k(x), 2), _heads(s.v(x), 2)
    return _joined(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def _rotary(s: Any, x: Tensor) -> Tensor:
    q, k, v = (_heads(layer(x), 1) for layer in (s.q, s.k, s.v))
    return _joined(F.scaled_dot_product_attention(_turned(q), _turned(k), v))


def _cross(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.q(x[:, :1]), s.k(x[:, 1:]), s.v(x[:, 1:])
    return F.scaled_dot_product_attention(*(t[:, None] for t in (q, k, v)))[:, 0]


def _causal_spelled(s: Any, x: Tensor) -> Tensor:
    q, k, v = (_heads(layer(x), 2) for layer in (s.q, s.k, s.v))
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    logits = (q @ k.mT).masked_fill(mask, -1e30) * 0.7
    return _joined(torch.softmax(logits, -1) @ v)


def _positions(s: Any, x: Tensor) -> Tensor:
    far = torch.tensor([[5.0, 0, 0, 0], [-5.0, 0, 0, 0], [0, 0, 0, 0]]).to(x)
    return _attend(s, x + far, 1)


def _batch_of_matrices(s: Any, x: Tensor) -> Tensor:
    return torch.softmax(s.q(x) @ s.k(x).mT, -1) @ s.v(x)


class _Whole(nn.Module):
    """Torch's own module for self-attention."""

    def __init__(self, layer: nn.Module, need_weights: bool) -> None:
        super().__init__()
        self.layer, self.need_weights = _layer(layer), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=self.need_weights)[0]


def _far_keys() -> nn.Module:
    model = _Maps(_rotary, True, **_QKV)
    model.k.bias.data *= 100
    return model


_QKV = {"q": (4, 4), "k": (4, 4), "v": (4, 4)}
_GQA = {"q": (4, 8), "k": (4, 4), "v": (4, 4)}

ATTENTION: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "biases, flat": (lambda: _Maps(_attend, True, **_QKV), 0.05),
    "fused": (lambda: _Maps(_fused, qkv=(4, 12)), 1.0),
    "fused by head": (lambda: _Maps(_fused_by_head, qkv=(4, 12)), 1.0),
    "grouped queries": (lambda: _Maps(_grouped, **_GQA), 1.0),
    "cross": (lambda: _Maps(_cross, True, **_QKV), 1.0),
    "spelled, causal": (lambda: _Maps(_causal_spelled, True, **_QKV), 0.5),
    "module with weights": (lambda: _Whole(nn.MultiheadAttention(4, 2, batch_first=True), True), 1.0),
    "batch of matrices": (lambda: _Maps(_batch_of_matrices, **_QKV), 1.0),
    "positions, flat": (lambda: _Maps(_positions, **_QKV), 1e-2),
    "rotary of a key bias": (_far_keys, 0.1),
}


def _net(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(lambda _, x: function(x))


def _layer(layer: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for each in layer.parameters():
        each.data = torch.randn(each.shape, generator=generator)
    return layer.eval()


def _mix_heads(x: Tensor) -> Tensor:
    first = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]).to(x)
    return (first @ x.unflatten(-1, (2, 1)).transpose(1, 2)).transpose(1, 2).flatten(2)


def _convex(x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    return x - factor * F.relu(F.linear(x, weight, bias)) @ weight


_T, _I = (1, 3, 4), (1, 2, 4, 4)
_W, _B = _random(5, 4), _random(5)
_P = _random(3, 3, seed=3)
_PER_HEAD = _random(2, 2, 3)


def _with_numbers_assigned(x: Tensor) -> Tensor:
    y = 3 * x
    y[:, 0] = 2.0
    y[..., 1].zero_()
    y[:, 1:, 2] = torch.tensor(-1).to(x)
    return y * x


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "weights of the input": (_net(lambda x: F.linear(x, x[0].tanh() / 2, x[0, :, 0])), _T, 1.0),
    "tokens times a matrix": (_net(lambda x: _P.to(x) @ x), _T, 1.0),
    "matrix per head": (_net(_mix_heads), (1, 2, 2), 1.0),
    "matrix per sample's head": (_net(lambda x: _joined(_heads(x, 2) @ _PER_HEAD.to(x))), _T, 1.0),
    "cube": (_net(lambda x: x**3), _T, 2.0),
    "seventh power": (_net(lambda x: x**7.0), _T, 1.0),
    "layer norm that centres twice": (
        _net(lambda x: (x - x.mean(-1, True)) * ((x - x.mean(-1, True)).pow(2).mean(-1, True) + 0.1).rsqrt()),
        _T,
        1.0,
    ),
    "sum with products": (_net(lambda x: torch.baddbmm(_P.to(x), x, x.mT, beta=2.0, alpha=-0.5)), _T, 1.0),
    "attention with a bias in its product": (
        _net(lambda x: torch.softmax(torch.baddbmm(_P.to(x), x, 2 * x.mT, alpha=-0.5), -1) @ x),
        _T,
        1.0,
    ),
    "matrix product": (_net(lambda x: (x @ x.mT) @ x), _T, 1.0),
    "gate": (_net(lambda x: F.silu(x[..., :2]) * x[..., 2:]), _T, 1.0),
    "max pool 2d": (_net(lambda x: F.max_pool2d(x, 3, 2, 1)), (1, 2, 5, 5), 1.0),
    "average pool, edges apart": (_net(lambda x: F.avg_pool2d(x, 3, 2, 1, True, False)), (1, 2, 4, 5), 1.0),
    "average pools": (_net(lambda x: F.avg_pool2d(F.avg_pool2d(x, 3, 1, 1), 1) * 2), _I, 1.0),
    "adaptive average pool": (_net(lambda x: F.adaptive_avg_pool2d(x, (3, 2))), _I, 1.0),
    "nearest": (_net(lambda x: F.interpolate(x, scale_factor=2)), _I, 1.0),
    "layer norm": (lambda: _layer(nn.LayerNorm(4, eps=0.1)), _T, 1.0),
    "group norm": (lambda: _layer(nn.GroupNorm(2, 4, eps=0.1)), (1, 4, 2, 2), 1.0),
    "ball, active": (_net(lambda x: x * torch.rsqrt((x.square().mean(-1, keepdim=True) * 9).clamp(min=1.0))), _T, 1.0),
    "log softmax": (_net(lambda x: torch.log_softmax(3 * x, -1)), _T, 2.0),
    "convex potential, long step": (_net(lambda x: _convex(x, _W.to(x), _B.to(x), 0.9)), _T, 1.0),
    "where": (_net(lambda x: torch.where(torch.eye(3, 4).bool(), 2 * x, -1.0)), _T, 1.0),
    "numbers assigned to slices": (_net(_with_numbers_assigned), _T, 1.0),
    "changed in place": (_net(lambda x: (x * 2).relu_() * x), _T, 1.0),
    "two weights": (_net(lambda x: F.linear(F.linear(x, torch.eye(4).to(x) * 1.0), torch.eye(4).to(x) * 9.0)), _T, 1.0),
    "threshold": (_net(lambda x: F.threshold(x, 0.5, 0.5)), (1, 1, 2), 3.0),
    "rrelu": (_net(lambda x: F.rrelu(x, 0.5, 1.9)), (1, 1, 2), 3.0),
    "two pools": (_net(lambda x: F.avg_pool1d(F.avg_pool1d(x, 4, 4), 1, 1) * 4), (1, 2, 16), 1.0),
}


@pytest.mark.parametrize(
    ("sizes", "steps", "restarts"), [([1.0], 6, 1), pytest.param([0.1, 1.0, 5.0], 100, 6, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", [*CASES, *ATTENTION])
def test_search_exceeds_no_bound(name, sizes, steps, restarts):
    """Prints the share of the proved gain that is attained."""
    model, shape, radius = CASES[name] if name in CASES else (ATTENTION[name][0], (1, 3, 4), ATTENTION[name][1])
    for size in sizes:
        share = attack(model(), _random(*shape), size * radius, steps=steps, restarts=restarts)
        print(f"{name} | {size * radius} | {share:.3f}")


@pytest.mark.parametrize("beta", [1.0, 100.0])
def test_softplus_jumps_by_less_than_a_rounding_and_is_listed_as_one(beta):
    """Its jump has no Lipschitz constant; the search in float64 does not see it."""
    example = torch.full((1, 1), 20 / beta, dtype=torch.float64)
    model, smooth = nn.Softplus(beta), lambda x: -F.logsigmoid(-beta * x) / beta
    certificate = certify(model, example)
    assert certificate.lipschitz == pytest.approx(1, abs=1e-15)
    assert list(certificate.rounds) == ["float32"]
    x = torch.linspace(15 / beta, 25 / beta, 10_001, dtype=torch.float64)
    torch.testing.assert_close(model(x), smooth(x), rtol=2.0**-24, atol=0)
    below, above = example * (1 - 1e-12), example * (1 + 1e-12)
    double = capture(model, example).double()
    assert float(abs(double(above) - double(below)) / (above - below)) <= 1.001  # float64 at a difference of 2e-12
    assert float(abs(model(above) - model(below)) / (above - below)) > 10
    with pytest.raises(UncertifiableError, match="leave the threshold at 20"):
        certify(nn.Softplus(beta, threshold=13.9), example)


class Coupling(nn.Module):
    """Half of a real-valued non-volume-preserving flow (Dinh et al., 2017)."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([a, b * torch.exp(torch.tanh(self.scale(a))) + self.shift(a)], -1)


def test_an_exponential_is_as_steep_as_its_argument_allows():
    torch.manual_seed(0)
    exact = certify(Net(lambda _, x: x.exp()), _random(1, 4), radius=1.0)  # all of one vector's size in one entry
    assert exact.lipschitz == pytest.approx(math.exp(2.0), rel=1e-6)
    model, x = Coupling(), _random(8, 4)
    certificate = certify(model, x, radius=2.0)
    found = lower_bound(model, x, radius=2.0).value
    assert certificate.with_lower_bound(found).lower_bound >= 0.25 * certificate.rms_lipschitz
    assert certificate.forward_error < 1e-4
    for radius, remedy in ((400.0, "as large as 800; bound them"), (math.inf, "certify for a smaller domain")):
        with pytest.raises(UncertifiableError, match=remedy):
            certify(Net(lambda _, x: x.exp()), _random(1, 4), radius=radius)


def test_a_flow_is_constrained():
    torch.manual_seed(0)
    model, x = Coupling(), _random(8, 4)
    optimizer = wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, lipschitz=4.0, example_input=x, radius=1.0)
    for _ in range(5):
        (-model(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert certify(model, x, radius=1.0).lipschitz <= 4.0
    assert certify(model, x, radius=1.0, within=constraints).lipschitz <= 4.0


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d, F.max_pool3d, F.avg_pool3d], ids=lambda f: f.__name__)
@pytest.mark.parametrize("batch", [(), (1,)])
def test_a_setting_of_one_entry_is_of_all_axes(pool, batch):
    """A one-dimensional pool of the same setting has results of the same shape, and a smaller bound."""
    axes = 2 if "2d" in pool.__name__ else 3
    example = torch.zeros(*batch, 1, *[4] * axes)
    listed = certify(_net(lambda x: pool(x, (3,), (1,), (1,)))(), example)
    assert listed.lipschitz == certify(_net(lambda x: pool(x, 3, 1, 1))(), example).lipschitz


@pytest.mark.parametrize("settings", [
    {"size": (7, 3), "mode": "bilinear"}, {"scale_factor": 3, "mode": "bicubic"},
    {"scale_factor": 1.7, "mode": "bilinear"},
], ids=str)  # fmt: skip
def test_interpolation_is_what_it_was_captured_as(settings):
    """In inference mode torch has it in parts, whose weights are constants of float32."""
    example = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(nn.Upsample(**settings), example).reshape(-1, 16)
    exact = float(torch.linalg.matrix_norm(jacobian, 2))
    assert exact <= certify(nn.Upsample(**settings), example.float()).lipschitz <= 1.001 * exact


_LIBRARY: dict[str, tuple[Callable[[Tensor], Tensor], list[tuple[float, ...]]]] = {
    "relu": (F.relu, [()]), "abs": (torch.abs, [()]), "relu6": (F.relu6, [()]), "tanh": (torch.tanh, [()]),
    "sin": (torch.sin, [()]), "cos": (torch.cos, [()]), "atan": (torch.atan, [()]), "asinh": (torch.asinh, [()]),
    "softsign": (F.softsign, [()]), "tanhshrink": (F.tanhshrink, [()]), "softshrink": (F.softshrink, [()]),
    "log_sigmoid": (F.logsigmoid, [()]), "sigmoid": (torch.sigmoid, [()]), "hardsigmoid": (F.hardsigmoid, [()]),
    "hardswish": (F.hardswish, [()]), "erf": (torch.erf, [()]), "gelu": (F.gelu, [()]),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), [()]), "silu": (F.silu, [()]), "mish": (F.mish, [()]),
    "leaky_relu": (F.leaky_relu, [(0.01,), (-2.0,), (3.0,)]),
    "elu": (torch.ops.aten.elu, [(1.0, 1.0, 1.0), (2.0, 0.5, 1.5), (-1.5, -1.0, 1.0), (0.2, 3.0, 2.0)]),
    "clamp": (torch.clamp, [(-1.0, 1.0), (0.5, 2.0), (-3.0, -2.0)]),
    "exp": (lambda x, most: x.clamp(max=most).exp(), [(0.0,), (0.2,)]),
    "clamp_min": (torch.clamp_min, [(-1.0,), (2.0,)]), "clamp_max": (torch.clamp_max, [(-1.0,), (2.0,)]),
}  # fmt: skip


def test_every_function_of_the_table_is_sampled():
    assert set(_LIBRARY) == {*FUNCTIONS, *SETTINGS}


@pytest.mark.parametrize(
    ("name", "numbers"), [pytest.param(name, numbers) for name, (_, many) in _LIBRARY.items() for numbers in many]
)
def test_no_slope_on_a_fine_grid_exceeds_the_table(name, numbers):
    function, known = _LIBRARY[name][0], shape_of(name, *numbers)
    # so fine that the steepest slope is met beside a kink, at which kernels choose one side or the other
    near = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    far = torch.logspace(-12, 4, 4001, dtype=torch.float64)
    x = torch.cat([near, far, -far]).sort().values.requires_grad_()
    y = function(x, *numbers)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    low, high = known.slopes
    assert low - Decimal("1e-13") <= Decimal(float(slopes.min()))
    assert Decimal(float(slopes.max())) <= high + Decimal("1e-13")
    tight = abs(float(slopes.min()) - float(low)) < 1e-4 and abs(float(slopes.max()) - float(high)) < 1e-4
    assert tight or name in ("elu", "leaky_relu")
    steepest = float(slopes.abs().max())
    assert Decimal(steepest) * (1 - Decimal("1e-13")) <= known.slope
    assert steepest >= float(known.slope) * (1 - 1e-4) or name in ("elu", "leaky_relu")  # a step of the grid aside
    secants = ((y[1:] - y[:-1]) / (x[1:] - x[:-1]))[(x[1:] - x[:-1]) > 1e-5]
    assert float(secants.detach().abs().max()) <= float(known.slope) * (1 + 1e-9)
    growth = float(known.growth)
    sizes = y.detach().abs()
    assert (sizes <= (growth * x.detach().abs() + float(known.at_zero)) * (1 + 1e-15) + 1e-300).all()
    if known.ceiling is not None:
        assert float(sizes.max()) <= float(known.ceiling)


def test_the_default_eps_is_that_of_the_dtype():
    model = Net(lambda _, x: F.rms_norm(x, (4,))).double()
    example = _random(1, 3, 4).double()
    attack(model, example, 1.0, steps=3, restarts=0, starts=(torch.zeros(1, 3, 4),))


@pytest.mark.parametrize("name", ["biases, flat", "fused", "spelled, causal"])
def test_no_logit_exceeds_its_bound(name):
    model, radius = ATTENTION[name]
    walk, _ = walked(model(), _random(1, 3, 4), radius)
    (bounds,) = (row.logits for row in walk.ledger.proof.inferences if row.logits is not None)
    seen: list[Tensor] = []
    net = model().double().requires_grad_(False)
    softmax, product = torch.softmax, F.scaled_dot_product_attention

    def looked(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        seen.append((q @ k.mT / math.sqrt(q.shape[-1])).abs().amax((0, 2, 3)))
        return product(q, k, v, **settings)

    def weighed(logits: Tensor, dim: int) -> Tensor:
        seen.append(logits.masked_fill(logits.abs() > 1e20, 0.0).abs().amax((0, 2, 3)))
        return softmax(logits, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", looked)
        patch.setattr(torch, "softmax", weighed)
        x = _random(500, 3, 4).double()
        net(x / x.square().mean(-1, keepdim=True).sqrt() * radius)
    for number, bound in enumerate(bounds):
        assert float(torch.stack(seen)[:, number].max()) <= float(bound) * (1 + 1e-9)


def test_refusals_of_attention():
    """What has no bound: queries that are constants, a mask of the input, dropout."""
    layer = _Maps(_attend, **_QKV)
    cases = [
        lambda s, x: F.scaled_dot_product_attention(torch.ones(1, 1, 4).expand(x.shape), x, x),
        lambda s, x: F.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT),
        lambda s, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ]
    for case in cases:
        layer.function = case
        with pytest.raises(UncertifiableError):
            bounds_of(layer, _random(1, 3, 4))


def test_a_window_that_holds_nothing_is_refused():
    model = Net(lambda s, x: x * F.hardtanh(F.max_pool2d(x, (1, 2), 1, (0, 1), 2)))
    with pytest.raises(UncertifiableError, match="window lies in the padding"):
        bounds_of(model, torch.randn(1, 1, 2, 1), 0.1)


def test_celu_of_a_negative_alpha_grows_and_is_refused():
    with pytest.raises(UncertifiableError, match=r"alpha=-0\.5 makes it grow"):
        bounds_of(Net(lambda s, x: F.celu(x, -0.5)), torch.randn(1, 3, 4), 10.0)
