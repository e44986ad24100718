"""Forms of several operations: maxima by comparisons, positive parts, centring, Euclidean pools, tanhshrink, mixtures.

`max(x, 0)` and `max(-x, 0)` are the larger and, up to the sign, the lesser of x and 0. So where a model has both, they
are bounded as such: together they are a contraction, and one by one they would cost the root of 2.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from wellnormed.proof import Value
from wellnormed.propagation import moves
from wellnormed.propagation.ledger import Ledger
from wellnormed.propagation.operations.activation import apply
from wellnormed.propagation.operations.elementwise import add, multiply
from wellnormed.propagation.operations.normalization import centre, euclidean_norm
from wellnormed.propagation.operations.selection import larger, windows
from wellnormed.propagation.patterns import Anything, Found, Lowering, Number, Op, match


def _op(names: str, *arguments: Any) -> Op:
    return Op(tuple(f"aten.{name}" for name in names.split()), arguments)


X, Y = Anything("x"), Anything("y")
_ABOVE = "gt.Tensor gt.Scalar ge.Tensor ge.Scalar"
_BELOW = "lt.Tensor lt.Scalar le.Tensor le.Scalar"
_WHERE = "where.self where.ScalarSelf where.ScalarOther"


def _chosen(lesser: bool) -> tuple[Op, ...]:
    """The larger or the lesser of two, of which x depends on the input."""
    above, below = (_BELOW, _ABOVE) if lesser else (_ABOVE, _BELOW)
    return tuple(
        _op(_WHERE, _op(names, *order), a, b)
        for order in ((X, Y), (Y, X))
        for names, (a, b) in ((above, order), (below, order[::-1]))
    )


_SQUARE = (_op("square.default", X), _op("pow.Tensor_Scalar", X, 2), _op("mul.Tensor", X, X))
_MEANS = tuple(
    Op((f"aten.avg_pool{n}d.default",), (square, Anything("kernel")), rest="windows")
    for n in (1, 2, 3)
    for square in _SQUARE
)
_ROOTS = tuple(
    _op("pow.Tensor_Scalar", _op("mul.Tensor", _op("mul.Tensor", _op("sign.default", m), size), Number("count")), 0.5)
    for m in _MEANS
    for size in (_op("relu.default", _op("abs.default", m)),)
)
"""`lp_pool` of torch for `norm_type=2`."""


def _pool(step: Ledger, f: Mapping[str, Any]) -> Value:
    kernel = list(f["kernel"])
    stride, padding, ceil, *more = [*f["windows"], *[[], 0, False, True, None][len(f["windows"]) :]]
    if any(moves.each_axis(padding, 1)) or ceil or more[1] is not None or f["count"] != math.prod(kernel):
        raise step.refuse("its windows do not lie inside the image, or it multiplies by another number than theirs")
    settings = [moves.each_axis(each, len(kernel)) for each in (stride or kernel, 0, 1)]
    held = moves.pick(step, f["x"], lambda t: windows(t, kernel, *settings))
    return euclidean_norm(step, held, dim=-1)


_GATE = _op("sigmoid.default", X)
_FIRST, _SECOND = Anything("first"), Anything("second")
_MIXTURE = Op(
    ("aten.add.Tensor",),
    (Op(("aten.mul.Tensor",), (_op("sub.Tensor", _FIRST, _SECOND), _GATE), either_order=True), _SECOND),
    either_order=True,
)
"""`(a - b) sigmoid(x) + b`, as gated recurrent units have it."""


def _mixture(step: Ledger, f: Mapping[str, Any]) -> Value:
    """`a sigmoid(x) + b sigmoid(-x)`: in the other form, b would count twice."""
    return add(
        step, multiply(step, apply(step, "sigmoid", f["x"]), f["first"]), multiply(step, _rest(step, f), f["second"])
    )


def _rest(step: Ledger, f: Mapping[str, Any]) -> Value:
    """`1 - sigmoid(x)`: no more than 1, like `sigmoid(-x)`, which it is."""
    return apply(step, "sigmoid", moves.times(step, f["x"], -1.0))


CONTRACTIONS: list[tuple[Any, Lowering]] = [
    *(
        (_chosen(lesser), lambda step, f, lesser=lesser: larger(step, f["x"], f["y"], lesser))
        for lesser in (False, True)
    ),
    (
        _op("sub.Tensor", X, Op(("aten.mean.dim",), (X, Anything("dims"), True), rest="mean_rest")),
        lambda step, f: centre(step, f["x"], f["dims"]),
    ),
    (_op("sub.Tensor", X, _op("tanh.default", X)), lambda step, f: apply(step, "tanhshrink", f["x"])),
    (_ROOTS, _pool),
    (_MIXTURE, _mixture),
    ((_op("rsub.Scalar", _GATE, 1), _op("sub.Tensor", 1, _GATE)), _rest),
]
"""Forms with what bounds them, as `PATTERNS` has them."""

_NEGATIVE = (_op("neg.default", X), _op("mul.Tensor mul.Scalar", X, -1), _op("mul.Tensor mul.Scalar", -1, X))
_RECTIFIED: list[tuple[int, int, tuple[Op, ...]]] = [
    (sign * outer, outer, forms)
    for sign, x in ((-1, _NEGATIVE), (1, X))
    for outer, forms in (
        (1, (_op("relu.default", x), _op("clamp.default clamp_min.default", x, 0))),
        (-1, (_op("clamp_max.default", x, 0), _op("clamp.default", x, None, 0))),
    )
]
"""`outer max(inner x, 0)`, with the forms of each; those of -x come first, since they are forms of x' = -x as well."""


def rectified(nodes: Iterable[fx.Node], same: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, tuple[Lowering, Found]]:
    """The positive parts of tensors and of their negatives, where a graph has both, with what bounds them."""
    parts: dict[Any, dict[fx.Node, Found]] = {}
    for node in nodes:
        if node.op != "call_function" or node.kwargs:  # a keyword would stand in the place of another argument
            continue
        for inner, outer, forms in _RECTIFIED:
            if (found := match(forms, node, {}, same)) is not None:
                parts.setdefault(found["x"], {})[node] = {**found, "inner": inner, "outer": outer}
                break
    both = [each for each in parts.values() if len({found["inner"] for found in each.values()}) == 2]
    return {node: (_bound_rectified, found) for each in both for node, found in each.items()}


def _bound_rectified(step: Ledger, f: Mapping[str, Any]) -> Value:
    result = larger(step, f["x"], 0.0, lesser=f["inner"] < 0)
    return result if f["inner"] == f["outer"] else moves.times(step, result, -1.0)
