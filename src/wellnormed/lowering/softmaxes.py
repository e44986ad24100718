"""Patterns of softmax, logsumexp and maxima over some entries only: the visible ones of a mask, or those of a segment.

A mask replaces entries by -infinity, so the operation is over the visible entries alone. Graph attention has a softmax
over the edges that lead to each node; the edges of one node are a segment.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wellnormed.lowering import matching, moves
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.matching import Anything, Number, Op, X, op
from wellnormed.lowering.operations.attention import logsumexp, softmax
from wellnormed.lowering.operations.elementwise import add
from wellnormed.lowering.operations.normalization import axes_of
from wellnormed.lowering.operations.scattering import positions, sources_of, taken
from wellnormed.lowering.operations.selection import extreme, in_order, ordered
from wellnormed.lowering.patterns import Lowering, Stated
from wellnormed.proof.value import Value

_MASK, _CHOICE, _BIAS, _DIM = (Anything(name) for name in ("mask", "choice", "bias", "dim"))
_FILL = (-math.inf, op("scalar_tensor.default", -math.inf, rest="settings"))
_HIDDEN = (
    op("masked_fill", X, _MASK, _FILL),
    op("where", _MASK, _FILL, X),
    op("where", _CHOICE, X, _FILL),
    op("add", X, _BIAS),
)
_SOFTMAX = op("softmax", _HIDDEN, _DIM, rest="rest")
_LOGSUMEXP = op("logsumexp.default", _HIDDEN, _DIM, rest="rest")
_MAX_OF_AXIS = op("max.dim", _HIDDEN, _DIM, rest="rest")
_MAX = (op("amax.default", _HIDDEN, _DIM, rest="rest"), Op(("<built-in function getitem>",), (_MAX_OF_AXIS, 0)))


def _visible(ledger: Ledger, f: Mapping[str, Any]) -> tuple[Value, Tensor]:
    """The value with hidden entries set to zero, and a boolean tensor of the visible entries."""
    x, mask = f["x"], next(f[name] for name in ("mask", "choice", "bias") if name in f)
    visible = torch.ones((), dtype=torch.bool)
    if isinstance(mask, Stored):
        visible = mask.tensor != -math.inf if "bias" in f else mask.tensor.bool() ^ ("mask" in f)
    if "bias" in f:
        if not bool(visible.all()):
            mask = ledger.computed(f"{mask.name} or 0", mask.tensor.where(visible, 0.0), made_of=[mask])
        x = add(ledger, x, mask)
    shape = torch.broadcast_shapes(x.shape, visible.shape)
    x, visible = moves.spread(ledger, x, shape), visible.expand(shape)
    if not bool(visible.sum(axes_of(x, f["dim"])).all()):
        raise ledger.refuse("its mask hides all entries of a line; leave one visible")
    return moves.pick(ledger, x, lambda t: torch.where(visible, t, 0.0)), visible


def _masked_softmax(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    x, visible = _visible(ledger, f)
    return moves.pick(ledger, softmax(ledger, x, f["dim"]), lambda t: torch.where(visible, t, 0.0))


def _masked_logsumexp(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    x, visible = _visible(ledger, f)
    counts = visible.sum(axes_of(x, f["dim"]), keepdim=True)
    counts = counts if len(counts.unique()) > 1 else counts.flatten()[:1]
    return logsumexp(ledger, x, f["dim"], *f["rest"], counts=counts)


def _masked_largest(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    """The largest visible entry; if entries are hidden, the sorted lines, which hold zeros there, are not shared."""
    x, visible = _visible(ledger, f)
    sort = ordered if bool(visible.all()) else in_order
    return extreme(ledger, x, f["dim"], any(f["rest"]), lesser=False, sort=sort)


def _read(what: Any, place: str) -> tuple[Op, ...]:
    """For each edge, the entry of its segment."""
    listed = op("index.Tensor", what, Anything(f"listed {place}"))
    return op("index_select.default", what, 0, Anything(f"index {place}")), listed


_MOST = op("scatter_reduce.two", Anything("any"), 0, Anything("index most"), X, "amax", include_self=False)


def _softmax_of(exponentials: Op) -> Op:
    to = Anything("zeros"), 0, Anything("index"), exponentials
    sums = op("scatter_add.default index_add.default", *to)
    return op("div", exponentials, _read((matching.add(sums, Number("eps")), sums), "sums"))


_SEGMENTS = tuple(_softmax_of(op("exp.default", x)) for x in (op("sub", X, _read(_MOST, "shift")), X))
"""`exp(x - m) / (sum(exp(x - m)) + eps)`, where m are the largest entries of the segments, or 0."""


_OVER, _SHIFT = Anything("over"), Anything("shift")
_LARGEST = (
    op("amax.default", X, _SHIFT, True),
    Op(("<built-in function getitem>",), (op("max.dim", X, _SHIFT, True), 0)),
)
_SHIFTED, *_WRITTEN = (
    op("div", each, total)
    for each in (op("exp.default", op("sub", X, _LARGEST)), op("exp.default", X))
    for sums in [op("sum.dim_IntList", each, _OVER, True)]
    for total in (sums, matching.add(sums, Number("eps")))
)
"""`exp(x - m) / (sum(exp(x - m)) + eps)`, where m is the largest entry along some axes, which cannot overflow, or 0."""


def _written_softmax(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    """An eps is as in `_segment_softmax`, if the largest entry is the line's; without a shift it is like one more."""
    over, shift = (axes_of(f["x"], f.get(name, f["over"])) for name in ("over", "shift"))
    eps = f.get("eps", 0.0)
    if len(over) > 1 or eps < 0 or not ({*over} == {*shift} if eps else {*over} <= {*shift}):
        raise ledger.refuse("it is not a softmax along one axis: take the sum, and the largest entry, along the same")
    result = softmax(ledger, f["x"], *over)
    return moves.times(ledger, result, math.nextafter(1 + 2 * eps, math.inf)) if eps else result


