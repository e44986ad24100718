"""Bounds of matrix products, and of operations that are matrix products: convex potentials, sums, means and margins.

A stored matrix may act on the last axis of a value (`linear`) or on the last axis but one (`average`).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from wellnormed.lowering import moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.operations.elementwise import add
from wellnormed.lowering.operations.scattering import mixed, positions
from wellnormed.program.operation import operation
from wellnormed.proof.inference import weight_of
from wellnormed.proof.value import UNIT, Base, Value

aten = torch.ops.aten


@operation("aten.linear.default", kind="product", executed=True)
def linear(ledger: Ledger, x: Any, weight: Stored | Value, bias: Any = None) -> Value:
    """`W x + b` along the last axis, `(*, inputs)` -> `(*, outputs)`, with W `(outputs, inputs)`.

    A weight that depends on the input, or is a multiple of a weight of which only the norm is known, is a `Value`; the
    operation is then bounded as a product of two values.
    """
    if isinstance(weight, Stored):
        return _apply(ledger, x, weight, bias, transposed=False)
    product = matmul(ledger, x, moves.pick(ledger, weight, lambda t: t.mT))
    return product if bias is None else add(ledger, product, bias, roundings=x.shape[-1] + 1)


@operation("wellnormed.float8_product.default", "aten._scaled_mm.default", bounded=False)
def rounded_product(ledger: Ledger, *arguments: Any, **keywords: Any) -> Value:
    """Refuse products of numbers that are rounded to 8 bits, since this rounding is a step function."""
    raise ledger.refuse(
        "it multiplies entries rounded to 8-bit floats, in steps that no Lipschitz constant holds for; certify the "
        "model before `to_float8_`, with `nn.Linear` in this place"
    )


@operation("aten.addmm.default", "aten.baddbmm.default", kind="product", executed=True)
def add_product(ledger: Ledger, summand: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Value:
    """`beta summand + alpha a b`, where a and b are matrices or batches of matrices."""
    product: Any = None
    if abs(alpha) != 1 and ledger.executed is not None:  # which may multiply a, and over- or underflow there, or a b
        with ledger.executing(None):
            return add_product(ledger, summand, a, b, beta=beta, alpha=alpha)
    stored = isinstance(a, Value) and isinstance(b, Stored) and isinstance(summand, Stored)
    if stored and beta == alpha == 1 and b.tensor.ndim == 2 and summand.tensor.shape == b.tensor.shape[1:]:
        return _apply(ledger, a, b, summand, transposed=True)  # as `linear`, so that its parts have bounds of their own
    if isinstance(a, Value) or isinstance(b, Value):
        product = matmul(ledger, a, b)
        product = product if alpha == 1 else moves.times(ledger, product, float(alpha))
    else:
        product = ledger.computed(f"{ledger.name}.product", alpha * (a.tensor @ b.tensor), made_of=(a, b))
    return add(ledger, product, summand, beta, roundings=a.shape[-1] + 2)


@operation("aten.matmul.default", "aten.mm.default", "aten.bmm.default", kind="product", family="matmul", executed=True)
@operation("aten.mv.default", "aten.dot.default", kind="product", executed=True)
def matmul(ledger: Ledger, a: Any, b: Any) -> Value:
    """`a b`, where one factor may be a stored matrix, vector, or batch of matrices."""
    if isinstance(a, Value) and isinstance(b, Value):
        return _of_values(ledger, a, b)
    if isinstance(a, Stored):
        return average(ledger, a, b)
    if b.tensor.ndim == 1:
        row = ledger.computed(f"{ledger.name}.row", b.tensor[None], made_of=[b])
        return moves.pick(ledger, _apply(ledger, a, row, None, transposed=False), lambda t: t.squeeze(-1))
    if b.tensor.ndim > 2:  # x W = (W^T x^T)^T, matrix by matrix
        flipped = ledger.computed(f"{ledger.name}.transposed", b.tensor.mT.contiguous(), made_of=[b])
        turned = moves.pick(ledger, a, lambda t: t.mT)
        return moves.pick(ledger, average(ledger, flipped, turned), lambda t: t.mT)
    return _apply(ledger, a, b, None, transposed=True)


def _apply(ledger: Ledger, x: Value, weight: Stored, bias: Stored | None, *, transposed: bool) -> Value:
    if weight.transpose_of is not None:
        weight, transposed = weight.transpose_of, not transposed
    if not transposed and (found := _rows_of(weight, bias)) is not None:
        whole, shift, rows = found
        return moves.pick(ledger, _apply(ledger, x, whole, shift, transposed=False), lambda t: t[..., rows])
    outputs = weight.tensor.shape[1] if transposed else weight.tensor.shape[0]
    last = len(x.shape) - 1
    axes = sorted({*inner_axes(x), last})
    settings = {"transposed": True} if transposed else {}

    claims = [ledger.prove("spectral", weight, parts=1, **settings)]
    claims += [] if bias is None else [ledger.prove("group_norm", bias, parts=1)]
    shape = (*x.shape[:-1], outputs)
    return ledger.derive("linear", [(x, axes)], shape=shape, axes=axes, constants={"parts": 1}, claims=claims)


def _rows_of(weight: Stored, bias: Stored | None) -> tuple[Stored, Stored | None, torch.Tensor] | None:
    """The matrix and bias of unknown entries that a weight and a bias are rows of, and which; None for others."""
    if weight.rows_of is None or weight.entries_of is None or weight.tensor.ndim != 2:
        return None
    whole, places = weight.entries_of
    rows = places[:, 0] // whole.tensor.shape[-1]
    if whole.tensor.ndim != 2 or places.is_floating_point():
        return None
    if bias is None:
        return whole, None, rows
    shift, entries = bias.entries_of or (None, rows)
    alike = shift is not None and shift.shape == whole.shape[:1] and torch.equal(entries, rows)
    return (whole, shift, rows) if alike else None


def convex_potential(ledger: Ledger, x: Value, weight: Stored, bias: Stored | None, factor: float) -> Value:
    """`x - factor W^T relu(W x + b)` along the last axis, for a stored matrix W, `(hidden, width)`.

    The bound is lower than the product of the bounds of the single operations.
    """
    if not isinstance(weight, Stored) or weight.tensor.ndim != 2 or isinstance(bias, Value):
        raise ledger.refuse("it needs a stored matrix as its weight, and a bias that does not depend on the input")
    claims = [ledger.prove("spectral", weight)]
    claims += [] if bias is None else [ledger.prove("positive_norm", bias)]
    axes = {*inner_axes(x), len(x.shape) - 1}
    return ledger.derive("convex_potential", [(x, axes)], shape=x.shape, constants={"factor": factor}, claims=claims)


def average(ledger: Ledger, matrix: Stored, x: Value, roundings: int | None = None) -> Value:
    """`P x` along the last axis but one, such as an average of tokens.

    Args:
        ledger: The ledger.
        matrix: P, a stored matrix `(rows, tokens)`, several of them `(*batch, rows, tokens)`, or a vector `(tokens,)`.
        x: The value, `(*batch, tokens, width)`, whose leading axes broadcast with those of P, or `(tokens,)`.
        roundings: How often each addend is rounded, if the sums are parts of larger ones.
    """
    if matrix.tensor.ndim == 1:
        row = ledger.computed(f"{ledger.name}.row", matrix.tensor[None], made_of=[matrix])
        return moves.pick(ledger, average(ledger, row, x), lambda t: t.squeeze(-2))
    if len(x.shape) == 1:
        column = moves.pick(ledger, x, lambda t: t[:, None])
        return moves.pick(ledger, average(ledger, matrix, column), lambda t: t.squeeze(-1))
    batch = tuple(np.broadcast_shapes(tuple(matrix.tensor.shape[:-2]), x.shape[:-2]))
    shape = (*batch, matrix.tensor.shape[-2], x.shape[-1])
    x = moves.spread(ledger, x, (*batch, *x.shape[-2:]))
    inner, along = inner_axes(x), len(shape) - 2
    parts = math.prod(matrix.tensor.shape[:-2])
    lead = [1] * (len(batch) - matrix.tensor.ndim + 2) + list(matrix.tensor.shape[:-2])
    joint = along in inner
    # a group may not extend along an axis on which the matrix differs: every matrix has a bound of its own
    inner = tuple(axis for axis in inner if axis >= along or lead[axis] == 1)
    if joint and matrix.tensor.ndim > 2:
        matrix = ledger.computed(f"{matrix.name}.rows", matrix.tensor.flatten(0, -2), made_of=[matrix])
    claims, constants = [ledger.prove("spectral" if joint else "row_sum", matrix, parts=parts)], {"parts": lead}
    return ledger.derive(
        "average", [(x, inner)], shape=shape, axes=inner, constants=constants, claims=claims, roundings=roundings
    )


def _of_values(ledger: Ledger, a: Value, b: Value) -> Value:
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise ledger.refuse("it multiplies a vector by another tensor that depends on the input; give both two axes")
    batch = tuple(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    a, b = (moves.spread(ledger, x, (*batch, *x.shape[-2:])) for x in (a, b))
    shape = (*batch, a.shape[-2], b.shape[-1])
    return ledger.derive("matrix_product", [(a, [-1]), (b, [-2, -1])], shape=shape, axes=[-1])


def reduce(ledger: Ledger, x: Value, dims: Sequence[int] | None, keepdim: bool, mean: bool) -> Value:
    """The sum or the mean over some axes, one after another, or over all axes if `dims` is None or empty."""
    rank = len(x.shape)
    axes = sorted({d % rank for d in dims}) if dims else list(range(rank))
    whole = x
    for axis in axes:
        size = x.shape[axis]
        ones = ledger.computed(f"{size} ones", torch.ones(1, size))
        turned = moves.pick(ledger, x, lambda t, axis=axis: t.movedim(axis, -1)[..., None])
        summed = average(ledger, ones, turned, math.prod(whole.shape[each] for each in axes))
        x = moves.pick(ledger, summed, lambda t, axis=axis: t[..., 0].movedim(-1, axis))
        x = moves.times(ledger, x, float(size), divide=True) if mean else x
    if not mean:
        with ledger.executing(None):
            x = mixed(ledger, whole, positions(x.shape).expand(whole.shape), x)
    if keepdim or not axes:
        return x
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    return moves.pick(ledger, x, lambda t: t.reshape(shape))


@operation("aten.mean.dim", "aten.mean.default", kind="affine", executed=True)
def mean(ledger: Ledger, x: Value, dim: Any = None, keepdim: bool = False, **keywords: Any) -> Value:
    """The mean over some axes, or over all."""
    return reduce(ledger, x, [dim] if isinstance(dim, int) else dim, keepdim, mean=True)


@operation("aten.sum.dim_IntList", "aten.sum.default", kind="affine", executed=True)
def total(ledger: Ledger, x: Value, dim: Any = None, keepdim: bool = False, **keywords: Any) -> Value:
    """The sum over some axes, or over all."""
    return reduce(ledger, x, [dim] if isinstance(dim, int) else dim, keepdim, mean=False)


def margin(ledger: Ledger, logits: Value) -> Value:
    """Add a row that bounds the difference of any two logits of one vector; a linear map must compute them.

    Args:
        ledger: The ledger.
        logits: The result of a linear map, perhaps times one number, `(*, classes)`.

    Returns:
        The bounded differences, as a value of shape `(*, 1)`.

    Raises:
        UncertifiableError: The logits are not the result of such a map, or there are too many pairs.
    """
    term, base = logits.terms[0], logits.terms[0].base
    linear = base.inference if isinstance(base, Base) and base.divisible and term.index is base.order else None
    if len(logits.terms) != 1 or linear is None:
        raise ledger.refuse(
            "its result is not that of a linear map, or is rounded after it, so the differences of its entries have "
            "no separate bound; certify the model up to its logits, or leave margins=True out"
        )
    if term.factor is not None and term.factor.size > 1:
        raise ledger.refuse("the entries of its result are multiplied by different factors; multiply all by one number")
    (weight, transposed), (x,), rows = weight_of(linear), linear.inputs, base.shape[-1]
    if rows**2 * x.shape[-1] > _MOST_DIFFERENCES:
        raise ledger.refuse(f"all pairs of {rows} outputs take too long; leave margins out")
    settings = {"transposed": True} if transposed else {}
    claims = [ledger.prove("row_difference", ledger.used[weight], **settings)]
    claims += [ledger.prove("max_abs", ledger.used[name]) for bias in linear.claims[1:] for name in bias.tensors]
    factor = 1.0 if term.factor is None else abs(term.factor).item() * (1 + 4 * UNIT * (term.roundings + 1))
    if not (term.error or logits.floor):  # the logits are what the map computes
        ledger.executed = linear.executed
    return ledger.derive("margin", [(x, [-1])], shape=(*x.shape[:-1], 1), constants={"factor": factor}, claims=claims)


_MOST_DIFFERENCES = 10**11
"""The largest number of operations for the margins of all pairs, which take some minutes of one core."""
