"""Linear maps by stored matrices: along the last axis, and averages along others."""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
import torch

from wellnormed.propagation import moves
from wellnormed.propagation.decimals import Decimals, decimals, float_up, sqrt_up
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.operations.elementwise import add
from wellnormed.propagation.registry import Read, operation, primitive, refusal
from wellnormed.propagation.rows import Claim
from wellnormed.propagation.value import Base, Bounds, Linear, Term, Value, slack

aten = torch.ops.aten


@operation("aten.linear.default")
def linear(step: Ledger, x: Value, weight: Stored, bias: Stored | None = None) -> Value:
    """`W x + b` along the last axis."""
    if not isinstance(weight, Stored):
        raise step.refuse("its weight depends on the input; only stored weights have a bound")
    return _apply(step, x, weight, bias, transposed=False)


@refusal("wellnormed.float8_product.default", "aten._scaled_mm.default")
def rounded_product(step: Ledger, *arguments: Any, **keywords: Any) -> Value:
    """Refused: rounding to 8 bits is a step function."""
    raise step.refuse(
        "it multiplies entries rounded to 8-bit floats, in steps that no Lipschitz constant holds for; certify the "
        "model before `to_float8_`, with `nn.Linear` in this place"
    )


@operation("aten.addmm.default", "aten.baddbmm.default")
def add_product(step: Ledger, summand: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Value:
    """`beta summand + alpha a b`: of matrices, or of batches of them."""
    product: Any = None
    if isinstance(a, Value) or isinstance(b, Value):
        product = matmul(step, a, b)
        product = product if alpha == 1 else moves.times(step, product, float(alpha))
    else:
        product = step.computed(f"{step.name}.product", alpha * (a.tensor @ b.tensor))
    return add(step, product, summand, beta)


@operation("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default")
def matmul(step: Ledger, a: Any, b: Any) -> Value:
    """A value times a stored matrix from either side, or the product of two values."""
    if isinstance(a, Value) and isinstance(b, Value):
        return _of_values(step, a, b)
    if isinstance(a, Stored):
        return average(step, a, b)
    if b.tensor.ndim == 1:
        row = step.computed(f"{step.name}.row", b.tensor[None])
        return moves.pick(step, _apply(step, a, row, None, transposed=False), lambda t: t.squeeze(-1))
    if b.tensor.ndim > 2:  # x W = (W^T x^T)^T, matrix by matrix
        flipped = step.computed(f"{step.name}.transposed", b.tensor.mT.contiguous())
        turned = moves.pick(step, a, lambda t: t.mT)
        return moves.pick(step, average(step, flipped, turned), lambda t: t.mT)
    return _apply(step, a, b, None, transposed=True)


def _apply(step: Ledger, x: Value, weight: Stored, bias: Stored | None, *, transposed: bool) -> Value:
    if weight.transpose_of is not None:
        weight, transposed = weight.transpose_of, not transposed
    outputs = weight.tensor.shape[1] if transposed else weight.tensor.shape[0]
    last = len(x.shape) - 1
    axes = sorted({*x.inner_axes(), last})
    settings = {"transposed": True} if transposed else {}

    @cache
    def cut(parts: int) -> Base:
        several = parts > 1
        base = (
            step.derive(
                "linear",
                [(x, axes)],
                shape=(*x.shape[:-1], parts, outputs // parts) if several else (*x.shape[:-1], outputs),
                axes=[*axes[:-1], last + 1] if several else axes,
                constants={"parts": parts},
                claims=[step.prove("spectral", weight, parts=parts, **settings)]
                + ([] if bias is None else [step.prove("group_norm", bias, parts=parts)]),
                name=f"{whole.name}/{parts}" if several else None,
                linear=Linear(x, weight, transposed, bias),
                cut=cut,
            )
            .terms[0]
            .base
        )
        assert isinstance(base, Base)
        return base

    whole = cut(1)
    return Value(whole.name, whole.shape, (Term(whole),))


def tokens_of(read: Read, inside: int) -> Decimal:
    """Square root of how many vectors of so many entries lie in a group."""
    return sqrt_up(math.prod(read.shape[axis] for axis in read.axes) // inside)


@primitive("linear")
def _linear(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """The norm of each part of the outputs; a bias moves the radius only."""
    (x,), parts = reads, c["parts"]
    bounds = Bounds(*(each[..., None] if parts > 1 else each for each in x.bounds))
    size = _along(claims[0].values, bounds.gain.ndim, parts)
    shift = _along(claims[1].values, bounds.gain.ndim, parts) if len(claims) > 1 else decimals(0)
    radius = size * bounds.radius + shift * tokens_of(x, x.shape[-1])
    return Bounds(radius, size * bounds.gain, radius)


def _along(values: Sequence[float], axes: int, parts: int) -> Decimals:
    """Numbers for each part, along the last axis but one."""
    return decimals(values).reshape([1] * (axes - 2) + [parts, 1]) if parts > 1 else decimals(values[0])


def average(step: Ledger, matrix: Stored, x: Value) -> Value:
    """`P x` along the last axis but one, for a stored P whose leading axes broadcast: an average of tokens, say."""
    if matrix.tensor.ndim == 1:
        row = step.computed(f"{step.name}.row", matrix.tensor[None])
        return moves.pick(step, average(step, row, x), lambda t: t.squeeze(-2))
    if len(x.shape) == 1:
        column = moves.pick(step, x, lambda t: t[:, None])
        return moves.pick(step, average(step, matrix, column), lambda t: t.squeeze(-1))
    batch = tuple(np.broadcast_shapes(tuple(matrix.tensor.shape[:-2]), x.shape[:-2]))
    shape = (*batch, matrix.tensor.shape[-2], x.shape[-1])
    x = moves.spread(step, x, (*batch, *x.shape[-2:]))
    inner, along = x.inner_axes(), len(shape) - 2
    parts = math.prod(matrix.tensor.shape[:-2])
    lead = [1] * (len(batch) - matrix.tensor.ndim + 2) + list(matrix.tensor.shape[:-2])
    measure = "spectral" if along in inner else "row_sum"
    # axes along which the matrix differs are apart: one bound for each
    inner = tuple(axis for axis in inner if axis >= along or lead[axis] == 1)
    if measure == "spectral":
        flat = step.computed(f"{matrix.name}.rows", matrix.tensor.flatten(0, -2)) if parts > 1 else matrix
        if parts == 1 and matrix.tensor.ndim > 2:
            flat = step.computed(f"{matrix.name}.rows", matrix.tensor.reshape(matrix.tensor.shape[-2:]))
        claim = step.prove("spectral", flat, parts=parts)
    else:
        claim = step.prove("row_sum", matrix, parts=parts)
    return step.derive(
        "average", [(x, inner)], shape=shape, axes=inner, constants={"parts": lead, "measure": measure}, claims=[claim]
    )


@primitive("average")
def _average(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|y_i| <= sum_j |P_ij| max_j |x_j|` of tokens that are groups apart; `|P|` if they are in one group."""
    (x,) = reads
    size = decimals(claims[0].values).reshape([*c["parts"], 1, 1])
    if c["measure"] == "row_sum":
        along = len(x.shape) - 2
        return Bounds(*(size * each.max(along, keepdims=True) for each in x.bounds))
    return Bounds(size * x.bounds.radius, size * x.bounds.gain, size * x.bounds.radius)


def _of_values(step: Ledger, a: Value, b: Value) -> Value:
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise step.refuse("it multiplies two vectors that depend on the input; give them two axes")
    batch = tuple(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    a, b = (moves.spread(step, x, (*batch, *x.shape[-2:])) for x in (a, b))
    shape = (*batch, a.shape[-2], b.shape[-1])
    return step.derive("matrix_product", [(a, [-1]), (b, [-2, -1])], shape=shape, axes=[-1])


@primitive("matrix_product")
def _matrix_product(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|d(a B)| <= |da| |B| + |a| |dB|` for every row a, with the Frobenius norm of B."""
    a, b = (read.bounds for read in reads)
    radius = a.radius * b.radius
    return Bounds(radius, a.gain * b.radius + a.radius * b.gain, radius)


def reduce(step: Ledger, x: Value, dims: Sequence[int] | None, keepdim: bool, mean: bool) -> Value:
    """The sum or mean over axes, one after another."""
    rank = len(x.shape)
    axes = sorted({d % rank for d in dims}) if dims else list(range(rank))
    for axis in axes:
        size = x.shape[axis]
        ones = step.computed(f"{size} ones", torch.ones(1, size))
        turned = moves.pick(step, x, lambda t, axis=axis: t.movedim(axis, -1)[..., None])
        summed = average(step, ones, turned)
        x = moves.pick(step, summed, lambda t, axis=axis: t[..., 0].movedim(-1, axis))
        x = moves.times(step, x, float(size), divide=True) if mean else x
    if keepdim or not axes:
        return x
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    return moves.pick(step, x, lambda t: t.reshape(shape))


@operation("aten.mean.dim", "aten.mean.default")
def mean(step: Ledger, x: Value, dim: Any = None, keepdim: bool = False, **keywords: Any) -> Value:
    """The mean over axes."""
    return reduce(step, x, [dim] if isinstance(dim, int) else dim, keepdim, mean=True)


@operation("aten.sum.dim_IntList", "aten.sum.default")
def total(step: Ledger, x: Value, dim: Any = None, keepdim: bool = False, **keywords: Any) -> Value:
    """The sum over axes."""
    return reduce(step, x, [dim] if isinstance(dim, int) else dim, keepdim, mean=False)


def margin(step: Ledger, logits: Value) -> Value:
    """The difference of any two entries of a linear map's result, for every vector that it maps."""
    term = logits.terms[0]
    base = term.base
    one_factor = term.factor is None or term.factor.numel() == 1
    if len(logits.terms) != 1 or not isinstance(base, Base) or base.linear is None or term.index is not None:
        raise step.refuse(
            "its result is no linear map, or is rounded after it, so that differences of its entries have no bound of "
            "their own"
        )
    if not one_factor:
        raise step.refuse("the entries of its result have factors of their own; multiply all by one number")
    linear, settings = base.linear, {"transposed": True} if base.linear.transposed else {}
    rows = linear.weight.tensor.shape[1 if linear.transposed else 0]
    if rows**2 * linear.source.shape[-1] > _MOST_DIFFERENCES:
        raise step.refuse(f"all pairs of {rows} outputs take too long; leave margins out")
    claims = [step.prove("row_difference", linear.weight, **settings)]
    claims += [] if linear.bias is None else [step.prove("max_abs", linear.bias)]
    factor = 1.0 if term.factor is None else float_up(abs(Decimal(float(term.factor))) * Decimal(slack(term.roundings)))
    shape = (*linear.source.shape[:-1], 1)
    return step.derive("margin", [(linear.source, [-1])], shape=shape, constants={"factor": factor}, claims=claims)


_MOST_DIFFERENCES = 10**11
"""Operations, some minutes of one core."""


@primitive("margin")
def _margin(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|(w_a - w_b) . x + b_a - b_b|`, and `|w_a - w_b|` times the change of x."""
    (x,), factor = reads, decimals(c["factor"]).item()
    size = factor * decimals(claims[0].values).item()
    shift = 2 * factor * decimals(claims[1].values).item() if len(claims) > 1 else decimals(0).item()
    radius = size * x.bounds.radius + shift
    return Bounds(radius, size * x.bounds.gain, radius)
