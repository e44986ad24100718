"""Layers that are made for images: convolutions, pooling; and changes of space, from any to any."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from campaigns.random_models.draw import Draw, Layer, Shape, layer, plain
from campaigns.random_models.entries import same_shape

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
def _largest_and_least(draw: Draw, shape: Shape) -> nn.Module:
    return Layer(lambda s, x: torch.cat([s.pool(x), -s.pool(-x)], 1), pool=_max_pool(draw, shape))


@layer("pooling", 3, 4, 5)
def _padding_of_two_kinds(draw: Draw, shape: Shape) -> nn.Module:
    """The padding of a max pool is -infinity, and that of `pad` is zeros."""
    count, stride = len(shape) - 2, draw.whole(1, 3)
    kind = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[count - 1]
    return Layer(
        lambda s, x: torch.cat([s.padded(x), s.bare(F.pad(x, (1, 1) * count))], 1),
        padded=kind(3, stride, 1), bare=kind(3, stride),
    )  # fmt: skip


@layer("pooling", 4, 5)
def _one_entry_for_all_axes(draw: Draw, shape: Shape) -> nn.Module:
    """A setting that is a list of one entry is of all axes, of a batch of images and of one without a batch."""
    pools = [[F.max_pool2d, F.max_pool3d], [partial(f, count_include_pad=False) for f in (F.avg_pool2d, F.avg_pool3d)]]
    pool = pools[draw.chance()][len(shape) - 4]
    if draw.chance():
        return Layer(lambda s, x: pool(x, (3,), (1,), (1,)))
    return Layer(lambda s, x: torch.stack([pool(each, (3,), (1,), (1,)) for each in x.unbind()]))


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
    plain("space", _name, _function, *_ranks)


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
    inner = same_shape(draw, (shape[0], shape[1] + 1, shape[2]))
    function = lambda s, x: s.inner(torch.cat([s.token.expand(len(x), -1, -1), x], 1))[:, 0]  # noqa: E731
    return Layer(function, token=token, inner=inner)
