"""Small random models over all operations that a certificate bounds; model k of seed s is the same everywhere.

A model is a chain of layers, drawn one after another from those that fit the shape at hand: vectors `(B, D)`, tokens
`(B, T, D)`, images `(B, C, H, W)` and volumes. `benchmarks.soundness` attacks their certificates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed.nn as wnn

Shape = tuple[int, ...]
LARGEST = 1024
"""Entries of a tensor between two layers."""
EVERY = (2, 3, 4, 5)
"""Numbers of axes: vectors, tokens, images, volumes."""


class Draw:
    """Draws of one model, by NumPy, whose streams do not depend on the machine."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = np.random.default_rng([seed, number])
        self.products = 0
        """Products of two values so far: each squares the size of activations."""
        self.nested = 0

    def chance(self, probability: float = 0.5) -> bool:
        """Heads or tails."""
        return bool(self._random.random() < probability)

    def whole(self, low: int, high: int) -> int:
        """An integer of `low, ..., high`."""
        return int(self._random.integers(low, high + 1))

    def between(self, low: float, high: float) -> float:
        """A positive number, uniform in its logarithm."""
        return math.exp(self._random.uniform(math.log(low), math.log(high)))

    def width(self, high: int = 64) -> int:
        """An integer of `1, ..., high`, small ones more often."""
        return int(self.between(1.0, high + 0.999))

    def choice(self, options: Sequence[Any]) -> Any:
        """One of several."""
        return options[self.whole(0, len(options) - 1)]

    def divisor(self, number: int, high: int = 8) -> int:
        """A divisor of a number, not above `high`."""
        return self.choice([each for each in range(1, min(number, high) + 1) if number % each == 0])

    def tensor(self, *shape: int, size: float | None = None) -> Tensor:
        """Entries of random scale; with structure in one draw of three, for bounds are attained there."""
        size = self.between(0.05, 3.0) if size is None else size
        entries = self._random.standard_normal(shape)
        kind = self.choice(["normal"] * 8 + ["positive", "signs", "sparse", "rank one"])
        if kind == "positive":
            entries = np.abs(entries)
        elif kind == "signs":
            entries = np.where(entries < 0, -1.0, 1.0)
        elif kind == "sparse":
            entries = entries * (self._random.random(shape) < 0.3)
        elif kind == "rank one" and len(shape) == 2:
            entries = entries[:, :1] * entries[:1]
        return torch.from_numpy(entries * size).float()

    def matrix(self, rows: int, columns: int) -> Tensor:
        """A matrix whose norm is moderate whatever its shape."""
        return self.tensor(rows, columns, size=self.between(0.1, 3.0) / math.sqrt(max(rows, columns)))

    def fill(self, module: nn.Module) -> nn.Module:
        """The module in evaluation mode, with random weights, biases and statistics."""
        for name, each in module.named_parameters():
            fan = math.sqrt(each.numel() / each.shape[0]) if each.ndim > 1 else 1.0
            each.data = self.tensor(*each.shape, size=self.between(0.1, 3.0) / fan)
            if name.endswith("logits_HT"):
                each.data = self.tensor(*each.shape, size=self.between(0.3, 5.0))
        for name, each in module.named_buffers():
            if name.endswith("running_mean"):
                each.copy_(self.tensor(*each.shape))
            elif name.endswith("running_var"):
                each.copy_(self.tensor(*each.shape).abs() + self.between(1e-3, 1.0))
        return module.eval()


