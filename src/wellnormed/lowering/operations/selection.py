"""Bounds of operations that order entries or take the largest; and refusals of operations that are not continuous."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wellnormed.lowering import moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger
from wellnormed.lowering.operations.movement import written
from wellnormed.program.operation import operation
from wellnormed.proof.value import Base, Value

Sizes = Sequence[int]
"""A setting of windows: one number for each of their axes."""


def ordered(ledger: Ledger, x: Value, dim: int) -> Value:
    """Sort every line along an axis in ascending order; maxima and minima are then its last and first entries.

    Sorting disjoint lines of one group is 1-Lipschitz as a whole. So if the model has sorted the same lines, or their
    negatives, before, the entries are taken from that result. For example, the maximum and the minimum of the same
    pairs are then parts of one contraction.
    """
    dim %= len(x.shape)
    rest = [size for axis, size in enumerate(x.shape) if axis != dim]
    for known, along, result in ledger.ordered:
        for sign in (1, -1):
            if (found := _same_lines(x, dim, known, along, sign)) is None:
                continue

            def move(t: Tensor, along: int = along, sign: int = sign, found: Tensor = found) -> Tensor:
                lines = t.movedim(along, -1).reshape(-1, t.shape[along])[found]
                return (lines if sign > 0 else lines.flip(-1)).reshape(*rest, -1).movedim(-1, dim)

            picked = moves.pick(ledger, result, move)
            return picked if sign > 0 else moves.times(ledger, picked, -1.0)
    result = in_order(ledger, x, dim)
    ledger.ordered.append((x, dim, result))
    return result


def in_order(ledger: Ledger, x: Value, dim: int) -> Value:
    """Sort every line along the axis `dim >= 0`. In contrast to `ordered`, the result is not shared."""
    return ledger.derive("contraction", [(x, {dim, *inner_axes(x)})], shape=x.shape, roundings=0)


def _same_lines(x: Value, dim: int, known: Value, along: int, sign: int) -> Tensor | None:
    """For each line of x along `dim`, the number of a line of `known` along `along` with the same entries times `sign`.

    The result is None if one line of x has no such line. Entries are the same if they are sums of the same constants
    and of the same entries of bases, each times the same factor. Factors with rounding errors are never the same.
    """
    n, values = x.shape[dim], (x, known)
    if sign > 0 and (x.name, dim) == (known.name, along):
        return torch.arange(math.prod(x.shape) // n)
    bases = [{id(term.base) for term in value.terms if isinstance(term.base, Base)} for value in values]
    inexact = any(term.roundings for value in values for term in value.terms)
    if known.shape[along] != n or bases[0] != bases[1] or inexact or _errs_more(x, known):
        return None
    most = max(len(value.terms) for value in values)
    addends = np.concatenate([_addends(x, dim, 1, most), _addends(known, along, sign, most)])
    entries = _number(addends.reshape(-1, 3)).reshape(-1, most)
    lines = _number(np.sort(_number(np.sort(entries)).reshape(-1, n)))
    of_x, of_known = np.split(lines, [math.prod(x.shape) // n])
    number = np.full(len(lines), -1)
    number[of_known] = np.arange(len(of_known))
    return None if (number[of_x] < 0).any() else torch.from_numpy(number[of_x])


def _errs_more(x: Value, known: Value) -> bool:
    """Whether x was computed in another way, with rounding errors that those of `known` may not bound."""
    errors = [[term.error for term in value.terms] for value in (x, known)]
    more = max(errors[0], default=0) > min(errors[1], default=0) or x.floor > known.floor
    return not known.fault and (bool(x.fault) or more)


def _addends(value: Value, dim: int, sign: int, most: int) -> np.ndarray:
    """Base, position and factor of every addend of every entry of a line, as integers `(lines, n, most, 3)`."""
    shape = value.shape
    result = np.full((*shape, most, 3), -1)
    for place, term in enumerate(value.terms):
        index = term.index
        factor = np.broadcast_to(sign * (1.0 if term.factor is None else term.factor), shape)
        base = np.full(shape, id(term.base))
        if not isinstance(term.base, Base):  # constants are identified by content and sign
            content = term.base[index] * np.sign(factor) + 0.0
            base, factor = np.zeros_like(index), np.where(content == 0, 1.0, abs(factor))
            addend = np.stack([base, content.view(np.int64), np.ascontiguousarray(factor).view(np.int64)], -1)
        else:
            addend = np.stack([base, index, np.ascontiguousarray(factor).view(np.int64)], -1)
        result[..., place, :] = np.where(((index < 0) | (factor == 0))[..., None], -1, addend)
    return np.moveaxis(result, dim, -3).reshape(-1, shape[dim], most, 3)


def _number(rows: np.ndarray) -> np.ndarray:
    """Number the rows of a matrix of integers; equal rows have the same number."""
    number = np.zeros(len(rows), np.int64)
    for column in rows.T:
        other = np.unique(column, return_inverse=True)[1].reshape(-1)
        number = np.unique(number * len(rows) + other, return_inverse=True)[1].reshape(-1)
    return number


def largest(
    ledger: Ledger, x: Value, dim: int, keepdim: bool = False, lesser: bool = False, sort: Any = ordered
) -> Value:
    """The largest (or least) entry along an axis."""
    place = 0 if lesser else x.shape[dim] - 1
    result = moves.pick(ledger, sort(ledger, x, dim), lambda t: t.narrow(dim, place, 1))
    return result if keepdim else moves.pick(ledger, result, lambda t: t.squeeze(dim))


def extreme(ledger: Ledger, x: Value, dim: Any, keepdim: bool, lesser: bool, sort: Any = ordered) -> Value:
    """The largest (or least) entry over several axes, which become one axis first, or over all if none is given."""
    rank = len(x.shape)
    axes = sorted({d % rank for d in ([dim] if isinstance(dim, int) else dim or ())} or range(rank))
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    lines = moves.pick(ledger, x, lambda t: t.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes)))
    result = moves.pick(ledger, largest(ledger, lines, -1, lesser=lesser, sort=sort), lambda t: t.reshape(kept))
    return result if keepdim else moves.pick(ledger, result, lambda t: t.squeeze(tuple(axes)))


for _name, _lesser in (("max", False), ("min", True)):
    operation(f"aten.a{_name}.default", executed=True)(
        lambda ledger, x, dim=(), keepdim=False, lesser=_lesser: extreme(ledger, x, dim, keepdim, lesser)
    )
    operation(f"aten.{_name}.dim", executed=True)(  # the positions of these entries have no bound
        lambda ledger, x, dim, keepdim=False, lesser=_lesser: [largest(ledger, x, dim, keepdim, lesser), None]
    )
    operation(f"aten.{_name}imum.default", f"aten.{_name}.other", executed=True)(
        lambda ledger, a, b, lesser=_lesser: larger(ledger, a, b, lesser)
    )


@operation("aten.aminmax.default", executed=True)
def extremes(ledger: Ledger, x: Value, *, dim: int | None = None, keepdim: bool = False) -> list[Value]:
    """The least and the largest entry."""
    return [extreme(ledger, x, dim, keepdim, lesser) for lesser in (True, False)]


@operation("aten.sort.default", "aten.sort.stable", executed=True)
def sort(ledger: Ledger, x: Value, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> list[Any]:
    """The sorted entries along an axis. Their positions have no bound, and are None."""
    result = ordered(ledger, x, dim)
    return [moves.pick(ledger, result, lambda t: t.flip(dim)) if descending else result, None]


operation("aten.msort.default", executed=True)(partial(ordered, dim=0))


@operation("aten.topk.default", executed=True)
def leading(ledger: Ledger, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Any]:
    """The largest (or least) entries along an axis. Their positions have no bound, and are None."""
    if not sorted:
        raise ledger.refuse("the order of its results is not defined; leave sorted=False out")
    result, _ = sort(ledger, x, dim, descending=largest)
    return [moves.pick(ledger, result, lambda t: t.narrow(dim, 0, k)), None]


@operation("aten.kthvalue.default", executed=True)
def ranked(ledger: Ledger, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> list[Any]:
    """The k-th smallest entry along an axis. Its position has no bound, and is None."""
    result = moves.pick(ledger, ordered(ledger, x, dim), lambda t: t.narrow(dim, k - 1, 1))
    return [result if keepdim else moves.pick(ledger, result, lambda t: t.squeeze(dim)), None]


@operation("aten.median.dim", executed=True)
def median(ledger: Ledger, x: Value, dim: int, keepdim: bool = False) -> list[Any]:
    """The middle entry along an axis, the lower one of two."""
    return ranked(ledger, x, (x.shape[dim] + 1) // 2, dim, keepdim)


def larger(ledger: Ledger, a: Any, b: Any, lesser: bool = False) -> Value:
    """The larger (or lesser) of two tensors, entry by entry, as an extreme along a new axis of two entries."""
    return largest(ledger, paired(ledger, a, b), -1, lesser=lesser)


def paired(ledger: Ledger, a: Any, b: Any) -> Value:
    """Stack two tensors, whose shapes broadcast, along a new last axis; (a, b) and (b, a) give the same value."""
    a, b = written(ledger, a), written(ledger, b)
    first, second = sorted((a, b), key=lambda each: each.name)
    if (first.name, second.name) not in ledger.pairs:
        wide = [moves.spread(ledger, each, torch.broadcast_shapes(a.shape, b.shape)) for each in (first, second)]
        ledger.pairs[first.name, second.name] = moves.side_by_side(ledger, wide, lambda ts: torch.stack(ts, -1))
    return ledger.pairs[first.name, second.name]


@operation("aten.clamp.Tensor", executed=True)
def clamp(ledger: Ledger, x: Any, min: Any = None, max: Any = None) -> Value:
    """`minimum(maximum(x, min), max)`, where either limit may be a tensor or None."""
    for limit, lesser in ((min, False), (max, True)):
        x = x if limit is None else larger(ledger, x, limit, lesser)
    return x


operation("aten.clamp_min.Tensor", executed=True)(larger)
operation("aten.clamp_max.Tensor", executed=True)(partial(larger, lesser=True))


def max_pool(
    count: int,
    ledger: Ledger,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Value:
    """The maximum over windows of the last `count` axes, as sorted lines with the entries of one window each."""
    settings = settings_of(count, kernel, stride, padding, dilation)
    inside = windows(torch.ones(1, *x.shape[-count:]), *settings, ceil=ceil)
    if not bool(inside.any(-1).all()):
        raise ledger.refuse("a window lies in the padding alone, so that its maximum is -infinity; pad less")
    lines = moves.pick(ledger, x, lambda t: windows(t, *settings, ceil=ceil))
    if not bool(inside.all()):  # padding is zeros here and -infinity in torch, so the sorted lines are not shared
        return moves.pick(ledger, in_order(ledger, lines, len(lines.shape) - 1), lambda t: t[..., -1])
    return largest(ledger, lines, -1)


def max_pool_with_indices(count: int, ledger: Ledger, x: Value, *settings: Any) -> list[Any]:
    """The values of a max pool. Their positions have no bound, and are None."""
    return [max_pool(count, ledger, x, *settings), None]


for _n in (1, 2, 3):  # only the name tells the number of axes: settings may have one entry, and images no batch
    operation(f"aten.max_pool{_n}d.default", slides=True, executed=True)(partial(max_pool, _n))
    _indexed = partial(max_pool_with_indices, _n)
    operation(f"aten.max_pool{_n}d_with_indices.default", slides=True, executed=True)(_indexed)


@operation(*(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)), slides=True, executed=True)
def adaptive_max_pool(ledger: Ledger, x: Value, size: Sequence[int]) -> list[Any]:
    """A max pool to a given size. It is refused unless all windows are equal."""
    pixels = x.shape[-len(size) :]
    if any(n % s for n, s in zip(pixels, size, strict=True)):
        raise ledger.refuse(f"{pixels} pixels do not divide into {tuple(size)} equal windows; choose a divisor")
    return [max_pool(len(size), ledger, x, [n // s for n, s in zip(pixels, size, strict=True)]), None]


def settings_of(count: int, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1) -> list[list[int]]:
    """The settings of windows along each of `count` axes; without a stride, one window begins where another ends."""
    return [moves.each_axis(each, count) for each in (kernel, stride or kernel, padding, dilation)]


def windows(t: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, *, ceil: bool = False) -> Tensor:
    """The entries of every window along a new last axis; padding is zeros.

    Args:
        t: Any tensor. The windows lie in its last axes, of which there are as many as each setting has entries.
        kernel: Entries of a window along each of these axes.
        stride: Distance between two windows along each axis.
        padding: Number of zeros at both ends of each axis.
        dilation: Distance between two entries of a window along each axis.
        ceil: Whether there is a last window that begins before the padding at the end and reaches beyond it.

    Returns:
        `(*batch, *windows, entries of a window)`.
    """
    count, ends = len(kernel), list(padding)
    for axis, (n, k, s, p, d) in enumerate(zip(t.shape[-count:], kernel, stride, padding, dilation, strict=True)):
        reach, last = d * (k - 1) + 1, -(-(n + 2 * p - d * (k - 1) - 1) // s) * s  # last: the start of the last window
        last -= s if last >= n + p else 0
        ends[axis] += max(0, last + reach - n - 2 * p) if ceil else 0
    t = F.pad(t, [p for each in zip(reversed(padding), reversed(ends), strict=True) for p in each])
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), t.ndim - count):
        t = t.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return t.flatten(-count)


def _refused(ledger: Ledger, *arguments: Any, **keywords: Any) -> Value:
    raise ledger.refuse(
        "it is not continuous: a change of the input, however small, can move its result by a fixed amount; use a soft "
        "form, such as softmax in the place of top-k, or a straight line in the place of a step. A function that is "
        "written with comparisons is certified if it is called by its name, such as torch.nn.functional.leaky_relu"
    )


@operation("aten.nan_to_num.default", executed=True)
def nan_to_num(ledger: Ledger, x: Value, *replacements: float | None) -> Value:
    """The identity, since certificates hold for finite numbers."""
    return x


@operation("aten.item.default", "aten._local_scalar_dense.default", bounded=False)
def item(ledger: Ledger, x: Value) -> Value:
    """Refuse `item`, because the graph does not show what Python code does with a number."""
    raise ledger.refuse("`item` turns a tensor that depends on the input into a Python number; keep it a tensor")


@operation("aten.sqrt.default", "aten.rsqrt.default", bounded=False)
def root(ledger: Ledger, x: Value) -> Value:
    """Refuse roots of anything but sums of squares, which are norms."""
    raise ledger.refuse(
        "a root has no bounded slope near 0; only `sqrt(x.square().sum(dim) + eps)`, `sqrt(x**2 + y**2 + eps)` and x "
        "divided by its root mean square have a bound"
    )


_STEPS = ("argmax", "argmin", "argsort", "sign", "round", "floor", "ceil", "trunc", "frac", "heaviside")
_JUMPS = ("hardshrink", "one_hot", "bucketize", "searchsorted", "multinomial")
operation(*(f"aten.{name}.default" for name in _STEPS + _JUMPS), bounded=False)(_refused)
for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    operation(f"aten.{_name}.Scalar", f"aten.{_name}.Tensor", bounded=False, family=_name)(_refused)
