"""Layers that are made for tokens: attention, positions, averages, recurrence; moves and selection."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed.nn as wnn
from campaigns.random_models.draw import Draw, Layer, Shape, layer
from campaigns.random_models.entries import by_head, eps_of, joined

# ---------------------------------------------------------------- attention


def _interleaved_rotation(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    a, b, c, s = x[..., ::2], x[..., 1::2], angle.cos().to(x), angle.sin().to(x)
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


@layer("attention", 3)
def _attention(draw: Draw, shape: Shape) -> nn.Module:
    """Projections, what is done to queries and keys, masks, scales and spellings, each drawn."""
    heads, size, tokens = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4, 6]), shape[1]
    shared = draw.divisor(heads) if draw.chance(0.3) else heads
    fused = draw.choice(["apart", "apart", "chunks", "by head", "transposed", "qk"])
    value = size if fused != "apart" or draw.chance(0.7) else draw.whole(1, 6)
    if fused in ("by head", "transposed", "chunks"):
        shared = heads
    width, bias = shape[-1], draw.chance()
    if fused == "apart":
        widths = {"q": heads * size, "k": shared * size, "v": shared * value}
    elif fused == "qk":
        widths = {"qk": (heads + shared) * size, "v": shared * value}
    else:
        widths = {"qkv": 3 * heads * size}
    parts: dict[str, Any] = {n: draw.fill(nn.Linear(width, w, bias=bias)) for n, w in widths.items()}
    if fused == "transposed":
        parts = {"w": draw.matrix(width, 3 * heads * size)}
    turn = draw.choice(["", "", "", "rotary", "interleaved", "ball", "norm", "unit"])
    turn = "" if size % 2 and turn in ("rotary", "interleaved") else turn
    if turn == "rotary":
        parts["turn"] = wnn.Rotary(size)
    if turn == "ball":
        parts["turn"] = wnn.BallProjection(draw.between(0.1, 3.0))
    eps = eps_of(draw)
    mask = draw.choice(["", "", "causal", "flags", "bias", "relative"])
    if mask == "flags":
        parts["mask"] = (draw.tensor(tokens, tokens, size=1.0) > 0) | torch.eye(tokens, dtype=torch.bool)
    if mask == "bias":
        parts["mask"] = draw.tensor(tokens, tokens)
    if mask == "relative":
        parts["mask"] = draw.tensor(heads, tokens, size=1.0)
    scale = draw.choice([None, None, 1.0 / size, draw.between(0.1, 3.0), -draw.between(0.1, 3.0)])
    spelled, group = draw.chance(0.3), draw.chance()
    order = draw.choice(["", "", "", "first token asks", "values reversed", "keys reversed"])
    if draw.chance():
        parts["out"] = draw.fill(nn.Linear(heads * value, width if draw.chance() else draw.width(), bias=draw.chance()))

    def project(s: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if fused == "apart":
            return by_head(s.q(x), heads), by_head(s.k(x), shared), by_head(s.v(x), shared)
        if fused == "qk":
            q, k = s.qk(x).split([heads * size, shared * size], -1)
            return by_head(q, heads), by_head(k, shared), by_head(s.v(x), shared)
        if fused == "by head":
            q, k, v = s.qkv(x).unflatten(-1, (heads, 3, size)).permute(3, 0, 2, 1, 4)
            return q, k, v
        q, k, v = ((x @ s.w) if fused == "transposed" else s.qkv(x)).chunk(3, -1)
        return by_head(q, heads), by_head(k, heads), by_head(v, heads)

    def turned(s: Any, x: Tensor) -> Tensor:
        if turn in ("rotary", "ball"):
            return s.turn(x)
        if turn == "interleaved":
            return _interleaved_rotation(x)
        if turn == "norm":
            return F.rms_norm(x, (size,), eps=eps)
        return F.normalize(x, dim=-1, eps=max(eps, 1e-3)) if turn == "unit" else x

    def function(s: Any, x: Tensor) -> Tensor:
        q, k, v = project(s, x)
        q, k = turned(s, q), turned(s, k)
        if order == "first token asks":
            q = q[..., :1, :]
        if order == "values reversed":
            v = v.flip(-2)
        if order == "keys reversed":
            k, v = k.flip(-2), v.flip(-2)
        rows = q.shape[-2]
        causal = mask == "causal" and rows == tokens
        added = None
        if mask in ("flags", "bias"):
            added = s.mask[:rows]
        elif mask == "relative":
            position = torch.arange(tokens)
            distance = (position[:, None] - position[None, :])[:rows]
            added = s.mask[:, distance.clamp(min=0)]
            added = added.masked_fill(distance < 0, -math.inf)
        if shared != heads and (spelled or group):
            k, v = (t.repeat_interleave(heads // shared, 1) for t in (k, v))
        if spelled:
            logits = q @ k.mT * (size**-0.5 if scale is None else scale)
            if causal:
                logits = logits.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
            elif added is not None:
                added = torch.where(added, 0.0, -math.inf) if added.dtype == torch.bool else added
                logits = logits + added
            y = torch.softmax(logits, -1) @ v
        else:
            grouped = shared != heads and not group
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None if added is None else added if added.dtype == torch.bool else added.to(q),
                is_causal=causal, scale=scale, enable_gqa=grouped,
            )  # fmt: skip
        y = joined(y)
        return s.out(y) if "out" in parts else y

    return Layer(function, **parts)


@layer("attention", 3)
def _multihead_attention(draw: Draw, shape: Shape) -> nn.Module:
    settings = {"bias": draw.chance(), "add_bias_kv": draw.chance(0.2), "add_zero_attn": draw.chance(0.2)}
    inner = nn.MultiheadAttention(shape[-1], draw.divisor(shape[-1]), batch_first=True, **settings)
    weights = draw.chance()
    return Layer(lambda s, x: s.inner(x, x, x, need_weights=weights)[0], inner=draw.fill(inner))


@layer("attention", 3)
def _encoder_layer(draw: Draw, shape: Shape) -> nn.Module:
    settings: dict[str, Any] = {"norm_first": draw.chance(), "activation": draw.choice(["relu", "gelu"])}
    settings |= {"bias": draw.chance(), "layer_norm_eps": eps_of(draw), "batch_first": True}
    return draw.fill(nn.TransformerEncoderLayer(shape[-1], draw.divisor(shape[-1]), draw.width(32), **settings))


@layer("attention", 3)
def _causal_attention(draw: Draw, shape: Shape) -> nn.Module | None:
    heads = draw.divisor(shape[-1])
    q, k, v = (draw.fill(wnn.HeadProjection(shape[-1], heads)) for _ in range(3))
    attend = wnn.CausalAttention(heads, draw.between(0.1, 5.0), shape[1] + 1, draw.chance())
    parts = {"q": q, "k": k, "v": v, "attend": draw.fill(attend), "merge": wnn.MergeHeads()}
    return Layer(lambda s, x: s.merge(s.attend(s.q(x), s.k(x), s.v(x))), **parts)


@layer("attention", 3)
def _attention_without_projections(draw: Draw, shape: Shape) -> nn.Module:
    heads, scale, causal = draw.divisor(shape[-1]), draw.between(0.1, 3.0), draw.chance()

    def function(_: Any, x: Tensor) -> Tensor:
        y = by_head(x, heads)
        return joined(F.scaled_dot_product_attention(y, y, y, is_causal=causal, scale=scale))

    return Layer(function)


@layer("attention", 4)
def _attention_of_pixels(draw: Draw, shape: Shape) -> nn.Module:
    inner = _attention(draw, (shape[0], shape[2] * shape[3], shape[1]))
    return Layer(lambda s, x: s.inner(x.flatten(2).mT).mT, inner=inner)


@layer("softmax")
def _softmax(draw: Draw, shape: Shape) -> nn.Module:
    axis, steepness = draw.whole(1, len(shape) - 1), draw.between(0.3, 10.0)
    return Layer(lambda s, x: torch.softmax(steepness * x, axis))


@layer("softmax")
def _log_softmax(draw: Draw, shape: Shape) -> nn.Module:
    axis, steepness = draw.whole(1, len(shape) - 1), draw.between(0.3, 10.0)
    return Layer(lambda s, x: torch.log_softmax(steepness * x, axis))


# ---------------------------------------------------------------- positions, potentials, averages


@layer("position", 3, 4)
def _position_vectors(draw: Draw, shape: Shape) -> nn.Module:
    return draw.fill(wnn.PositionEmbedding(shape[-2] + 1, shape[-1], draw.choice([0.1, 0.5, 1.0])))


@layer("position", 3)
def _position_mixing(draw: Draw, shape: Shape) -> nn.Module:
    return draw.fill(wnn.PositionAverages(shape[1] + draw.whole(0, 2), shape[-1], draw.whole(1, 8)))


@layer("position", 3, 4)
def _rotary_positions(draw: Draw, shape: Shape) -> nn.Module | None:
    return wnn.Rotary(shape[-1], draw.between(2.0, 1e4)) if shape[-1] % 2 == 0 else None


@layer("position")
def _added_constants(draw: Draw, shape: Shape) -> nn.Module:
    kept = tuple(n if draw.chance() else 1 for n in shape[1:])
    return Layer(lambda s, x: x + s.c, c=draw.tensor(*kept))


@layer("potential")
def _convex_potential(draw: Draw, shape: Shape) -> nn.Module:
    return draw.fill(wnn.ConvexPotential(shape[-1], draw.width(32)))


@layer("potential")
def _convex_potential_spelled(draw: Draw, shape: Shape) -> nn.Module:
    factor = draw.choice([0.1, 1.0, 2.0, -0.5])
    parts = {"w": draw.matrix(draw.width(32), shape[-1]), "b": draw.tensor(1)}
    return Layer(lambda s, x: x - F.linear(F.relu(F.linear(x, s.w)) * factor, s.w.t()), **parts)


@layer("average", 3, 4)
def _matrix_of_tokens(draw: Draw, shape: Shape) -> nn.Module:
    return Layer(lambda s, x: s.p @ x, p=draw.matrix(draw.width(8), shape[-2]))


@layer("average", 3)
def _matrices_of_tokens(draw: Draw, shape: Shape) -> nn.Module:
    p = torch.stack([draw.matrix(shape[1], shape[1]) for _ in range(draw.whole(1, 4))])
    return Layer(lambda s, x: joined(s.p @ x[:, None]), p=p)


@layer("average")
def _less_the_mean(draw: Draw, shape: Shape) -> nn.Module:
    axes, factor = tuple(a for a in range(1, len(shape)) if draw.chance()) or (1,), draw.choice([1.0, 0.5, -1.0])
    return Layer(lambda s, x: x - factor * x.mean(axes, keepdim=True))


@layer("average", 3, 4, 5)
def _mean_or_sum(draw: Draw, shape: Shape) -> nn.Module:
    axis, keep, total = draw.whole(1, len(shape) - 1), draw.chance(), draw.chance()
    return Layer(lambda s, x: x.sum(axis, keepdim=keep) if total else x.mean(axis, keepdim=keep))


@layer("average", 3)
def _causal_mean(draw: Draw, shape: Shape) -> nn.Module:
    share = torch.ones(shape[1], shape[1]).tril()
    return Layer(lambda s, x: s.p @ x, p=share / share.sum(-1, keepdim=True))


@layer("average", 3)
def _mixing_of_tokens(draw: Draw, shape: Shape) -> nn.Module:
    inner = draw.fill(nn.Linear(shape[1], draw.width(8), bias=draw.chance()))
    return Layer(lambda s, x: s.inner(x.mT).mT, inner=inner)


# ---------------------------------------------------------------- moves


def _moves(draw: Draw, shape: Shape, axis: int) -> dict[str, Callable[[Tensor], Tensor]]:
    size, last = shape[axis], len(shape) - 1
    start, shift = draw.whole(0, size - 1), draw.whole(1, 3)
    order = [draw.whole(0, size - 1) for _ in range(draw.whole(1, size))]
    a, b = (draw.whole(1, last) for _ in range(2))
    return {
        "slice": lambda x: x.narrow(axis, start, size - start),
        "strided slice": lambda x: x[..., start % x.shape[-1] :: 2],
        "flip": lambda x: x.flip(axis), "roll": lambda x: x.roll(shift, axis), "transpose": lambda x: x.transpose(a, b),
        "repeat": lambda x: torch.cat([x, x], axis), "interleave": lambda x: x.repeat_interleave(2, axis),
        "index": lambda x: x.index_select(axis, torch.tensor(order)), "pad": lambda x: F.pad(x, (shift, 1)),
        "pad with a number": lambda x: F.pad(x, (1, shift), value=-1.5),
        "windows": lambda x: x.unfold(-1, 2, 1).flatten(-2),
        "difference": lambda x: x.narrow(axis, 1, size - 1) - x.narrow(axis, 0, size - 1), "tril": lambda x: x.tril(),
        "concatenation": lambda x: torch.cat([x, torch.tanh(x), 2 * x.flip(axis)], axis),
        "stack": lambda x: torch.stack([x, x.relu()], axis).flatten(axis, axis + 1),
        "halves": lambda x: torch.cat(x.chunk(2, axis)[::-1], axis), "sum of copies": lambda x: x + x.flip(axis) * 0.5,
        "filled": lambda x: x.masked_fill(torch.eye(*x.shape[-2:]).bool(), 0.75),
        "where": lambda x: torch.where(torch.ones(x.shape[-1]).cumsum(0) % 2 == 1, 2 * x, -1.0),
        "overwritten slice": lambda x: torch.slice_scatter(x, x.narrow(axis, 0, 1).relu(), axis, size - 1, size),
        "mean of parts": lambda x: (x.narrow(axis, 0, size - 1) + x.narrow(axis, 1, size - 1)) / 2,
    }  # fmt: skip


for _name in _moves(Draw(0, 0), (1, 4, 4), 1):

    def _move(draw: Draw, shape: Shape, name: str = _name) -> nn.Module:
        function = _moves(draw, shape, draw.whole(1, len(shape) - 1))[name]
        return Layer(lambda s, x: function(x))

    layer("move", name=_name)(_move)


@layer("move", 3)
def _class_token(draw: Draw, shape: Shape) -> nn.Module:
    token = draw.tensor(1, 1, shape[-1])
    return Layer(lambda s, x: torch.cat([s.token.expand(len(x), -1, -1), x], 1), token=token)


# ---------------------------------------------------------------- selection


def _selections(draw: Draw, shape: Shape) -> dict[str, Callable[[Tensor], Tensor]]:
    axis, down = draw.whole(1, len(shape) - 1), draw.chance()
    return {
        "sort": lambda x: x.sort(axis, descending=down).values, "amax": lambda x: x.amax(axis, keepdim=True),
        "less the largest": lambda x: x - x.amax(axis, keepdim=True), "min": lambda x: x.min(-1, keepdim=True).values,
        "maxout": lambda x: x.unflatten(-1, (-1, 2)).amax(-1), "maximum": lambda x: torch.maximum(x, 1 - x.flip(axis)),
        "minimum": lambda x: torch.minimum(x, 0.3 * torch.ones(x.shape[-1])), "pairs sorted":
        lambda x: x.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2),
        "max and min": lambda x: torch.cat([x.amax(axis, keepdim=True), x.amin(axis, keepdim=True)], axis),
    }  # fmt: skip


for _name in _selections(Draw(0, 0), (1, 4, 4)):

    def _selection(draw: Draw, shape: Shape, name: str = _name) -> nn.Module:
        function = _selections(draw, shape)[name]
        return Layer(lambda s, x: function(x))

    layer("selection", name=_name)(_selection)


# ---------------------------------------------------------------- recurrence


def _recurrent(name: str, kind: Callable[..., nn.Module]) -> None:
    @layer("recurrence", 3, name=name)
    def build(draw: Draw, shape: Shape) -> nn.Module | None:
        if shape[1] > 4:
            return None
        settings = {"num_layers": draw.whole(1, 2), "bidirectional": draw.chance(0.3), "bias": draw.chance(0.8)}
        inner = kind(shape[-1], draw.width(12), batch_first=True, **settings)
        return Layer(lambda s, x: s.inner(x)[0], inner=draw.fill(inner))

    _ = build


_recurrent("lstm", nn.LSTM)
_recurrent("gru", nn.GRU)
_recurrent("rnn", nn.RNN)
_recurrent("rnn with relu", lambda *sizes, **settings: nn.RNN(*sizes, nonlinearity="relu", **settings))


@layer("recurrence", 2)
def _cell(draw: Draw, shape: Shape) -> nn.Module:
    kind = draw.choice([nn.LSTMCell, nn.GRUCell])
    inner = draw.fill(kind(shape[-1], draw.width(12)))
    return Layer(lambda s, x: s.inner(x)[0] if kind is nn.LSTMCell else s.inner(x), inner=inner)