def _at(table: Tensor, index: Any) -> Tensor:
    """The entries of a table at an index: of slices, of single entries, or of a list with one index per axis."""
    if not isinstance(index, Stored):
        return table[tuple(slice(None) if each is None else each.tensor for each in index)]
    return table.gather(0, index.tensor) if index.tensor.ndim == table.ndim else table[index.tensor]


def _segment_softmax(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    """A softmax of each segment; segments are gathered as lines of one tensor, padded with zeros.

    Adding eps to the denominator is like one more entry `m + log eps`, whose weight is at most eps, where m is the
    largest entry. So the Jacobian is a submatrix of a softmax's, whose norm is 1/2, plus a matrix of norm eps.
    """
    x, zeros, eps = f["x"], f["zeros"].tensor, f.get("eps", 0.0)
    table = positions((zeros.shape[0], *x.shape[1:]))
    indices = [f[name] for name in f if name.split()[0] in ("index", "listed")]
    found = [_at(table, each) for each in indices]
    if bool(zeros.any()) or eps < 0 or not all(torch.equal(each, found[0]) for each in found):
        raise ledger.refuse(
            "it is not a softmax of segments: write exp(x - m[index]) / (sums[index] + eps) with one index"
        )
    sources = sources_of(found[0], table.numel())
    back = sources.new_empty(found[0].numel()).scatter(
        0, sources[sources >= 0], (sources >= 0).flatten().nonzero()[:, 0]
    )
    weights = softmax(ledger, taken(ledger, x, sources.reshape(*table.shape, -1)), -1)
    result = taken(ledger, weights, back.reshape(x.shape))
    return moves.times(ledger, result, math.nextafter(1 + 2 * eps, math.inf)) if eps else result


SOFTMAXES: list[tuple[Any, Lowering]] = [
    (_SOFTMAX, Stated(_masked_softmax)), (_LOGSUMEXP, Stated(_masked_logsumexp)), (_MAX, Stated(_masked_largest)),
    (_SEGMENTS, _segment_softmax), (_SHIFTED, Stated(_written_softmax, short=False)),
    (tuple(_WRITTEN), _written_softmax),
]  # fmt: skip
"""Patterns with the functions that bound them, as in `PATTERNS`."""
