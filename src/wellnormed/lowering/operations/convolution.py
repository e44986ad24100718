"""Bounds of convolutions and transposed convolutions with stored kernels.

The bound is in the Euclidean norm of whole samples; if each pixel of the input has a separate bound, in the norm of
single pixels.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from wellnormed.lowering import moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.moves import each_axis
from wellnormed.lowering.operations.elementwise import add, along_channels
from wellnormed.lowering.operations.linear import linear
from wellnormed.lowering.operations.normalization import batch_norm_whole, scale_and_shift
from wellnormed.lowering.operations.selection import windows
from wellnormed.program.operation import operation
from wellnormed.proof.value import Value

aten = torch.ops.aten


def of_images(bound: Callable[..., Value]) -> Callable[..., Value]:
    """Extend the bound of an operation on batches of images to one image without a batch axis."""

    @wraps(bound)
    def of_any(ledger: Ledger, x: Value, weight: Stored, *settings: Any, **named: Any) -> Value:
        if not isinstance(weight, Stored):
            raise ledger.refuse("its kernel is not a stored tensor, and no other kernel has a bound; use a stored one")
        if len(x.shape) == weight.tensor.ndim:
            return bound(ledger, x, weight, *settings, **named)
        batch = moves.pick(ledger, x, lambda t: t[None])
        return moves.pick(ledger, bound(ledger, batch, weight, *settings, **named), lambda t: t[0])

    return of_any


@operation(
    *(f"aten.conv{n}d.{padding}" for n in (1, 2, 3) for padding in ("default", "padding")),
    kind="product",
    slides=True,
    executed=True,
)
@of_images
def convolution(
    ledger: Ledger,
    x: Value,
    weight: Stored,
    bias: Stored | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    affine: tuple[Stored, Stored, dict[str, Any]] | None = None,
) -> Value:
    """A convolution of images `(batch, channels, *pixels)`, or of one image without the batch axis.

    Zero padding becomes a separate row. Circular padding arrives as an image whose end repeats its beginning; such
    images are recognised, and the convolution is bounded as a circular one of the image without the repeated pixels.
    With `affine`, as `scale_and_shift` returns it, every channel of the result is scaled and shifted.
    """
    count = weight.tensor.ndim - 2
    stride, dilation, kernel = each_axis(stride, count), each_axis(dilation, count), list(weight.tensor.shape[2:])
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same":
        pads = [(r // 2, r - r // 2) for r in reach]
    else:
        pads = [(p, p) for p in each_axis(0 if padding == "valid" else padding, count)]
    if any(p for pair in pads for p in pair):
        flat = [p for pair in reversed(pads) for p in pair]
        x = moves.pick(ledger, x, lambda t: F.pad(t, flat))
    if groups == 1 and affine is None and all(s > r for s, r in zip(stride, reach, strict=True)):
        none = [0] * count  # windows do not overlap: one linear map is applied to each
        cut = moves.pick(ledger, x, lambda t: windows(t, kernel, stride, none, dilation).movedim(1, -2).flatten(-2))
        return moves.pick(ledger, linear(ledger, cut, weight, bias), lambda t: t.movedim(-1, 1))
    pixels = [(n - r - 1) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True)]
    settings: dict[str, Any] = {"groups": groups}
    inner, channels = set(inner_axes(x)), weight.tensor.shape[0]
    constants: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
    if not inner.intersection(range(2, count + 2)):  # each pixel has a separate bound
        measure, axes = "taps", [1]
    else:
        measure, axes = "convolution", list(range(1, count + 2))
        circular = []
        for number, (r, s) in enumerate(zip(reach, stride, strict=True)):
            period = x.shape[2 + number] - r
            if r and period > 0 and period % s == 0 and _repeats(x, 2 + number, period):
                circular.append(number)
                x = moves.pick(ledger, x, lambda t, axis=2 + number, period=period: t.narrow(axis, 0, period))
        constants |= {"circular": circular} if circular else {}
        settings |= {"size": list(x.shape[2:]), "stride": stride, "dilation": dilation}
    of_kernel, of_bias, how = [weight], [] if bias is None else [bias], dict[str, Any]()
    if affine is not None:
        scale, shift, how = affine
        of_kernel, of_bias = [weight, scale], [shift] if bias is None else [bias, scale, shift]
    claims = [ledger.prove(measure, *of_kernel, **settings)]
    claims += [ledger.prove("group_norm", *of_bias)] if of_bias else []
    shape = (x.shape[0], channels, *pixels)
    return ledger.derive("convolution", [(x, axes)], shape=shape, axes=axes, constants=constants, claims=claims, **how)


def normalized(ledger: Ledger, found: Mapping[str, Any]) -> Value:
    """A batch norm of a convolution: one whose kernel is scaled, the norm of which is less than the product of both.

    Patches, whose bound is that of a matrix, and tensors of unknown entries are bounded one by one.
    """
    x, kernel, (bias, *settings) = found["x"], found["kernel"], found["settings"] or [None]
    gain, offset, mean, variance = norm = [found[key] for key in ("gain", "offset", "mean", "variance")]
    given = [each for each in (kernel, bias, *norm) if each is not None]
    known = all(isinstance(each, Stored) and ledger.unknown(each) is None for each in given)
    taps = list(kernel.tensor.shape[2:]) if known else []
    strides = each_axis(settings[0] if settings else 1, len(taps))
    patches = max(taps, default=1) > 1 and all(k <= s for k, s in zip(taps, strides, strict=True))
    if not known or patches or len(x.shape) != len(taps) + 2:
        result = convolution(ledger, x, kernel, bias, *settings)
        return batch_norm_whole(ledger, result, *norm, False, 0.0, found["eps"])
    affine = scale_and_shift(ledger, gain, offset, mean, variance, found["eps"], bias)
    return convolution(ledger, x, kernel, bias, *settings, affine=affine)


def _repeats(x: Value, axis: int, period: int) -> bool:
    """Whether the entries from `period` on along an axis repeat those at its beginning, as after circular padding."""
    more = x.shape[axis] - period
    for term in x.terms:
        factor = np.ones(()) if term.factor is None else term.factor
        for each in (term.index, np.broadcast_to(factor, x.shape)):
            ends = np.moveaxis(each, axis, 0)
            if not np.array_equal(ends[:more], ends[period:]):
                return False
    return more <= period


@operation(
    *("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"),
    kind="product",
    slides=True,
    executed=True,
)
@of_images
def transposed_convolution(
    ledger: Ledger,
    x: Value,
    weight: Stored,
    bias: Stored | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Value:
    """A transposed convolution, which is the adjoint of the convolution that maps images of its result to images of x.

    `padding` cuts entries off both ends of every axis of pixels, and `output_padding` adds entries at the far end.
    """
    count = weight.tensor.ndim - 2
    stride, dilation, padding, extra = (each_axis(each, count) for each in (stride, dilation, padding, output_padding))
    kernel = weight.tensor.shape[2:]
    size = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(x.shape[2:], stride, dilation, kernel, strict=True)]
    settings: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
    claims = [ledger.prove("convolution", weight, size=size, **settings)]
    axes, shape = list(range(1, count + 2)), (x.shape[0], weight.tensor.shape[1] * groups, *size)
    constants = settings | {"adjoint": True}
    full = ledger.derive("convolution", [(x, axes)], shape=shape, axes=axes, constants=constants, claims=claims)
    cuts = [(-p, e - p) for p, e in zip(padding, extra, strict=True)]
    if any(p or e for p, e in cuts):
        flat = [p for pair in reversed(cuts) for p in pair]
        full = moves.pick(ledger, full, lambda t: F.pad(t, flat))
    bias, addends = along_channels(ledger, bias, count), weight.tensor[:, 0].numel() // groups
    return full if bias is None else add(ledger, full, bias, roundings=addends + 1)
