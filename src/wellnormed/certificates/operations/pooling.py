"""Bounds of average pooling and interpolation: a matrix along each axis, which the operation itself computes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellnormed.certificates import moves
from wellnormed.certificates.ledger import Ledger
from wellnormed.certificates.operations.linear import average
from wellnormed.program.operation import operation
from wellnormed.proof.value import Value

aten = torch.ops.aten


def along_axes(ledger: Ledger, x: Value, maps: Sequence[Callable[[Tensor], Tensor]]) -> Value:
    """Apply a linear map to each of the last axes. Each map is given as a function that acts on the last axis."""
    for number, apply in enumerate(maps):
        axis = len(x.shape) - len(maps) + number
        columns = apply(torch.eye(x.shape[axis], dtype=torch.float64)[:, None])[:, 0]
        matrix = ledger.computed(f"{ledger.name}.matrix{number}", columns.mT.contiguous())
        turned = moves.pick(ledger, x, lambda t, axis=axis: t.movedim(axis, -1)[..., None])
        mapped = average(ledger, matrix, turned)
        x = moves.pick(ledger, mapped, lambda t, axis=axis: t[..., 0].movedim(-1, axis))
    return x


def average_pool(
    count: int,
    ledger: Ledger,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """Means over windows of the last `count` axes, which may overlap."""
    if divisor_override is not None:
        raise ledger.refuse("it has a divisor_override; leave it out, and multiply by a constant")
    stride = kernel if stride in ((), [], None) else stride
    settings = zip(*(moves.each_axis(each, count) for each in (kernel, stride, padding)), strict=True)

    def one(k: int, s: int, p: int) -> Callable[[Tensor], Tensor]:
        return lambda t: aten.avg_pool1d(t, [k], [s], [p], ceil_mode, count_include_pad)

    return along_axes(ledger, x, [one(*each) for each in settings])


for _count in (1, 2, 3):  # a list of one entry stands for all axes, and images may have no batch: only the name is sure
    operation(f"aten.avg_pool{_count}d.default")(partial(average_pool, _count))


@operation("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default")
def adaptive_average_pool(ledger: Ledger, x: Value, size: Sequence[int]) -> Value:
    """Means over windows that together cover the image, `size` of them along the last axes."""
    return along_axes(ledger, x, [lambda t, n=n: aten.adaptive_avg_pool1d(t, [n]) for n in size])


@operation("aten.upsample_linear1d.default", "aten.upsample_bilinear2d.default", "aten.upsample_trilinear3d.default")
def interpolate(ledger: Ledger, x: Value, size: Sequence[int], align_corners: bool, *scales: float | None) -> Value:
    """Linear interpolation to a given size."""
    given = [*scales, *[None] * len(size)]
    return along_axes(
        ledger,
        x,
        [
            lambda t, n=n, s=s: aten.upsample_linear1d(t, [n], align_corners, s)
            for n, s in zip(size, given, strict=False)
        ],
    )


@operation("aten.upsample_linear1d.vec", "aten.upsample_bilinear2d.vec", "aten.upsample_trilinear3d.vec")
def interpolate_to(
    ledger: Ledger, x: Value, size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None
) -> Value:
    """Linear interpolation to a given size, or by given factors."""
    count = len(size or factors or ())
    sizes, scales = size or [None] * count, factors or [None] * count

    def one(n: int | None, s: float | None) -> Callable[[Tensor], Tensor]:
        return lambda t: aten.upsample_linear1d.vec(
            t, None if n is None else [n], align_corners, None if s is None else [s]
        )

    return along_axes(ledger, x, [one(n, s) for n, s in zip(sizes, scales, strict=True)])


@operation("aten.upsample_bicubic2d.vec")
def interpolate_cubic(
    ledger: Ledger, x: Value, size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None
) -> Value:
    """Cubic interpolation of two axes to a given size, or by given factors."""

    def one(number: int) -> Callable[[Tensor], Tensor]:
        def apply(t: Tensor) -> Tensor:
            wide = t[..., None, :]
            if size is not None:
                return aten.upsample_bicubic2d.vec(wide, [1, size[number]], align_corners, None)[..., 0, :]
            assert factors is not None
            return aten.upsample_bicubic2d.vec(wide, None, align_corners, [1.0, factors[number]])[..., 0, :]

        return apply

    return along_axes(ledger, x, [one(0), one(1)])
