"""Layers for tensors of any shape: linear maps, functions of entries, products, residuals, normalisation."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed.nn as wnn
from campaigns.random_models.draw import EVERY, OFTEN, Draw, Layer, Shape, draw_layer, layer, plain


def by_head(x: Tensor, count: int) -> Tensor:
    """`(B, T, H K) -> (B, H, T, K)`."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """`(B, H, T, K) -> (B, T, H K)`."""
    return x.transpose(1, 2).flatten(2)


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
    return Layer(lambda s, x: joined(by_head(x, heads) @ s.w), w=w)


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
    "mish": F.mish, "selu": F.selu, "hardtanh": F.hardtanh, "softplus": F.softplus,
    "exp": lambda x: torch.exp(1.5 * torch.tanh(x)),
    "gelu, spelled": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu by tanh, spelled": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}  # fmt: skip
for _name, _function in _ACTIVATIONS.items():
    plain("activation", _name, _function)


def _with_number(name: str, low: float, high: float, function: Callable[[Tensor, float], Tensor]) -> None:
    """An activation with a setting, of either sign, which float32 holds: torch rounds others, as a certificate does."""

    @layer("activation", name=name)
    def build(draw: Draw, shape: Shape) -> nn.Module:
        number = math.ldexp(round(draw.between(low, high) * 2**16), -16) * draw.choice([1.0, -1.0])
        return Layer(lambda s, x: function(x, number))

    _ = build


_with_number("leaky relu", 0.01, 3.0, F.leaky_relu)
_with_number("leaky relu, by a comparison", 0.01, 3.0, lambda x, a: torch.where(x > 0, x, a * x))
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


def same_shape(draw: Draw, shape: Shape) -> nn.Module:
    """A block that keeps the shape."""
    draw.nested += 1
    found: list[nn.Module] = []
    for _ in range(12):
        if draw.nested > 2:
            break
        one = draw_layer(draw, shape, draw.choice([f for f in OFTEN if f != "space"]))
        if one is not None and one[2] == shape:
            found.append(one[1])
        if len(found) == draw.whole(1, 3):
            break
    draw.nested -= 1
    return nn.Sequential(*found) if found else draw.fill(nn.Linear(shape[-1], shape[-1]))


@layer("residual")
def _convex_residual(draw: Draw, shape: Shape) -> nn.Module:
    return wnn.ConvexResidual(same_shape(draw, shape), float(draw.choice([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])))


@layer("residual")
def _plain_residual(draw: Draw, shape: Shape) -> nn.Module:
    alpha = draw.choice([1, 1, -1, 0.3])
    return Layer(lambda s, x: torch.add(x, s.block(x), alpha=alpha), block=same_shape(draw, shape))


@layer("residual")
def _two_branches(draw: Draw, shape: Shape) -> nn.Module:
    a, b = same_shape(draw, shape), same_shape(draw, shape)
    return Layer(lambda s, x: 0.3 * s.a(x) - 0.7 * s.b(x) + x / 2, a=a, b=b)


@layer("residual")
def _orthogonal_join(draw: Draw, shape: Shape) -> nn.Module:
    join = wnn.OrthogonalJoin(shape[-1], draw.choice([0.1, 0.5, 0.9]))
    if draw.chance():
        draw.fill(join)
    return Layer(lambda s, x: s.join(x, s.block(x)), join=join, block=same_shape(draw, shape))


@layer("residual")
def _scaled_branch(draw: Draw, shape: Shape) -> nn.Module:
    parts = {"block": same_shape(draw, shape), "scale": draw.tensor(shape[-1])}
    return Layer(lambda s, x: x + s.scale * s.block(x), **parts)


@layer("residual")
def _difference(draw: Draw, shape: Shape) -> nn.Module:
    return Layer(lambda s, x: s.block(x) - s.block(x.flip(-1)), block=same_shape(draw, shape))


# ---------------------------------------------------------------- normalisation and balls


def eps_of(draw: Draw) -> float:
    return draw.choice([1e-5, 1e-3, 0.1, 1.0, draw.between(1e-5, 1.0)])


@layer("normalization")
def _layer_norm(draw: Draw, shape: Shape) -> nn.Module:
    last = draw.whole(1, len(shape) - 1)
    return draw.fill(nn.LayerNorm(list(shape[-last:]), eps=eps_of(draw), elementwise_affine=draw.chance()))


@layer("normalization")
def _rms_norm(draw: Draw, shape: Shape) -> nn.Module:
    last = draw.whole(1, len(shape) - 1)
    return draw.fill(nn.RMSNorm(list(shape[-last:]), eps=eps_of(draw), elementwise_affine=draw.chance()))


@layer("normalization")
def _rms_norm_spelled(draw: Draw, shape: Shape) -> nn.Module:
    eps, axis, form = eps_of(draw), draw.whole(1, len(shape) - 1), draw.whole(0, 3)

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
def _by_norm_and_eps(draw: Draw, shape: Shape) -> nn.Module:
    eps, axis, form = draw.choice([1e-3, 0.1, 1.0]), draw.whole(1, len(shape) - 1), draw.whole(0, 2)

    def function(_: Any, x: Tensor) -> Tensor:
        squares, norm = x.square().sum(axis, keepdim=True), x.norm(dim=axis, keepdim=True)
        forms = (
            lambda: x / (norm + eps), lambda: x * (1 / (norm / 3 + eps)), lambda: x / (squares + eps).sqrt(),
        )  # fmt: skip
        return forms[form]()

    return Layer(function)


@layer("normalization")
def _by_deviation(draw: Draw, shape: Shape) -> nn.Module:
    if max(shape[1:]) == 1:  # where torch's derivative is 0 / 0
        return _by_norm_and_eps(draw, shape)
    eps, squared = draw.choice([1e-3, 0.1, 1.0]), draw.chance()
    axis = draw.choice([axis for axis in range(1, len(shape)) if shape[axis] > 1])
    correction = draw.whole(0, 1)

    def function(_: Any, x: Tensor) -> Tensor:
        centred, over = x - x.mean(axis, keepdim=True), {"dim": axis, "correction": correction, "keepdim": True}
        return centred * torch.rsqrt(x.var(**over) + eps) if squared else centred / (x.std(**over) + eps)

    return Layer(function)


@layer("normalization")
def _ball(draw: Draw, shape: Shape) -> nn.Module:
    return wnn.BallProjection(draw.between(0.1, 10.0))


@layer("normalization")
def _ball_along_an_axis(draw: Draw, shape: Shape) -> nn.Module:
    scale, axis = draw.between(0.01, 10.0), draw.whole(1, len(shape) - 1)
    return Layer(lambda s, x: x * (scale * x.square().mean(axis, keepdim=True)).clamp(min=1.0).rsqrt())


@layer("normalization", 3, 4, 5)
def _group_norm(draw: Draw, shape: Shape) -> nn.Module:
    return draw.fill(nn.GroupNorm(draw.divisor(shape[1]), shape[1], eps=eps_of(draw), affine=draw.chance()))


@layer("normalization")
def _batch_norm(draw: Draw, shape: Shape) -> nn.Module:
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 2]
    return draw.fill(kind(shape[1], eps=eps_of(draw), affine=draw.chance()))


@layer("normalization", 3, 4, 5)
def _instance_norm(draw: Draw, shape: Shape) -> nn.Module:
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(shape) - 3]
    return draw.fill(kind(shape[1], eps=eps_of(draw), affine=draw.chance(), track_running_stats=draw.chance(0.3)))
