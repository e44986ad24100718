"""Near misses of the spelled-out functions: refused, or bounded as what they are."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wellnormed.certificates import certify
from wellnormed.program.errors import UncertifiableError

from .adversary import Net, attack

_WEIGHTS = list(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)))


def _mean_square(x: Tensor, dims: Any = -1, keepdim: bool = True) -> Tensor:
    return x.square().mean(dims, keepdim=keepdim)


def _norm(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)


def _potential(x: Tensor, factor: float, alpha: float = 1.0, weights: tuple[int, int] = (0, 0)) -> Tensor:
    w, v = (_WEIGHTS[i].to(x) for i in weights)
    v = w if weights[0] == weights[1] else v  # one tensor, as a module has it
    back = F.relu(F.linear(x, w)) * factor @ v
    return x - back if alpha == 1 else torch.sub(x, back, alpha=alpha)


def _added(x: Tensor, activation: Callable[[Tensor], Tensor], y: Tensor, sign: float = 1.0) -> Tensor:
    weight = _WEIGHTS[0].to(x)
    back = activation(F.linear(y, weight)) @ weight
    return x + 0.3 * back if sign > 0 else x - back * 0.3


def _attention(
    x: Tensor,
    *,
    dim: int = -1,
    mask: Callable[[Tensor], Tensor] = lambda logits: logits,
    scale: Callable[[Tensor], Any] = lambda x: 1.0,
    bias: float = 0.0,
) -> Tensor:
    shift = torch.tensor([bias, 0.0, 0.0, 0.0]).to(x)
    q, k, v = x, 0.5 * x + shift, x * torch.tensor([1.0, 2.0, -1.0, 1.0]).to(x)
    q, k, v = q[:, None], k[:, None], v[:, None]
    logits = mask(q @ k.mT) * scale(x)
    return (torch.softmax(logits, dim) @ v)[:, 0]


def _softmax(x, dim=-1, eps=0.0):
    weights = x.exp()
    return weights / (weights.sum(dim, keepdim=True) + eps)


_FIRST = torch.tensor([[False, True, True]])

NEAR_MISSES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "gate by another": (lambda x: x * torch.sigmoid(x.flip(-1)), 5.0),
    "gate without the factor": (lambda x: x * torch.sigmoid(x + 3), 5.0),
    "silu of a vector multiple": (lambda x: x * torch.sigmoid(torch.tensor([9.0, 1, -5, 2]).to(x) * x), 2.0),
    "mean over tokens": (lambda x: x * torch.rsqrt(_mean_square(x, 1) + 0.01), 1.0),
    "mean over no axes, which is over all": (lambda x: x * torch.rsqrt(x.square().mean((), keepdim=True) + 0.01), 1.0),
    "not kept": (lambda x: x * torch.rsqrt(_mean_square(x, -1, False)[:, :1, None] + 0.01), 1.0),
    "mean square about another mean": (
        lambda x: (x - x.mean(-1, True)) * torch.rsqrt(_mean_square(x - x.mean(1, True)) + 0.01),
        1.0,
    ),
    "sum with a product of the input's own": (
        lambda x: torch.softmax(torch.baddbmm(20 * (x @ x.mT).square(), x, x.mT), -1) @ x,
        1.0,
    ),
    "root outside": (lambda x: x / (torch.sqrt(_mean_square(x)) + 0.01), 1.0),
    "root without a floor": (lambda x: x * torch.rsqrt(_mean_square(x)), 1.0),
    "negative eps": (lambda x: x * torch.rsqrt(_mean_square(x) - 0.01), 1.0),
    "reciprocal without a root": (lambda x: x / (_mean_square(x) + 0.01), 1.0),
    "sum of squares": (lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 0.01), 1.0),
    "ball from the other side": (lambda x: x * torch.rsqrt(_mean_square(x).clamp(max=1)), 3.0),
    "ball of a negative scale": (lambda x: x * torch.rsqrt((_mean_square(x) * -1.0).clamp(min=1)), 3.0),
    "unit in another norm": (lambda x: F.normalize(x, p=1.0, dim=-1, eps=0.2), 1.0),
    "unit without a floor": (lambda x: x / x.norm(dim=-1, keepdim=True), 1.0),
    "unit with a ceiling": (lambda x: x / x.norm(dim=-1, keepdim=True).clamp(max=0.2), 1.0),
    "unit over no axes": (lambda x: x / torch.linalg.vector_norm(x, dim=None, keepdim=True).clamp(min=0.2), 1.0),
    "unit of a negative share": (lambda x: x / (_norm(x) * -1.0 + 0.2), 1.0),
    "negative radius": (lambda x: x * (-2.0 / _norm(x)).clamp(max=1), 1.0),
    "deviation about another mean": (lambda x: (x - x.mean(1, True)) / (x.std(-1, keepdim=True) + 0.1), 1.0),
    "deviation without its mean": (lambda x: x / (x.std(-1, keepdim=True) + 0.1), 1.0),
    "slope by another's sign": (lambda x: torch.where(x.flip(-1) > 0, x, 0.1 * x), 1.0),
    "slope from another point": (lambda x: torch.where(x > 1, x, 0.1 * x), 3.0),
    "gelu with another root": (lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))), 3.0),
    "potential of two weights": (lambda x: _potential(x, 0.3, weights=(0, 1)), 1.0),
    "potential of a negative factor": (lambda x: _potential(x, -0.3), 1.0),
    "potential with alpha": (lambda x: _potential(x, 0.1, 9.0), 1.0),
    "potential with negative alpha": (lambda x: _potential(x, 0.1, -9.0), 1.0),
    "potential, added": (lambda x: _added(x, F.relu, x), 1.0),
    "potential by gelu": (lambda x: _added(x, F.gelu, x, -1.0), 1.0),
    "softmax over queries": (lambda x: _attention(x, dim=-2), 1.0),
    "mask of the input": (lambda x: _attention(x, mask=lambda s: s.masked_fill(s > 1, -1e9)), 1.0),
    "bias of the input": (lambda x: _attention(x, mask=lambda s: s + 20 * s.square()), 1.0),
    "scale of the input": (lambda x: _attention(x, scale=lambda x: x[:, :1, None, :1]), 2.0),
    "negative scale": (lambda x: _attention(x, scale=lambda x: -3.0), 1.0),
    "temperature by token": (lambda x: _attention(x, scale=lambda x: torch.tensor([1.0, 9, 1])[:, None].to(x)), 1.0),
    "logits filled with zero": (lambda x: _attention(x, mask=lambda s: s.masked_fill(_FIRST, 0.0), bias=9.0), 1.0),
    "logits replaced": (lambda x: _attention(x, mask=lambda s: torch.where(~_FIRST, s, -1.0), bias=9.0), 1.0),
    "logits filled, and the fill made small": (
        lambda x: _attention(x, mask=lambda s: (1e31 * s).masked_fill(_FIRST, -1e31), scale=lambda x: 1e-31, bias=9.0),
        1.0,
    ),
    "softmax less another axis's largest": (lambda x: _softmax(x - x.amax(1, keepdim=True)), 1.0),
    "softmax along two axes": (lambda x: _softmax(x, (1, 2)), 1.0),
    "softmax and a large eps": (lambda x: _softmax(x - x.amax(-1, keepdim=True), eps=2.0), 1.0),
    "softmax and eps, less the largest of two axes": (lambda x: _softmax(x - x.amax((1, 2), True), eps=0.1), 3.0),
    "logits squashed": (lambda x: _attention(x, mask=lambda s: 2 * torch.tanh(3 * s)), 1.0),
}

REFUSED = {
    "not kept", "mean square about another mean", "root without a floor",
    "negative eps", "reciprocal without a root", "ball from the other side", "ball of a negative scale",
    "unit in another norm", "unit without a floor", "unit with a ceiling", "mask of the input",
    "deviation about another mean",
    "deviation without its mean", "slope by another's sign", "slope from another point",
    "negative radius", "unit of a negative share", "softmax less another axis's largest", "softmax along two axes",
    "softmax and eps, less the largest of two axes",
}  # fmt: skip
"""Which have no bound; the others have one, and are attacked."""
QUICK = {
    "gate by another", "mean over tokens", "not kept", "negative eps", "unit with a ceiling",
    "gelu with another root", "potential with negative alpha", "softmax over queries",
    "mean over no axes, which is over all", "mean square about another mean", "potential of a negative factor",
    "logits filled with zero", "logits filled, and the fill made small",
    "logits replaced", "unit over no axes", "softmax less another axis's largest", "softmax along two axes",
    "softmax and a large eps", "softmax and eps, less the largest of two axes",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NEAR_MISSES]
)
def test_near_misses_are_refused_or_bounded_as_what_they_are(name):
    function, radius = NEAR_MISSES[name]
    example = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    # many tokens show what mixes them; a long first one and short others what depends on the longest
    uneven = torch.full((1, 3, 4), 0.05).index_fill(1, torch.tensor([0]), 1.0)
    if "no axes" in name:
        example, uneven = torch.randn(1, 400, 2), torch.full((1, 400, 2), 0.005).index_fill(1, torch.tensor([0]), 0.1)
    with pytest.raises(UncertifiableError) if name in REFUSED else nullcontext():
        attack(Net(lambda _, x: function(x)), example, radius, steps=8, restarts=1, starts=(uneven * radius,))


_CENTRED = lambda x: x - x.mean(-1, keepdim=True)  # noqa: E731
SPELLED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "deviation and eps": (lambda x: _CENTRED(x) / (x.std(-1, keepdim=True) + 0.1), 10.0),
    "deviation of all entries": (lambda x: _CENTRED(x) / (x.std(-1, False, keepdim=True) + 0.1), 10.0),
    "variance": (lambda x: _CENTRED(x) / torch.sqrt(x.var(-1, keepdim=True) + 0.01), 10.0),
    "variance of entries": (lambda x: _CENTRED(x) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 0.01), 10.0),
    "norm and eps": (lambda x: x / (_norm(x) + 0.1), 10.0),
    "times a reciprocal": (lambda x: x * (1 / (_norm(x) + 0.1)), 10.0),
    "root mean square and eps": (lambda x: x / (x.square().mean(-1, keepdim=True).sqrt() + 0.1), 10.0),
    "share of a norm and eps": (lambda x: x / (_norm(x) * 4**-0.5 + 0.1), 10.0),
    "norm over a number and eps": (lambda x: x / (_norm(x) / 2 + 0.1), 10.0),
    "squares and eps": (lambda x: x / torch.sqrt(x.square().sum(-1, keepdim=True) + 0.01), 10.0),
    "ball by a reciprocal": (lambda x: x * (0.3 / _norm(x)).clamp(max=1.0), 1.0),
    "softsign": (lambda x: x / (1 + x.abs()), 1.0),
    "leaky": (lambda x: torch.where(x > 0, x, 0.1 * x), 1.0),
    "softmax": (lambda x: _softmax(x[..., :2] - x[..., :2].amax(-1, keepdim=True)), 0.5),
    "softmax, less the largest of two axes": (lambda x: _softmax((y := x[..., :2]) - y.amax((-2, -1), True)), 0.5),
    "softmax of no difference": (lambda x: _softmax(x[..., :2]), 0.5),
    "softmax and eps": (lambda x: _softmax((y := x[..., :2]) - y.amax(-1, True), eps=2.0**-20), 0.5 + 2.0**-20),
    "steeper below": (lambda x: torch.where(x <= 0, -3.0 * x, x), 3.0),
}
"""Forms that models spell out, and their constants."""


@pytest.mark.parametrize("name", SPELLED)
def test_spelled_out_functions_have_their_constant(name):
    function, constant = SPELLED[name]
    model, example = Net(lambda _, x: function(x)), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    certificate = certify(model, example, radius=2.0)
    assert certificate.lipschitz == pytest.approx(constant, rel=1e-12)
    assert certificate.lipschitz >= constant * (1 - 1e-15)
    # from short vectors to long ones: where a floor is all, and where it is nothing
    sizes = torch.logspace(-4, 0, 50, dtype=torch.float64)[:, None, None]
    x = 2 * sizes * F.normalize(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(1)), dim=-1)
    jacobian = torch.func.vmap(torch.func.jacrev(function))(x[:, :1].double()).flatten(1, 3).flatten(2)
    found = float(torch.linalg.matrix_norm(jacobian, 2).max())
    assert 0.95 * constant < found <= constant * (1 + 1e-9)
    largest = max(float(row.bounds.radius.max()) for row in certificate.rows[-1:])
    assert float(function(x).norm(dim=-1).max()) <= largest


@pytest.mark.parametrize(("radius", "idle"), [(0.99999999, False), (1.0, False), (1.00000001, True)])
def test_a_ball_by_a_reciprocal_is_idle_only_where_nothing_leaves_it(radius, idle):
    def ball(x):
        return x * (2 * radius / _norm(x)).clamp(max=1)  # vectors of RMS 1 have the norm 2

    model = Net(lambda _, x: ball(F.linear(x, torch.eye(4))))
    names = {row.operation for row in certify(model, torch.randn(1, 3, 4)).rows}
    assert ("idle_ball" in names, "ball" in names) == (idle, not idle)


@cache
def _without_a_mask():
    example = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    return certify(Net(lambda _, x: _attention(x, bias=9.0)), example).lipschitz


_LOW = torch.tensor([[-1e30, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("mask", "refused"),
    [
        (lambda s: (s + _LOW).masked_fill(_FIRST, -1e30), True),
        (lambda s: s.masked_fill(_FIRST, -1e30) + _LOW, True),
        (lambda s: torch.where(~_FIRST, 1e10 * (s + 1e-10 * _LOW), -1e30), True),
        (lambda s: torch.baddbmm(_LOW[None], s, torch.eye(3)[None]).masked_fill(_FIRST, -1e30), True),
        (lambda s: (s + _LOW).masked_fill(_FIRST, -math.inf), False),
        (lambda s: (s + 3 * _FIRST.float()).masked_fill(_FIRST, -1e30), False),
        (lambda s: s + _LOW, False),
    ],
)
def test_what_is_added_to_logits_may_not_be_as_low_as_what_masks_them(mask, refused):
    """Where all others are as low, a masked logit takes part, and what the keys share no longer cancels."""
    model = Net(lambda _, x: _attention(x, mask=mask, bias=9.0))
    example = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    if refused:
        with pytest.raises(UncertifiableError):
            certify(model, example)
    else:
        assert certify(model, example).lipschitz == _without_a_mask()
