"""Bounds of operations that add entries at stored positions, as message passing does: sums of moves.

As positions do not depend on the input, such an operation is a stored matrix. The value of the result keeps the
matrix's entries, so edge weights and linear operations before and after it are bounded jointly with it.
"""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellnormed.lowering import moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.operations.elementwise import add
from wellnormed.lowering.operations.movement import as_value, where
from wellnormed.lowering.operations.selection import in_order, larger
from wellnormed.program.operation import operation
from wellnormed.proof.value import UNIT, Base, Value

aten = torch.ops.aten

_TERMS, _ENTRIES, _ADDENDS = 32, 2**24, 2**26
"""Limits: the terms of a sum that need no row of their own; the entries of a mixture; the addends of all sums."""


def positions(shape: tuple[int, ...]) -> Tensor:
    """The flat positions of all entries of a tensor of this shape."""
    return torch.arange(math.prod(shape)).reshape(shape)


def sources_of(places: Tensor, count: int) -> Tensor:
    """For each of `count` positions, the flat positions of all entries of `places` that equal it, `(count, most)`.

    Shorter rows are filled up with -1; entries of `places` that are -1 count for no position.

    Example:
        >>> sources_of(torch.tensor([2, 0, 2, -1]), 3)
        tensor([[ 1, -1],
                [-1, -1],
                [ 0,  2]])
    """
    order = places.flatten().argsort(stable=True)
    order = order[places.flatten()[order] >= 0]
    named = places.flatten()[order]
    number = torch.arange(len(named)) - torch.searchsorted(named, named)
    most = int(number.max()) + 1 if len(named) else 1
    if count * most > _ADDENDS:
        raise ValueError(f"{most} of its entries go to one of {count} places, which is too many")
    sources = torch.full((count, most), -1)
    sources[named, number] = order
    return sources


def taken(ledger: Ledger, x: Value, sources: Tensor) -> Value:
    """The entries at flat positions, and zeros at -1."""
    return moves.pick(ledger, x, lambda t: torch.cat([t.flatten(), t.new_zeros(1)])[sources])


def scattered(ledger: Ledger, x: Value, places: Tensor, shape: tuple[int, ...]) -> Value:
    """Add every entry of x to zeros of this shape, at the flat position in `places`; -1 leaves an entry out.

    Executed, the entries that go to one place may be added one after another, in the dtype of the result.
    """
    sources, sums = sources_of(places, math.prod(shape)).reshape(*shape, -1), []
    for some in sources.split(_TERMS, -1):
        part = moves.add(ledger, [taken(ledger, x, column) for column in some.unbind(-1)], sources.shape[-1])
        if sources.shape[-1] > _TERMS:  # an identity row, whose result is one term
            part = ledger.derive("contraction", [(part, inner_axes(part))], shape=shape, roundings=0)
        sums.append(part)
    total = moves.add(ledger, sums, 0)  # whose roundings are counted
    with ledger.executing(None):  # executed are sums, and no attention
        return mixed(ledger, x, places, total)


