"""Bounds of normalisation layers, of Euclidean norms, deviations and variances, and of projections onto balls."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import torch

from wellnormed.lowering import moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.operations.elementwise import add, along_channels, multiply, square
from wellnormed.lowering.operations.selection import paired
from wellnormed.program.operation import operation
from wellnormed.proof.attention import origin_of
from wellnormed.proof.decimals import rounding_up
from wellnormed.proof.value import Value

Dims = Sequence[int] | int | None
"""Numbers of axes, as torch takes them: None and an empty list stand for all axes."""


def axes_of(x: Value, dims: Dims) -> list[int]:
    """The numbers of the axes, in order."""
    given = [dims] if isinstance(dims, int) else list(dims or range(len(x.shape)))
    return sorted({d % len(x.shape) for d in given})


def normalize(
    ledger: Ledger, x: Value, dims: Dims, eps: float | None, centred: bool = True, squares: bool = False
) -> Value:
    """`(x - mean) / sqrt(variance + eps)`, or `x / sqrt(mean square + eps)` if not `centred`, over some axes.

    One bound holds for both, but for rounding errors. With `squares`, a variance may be computed as the mean of squares
    less the square of the mean, as torch does for images whose channels lie last.
    """
    if eps is None or not eps > 0:
        raise ledger.refuse(f"eps={eps} lets it divide by numbers near 0; pass a positive eps")
    dims = axes_of(x, dims)
    constants = {"eps": float(eps), "over": dims} | ({} if centred else {"centred": False})
    constants |= {"squares": True} if squares else {}
    return ledger.derive("normalization", [(x, ledger.vectors(x, dims))], shape=x.shape, constants=constants)


def _scaled(ledger: Ledger, x: Value, weight: Stored | None, bias: Stored | None) -> Value:
    x = x if weight is None else multiply(ledger, x, weight)
    return x if bias is None else add(ledger, x, bias, roundings=3)


@operation("aten.layer_norm.default", executed=True)
def layer_norm(
    ledger: Ledger, x: Value, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Value:
    """LayerNorm over as many of the last axes as `shape` has."""
    return _scaled(ledger, normalize(ledger, x, range(-len(shape), 0), eps), weight, bias)


@operation("aten.rms_norm.default", executed=True)
def rms_norm(
    ledger: Ledger, x: Value, shape: Sequence[int], weight: Stored | None = None, eps: float | None = None
) -> Value:
    """RMSNorm over as many of the last axes as `shape` has.

    Without eps, torch takes the machine epsilon of the dtype that it computes in, which has at least 32 bits.
    """
    eps = min(torch.finfo(each).eps for each in (ledger.dtype, torch.float32)) if eps is None else eps
    return _scaled(ledger, normalize(ledger, x, range(-len(shape), 0), eps, centred=False), weight, None)


@operation("aten.group_norm.default", executed=True)
def group_norm(
    ledger: Ledger, x: Value, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Value:
    """GroupNorm, which normalises the channels of each group together, over all pixels."""
    shape = x.shape
    cut = moves.pick(ledger, x, lambda t: t.unflatten(1, (groups, -1)))
    normal = normalize(ledger, cut, range(2, len(cut.shape)), eps, squares=True)
    return _by_channel(ledger, moves.pick(ledger, normal, lambda t: t.reshape(shape)), weight, bias)


@operation("aten.instance_norm.default", statistics=(3, 4), executed=True)
def instance_norm(
    ledger: Ledger, x: Value, weight: Any, bias: Any, mean: Any, variance: Any, use_input: bool, *rest: Any
) -> Value:
    """InstanceNorm, which normalises the pixels of each channel, or uses stored statistics."""
    eps = float(rest[1])
    if use_input:
        return _by_channel(ledger, normalize(ledger, x, range(2, len(x.shape)), eps, squares=True), weight, bias)
    return _with_statistics(ledger, x, weight, bias, mean, variance, eps)


@operation("aten._native_batch_norm_legit_no_training.default", kind="affine", statistics=(3, 4), executed=True)
def batch_norm(
    ledger: Ledger, x: Value, weight: Any, bias: Any, mean: Stored, variance: Stored, momentum: float, eps: float
) -> list[Value]:
    """BatchNorm in evaluation mode, which multiplies every channel by a constant and adds another."""
    return [_with_statistics(ledger, x, weight, bias, mean, variance, eps)]


@operation("aten.batch_norm.default", statistics=(3, 4), executed=True)
def batch_norm_whole(
    ledger: Ledger, x: Value, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
) -> Value:
    """BatchNorm in evaluation mode. It is refused in training mode."""
    if mean is None:
        raise ledger.refuse(
            "it has no running statistics, so it normalises by the batch in evaluation mode, too; make the layer with "
            "track_running_stats=True, or use GroupNorm"
        )
    if training:
        return batch_norm_training(ledger)
    return _with_statistics(ledger, x, weight, bias, mean, variance, float(rest[1]))


@operation("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.default", bounded=False)
@operation("aten._native_batch_norm_legit.no_stats", "aten.native_batch_norm.default", bounded=False)
def batch_norm_training(ledger: Ledger, *arguments: Any) -> Value:
    """Refuse BatchNorm in training mode, where the result for one sample depends on the others."""
    raise ledger.refuse("it normalises by the batch, so each result depends on all samples; call `model.eval()` first")


def _with_statistics(
    ledger: Ledger, x: Value, weight: Any, bias: Any, mean: Stored, variance: Stored, eps: float
) -> Value:
    if ledger.unknown(weight) or ledger.unknown(bias):
        normal = _with_statistics(ledger, x, None, None, mean, variance, eps)
        return _by_channel(ledger, normal, weight, bias)
    *stored, how = scale_and_shift(ledger, weight, bias, mean, variance, eps)
    factor, summand = (along_channels(ledger, each, len(x.shape) - 2) for each in stored)
    return moves.add(ledger, [moves.times(ledger, x, factor), ledger.constant(summand)], **how)


def scale_and_shift(
    ledger: Ledger, weight: Any, bias: Any, mean: Stored, variance: Stored, eps: float, before: Stored | None = None
) -> tuple[Stored, Stored, dict[str, Any]]:
    """The scale and shift of a batch norm, and how its row is executed, as keywords of the ledger's methods.

    Executed, scale and shift are computed in the model's dtype, the shift from numbers that may cancel.

    Args:
        ledger: The ledger.
        weight: As in torch, like the following.
        bias: None for zeros.
        mean: The running mean.
        variance: The running variance.
        eps: A number that is added to it.
        before: The bias of a map before it, whose scaled sum with the shift is the shift of the result.
    """
    unit, form = torch.finfo(torch.float64).eps / 2, torch.finfo(ledger.dtype)
    squared = variance.tensor.detach().double() + eps
    # rounded down twice, so that the scale, which divides by it, is not below the exact one
    deviation = squared.sqrt() * (1 - 4 * unit)
    scale = 1 / deviation if weight is None else weight.tensor.detach().double() / deviation
    offset, first = (torch.zeros(()) if each is None else each.tensor.detach().double() for each in (bias, before))
    moved, first = mean.tensor.detach().double() * scale, first * scale
    shift, size = offset - moved, moved.abs() + offset.abs() + first.abs()
    shift = shift + torch.where(first + shift < 0, -1, 1) * 16 * unit * size  # nor the size of the whole shift
    numbers = torch.cat([squared, 1 / deviation, scale[scale != 0].abs()])
    if not ((numbers >= form.smallest_normal) & (numbers <= form.max)).all():
        ledger.executed = None  # a number on the way may become zero or infinity
    factor, summand = (
        ledger.computed(f"{ledger.name}.{kind}", t, made_of=(weight, bias, mean, variance))
        for kind, t in (("scale", scale), ("shift", shift))
    )
    # at most 7 roundings, and in units of float64 as many more as the tensors that are stored are moved
    roundings = 40 if ledger.dtype == torch.float64 else 12
    return factor, summand, {"roundings": roundings, "beside": float(size.max()) * (1 + 8 * unit)}


def _by_channel(ledger: Ledger, x: Value, weight: Stored | None, bias: Stored | None) -> Value:
    channels = (along_channels(ledger, stored, len(x.shape) - 2) for stored in (weight, bias))
    return _scaled(ledger, x, *channels)


def project(ledger: Ledger, x: Value, dims: Dims, *, scale: float | None = None, radius: float = 1.0) -> Value:
    """`x / sqrt(max(1, scale mean(x^2)))` over some axes, or `x min(1, radius / |x|)`.

    It is the projection onto the ball of all vectors with a root mean square of at most `scale^(-1/2)`.
    """
    dims = axes_of(x, dims)
    entries = math.prod(x.shape[d] for d in dims)
    if not radius > 0:
        raise ledger.refuse(f"it divides {radius} by a norm, which is not positive")
    least = most = scale
    if least is None or most is None:  # the larger ball bounds the result, the smaller one decides if x moves
        least, most = (entries / radius / radius * (1 + sign * 2.0**-50) for sign in (-1, 1))
    if not 0 < least <= most < math.inf:
        raise ledger.refuse(f"it multiplies the mean square by {least}, which is not positive and finite")
    with rounding_up():
        idle = all(r * r * Decimal(most) <= entries for r in ledger.bounds(x, dims).radius.flat)
    # where x never leaves the ball the result is x, with its linear origin; but as a contraction it errs less
    if origin_of(x) is not None and ledger.choose(lambda: int(idle)):
        return ledger.move("idle_ball", [x], x.shape, {"scale": float(most), "over": dims})
    constants = {"scale": float(least), "over": dims}
    return ledger.derive("ball", [(x, ledger.vectors(x, dims))], shape=x.shape, constants=constants)


def centre(ledger: Ledger, x: Value, dims: Dims, means: int = 1) -> Value:
    """`x - mean(x)` over some axes. It is an orthogonal projection, and at most doubles the largest absolute entry.

    With `means`, it may be off by as many errors of a mean, of which the root of an executed variance has six; see
    `normalization` in `proof.rules`. Two are counted anyway.
    """
    dims = axes_of(x, dims)
    roundings = means * (math.prod(x.shape[d] for d in dims) + 3)
    reads = [(x, {*dims, *inner_axes(x)})]
    return ledger.derive("contraction", reads, shape=x.shape, constants={"growth": 2.0}, roundings=roundings)


@operation("aten.linalg_vector_norm.default", executed=True)
def euclidean_norm(
    ledger: Ledger, x: Value, ord: float = 2, dim: Any = None, keepdim: bool = False, **keywords: Any
) -> Value:
    """The Euclidean norm over some axes, or over all.

    The bounds are `||x| - |y|| <= |x - y|`, and `|x| <= sqrt(n) max_i |x_i|` for n entries.
    """
    if ord != 2:
        raise ledger.refuse(f"only Euclidean norms of vectors have a bound, not norms of order {ord}")
    dims = axes_of(x, dim)
    kept = [1 if axis in dims else size for axis, size in enumerate(x.shape)]
    growth = math.nextafter(math.sqrt(math.prod(x.shape[d] for d in dims)), math.inf)
    reads = [(x, {*dims, *inner_axes(x)})]
    roundings = math.prod(x.shape[d] for d in dims) + 6
    result = ledger.derive("contraction", reads, shape=kept, constants={"growth": growth}, roundings=roundings)
    return result if keepdim else moves.pick(ledger, result, lambda t: t.squeeze(tuple(dims)))


def to_unit(
    ledger: Ledger, x: Value, dims: Dims, eps: float, share: float = 1.0, *,
    squared: bool = False, roundings: int | None = None,
) -> Value:  # fmt: skip
    """`x / max(|x|, eps)`, `x / (share |x| + eps)`, or `x / sqrt(share^2 |x|^2 + eps)` if `squared`, over some axes.

    With `roundings`, the norm may be of other executed numbers than x; see `unit` in `proof.rules`.
    """
    if not (eps > 0 and share > 0):
        raise ledger.refuse(f"eps={eps} lets it divide by numbers near 0; pass a positive eps")
    dims, floor = axes_of(x, dims), math.sqrt(eps) if squared else float(eps)
    if share != 1 or squared:
        floor *= (1 - 2.0**-50) / share
    constants = {"eps": floor, "over": dims}
    reads = [(x, ledger.vectors(x, dims))]
    with nullcontext() if share <= 1 else ledger.executing(None):  # a multiple of |x| may overflow
        result = ledger.derive("unit", reads, shape=x.shape, constants=constants, roundings=roundings)
    return result if share == 1 else moves.times(ledger, result, (1 + 2.0**-50) / share)


def standardize(ledger: Ledger, x: Value, dims: Dims, correction: float, eps: float, *, squared: bool) -> Value:
    """`(x - mean) / (deviation + eps)` over some axes, or `(x - mean) / sqrt(variance + eps)` if `squared`."""
    dims = axes_of(x, dims)
    share = 1 / math.sqrt(_freedom(ledger, x, dims, correction))
    return to_unit(ledger, centre(ledger, x, dims, 4), dims, eps, share, squared=squared, roundings=1)


def _freedom(ledger: Ledger, x: Value, dims: list[int], correction: float) -> float:
    freedom = math.prod(x.shape[d] for d in dims) - correction
    if not freedom > 0:
        raise ledger.refuse(f"it divides by {freedom}; take it over more entries, or pass correction=0")
    return freedom


@operation("aten.hypot.default", executed=True)
def hypotenuse(ledger: Ledger, a: Any, b: Any) -> Value:
    """`sqrt(a^2 + b^2)`, entry by entry."""
    return euclidean_norm(ledger, paired(ledger, a, b), dim=-1)


def smooth_norm(ledger: Ledger, x: Value, dims: Any, keepdim: bool, eps: float, mean: bool = False) -> Value:
    """`sqrt(|x|^2 + eps)`, or `sqrt(mean(x^2) + eps)`, over some axes: a contraction of x plus at most `sqrt(eps)`."""
    if eps < 0:
        raise ledger.refuse(f"it adds {eps} below a root; add a positive number")
    ledger.beside = max(ledger.beside, eps)  # which is added to the sum of squares
    norm, count = euclidean_norm(ledger, x, 2, dims, keepdim), math.prod(x.shape[d] for d in axes_of(x, dims))
    if mean:
        norm = moves.times(ledger, norm, math.nextafter(math.sqrt(count), 0.0), divide=True)
    if not eps:
        return norm
    # executed is the root of one sum, whose roundings are those of the norm
    added = moves.number(ledger, math.nextafter(math.sqrt(eps), math.inf))
    return moves.add(ledger, [norm, added], roundings=count + 8)


@operation("aten.std.correction", "aten.std.dim", executed=True)
def deviation(
    ledger: Ledger, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> Value:
    """The standard deviation over some axes with n entries together: `|x - mean(x)| / sqrt(n - correction)`.

    It is `1 / sqrt(n - correction)`-Lipschitz, also at equal entries, where, like a norm at 0, it has no derivative.
    """
    dims = axes_of(x, dim)
    freedom = _freedom(ledger, x, dims, unbiased if correction is None else correction)
    norm = euclidean_norm(ledger, centre(ledger, x, dims, 3), 2, dims, keepdim)
    return moves.times(ledger, norm, math.nextafter(math.sqrt(freedom), 0.0), divide=True)


@operation("aten.var.correction", "aten.var.dim", executed=True)
def variance(ledger: Ledger, x: Value, *settings: Any, **named: Any) -> Value:
    """The variance over some axes, the square of the deviation. Its slope grows with x."""
    return square(ledger, deviation(ledger, x, *settings, **named))
