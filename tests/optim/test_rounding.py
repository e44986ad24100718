"""A gradient that is only rounding error moves nothing; the smallest true one moves its parameter."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wellnormed as wn
from wellnormed.optim.rounding import memory_of_signs, rounding_level

precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


class Attention(nn.Module):
    """As people write it: four layers with biases, or a bias of the keys that stands beside them."""

    def __init__(self, width, heads, own_bias=False):
        super().__init__()
        self.heads = heads
        self.q, self.v, self.o = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=not own_bias)
        self.k_bias = nn.Parameter(torch.zeros(width)) if own_bias else self.k.bias

    def forward(self, x):
        keys = x @ self.k.weight.T + self.k_bias
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), keys, self.v(x)))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Torchs(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def attention_of(kind):
    if kind == "torch":
        model = Torchs(32, 4, batch_first=True)
        return model, model.in_proj_bias, slice(32, 64)
    model = Attention(32, 4, own_bias=kind == "own bias")
    return model, model.k_bias, slice(None)


def shifted_tokens(model, dtype, seed):
    x = torch.randn(8, 16, 32, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x.roll(1, 1)).square().mean()


def train(model, optimizer, loss, dtype, steps, clip=None, first=0):
    for seed in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, dtype, seed).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@precisions
@pytest.mark.parametrize("kind", ["layers", "own bias", "torch"])
@pytest.mark.parametrize("optimizer", [wn.Scion, wn.optim.Signum, wn.Almond, wn.Muon])
def test_the_bias_of_the_keys_stays(kind, optimizer, dtype):
    torch.manual_seed(0)
    model, bias, part = attention_of(kind)
    model.to(dtype)
    before = {p: p.detach().clone() for p in model.parameters()}
    train(model, optimizer(model, lr=0.02), shifted_tokens, dtype, 60)
    moved = (bias - before[bias])[part].abs().max()
    if kind == "torch" and optimizer is not wn.optim.Signum:  # a part of a vector that is normalised as a whole
        assert moved < 60 * 0.02 * rounding_level(dtype)
    else:
        assert moved == 0
    assert all(not torch.equal(p, before[p]) for p in before if p is not bias)
    if kind == "torch":  # the biases of queries have moved; a few may have come back by a step of a sign
        assert (bias != before[bias])[:32].float().mean() > 0.5


def images(model, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 3, 12, 12, dtype=dtype, generator=generator)
    return F.cross_entropy(model(x), torch.randint(10, (16,), generator=generator))


def batch_normed():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


@precisions
@pytest.mark.parametrize("optimizer", [wn.Scion, wn.optim.Signum])
def test_the_bias_before_a_batch_norm_stays(optimizer, dtype):
    model = batch_normed().to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer(model, lr=0.02), images, dtype, 60)
    moved = {name: not torch.equal(p, before[name]) for name, p in model.named_parameters()}
    assert [name for name, did in moved.items() if not did] == ["0.bias", "3.bias"]


@pytest.mark.parametrize("clip", [1e-3, 1.0])
def test_clipping_changes_nothing(clip):
    model = batch_normed()
    before = model[0].bias.detach().clone()
    train(model, wn.Scion(model, lr=0.02), images, torch.float32, 40, clip)
    assert torch.equal(model[0].bias, before)


def test_parameters_without_names_are_judged_too():
    model, bias, _ = attention_of("layers")
    before = bias.detach().clone()
    train(model, wn.optim.Signum(model.parameters(), lr=0.02), shifted_tokens, torch.float32, 20)
    assert torch.equal(bias, before)


def test_the_momentum_kept_in_gradients_is_judged_by_size():
    model, bias, _ = attention_of("layers")
    before = bias.detach().clone()
    optimizer = wn.Scion(model, lr=0.02, memory="gradient")
    train(model, optimizer, shifted_tokens, torch.float32, 20)
    assert torch.equal(bias, before)


class TwoParts(nn.Module):
    """A layer whose bias has gradients `share` times as large as its weight's."""

    def __init__(self, share, ndim=1):
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn((6,) * ndim))

    def loss(self, seed, persistent):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda p: torch.randn(p.shape, dtype=p.dtype, generator=generator)  # noqa: E731
        direction = torch.ones_like(self.bias) if persistent else draw(self.bias)
        return (self.weight * draw(self.weight)).sum() + self.share * (self.bias * direction).sum()


