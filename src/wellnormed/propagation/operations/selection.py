"""Operations that pick or rearrange entries by size: every result is one of the entries, or changes by no more."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from wellnormed.propagation import moves
from wellnormed.propagation.ledger import Ledger
from wellnormed.propagation.operations.movement import as_value
from wellnormed.propagation.registry import Read, operation, primitive, refusal
from wellnormed.propagation.rows import Claim
from wellnormed.propagation.value import Bounds, Value


def largest(step: Ledger, x: Value, dim: int, keepdim: bool = False) -> Value:
    """The largest (or least) entry along an axis: `|max x - max y| <= |x - y|`."""
    dim %= len(x.shape)
    axes = x.with_inner_axes([dim])
    kept = [1 if axis == dim else size for axis, size in enumerate(x.shape)]
    result = step.derive("contraction", [(x, axes)], shape=kept)
    return result if keepdim else moves.pick(step, result, lambda t: t.squeeze(dim))


@primitive("contraction")
def _contraction(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """A map with `|f(x) - f(y)| <= |x - y|` and `|f(x)| <= |x|` in every group, and no entry beyond those of x."""
    return reads[0].bounds


@operation("aten.amax.default", "aten.amin.default")
def extreme(step: Ledger, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    """Over several axes, one after another."""
    rank = len(x.shape)
    axes = sorted({d % rank for d in ([dim] if isinstance(dim, int) else dim)} or range(rank))
    for axis in axes:
        x = largest(step, x, axis, keepdim=True)
    return x if keepdim else moves.pick(step, x, lambda t: t.squeeze(tuple(axes)))


@operation("aten.max.dim", "aten.min.dim")
def extreme_along(step: Ledger, x: Value, dim: int, keepdim: bool = False) -> list[Any]:
    """Values; the positions have no bound."""
    return [largest(step, x, dim, keepdim), None]


@operation("aten.sort.default", "aten.msort.default")
def sort(step: Ledger, x: Value, dim: int = -1, descending: bool = False) -> list[Any]:
    """Sorting along an axis is 1-Lipschitz; the positions have no bound."""
    return [step.derive("contraction", [(x, x.with_inner_axes([dim]))], shape=x.shape), None]


@operation("aten.maximum.default", "aten.minimum.default", "aten.max.other", "aten.min.other")
def maximum(step: Ledger, a: Any, b: Any) -> Value:
    """The larger of two, entry by entry: a maximum along an axis of two."""
    a, b = as_value(step, a), as_value(step, b)
    shape = torch.broadcast_shapes(a.shape, b.shape)
    wide = [moves.spread(step, x, shape) for x in (a, b)]
    return largest(step, moves.side_by_side(step, wide, lambda ts: torch.stack(ts, -1)), -1)


@operation("aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default")
def max_pool(
    step: Ledger, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Value:
    """A maximum over windows, which are laid side by side first."""
    count = max(len(each) if isinstance(each, list | tuple) else 0 for each in (kernel, stride, padding, dilation))
    count = max(count, 1 if len(x.shape) < 3 else len(x.shape) - 2)
    settings = [moves.each_axis(each, count) for each in (kernel, stride or kernel, padding, dilation)]
    if ceil:
        raise step.refuse("ceil_mode=True cuts the last window; pad the input instead")
    held = windows(torch.ones(1, *x.shape[-count:]), *settings)
    if not bool(held.any(-1).all()):
        raise step.refuse("a window lies in the padding as a whole, whose largest entry is -infinity; pad less")
    return largest(step, moves.pick(step, x, lambda t: windows(t, *settings)), -1)


@operation("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool_with_indices(step: Ledger, x: Value, *settings: Any) -> list[Any]:
    """Values; the positions have no bound."""
    return [max_pool(step, x, *settings), None]


@operation("aten.adaptive_max_pool1d.default", "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(step: Ledger, x: Value, size: Sequence[int]) -> list[Any]:
    """As a max pool, where the windows are equal."""
    pixels = x.shape[-len(size) :]
    if any(n % s for n, s in zip(pixels, size, strict=True)):
        raise step.refuse(f"{pixels} pixels do not divide into {tuple(size)} equal windows; choose a divisor")
    return [max_pool(step, x, [n // s for n, s in zip(pixels, size, strict=True)]), None]


def windows(
    t: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """The entries of every window along a last axis of their own."""
    count = len(kernel)
    t = F.pad(t, [p for each in reversed(padding) for p in (each, each)])
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), t.ndim - count):
        t = t.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return t.flatten(-count)


def _refused(step: Ledger, *arguments: Any, **keywords: Any) -> Value:
    raise step.refuse(
        "it is not continuous: a change of the input, however small, can move its result by a fixed amount; use a soft "
        "form, such as softmax in the place of top-k, or a straight line in the place of a step"
    )


@refusal("aten.item.default", "aten._local_scalar_dense.default")
def item(step: Ledger, x: Value) -> Value:
    """Refused: what Python does with a number does not show."""
    raise step.refuse("`item` makes a number of Python's of what depends on the input; keep it a tensor")


_STEPS = ("topk", "argmax", "argmin", "argsort", "sign", "round", "floor", "ceil", "trunc", "frac", "heaviside")
_JUMPS = ("hardshrink", "threshold", "nan_to_num", "one_hot", "bucketize", "searchsorted", "multinomial")
_COMPARISONS = (f"{name}.{kind}" for name in ("gt", "ge", "lt", "le", "eq", "ne") for kind in ("Scalar", "Tensor"))
refusal(*(f"aten.{name}.default" for name in _STEPS + _JUMPS), *(f"aten.{name}" for name in _COMPARISONS))(_refused)
