"""Bounds of average pooling, interpolation, running sums and sampling at stored places: matrices along some axes.

The operation itself computes the matrices.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellnormed.lowering import moves
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.operations.linear import average
from wellnormed.lowering.operations.selection import settings_of
from wellnormed.program.operation import operation
from wellnormed.proof.value import Value

aten = torch.ops.aten


def along_axes(ledger: Ledger, x: Value, maps: Sequence[Callable[[Tensor], Tensor]], places: int = 0) -> Value:
    """Apply a linear map to each of the last axes. Each map is given as a function that acts on the last axis.

    Executed are sums over all these axes at once, and a quotient. If they are sums of entries at computed places, whose
    errors grow with the number n of entries, each map errs by as many roundings of its result as n times `places`.
    """
    addends = math.prod(x.shape[-len(maps) :])
    for number, apply in enumerate(maps):
        axis = len(x.shape) - len(maps) + number
        columns = apply(torch.eye(x.shape[axis], dtype=torch.float64)[:, None])[:, 0]
        matrix = ledger.computed(f"{ledger.name}.matrix{number}", columns.mT.contiguous())
        turned = moves.pick(ledger, x, lambda t, axis=axis: t.movedim(axis, -1)[..., None])
        mapped = average(ledger, matrix, turned, roundings=addends + 2)
        mapped = moves.pick(ledger, mapped, lambda t, axis=axis: t[..., 0].movedim(-1, axis))
        entries = max(x.shape[axis], mapped.shape[axis]) + 4
        x = moves.times(ledger, mapped, 1.0, roundings=places * entries) if places else mapped
    return x


_OF_PLACES, _OF_CUBIC = 32, 128
"""Roundings for each entry of an axis that linear and cubic interpolation along it count.

A place is computed as `scale (i + 1/2) - 1/2` with an error d of at most `4 n u`, by the model and by the matrix.
Linear weights move by d at two entries of a row, and at most `2 s + 2` of a column, where the result has s times as
many entries as x, while the norm of the matrix is at least `sqrt(s)`, as its rows' sums are 1, and `1 / sqrt(2)`: so by
at most `2.9 d` relative to it. Cubic weights of four entries move by 1.5 d, so by at most 12 d.
"""


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
    settings = zip(*settings_of(count, kernel, stride, padding), strict=True)
    rest = ceil_mode, count_include_pad
    return along_axes(
        ledger, x, [lambda t, k=k, s=s, p=p: aten.avg_pool1d(t, [k], [s], [p], *rest) for k, s, p, _ in settings]
    )


for _n in (1, 2, 3):  # only the name tells the number of axes: settings may have one entry, and images no batch
    operation(f"aten.avg_pool{_n}d.default", kind="affine", slides=True, executed=True)(partial(average_pool, _n))


@operation(*(f"aten.adaptive_avg_pool{n}d.default" for n in (1, 2, 3)), kind="affine", slides=True, executed=True)
def adaptive_average_pool(ledger: Ledger, x: Value, size: Sequence[int]) -> Value:
    """Means over windows that together cover the image; `size` is the number of windows along each of the last axes."""
    with _summed_in_dtype(ledger) if len(size) == 3 else nullcontext():
        return along_axes(ledger, x, [lambda t, n=n: aten.adaptive_avg_pool1d(t, [n]) for n in size])


def _summed_in_dtype(ledger: Ledger) -> AbstractContextManager[None]:
    """Rows of sums that torch may round to the dtype of the result after each addend; of 16 bits, none has a bound."""
    return ledger.executing(None) if ledger.dtype.itemsize < 4 else nullcontext()


Along = Callable[[Tensor, list[int] | None, bool, list[float] | None], Tensor]
"""An interpolation along the last axis, to a given size or by a given factor, with `align_corners` between them."""


def interpolate(
    along: Along, places: int, ledger: Ledger, x: Value, size: Any, align_corners: bool, factors: Any
) -> Value:
    """Interpolation to a given size, or by given factors."""
    ends = [[n] for n in size] if size else [None] * len(factors or ())
    by = [[f] for f in factors] if factors else [None] * len(ends)
    maps = [lambda t, n=n, f=f: along(t, n, align_corners, f) for n, f in zip(ends, by, strict=True)]
    with _summed_in_dtype(ledger):
        return along_axes(ledger, x, maps, places)


def _cubic(t: Tensor, size: list[int] | None, align_corners: bool, factors: list[float] | None) -> Tensor:
    """Cubic interpolation along one axis, by torch's operation for two axes, the first of size 1."""
    ends, by = size and [1, *size], factors and [1.0, *factors]
    return aten.upsample_bicubic2d.vec(t[..., None, :], ends, align_corners, by)[..., 0, :]


operation(*(f"aten.upsample_{n}.vec" for n in ("linear1d", "bilinear2d", "trilinear3d")), kind="affine", executed=True)(
    partial(interpolate, aten.upsample_linear1d.vec, _OF_PLACES)
)
operation("aten.upsample_bicubic2d.vec", kind="affine", executed=True)(partial(interpolate, _cubic, _OF_CUBIC))


@operation("aten.cumsum.default", kind="affine", executed=True)
def running_sum(ledger: Ledger, x: Value, dim: int, **keywords: Any) -> Value:
    """Cumulative sums along an axis."""
    turned = moves.pick(ledger, x, lambda t: t.movedim(dim, -1))
    with _summed_in_dtype(ledger):  # on GPUs
        sums = along_axes(ledger, turned, [lambda t: t.cumsum(-1)])
    return moves.pick(ledger, sums, lambda t: t.movedim(-1, dim))


@operation("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def sample(ledger: Ledger, x: Value, grid: Any, mode: int, padding: int, align_corners: bool) -> Value:
    """Interpolation at stored places, which differ from sample to sample: one matrix of pixels for each sample."""
    if not isinstance(grid, Stored) or not isinstance(x, Value):
        raise ledger.refuse("its places depend on the input; sample at stored places")
    ledger.require_known(grid)
    count, pixels = len(x.shape) - 2, x.shape[2:]
    # the nearest pixel depends on the precision in which the model rounds the places
    places = grid.tensor if mode == 1 else grid.tensor.double()
    columns = torch.eye(math.prod(pixels), dtype=places.dtype).reshape(1, -1, *pixels)
    columns = aten.grid_sampler(columns.expand(x.shape[0], *columns.shape[1:]), places, mode, padding, align_corners)
    matrices = ledger.computed(f"{ledger.name}.matrix", columns.flatten(2).mT.contiguous())
    flat = moves.pick(ledger, x, lambda t: t.flatten(2).mT)
    result = (*x.shape[:2], *grid.tensor.shape[1 : count + 1])
    return moves.pick(ledger, average(ledger, matrices, flat), lambda t: t.mT.reshape(result))