class Layer(nn.Module):
    """A function of its parts, which are tensors and modules, and its input."""

    def __init__(self, function: Callable[..., Tensor], /, **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


Builder = Callable[[Draw, Shape], nn.Module | None]
FAMILIES: dict[str, dict[str, tuple[Builder, tuple[int, ...]]]] = {}
"""Family -> name of a layer -> what draws it for a shape (None if it does not fit), and the numbers of axes."""


def layer(family: str, *ranks: int, name: str = "") -> Callable[[Builder], Builder]:
    """Decorate what draws a layer."""

    def register(build: Builder) -> Builder:
        label = name or build.__name__.strip("_").replace("_", " ")
        FAMILIES.setdefault(family, {})[label] = (build, ranks or EVERY)
        return build

    return register


def _plain(family: str, name: str, function: Callable[[Tensor], Tensor], *ranks: int) -> None:
    """A layer without parts."""
    layer(family, *ranks, name=name)(lambda draw, shape: Layer(lambda s, x: function(x)))


# ---------------------------------------------------------------- linear maps


@layer("linear")
def _linear(draw: Draw, shape: Shape) -> nn.Module:
    return draw.fill(nn.Linear(shape[-1], draw.width(), bias=draw.chance(0.7)))


@layer("linear")
def _matrix_from_the_right(draw: Draw, shape: Shape) -> nn.Module:
    return Layer(lambda s, x: x @ s.w, w=draw.matrix(shape[-1], draw.width()))


@layer("linear", 2)
def _addmm(draw: Draw, shape: Shape) -> nn.Module:
    width, beta, alpha = draw.width(), draw.between(0.3, 2.0), draw.between(0.3, 2.0)
    parts = {"w": draw.matrix(shape[-1], width), "b": draw.tensor(width)}
    return Layer(lambda s, x: torch.addmm(s.b, x, s.w, beta=beta, alpha=-alpha), **parts)


@layer("linear", 3)
def _einsum(draw: Draw, shape: Shape) -> nn.Module:
    return Layer(lambda s, x: torch.einsum("btd,ed->bte", x, s.w), w=draw.matrix(draw.width(), shape[-1]))


@layer("linear")
def _there_and_back(draw: Draw, shape: Shape) -> nn.Module:
    sign = draw.choice([1.0, -1.0])
    parts = {"w": draw.matrix(draw.width(), shape[-1]), "b": draw.tensor(shape[-1])}
    return Layer(lambda s, x: sign * F.linear(F.linear(x, s.w), s.w.t()) + s.b, **parts)


@layer("linear", 3)
def _matrix_per_head(draw: Draw, shape: Shape) -> nn.Module:
    heads, width = draw.divisor(shape[-1]), draw.width(8)
    w = torch.stack([draw.matrix(shape[-1] // heads, width) for _ in range(heads)])
    return Layer(lambda s, x: _joined(_heads(x, heads) @ s.w), w=w)


@layer("linear", 4)
def _linear_of_channels(draw: Draw, shape: Shape) -> nn.Module:
    inner = draw.fill(nn.Linear(shape[1], draw.width(8)))
    return Layer(lambda s, x: s.inner(x.movedim(1, -1)).movedim(-1, 1), inner=inner)


# ---------------------------------------------------------------- functions of single entries

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "abs": torch.abs, "relu6": F.relu6, "tanh": torch.tanh, "sin": torch.sin, "cos": torch.cos,
    "atan": torch.atan, "asinh": torch.asinh, "tanhshrink": F.tanhshrink, "softshrink": F.softshrink,
    "logsigmoid": F.logsigmoid, "sigmoid": torch.sigmoid, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
    "erf": torch.erf, "gelu": F.gelu, "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "mish": F.mish, "selu": F.selu, "hardtanh": F.hardtanh, "softplus": lambda x: -F.logsigmoid(-x),
    "gelu, spelled": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu by tanh, spelled": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}  # fmt: skip
for _name, _function in _ACTIVATIONS.items():
    _plain("activation", _name, _function)


def _with_number(name: str, low: float, high: float, function: Callable[[Tensor, float], Tensor]) -> None:
    """An activation with a setting, of either sign."""

    @layer("activation", name=name)
    def build(draw: Draw, shape: Shape) -> nn.Module:
        number = draw.between(low, high) * draw.choice([1.0, -1.0])
        return Layer(lambda s, x: function(x, number))

    _ = build


_with_number("leaky relu", 0.01, 3.0, F.leaky_relu)
_with_number("elu", 0.1, 3.0, F.elu)
_with_number("celu", 0.1, 3.0, lambda x, a: F.celu(x, abs(a)))
_with_number("silu, steep", 0.2, 5.0, lambda x, a: x * torch.sigmoid(a * x))
_with_number("clamp", 0.1, 3.0, lambda x, a: x.clamp(a - 0.5, a + 0.5))
_with_number("clamp below", 0.1, 3.0, lambda x, a: x.clamp(min=a))
_with_number("scaled gelu", 0.3, 5.0, lambda x, a: F.gelu(x * a) * (1.0 / a))
_with_number("negated and shifted", 0.1, 3.0, lambda x, a: a - x)
_with_number("scaled and divided", 0.1, 3.0, lambda x, a: x * a / 1.7)


@layer("activation")
def _prelu(draw: Draw, shape: Shape) -> nn.Module:
    return Layer(lambda s, x: F.prelu(x, s.w), w=draw.tensor(draw.choice([1, shape[1]])))


@layer("activation")
def _diagonal_scale(draw: Draw, shape: Shape) -> nn.Module:
    return Layer(lambda s, x: x * s.w + s.b, w=draw.tensor(shape[-1]), b=draw.tensor(shape[-1]))


# ---------------------------------------------------------------- gates and products


def _count_product(draw: Draw) -> bool:
    """Whether the model may still multiply two values."""
    draw.products += 1
    return draw.products <= 2


@layer("gate")
def _glu(draw: Draw, shape: Shape) -> nn.Module | None:
    axis = draw.choice([a for a in range(1, len(shape)) if shape[a] % 2 == 0] or [0])
    return Layer(lambda s, x: F.glu(x, axis)) if axis and _count_product(draw) else None


@layer("gate")
def _gated_unit(draw: Draw, shape: Shape) -> nn.Module | None:
    width, gate = draw.width(), draw.choice([F.silu, F.gelu, F.relu, torch.sigmoid, torch.tanh])
    bias, fused = draw.chance(), draw.chance()
    parts: dict[str, Any] = {"a": draw.fill(nn.Linear(shape[-1], 2 * width if fused else width, bias=bias))}
    if not fused:
        parts["b"] = draw.fill(nn.Linear(shape[-1], width, bias=bias))

    def function(s: Any, x: Tensor) -> Tensor:
        a, b = s.a(x).chunk(2, -1) if fused else (s.a(x), s.b(x))
        return gate(a) * b

    return Layer(function, **parts) if _count_product(draw) else None


@layer("gate")
def _column_gate(draw: Draw, shape: Shape) -> nn.Module | None:
    return Layer(lambda s, x: x * torch.sigmoid(x[..., :1])) if _count_product(draw) else None


@layer("gate", 4, 5)
def _channel_gate(draw: Draw, shape: Shape) -> nn.Module | None:
    ones = [1] * (len(shape) - 2)
    axes = tuple(range(2, len(shape)))
    inner = draw.fill(nn.Linear(shape[1], shape[1]))
    function = lambda s, x: x * torch.sigmoid(s.inner(x.mean(axes))).unflatten(-1, (-1, *ones))  # noqa: E731
    return Layer(function, inner=inner) if _count_product(draw) else None


for _name, _function, _ranks in (
    ("square", lambda x: x.square(), EVERY), ("power of two", lambda x: x * x, EVERY),
    ("product with the reverse", lambda x: x * x.flip(1), EVERY),
    ("gram", lambda x: x @ x.mT, (3, 4)), ("linear attention", lambda x: x @ (x.mT @ x), (3,)),
):  # fmt: skip
    layer("product", *_ranks, name=_name)(
        lambda draw, shape, function=_function: Layer(lambda s, x: function(x)) if _count_product(draw) else None
    )


# ---------------------------------------------------------------- residuals


def _same_shape(draw: Draw, shape: Shape) -> nn.Module:
    """A block that keeps the shape."""
    draw.nested += 1
    found: list[nn.Module] = []
    for _ in range(12):
        if draw.nested > 2:
            break
        one = draw_layer(draw, shape, draw.choice([f for f in _OFTEN if f != "space"]))
        if one is not None and one[2] == shape:
            found.append(one[1])
        if len(found) == draw.whole(1, 3):
            break
    draw.nested -= 1
    return nn.Sequential(*found) if found else draw.fill(nn.Linear(shape[-1], shape[-1]))


@layer("residual")
def _convex_residual(draw: Draw, shape: Shape) -> nn.Module:
    return wnn.ConvexResidual(_same_shape(draw, shape), float(draw.choice([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])))


@layer("residual")
def _plain_residual(draw: Draw, shape: Shape) -> nn.Module:
    alpha = draw.choice([1, 1, -1, 0.3])
    return Layer(lambda s, x: torch.add(x, s.block(x), alpha=alpha), block=_same_shape(draw, shape))


@layer("residual")
def _two_branches(draw: Draw, shape: Shape) -> nn.Module:
    a, b = _same_shape(draw, shape), _same_shape(draw, shape)
    return Layer(lambda s, x: 0.3 * s.a(x) - 0.7 * s.b(x) + x / 2, a=a, b=b)


@layer("residual")
def _orthogonal_join(draw: Draw, shape: Shape) -> nn.Module:
    join = wnn.OrthogonalJoin(shape[-1], draw.choice([0.1, 0.5, 0.9]))
    if draw.chance():
        draw.fill(join)
    return Layer(lambda s, x: s.join(x, s.block(x)), join=join, block=_same_shape(draw, shape))


@layer("residual")
def _scaled_branch(draw: Draw, shape: Shape) -> nn.Module:
    parts = {"block": _same_shape(draw, shape), "scale": draw.tensor(shape[-1])}
    return Layer(lambda s, x: x + s.scale * s.block(x), **parts)


@layer("residual")
def _difference(draw: Draw, shape: Shape) -> nn.Module:
    return Layer(lambda s, x: s.block(x) - s.block(x.flip(-1)), block=_same_shape(draw, shape))


# ---------------------------------------------------------------- normalisation and balls


def _eps(draw: Draw) -> float:
    return draw.choice([1e-5, 1e-3, 0.1, 1.0, draw.between(1e-5, 1.0)])


@layer("normalization")
def _layer_norm(draw: Draw, shape: Shape) -> nn.Module:
    last = draw.whole(1, len(shape) - 1)
    return draw.fill(nn.LayerNorm(list(shape[-last:]), eps=_eps(draw), elementwise_affine=draw.chance()))


@layer("normalization")
def _rms_norm(draw: Draw, shape: Shape) -> nn.Module:
    last = draw.whole(1, len(shape) - 1)
    return draw.fill(nn.RMSNorm(list(shape[-last:]), eps=_eps(draw), elementwise_affine=draw.chance()))


@layer("normalization")
def _rms_norm_spelled(draw: Draw, shape: Shape) -> nn.Module:
    eps, axis, form = _eps(draw), draw.whole(1, len(shape) - 1), draw.whole(0, 3)

    def function(_: Any, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(axis, keepdim=True) + eps
        forms = (
            lambda: x * torch.rsqrt(mean), lambda: x / torch.sqrt(mean), lambda: x * mean.pow(-0.5),
            lambda: x * mean.sqrt().reciprocal(),
        )  # fmt: skip
        return forms[form]()

    return Layer(function)


@layer("normalization")
def _unit_vectors(draw: Draw, shape: Shape) -> nn.Module:
    eps, axis = draw.choice([1e-3, 0.1, 1.0, 5.0]), draw.whole(1, len(shape) - 1)
    return Layer(lambda s, x: F.normalize(x, dim=axis, eps=eps))


@layer("normalization")
def _ball(draw: Draw, shape: Shape) -> nn.Module:
    return wnn.BallProjection(draw.between(0.1, 10.0))


@layer("normalization")
def _ball_along_an_axis(draw: Draw, shape: Shape) -> nn.Module:
    scale, axis = draw.between(0.01, 10.0), draw.whole(1, len(shape) - 1)
    return Layer(lambda s, x: x * (scale * x.square().mean(axis, keepdim=True)).clamp(min=1.0).rsqrt())


@layer("normalization", 3, 4, 5)
def _group_norm(draw: Draw, shape: Shape) -> nn.Module:
    return draw.fill(nn.GroupNorm(draw.divisor(shape[1]), shape[1], eps=_eps(draw), affine=draw.chance()))


@layer("normalization")
def _batch_norm(draw: Draw, shape: Shape) -> nn.Module:
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 2]
    return draw.fill(kind(shape[1], eps=_eps(draw), affine=draw.chance()))


@layer("normalization", 3, 4, 5)
def _instance_norm(draw: Draw, shape: Shape) -> nn.Module:
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(shape) - 3]
    return draw.fill(kind(shape[1], eps=_eps(draw), affine=draw.chance(), track_running_stats=draw.chance(0.3)))


# ---------------------------------------------------------------- attention


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


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
    eps = _eps(draw)
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
            return _heads(s.q(x), heads), _heads(s.k(x), shared), _heads(s.v(x), shared)
        if fused == "qk":
            q, k = s.qk(x).split([heads * size, shared * size], -1)
            return _heads(q, heads), _heads(k, shared), _heads(s.v(x), shared)
        if fused == "by head":
            q, k, v = s.qkv(x).unflatten(-1, (heads, 3, size)).permute(3, 0, 2, 1, 4)
            return q, k, v
        q, k, v = ((x @ s.w) if fused == "transposed" else s.qkv(x)).chunk(3, -1)
        return _heads(q, heads), _heads(k, heads), _heads(v, heads)

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
        y = _joined(y)
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
    settings |= {"bias": draw.chance(), "layer_norm_eps": _eps(draw), "batch_first": True}
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
        y = _heads(x, heads)
        return _joined(F.scaled_dot_product_attention(y, y, y, is_causal=causal, scale=scale))

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
    return draw.fill(wnn.PositionMix(shape[-2] + 1, shape[-1], draw.choice([0.1, 0.5, 1.0])))


@layer("position", 3)
def _position_mixing(draw: Draw, shape: Shape) -> nn.Module:
    return draw.fill(wnn.PositionMixing(shape[1] + draw.whole(0, 2), shape[-1], draw.whole(1, 8)))


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
    return Layer(lambda s, x: _joined(s.p @ x[:, None]), p=p)


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
        "filled": lambda x: x.masked_fill(torch.eye(*x.shape[-2:]).bool(), 0.7),
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


# ---------------------------------------------------------------- convolutions and pooling

_CONV = {3: (nn.Conv1d, nn.ConvTranspose1d), 4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}


def _each(draw: Draw, count: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw.whole(low, high) for _ in range(count))


@layer("convolution", 3, 4, 5)
def _convolution(draw: Draw, shape: Shape) -> nn.Module:
    count, groups = len(shape) - 2, draw.divisor(shape[1])
    kernel, dilation, stride = (_each(draw, count, 1, high) for high in (3, 2, 3))
    padding: Any = _each(draw, count, 0, 2)
    if draw.chance(0.25):
        padding, stride = "same", (1,) * count
    mode = draw.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
    inner = _CONV[len(shape)][0](
        shape[1], groups * draw.width(8), kernel, stride, padding, dilation, groups, draw.chance(), mode
    )
    return draw.fill(inner)


@layer("convolution", 3, 4, 5)
def _transposed_convolution(draw: Draw, shape: Shape) -> nn.Module:
    count, groups = len(shape) - 2, draw.divisor(shape[1])
    kernel, dilation, stride = (_each(draw, count, 1, high) for high in (3, 2, 3))
    padding = _each(draw, count, 0, 1)
    extra = tuple(draw.whole(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    inner = _CONV[len(shape)][1](
        shape[1], groups * draw.width(6), kernel, stride, padding, extra, groups, draw.chance(), dilation
    )
    return draw.fill(inner)


@layer("convolution", 3)
def _convolution_over_tokens(draw: Draw, shape: Shape) -> nn.Module:
    inner = _convolution(draw, (shape[0], shape[2], shape[1]))
    return Layer(lambda s, x: s.inner(x.mT).mT, inner=inner)


@layer("convolution", 3)
def _transposed_convolution_over_tokens(draw: Draw, shape: Shape) -> nn.Module:
    inner = _transposed_convolution(draw, (shape[0], shape[2], shape[1]))
    return Layer(lambda s, x: s.inner(x.mT).mT, inner=inner)


@layer("convolution", 4)
def _separable_convolution(draw: Draw, shape: Shape) -> nn.Module:
    first = nn.Conv2d(shape[1], shape[1], 3, padding=1, groups=shape[1])
    return nn.Sequential(draw.fill(first), draw.fill(nn.Conv2d(shape[1], draw.width(8), 1)))


@layer("convolution", 3, 4, 5)
def _patches(draw: Draw, shape: Shape) -> nn.Module:
    size = draw.whole(1, 3)
    return draw.fill(_CONV[len(shape)][0](shape[1], draw.width(16), size, size, bias=draw.chance()))


@layer("pooling", 3, 4, 5)
def _average_pool(draw: Draw, shape: Shape) -> nn.Module:
    count = len(shape) - 2
    kernel, stride = (_each(draw, count, 1, 3) for _ in range(2))
    padding = tuple(draw.whole(0, k // 2) for k in kernel)
    kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[count - 1]
    return kind(kernel, stride, padding, draw.chance(0.3), draw.chance())


@layer("pooling", 3, 4, 5)
def _max_pool(draw: Draw, shape: Shape) -> nn.Module:
    count = len(shape) - 2
    kernel, stride, dilation = (_each(draw, count, 1, high) for high in (3, 3, 2))
    padding = tuple(draw.whole(0, k // 2) for k in kernel)
    return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[count - 1](kernel, stride, padding, dilation)


@layer("pooling", 3, 4, 5)
def _adaptive_average_pool(draw: Draw, shape: Shape) -> nn.Module:
    count = len(shape) - 2
    kind = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[count - 1]
    return kind(tuple(draw.whole(1, n + 1) for n in shape[2:]))


@layer("pooling", 3, 4, 5)
def _adaptive_max_pool(draw: Draw, shape: Shape) -> nn.Module:
    count = len(shape) - 2
    kind = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[count - 1]
    return kind(tuple(draw.divisor(n) for n in shape[2:]))


@layer("pooling", 3, 4, 5)
def _interpolation(draw: Draw, shape: Shape) -> nn.Module:
    count = len(shape) - 2
    mode = draw.choice([("linear", "bilinear", "trilinear")[count - 1]] * 2 + ["bicubic"] * (count == 2))
    settings: dict[str, Any] = {"mode": mode, "align_corners": draw.chance()}
    if draw.chance():
        settings["size"] = [draw.whole(1, 7) for _ in range(count)]
    else:
        settings["scale_factor"] = [draw.choice([0.5, 0.7, 1.0, 1.5, 2.0]) for _ in range(count)]
        settings["recompute_scale_factor"] = draw.choice([None, True])
    return Layer(lambda s, x: F.interpolate(x, **settings))


@layer("pooling", 3, 4, 5)
def _nearest_neighbours(draw: Draw, shape: Shape) -> nn.Module:
    mode, sizes = draw.choice(["nearest", "nearest-exact"]), [draw.whole(1, 7) for _ in shape[2:]]
    return Layer(lambda s, x: F.interpolate(x, sizes, mode=mode))


@layer("pooling", 3, 4, 5)
def _padding(draw: Draw, shape: Shape) -> nn.Module:
    mode = draw.choice(["constant", "reflect", "replicate", "circular"])
    pads = [draw.whole(0, 2) for _ in range(2 * (len(shape) - 2))]
    return Layer(lambda s, x: F.pad(x, pads, mode))


@layer("pooling", 4)
def _pixel_shuffle(draw: Draw, shape: Shape) -> nn.Module:
    return draw.choice([nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle])(2)


@layer("pooling", 4)
def _unfolded_windows(draw: Draw, shape: Shape) -> nn.Module:
    kernel, stride, padding = draw.whole(1, 3), draw.whole(1, 3), draw.whole(0, 1)
    inner = draw.fill(nn.Linear(shape[1] * kernel * kernel, draw.width(8)))
    return Layer(lambda s, x: s.inner(F.unfold(x, kernel, 1, padding, stride).mT), inner=inner)


# ---------------------------------------------------------------- changes of space

_SPACES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "mean of tokens": (lambda x: x.mean(1), (3,)), "last token": (lambda x: x[:, -1], (3,)),
    "first token": (lambda x: x.select(1, 0), (3,)), "largest of tokens": (lambda x: x.max(1).values, (3,)),
    "flatten": (lambda x: x.flatten(1), (3, 4, 5)), "global average": (lambda x: x.flatten(2).mean(-1), (4, 5)),
    "global maximum": (lambda x: x.amax((2, 3)), (4,)), "pixels to tokens": (lambda x: x.flatten(2).mT, (4, 5)),
    "rows to tokens": (lambda x: x.transpose(1, 2).flatten(2), (4,)),
    "vector to one token": (lambda x: x[:, None], (2,)),
    "image to volume": (lambda x: x.unsqueeze(2), (4,)), "volume to image": (lambda x: x.flatten(2, 3), (5,)),
    "tokens to image": (lambda x: x[:, None], (3,)), "tokens swapped with features": (lambda x: x.mT, (3,)),
    "samples to tokens": (lambda x: x.flatten(0, 1)[None], (3,)),
}  # fmt: skip
for _name, (_function, _ranks) in _SPACES.items():
    _plain("space", _name, _function, *_ranks)


@layer("space", 2)
def _vector_to_tokens(draw: Draw, shape: Shape) -> nn.Module:
    count = draw.divisor(shape[-1])
    return Layer(lambda s, x: x.unflatten(-1, (count, -1)))


@layer("space", 2)
def _vector_to_image(draw: Draw, shape: Shape) -> nn.Module:
    channels, height, width = draw.whole(1, 4), draw.whole(1, 4), draw.whole(1, 4)
    inner = draw.fill(nn.Linear(shape[-1], channels * height * width))
    return Layer(lambda s, x: s.inner(x).unflatten(-1, (channels, height, width)), inner=inner)


@layer("space", 3)
def _tokens_to_pixels(draw: Draw, shape: Shape) -> nn.Module:
    height = draw.divisor(shape[1])
    return Layer(lambda s, x: x.mT.unflatten(-1, (height, -1)))


@layer("space", 4, 5)
def _patches_to_tokens(draw: Draw, shape: Shape) -> nn.Module:
    size = draw.whole(1, 3)
    inner = _CONV[len(shape)][0](shape[1], draw.width(16), size, size, bias=draw.chance())
    return Layer(lambda s, x: s.inner(x).flatten(2).mT, inner=draw.fill(inner))


@layer("space", 3)
def _class_token_read(draw: Draw, shape: Shape) -> nn.Module:
    token = draw.tensor(1, 1, shape[-1])
    inner = _same_shape(draw, (shape[0], shape[1] + 1, shape[2]))
    function = lambda s, x: s.inner(torch.cat([s.token.expand(len(x), -1, -1), x], 1))[:, 0]  # noqa: E731
    return Layer(function, token=token, inner=inner)


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class Drawn:
    """A model with its example input and domain."""

    number: int
    model: nn.Module
    example: Tensor
    radius: float
    layers: tuple[str, ...]
    """Names of its layers."""


LAYERS = {f"{family}: {name}": entry for family, members in FAMILIES.items() for name, entry in members.items()}
"""All layers, under their family and name."""


_SHARES = {"linear": 3, "activation": 3, "attention": 3, "convolution": 2, "pooling": 2, "space": 3, "residual": 2}
_OFTEN = [family for family in FAMILIES for _ in range(_SHARES.get(family, 1))]


def draw_layer(draw: Draw, shape: Shape, family: str, name: str = "") -> tuple[str, nn.Module, Shape] | None:
    """A layer of a family for a shape, and the shape that it makes; None if the one drawn does not fit."""
    members = {n: entry for n, entry in FAMILIES[family].items() if len(shape) in entry[1]}
    if not members or (name and name not in members):
        return None
    name = name or draw.choice(list(members))
    try:
        built = members[name][0](draw, shape)
        with torch.no_grad():
            made = None if built is None else tuple(built(torch.zeros(shape)).shape)
    except (RuntimeError, ValueError, IndexError, TypeError):  # torch says which settings do not fit a shape
        return None
    if built is None or made is None or not 0 < math.prod(made) <= LARGEST or len(made) not in EVERY:
        return None
    return f"{family}: {name}", built, made


def _input_shape(draw: Draw, ranks: Sequence[int]) -> Shape:
    rank, batch = draw.choice(ranks), 1 if draw.chance(0.7) else 2
    if rank == 2:
        return batch, draw.width()
    if rank == 3:
        return batch, draw.width(8), draw.width()
    sizes = (
        (draw.whole(1, 6), draw.whole(1, 6)) if rank == 4 else (draw.whole(1, 3), draw.whole(1, 4), draw.whole(1, 4))
    )
    return batch, draw.width(6), *sizes


def draw_model(seed: int, number: int) -> Drawn:
    """Model `number` of a seed: every fourth is one layer alone, all in turn; the others are chains of 1 to 8."""
    draw = Draw(seed, number)
    radius = draw.between(0.1, 10.0)
    alone = list(LAYERS)[number // 4 % len(LAYERS)] if number % 4 == 3 else ""
    while True:
        draw.products = 0
        shape = _input_shape(draw, LAYERS[alone][1] if alone else (2, 3, 3, 3, 3, 4, 4, 4, 5))
        modules: list[nn.Module] = []
        names: list[str] = []
        example = torch.zeros(shape)
        if len(shape) == 3 and not alone and draw.chance(0.15):
            table = draw.tensor(7, shape[-1], size=1.0)
            table *= 0.999 * radius / table.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6).amax()
            modules.append(nn.Embedding.from_pretrained(table))
            names.append("input: embedding")
            example = torch.arange(math.prod(shape[:2])).reshape(shape[:2]) % 7
        depth = draw.whole(1, 8)
        for _ in range(1 if alone else 12 * depth):
            family, _, name = alone.partition(": ")
            one = draw_layer(draw, shape, family or draw.choice(_OFTEN), name)
            if one is not None:
                names.append(one[0])
                modules.append(one[1])
                shape = one[2]
            if len(modules) >= depth:
                break
        if names and names[-1] != "input: embedding":
            return Drawn(number, nn.Sequential(*modules).eval(), example, radius, tuple(names))
