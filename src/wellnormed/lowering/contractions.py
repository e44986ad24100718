"""Patterns of maxima by comparisons, positive parts, centring, Euclidean norms and pools, tanhshrink and mixtures.

`max(x, 0)` and `max(-x, 0)` are, up to a sign, the larger and the smaller of x and 0, the two entries of a sorted pair.
If a model has both, they are bounded together as a contraction; bounded separately they would cost sqrt(2).
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import fx

from wellnormed.lowering import matching, moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger
from wellnormed.lowering.matching import SQUARE, Anything, Found, Number, Op, X, match, op, square
from wellnormed.lowering.operations.activation import apply
from wellnormed.lowering.operations.movement import as_value
from wellnormed.lowering.operations.normalization import centre, euclidean_norm, smooth_norm
from wellnormed.lowering.operations.selection import larger, paired, settings_of, windows
from wellnormed.lowering.patterns import Lowering, Stated, entrywise
from wellnormed.proof.value import Value

Y = Anything("y")
_ABOVE, _BELOW = "gt ge", "lt le"


def _chosen(lesser: bool) -> tuple[Op, ...]:
    """The larger or the lesser of x and y, where x depends on the input."""
    above, below = (_BELOW, _ABOVE) if lesser else (_ABOVE, _BELOW)
    return tuple(
        op("where", op(names, *order), a, b)
        for order in ((X, Y), (Y, X))
        for names, (a, b) in ((above, order), (below, order[::-1]))
    )


def _lp_pool(axes: int) -> Any:
    """The `lp_pool` of torch with `norm_type=2`, over this number of axes."""
    mean = op(f"avg_pool{axes}d.default", SQUARE, Anything("kernel"), rest="windows")
    size = op("mul", op("sign.default", mean), op("relu.default", op("abs.default", mean)))
    return op("pow.Tensor_Scalar", op("mul", size, Number("count")), 0.5)


def _pool(axes: int, ledger: Ledger, f: Mapping[str, Any]) -> Value:
    stride, padding, ceil, _, divisor = [*f["windows"], *[None, 0, False, True, None][len(f["windows"]) :]]
    settings = settings_of(axes, f["kernel"], stride, padding)
    if any(settings[2]) or ceil or divisor is not None or f["count"] != math.prod(settings[0]):
        raise ledger.refuse("its windows leave the image, or it does not multiply by the number of entries of a window")
    entries = moves.pick(ledger, f["x"], lambda t: windows(t, *settings))
    return euclidean_norm(ledger, entries, dim=-1)


_OVER = Anything("dims")
_SQUARES = (
    op("sum.dim_IntList", SQUARE, _OVER, rest="keepdim"),
    op("mean.dim", SQUARE, _OVER, rest="keepdim of a mean"),
    matching.add(SQUARE, square(Y)),
)
_FLOORED = (matching.add(_SQUARES, Number("eps")), _SQUARES)
_LENGTH = (op("sqrt.default", _FLOORED), op("pow.Tensor_Scalar", _FLOORED, 0.5))
"""`sqrt(|x|^2 + eps)` or `sqrt(mean(x^2) + eps)` over some axes of x, or `sqrt(x^2 + y^2 + eps)`."""


def _length(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    eps = f.get("eps", 0.0)
    if "y" in f:
        return smooth_norm(ledger, paired(ledger, f["x"], f["y"]), -1, False, eps)
    mean = "keepdim of a mean" in f
    keepdim = True in f["keepdim of a mean" if mean else "keepdim"]  # or a dtype, which does not count
    return smooth_norm(ledger, f["x"], f["dims"], keepdim, eps, mean=mean)


_GATE = op("sigmoid.default", X)
_FIRST, _SECOND = Anything("first"), Anything("second")
_DIFFERENCE = op("mul", op("sub", _FIRST, _SECOND), _GATE, either_order=True)
_MIXTURE = op("add", _DIFFERENCE, _SECOND, either_order=True)
"""`(a - b) sigmoid(x) + b`, the gate of a GRU."""


def _mixture(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    """`a sigmoid(x) + b sigmoid(-x)`, which lies between a and b; operation by operation, b would count twice."""
    parts = [as_value(ledger, f[name]) for name in ("x", "first", "second")]
    shape = np.broadcast_shapes(*(each.shape for each in parts))
    wide = [moves.spread(ledger, each, shape) for each in parts]
    axes = inner_axes(*wide)
    return ledger.derive("mixture", [(each, axes) for each in wide], shape=shape)


def _complement(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    """`1 - sigmoid(x)`, which equals `sigmoid(-x)` and is therefore at most 1.

    Executed, it errs by 10 units of 1 for the sigmoid, and by one for storing it and one for the difference.
    """
    ledger.beside = 12.0
    return apply(ledger, "sigmoid", moves.times(ledger, f["x"], -1.0))


CONTRACTIONS: list[tuple[Any, Lowering]] = [
    *(
        (_chosen(lesser), Stated(lambda ledger, f, lesser=lesser: larger(ledger, f["x"], f["y"], lesser)))
        for lesser in (False, True)
    ),
    (
        op("sub", X, op("mean.dim", X, Anything("dims"), True, rest="mean_rest")),
        Stated(lambda ledger, f: centre(ledger, f["x"], f["dims"])),
    ),
    (op("sub", X, op("tanh.default", X)), entrywise("tanhshrink")),
    *((_lp_pool(axes), Stated(partial(_pool, axes))) for axes in (1, 2, 3)),
    (_LENGTH, Stated(_length)),
    (_MIXTURE, Stated(_mixture)),
    ((op("rsub", _GATE, 1), op("sub", 1, _GATE)), Stated(_complement)),
]
"""Patterns with the functions that bound them, as in `PATTERNS`."""

_NEGATIVE = (op("neg.default", X), op("mul", X, -1), op("mul", -1, X))
_RECTIFIED: list[tuple[int, int, tuple[Op, ...]]] = [
    (sign * outer, outer, forms)
    for sign, x in ((-1, _NEGATIVE), (1, X))
    for outer, forms in (
        (1, (op("relu.default", x), op("clamp.default clamp_min.default", x, 0))),
        (-1, (op("clamp_max.default", x, 0), op("clamp.default", x, None, 0))),
    )
]
"""Signs and forms of `outer max(inner x, 0)`. Forms of -x come first, since -x also matches the placeholder x."""


def rectified(nodes: Iterable[fx.Node], same: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, tuple[Lowering, Found]]:
    """Node -> bound and match, for the positive parts of x and of -x where a graph has both."""
    parts: dict[Any, dict[fx.Node, Found]] = {}
    for node in nodes:
        if node.op != "call_function" or node.kwargs:  # `match` would take a keyword for the next positional argument
            continue
        for inner, outer, forms in _RECTIFIED:
            if (found := match(forms, node, {}, same)) is not None:
                parts.setdefault(found["x"], {})[node] = {**found, "inner": inner, "outer": outer}
                break
    both = [each for each in parts.values() if len({found["inner"] for found in each.values()}) == 2]
    return {node: (Stated(_bound_rectified), found) for each in both for node, found in each.items()}


def _bound_rectified(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    result = larger(ledger, f["x"], 0.0, lesser=f["inner"] < 0)
    return result if f["inner"] == f["outer"] else moves.times(ledger, result, -1.0)
