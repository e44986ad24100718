"""Joint gradient search over the weights and inputs of one attention layer, for the tests of its bounds.

Written with plain softmax, so it shares no code with the layers and rules it tests. Shape suffixes: N
searches at once, T tokens, D width, H heads, K entries of a head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed.certificates.search import rms


@dataclass(frozen=True)
class Layer:
    heads: int
    width: int
    scale: float = 1.0
    radius: float = 1.0
    per_head: bool = True
    """Caps on every head's slice (RMS -> RMS) instead of the whole matrix."""
    query_cap: float = 1.0
    key_cap: float = 1.0
    value_cap: float = 1.0
    query_radius: float = math.inf
    key_radius: float = math.inf
    value_radius: float = math.inf
    rotary: bool = False
    """Turn queries and keys by their position."""

    def weights(self, raw_N3DD: Tensor) -> Tensor:
        """Raw numbers -> matrices whose norms are exactly at their caps."""
        caps = torch.tensor([self.query_cap, self.key_cap, self.value_cap], dtype=raw_N3DD.dtype)
        if self.per_head:
            slices = raw_N3DD.unflatten(-2, (self.heads, -1))
            unit = math.sqrt(1 / self.heads)  # sqrt(K / D): singular value of a slice of norm 1
            slices = slices / torch.linalg.matrix_norm(slices, 2)[..., None, None] * unit
            return slices.flatten(-3, -2) * caps[:, None, None]
        return raw_N3DD / torch.linalg.matrix_norm(raw_N3DD, 2)[..., None, None] * caps[:, None, None]

    def __call__(self, weights_N3DD: Tensor, x_NTD: Tensor) -> Tensor:
        """Heads side by side, `(N, T, D)`."""
        q, k, v = ((x_NTD @ weights_N3DD[:, i].mT).unflatten(-1, (self.heads, -1)).transpose(1, 2) for i in range(3))
        q, k, v = (_ball(q, self.query_radius), _ball(k, self.key_radius), _ball(v, self.value_radius))
        if self.rotary:
            q, k = _turned(q), _turned(k)
        weights = torch.softmax(self.scale / q.shape[-1] * q @ k.mT, -1)
        return (weights @ v).transpose(1, 2).flatten(2)


def _ball(x: Tensor, radius: float) -> Tensor:
    return x if radius == math.inf else x * (radius / rms(x)).clamp(max=1.0)


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[-2], dtype=x.dtype)
    angle = position[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


@dataclass(frozen=True)
class Found:
    gain: float
    weights_3DD: Tensor
    x_TD: Tensor


def largest_gain(layer: Layer, tokens: int, steps: int, searches: int = 8) -> Found:
    """Adam ascent on the gain of the first output token, jointly over weights, input and output direction."""
    generator, rate, d = torch.Generator().manual_seed(0), 0.05, layer.width

    def draw(*shape: int) -> Tensor:
        return torch.randn(searches, *shape, dtype=torch.float64, generator=generator).requires_grad_()

    raw, points, u = draw(3, d, d), draw(tokens, d), draw(d)
    optimizer = torch.optim.Adam([raw, points, u], lr=rate)
    best = Found(0.0, layer.weights(raw)[0].detach(), points[0].detach())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        weights = layer.weights(raw)
        x = points * (layer.radius / rms(points)).clamp(max=1.0)
        direction = u / torch.linalg.vector_norm(u, dim=-1, keepdim=True) / math.sqrt(d)
        (pulled,) = torch.autograd.grad((layer(weights, x)[:, 0] * direction).sum(), x, create_graph=True)
        # the largest <direction, J dx> over dx of RMS 1 at every token
        gain = torch.linalg.vector_norm(pulled, dim=-1).sum(-1) * math.sqrt(d)
        leader = int(gain.detach().argmax())
        if float(gain[leader].detach()) > best.gain:
            best = Found(float(gain[leader].detach()), *(each[leader].detach() for each in (weights, x)))
        optimizer.zero_grad()
        gain.clamp(min=1e-12).log().sum().neg().backward()
        optimizer.step()
    return best