def mixed(ledger: Ledger, x: Value, places: Tensor, total: Value) -> Value:
    """Sums of the entries of x that go to one position; bounded as attention if the entries have softmax weights.

    If the weights of each sum are different entries of one line of a softmax, the sum is attention: its keys are the
    logits of that line, of width 1, and its query is 1. So its norm is at most that of the longest value.

    Args:
        ledger: The ledger.
        x: The entries.
        places: Flat positions in the result, of the shape of x.
        total: The same sums, bounded as plain sums; returned if they are not attention or this bound is lower.
    """
    if (product := _only_term(x, "product")) is None:
        return total
    (a, b), at = product.base.inference.inputs, sources_of(places, math.prod(total.shape))
    for first, second in ((a, b), (b, a)):
        if (weights := _only_term(first, "softmax")) is None:
            continue
        factors, over = weights.base.shape, weights.base.inference.constants["over"]
        n, inner, width = factors[over], math.prod(factors[over + 1 :]), (total.shape or (1,))[-1]
        added = _at(product.index, at)
        chosen = _at(weights.index, added).reshape(-1, width, at.shape[-1])
        width = width if bool((chosen == chosen[:, :1]).all()) else 1  # whether a vector has one weight
        chosen = chosen.reshape(-1, width, at.shape[-1])[:, 0]
        sums, addends = (chosen >= 0).nonzero(as_tuple=True)
        line, place = chosen // (inner * n) * inner + chosen % inner, chosen // inner % n
        line_of_sum = torch.where(chosen >= 0, line, 0).max(-1).values
        if len(chosen) * n * width > _ENTRIES:
            continue
        times = torch.zeros(len(chosen), n).index_put_((sums, place[sums, addends]), torch.ones(()), accumulate=True)
        if bool((line != line_of_sum[:, None])[sums, addends].any()) or times.max() > 1:
            continue
        keys = (line_of_sum // inner * inner * n + line_of_sum % inner)[:, None] + inner * torch.arange(n)
        values = torch.full((len(keys), n, width), -1)
        values[sums, place[sums, addends]] = added.reshape(len(keys), width, -1)[sums, :, addends]
        query = moves.spread(ledger, moves.number(ledger, 1.0), (len(keys), 1, 1))
        logits = taken(ledger, weights.base.inference.inputs[0], keys[..., None])
        reads = [(query, [-1]), (logits, [-1]), (taken(ledger, second, values), [-1])]
        result = ledger.derive("attention", reads, shape=(len(keys), 1, width), axes=[-1], constants={"scale": 1.0})
        result = moves.pick(ledger, result, lambda t: t.reshape(total.shape))
        for term in (product, weights):
            factor = 1.0 if term.factor is None else term.factor.item() * (1 + 4 * UNIT * term.roundings)
            result = result if factor == 1 else moves.times(ledger, result, factor)
        return ledger.least(result, total)
    return total


def _only_term(x: Value, operation: str) -> Any:
    """The only term of a value, if it is the result of a row of this operation, moved and scaled by one number."""
    term = x.terms[0] if len(x.terms) == 1 else None
    if term is None or not isinstance(term.base, Base) or (term.factor is not None and term.factor.size > 1):
        return None
    return term if term.base.inference is not None and term.base.inference.operation == operation else None


def _at(index: Any, places: Tensor) -> Tensor:
    """The entries of an index at flat positions, and -1 at -1."""
    return torch.cat([torch.from_numpy(index).long().flatten(), torch.full((1,), -1)])[places]


def _onto(ledger: Ledger, x: Value | Stored, added: Value, places: Tensor) -> Value:
    """The sum of x, mostly a stored tensor of zeros, which needs no row, and of what was `added` to it at `places`."""
    if isinstance(x, Stored) and not bool(x.tensor.any()):
        return added
    return add(ledger, added, x, roundings=int(places.flatten().clamp(min=0).bincount(minlength=1).max()) + 1)


@operation("aten.index_add.default", executed=True)
def index_add(ledger: Ledger, x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Value:
    """Slices of the source, times alpha, added to the slices of x that an index names."""
    places = positions(x.shape).index_select(dim, index.tensor)
    source = as_value(ledger, source)
    source = source if alpha == 1 else moves.times(ledger, source, float(alpha))
    return _onto(ledger, x, scattered(ledger, source, places, x.shape), places)


@operation("aten.scatter_reduce.two", executed=True)
def scatter_reduce(
    ledger: Ledger, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Value:
    """Sums, means, maxima or minima of entries that go to one place, with or without the entry of x that is there."""
    if reduce not in ("sum", "mean", "amax", "amin"):
        raise ledger.refuse(f"it reduces by {reduce!r}; only sums, means, maxima and minima have a bound")
    shape, places = x.shape, positions(x.shape).gather(dim, index.tensor)
    source = moves.pick(ledger, as_value(ledger, source), lambda t: t[tuple(map(slice, index.tensor.shape))])
    counts = places.flatten().bincount(minlength=math.prod(shape)).reshape(shape)
    if reduce in ("sum", "mean"):
        result = scattered(ledger, source, places, shape)
        result = _onto(ledger, x, result, places) if include_self else result
        if reduce == "mean":
            numbers = (counts + include_self).clamp(min=1)
            divisors = ledger.computed(f"{ledger.name}.counts", numbers.double())
            # torch counts in the dtype of the result, where 1 + 256 is 256 in bfloat16
            counted = bool(numbers.max() <= 2 / torch.finfo(ledger.dtype).eps)
            with nullcontext() if counted else ledger.executing(None):
                result = moves.times(ledger, result, divisors, divide=True)
    else:  # missing entries are zeros here and infinite in torch, so the sorted lines are not shared
        lines = taken(ledger, source, sources_of(places, math.prod(shape)).reshape(*shape, -1))
        end = -1 if reduce == "amax" else 0
        result = moves.pick(ledger, in_order(ledger, lines, len(shape)), lambda t: t[..., end])
    if not bool((counts > 0).all()) and not (include_self and reduce in ("sum", "mean")):
        result = where(ledger, ledger.computed(f"{ledger.name}.reached", counts > 0), result, x)
    return larger(ledger, result, x, reduce == "amin") if include_self and reduce[0] == "a" else result


operation("aten.scatter_add.default", executed=True)(partial(scatter_reduce, reduce="sum"))


@operation("aten.index_put.default", executed=True)
def index_put(ledger: Ledger, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Value:
    """Entries of x at stored positions, replaced by values or added to them."""
    places = aten.index.Tensor(positions(x.shape), [None if each is None else each.tensor for each in indices])
    added = scattered(ledger, moves.spread(ledger, as_value(ledger, values), places.shape), places, x.shape)
    if accumulate:
        return _onto(ledger, x, added, places)
    if places.unique().numel() < places.numel():
        raise ledger.refuse("it writes to one place twice, in an undefined order; use each position once")
    written = torch.isin(positions(x.shape), places)
    return where(ledger, ledger.computed(f"{ledger.name}.written", written), added, x)


@operation("aten.col2im.default", executed=True)
def fold(ledger: Ledger, x: Value, size: Any, kernel: Any, *settings: Any) -> Value:
    """Add up windows to an image, `torch.nn.functional.fold`: the adjoint of cutting windows out of an image."""
    image = (*x.shape[:-2], x.shape[-2] // math.prod(kernel), *size)
    places = aten.im2col.default(positions(image).double() + 1, kernel, *settings).long() - 1  # -1 in the padding
    return scattered(ledger, x, places, image)


@operation("aten._sparse_mm.default", executed=True)
def sparse_product(ledger: Ledger, matrix: Any, x: Any) -> Value:
    """`A x` with a stored sparse matrix A and a matrix x."""
    entries = matrix.tensor.to_sparse_coo().coalesce()
    rows, columns = entries.indices()
    weights = ledger.computed(f"{ledger.name}.entries", entries.values()[:, None])
    messages = moves.times(ledger, moves.pick(ledger, x, lambda t: t[columns]), weights)
    shape = (len(entries), x.shape[1])
    return scattered(ledger, messages, positions(shape)[rows], shape)