def steps_that_move(model, optimizer, persistent, count):
    moved = []
    for seed in range(count):
        before = model.bias.detach().clone()
        optimizer.zero_grad()
        model.loss(seed, persistent).backward()
        optimizer.step()
        moved.append(not torch.equal(model.bias, before))
    return moved


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("optimizer", [wn.Scion, wn.optim.Signum, wn.Almond])
def test_true_gradients_of_a_millionth_of_a_millionth_move_in_float64(optimizer, persistent, ndim):
    torch.manual_seed(0)
    model = TwoParts(1e-12, ndim).double()
    norms = {} if optimizer is wn.optim.Signum else {"norms": wn.assign_norms(model, overrides={
        "weight": wn.Spectral(), "bias": wn.Sign(ndim=ndim)})}  # fmt: skip
    params = model if not norms else model.parameters()
    moved = steps_that_move(model, optimizer(params, lr=1e-3, momentum=0.0, **norms), persistent, 5)
    assert moved == [True] * 5


@pytest.mark.parametrize("ndim", [1, 2])
def test_tiny_gradients_that_persist_move_in_float32_once_they_have_shown_it(ndim):
    torch.manual_seed(0)
    model = TwoParts(1e-12, ndim)
    moved = steps_that_move(model, wn.optim.Signum(model, lr=1e-3), True, 60)
    first = math.ceil(math.log(2) / -math.log(memory_of_signs(torch.float32)))
    assert not any(moved[:first])
    assert all(moved[first + 2 :])  # the first step has no average before it, and the average is rounded


@pytest.mark.parametrize("ndim", [1, 2])
def test_tiny_gradients_without_direction_stay_in_float32(ndim):
    torch.manual_seed(0)
    model = TwoParts(1e-7, ndim)
    assert not any(steps_that_move(model, wn.optim.Signum(model, lr=1e-3), False, 200))


def test_the_size_alone_decides_at_the_level():
    torch.manual_seed(0)
    level = rounding_level(torch.float32)
    for share, moves in ((0.9 * level, False), (1.1 * level, True)):
        model = TwoParts(0.0)
        optimizer = wn.optim.Signum(model, lr=1e-3)
        model.weight.grad, model.bias.grad = torch.ones(6, 6), torch.full((6,), share)
        before = model.bias.detach().clone()
        optimizer.step()
        assert bool((model.bias != before).all()) == moves


@pytest.mark.parametrize("optimizer", [wn.Scion, wn.optim.Signum])
def test_a_training_without_errors_is_bit_for_bit_that_of_the_formula(optimizer, monkeypatch):
    def trained():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        train(model, optimizer(model, lr=0.01), shifted_tokens, torch.float32, 40)
        return [p.detach().clone() for p in model.parameters()]

    judged = trained()
    monkeypatch.setattr("wellnormed.optim.rounding.doubtful_sizes", lambda sizes, parameters: {})
    assert all(torch.equal(p, q) for p, q in zip(judged, trained(), strict=True))


def test_a_layer_of_its_own_is_never_judged():
    """Vanishing gradients of deep layers are not errors: only parameters of one module are compared."""
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = wn.Scion(layers, lr=0.1)
    before = layers[0].weight.detach().clone()
    layers[0].weight.grad, layers[1].weight.grad = 1e-12 * torch.eye(4), torch.eye(4)
    optimizer.step()
    assert not torch.equal(layers[0].weight, before)


def test_a_gradient_of_zero_leaves_a_parameter_to_its_momentum():
    model = TwoParts(1.0)
    optimizer = wn.optim.Signum(model, lr=0.1)
    model.weight.grad, model.bias.grad = torch.ones(6, 6), torch.zeros(6)
    before = model.bias.detach().clone()
    optimizer.step()
    assert torch.equal(model.bias, before)
    model.bias.grad = torch.ones(6)
    optimizer.step()
    moving = model.bias.detach().clone()
    model.bias.grad = torch.zeros(6)
    optimizer.step()
    assert (model.bias != moving).all()


def test_what_is_known_of_the_signs_is_saved():
    """Bit for bit, and in the middle of the time that a persistent gradient needs."""
    torch.manual_seed(0)
    one = TwoParts(1e-12)
    first = wn.optim.Signum(one, lr=1e-3)
    steps_that_move(one, first, True, 30)
    other = copy.deepcopy(one)
    second = wn.optim.Signum(other, lr=1e-3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert steps_that_move(one, first, True, 30) == steps_that_move(other, second, True, 30)
    assert torch.equal(one.bias, other.bias)
    assert all(
        torch.equal(first.state[p][key], second.state[q][key])
        for p, q in zip(one.parameters(), other.parameters(), strict=True)
        for key in first.state[p]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fair_coin_shows_a_direction_with_the_probability_of_a_rounding(dtype):
    """Hoeffding: exp(-x^2 / (2 sum of squared weights)) at x = 1/2, for weights (1 - b) b^k."""
    b = memory_of_signs(dtype)
    squares = (1 - b) ** 2 / (1 - b**2)
    assert math.exp(-0.125 / squares) == pytest.approx(torch.finfo(dtype).eps / 2, rel=1e-9)  # float64 algebra
