"""Functions that models spell out in several operations, such as a GELU or attention, with what bounds them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from wellnormed.proof import Value
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.matching import SQUARE, Anything, Found, Number, Op, X, add, mul, op, peel
from wellnormed.propagation.moves import pick
from wellnormed.propagation.operations.activation import apply
from wellnormed.propagation.operations.attention import attend
from wellnormed.propagation.operations.normalization import normalize, project, to_unit
from wellnormed.propagation.operations.potential import convex_potential, convolutional_potential
from wellnormed.propagation.registry import name_of
from wellnormed.propagation.rounding import rounds

_DIV = "div.Tensor div.Scalar"
_MEAN_SQUARE = op("mean.dim", SQUARE, Anything("dims"), True, rest="mean_rest")
_FLOORED = add(_MEAN_SQUARE, Number("eps"))
_ROOT = (
    mul(X, op("rsqrt.default", _FLOORED)),
    mul(X, op("pow.Tensor_Scalar", _FLOORED, -0.5)),
    op(_DIV, X, op("sqrt.default", _FLOORED)),
    mul(X, op("reciprocal.default", op("sqrt.default", _FLOORED))),
)
_SCALED_MEAN_SQUARE = (mul(_MEAN_SQUARE, Number("scale")), _MEAN_SQUARE)
_BALL = mul(X, op("rsqrt.default", op("clamp.default clamp_min.default", _SCALED_MEAN_SQUARE, 1)))
_LENGTH = op("linalg_vector_norm.default", X, 2, Anything("dims"), True, rest="norm_rest")
_FLOOR = op("clamp_min.default clamp.default", _LENGTH, Number("eps"))
_UNIT = op(_DIV, X, (_FLOOR, op("expand_as.default", _FLOOR, X), op("expand.default", _FLOOR, Anything("shape"))))
_CUBE = (op("pow.Tensor_Scalar", X, 3), mul(mul(X, X), X))
_TANH = op("tanh.default", mul(add(X, mul(_CUBE, 0.044715)), math.sqrt(2 / math.pi)))
_ERF = op("erf.default", (op(_DIV, X, math.sqrt(2)), mul(X, 1 / math.sqrt(2)), mul(X, math.sqrt(0.5))))
_SIGMOID = op("sigmoid.default", (mul(X, Number("steepness")), X))


def _gated(gate: Op) -> tuple[Op, ...]:
    """`x (1 + gate) / 2`, in the orders in which it is written."""
    one = add(gate, 1)
    return mul(mul(X, 0.5), one), mul(X, mul(one, 0.5)), mul(mul(X, one), 0.5)


_WEIGHT, _FACTOR = Anything("weight"), Number("factor")


def _back(hidden: Any) -> tuple[Op, ...]:
    """`W^T hidden`."""
    return (
        op("matmul.default mm.default", hidden, _WEIGHT),
        op("linear.default", hidden, op("t.default numpy_T.default", _WEIGHT)),
    )


_HIDDEN = op("relu.default", op("linear.default", X, _WEIGHT, rest="bias"))
_POTENTIAL = op("sub.Tensor", X, (*_back((mul(_HIDDEN, _FACTOR), _HIDDEN)), mul(_back(_HIDDEN), _FACTOR)))
_FUSED_POTENTIAL = op("addmm.default", X, _HIDDEN, _WEIGHT, alpha=Number("minus_factor"))
_CONVOLUTIONAL_POTENTIAL = tuple(
    op("sub.Tensor", X, back)
    for name, adjoint in (
        ("conv1d.default", "conv_transpose1d.default"),
        ("conv2d.default", "conv_transpose2d.input"),
        ("conv3d.default", "conv_transpose3d.input"),
    )
    for hidden in [op("relu.default", op(name, X, _WEIGHT, rest="forward"))]
    for back in (
        mul(op(adjoint, hidden, _WEIGHT, rest="back"), _FACTOR),
        op(adjoint, (mul(hidden, _FACTOR), hidden), _WEIGHT, rest="back"),
    )
)


def _bound_convolutional(step: Ledger, f: Mapping[str, Any]) -> Value:
    bias, *forward = f["forward"] or [None]
    return convolutional_potential(step, f["x"], f["weight"], bias, f.get("factor", 1.0), forward, f["back"])


def _bias(f: Mapping[str, Any]) -> Any:
    return next(iter(f.get("bias", [])), None)


Lowering = Callable[[Ledger, Mapping[str, Any]], Value]
PATTERNS: list[tuple[Any, Lowering]] = [
    (_ROOT, lambda step, f: normalize(step, f["x"], f["dims"], f["eps"])),
    (_BALL, lambda step, f: project(step, f["x"], f["dims"], f.get("scale", 1.0))),
    (_UNIT, lambda step, f: to_unit(step, f["x"], f["dims"], f["eps"])),
    (_gated(_TANH), lambda step, f: apply(step, "gelu_tanh", f["x"])),
    (_gated(_ERF), lambda step, f: apply(step, "gelu", f["x"])),
    (mul(X, _SIGMOID), lambda step, f: apply(step, "silu", f["x"])),
    (_POTENTIAL, lambda step, f: convex_potential(step, f["x"], f["weight"], _bias(f), f.get("factor", 1.0))),
    (_FUSED_POTENTIAL, lambda step, f: convex_potential(step, f["x"], f["weight"], _bias(f), -f["minus_factor"])),
    (_CONVOLUTIONAL_POTENTIAL, _bound_convolutional),
]
"""Patterns, each with the function that bounds it: it takes what the pattern found, with values and stored tensors in
the place of nodes."""


def attention_of(node: fx.Node, dependent: Callable[[Any], bool]) -> Found | None:
    """Queries, transposed keys, values and scale of `softmax(scale q k^T + constants) v`; None if a node is not that.

    Where some logits are replaced by finite numbers, `added` lists the constants, each with the factor that multiplies
    it afterwards.

    Args:
        node: The last product.
        dependent: Whether a node depends on the input.
    """
    if name_of(node.target) not in _PRODUCTS or rounds(node):
        return None
    weights, v = _under(node.args[0], _DROPOUT), node.args[1]
    if not isinstance(weights, fx.Node) or name_of(weights.target) not in _SOFTMAX or rounds(weights):
        return None
    if not dependent(v):
        return None
    if int(weights.args[1]) not in (-1, weights.meta["val"].ndim - 1):  # type: ignore[arg-type]
        return None
    logits, scale, outer = _under(weights.args[0], ()), 1.0, 1.0
    fills: list[tuple[float, float]] = []  # each with the factor by which it is multiplied later, as in `added`
    added: list[tuple[Any, float]] = []
    while isinstance(logits, fx.Node) and name_of(logits.target) not in (*_PRODUCTS, _SUM_WITH_PRODUCT):
        if rounds(logits):
            return None
        name, arguments = name_of(logits.target), list(logits.args)
        if name in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"):
            if not isinstance(arguments[1], float | int) or not arguments[1]:
                return None
            # rounded up: the bound grows with the scale
            quotient = abs(float(arguments[1])) if "mul" in name else abs(1 / float(arguments[1])) * (1 + 2.0**-52)
            scale *= quotient * (1 + 2.0**-52) if scale != 1 else quotient
            outer *= math.copysign(quotient, float(arguments[1]))
        elif name == "aten.add.Tensor":
            if not dependent(arguments[0]):
                arguments = [arguments[1], arguments[0]]
            if dependent(arguments[1]) or logits.kwargs.get("alpha", 1) != 1:
                return None
            added.append((arguments[1], outer))
        elif name == "aten.masked_fill.Scalar" and not dependent(arguments[1]):
            fills.append((_number(arguments[2]), outer))
        elif name in ("aten.where.self", "aten.where.ScalarOther") and not dependent(arguments[0]):
            if dependent(arguments[2]):
                return None
            fills.append((_number(arguments[2]), outer))
            arguments = arguments[1:]
        else:
            return None
        logits = _under(arguments[0], ())
    if not isinstance(logits, fx.Node) or rounds(logits):
        return None
    factors = logits.args
    if name_of(logits.target) == _SUM_WITH_PRODUCT:
        constants, *factors = logits.args
        if dependent(constants) or not set(logits.kwargs) <= {"alpha", "beta"}:
            return None
        alpha = abs(float(logits.kwargs.get("alpha", 1.0)))  # type: ignore[arg-type]
        scale *= alpha * (1 + 2.0**-52) if scale != 1 else alpha
        added.append((constants, outer * float(logits.kwargs.get("beta", 1.0))))  # type: ignore[arg-type]
    if len(factors) != 2 or not all(map(dependent, factors)):
        return None
    # a logit that is replaced by a number takes part in the softmax, unless that is far below all others
    if not all(fill < math.inf and fill * factor <= _FAR_BELOW for fill, factor in fills):
        return None
    below = all(fill == -math.inf for fill, _ in fills)  # all others, whatever is added to them
    return {"q": factors[0], "transposed_k": factors[1], "v": v, "scale": scale, "added": [] if below else added}


_FAR_BELOW = -1e25
"""Next to a logit of at least -2e24, one below this, to which no more than 1e24 is added, has a weight of less than 10
to the -10^24."""


def _number(node: Any) -> float:
    """A number, or the number that a tensor is filled with; infinity for anything else."""
    if isinstance(node, fx.Node) and name_of(node.target) in ("aten.full.default", "aten.scalar_tensor.default"):
        node = node.args[-1]
    return float(node) if isinstance(node, float | int) else math.inf


_PRODUCTS = ("aten.matmul.default", "aten.bmm.default")
_SUM_WITH_PRODUCT = "aten.baddbmm.default"
_SOFTMAX = ("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default")
_DROPOUT = ("aten.dropout.default",)


def _under(node: Any, names: tuple[str, ...]) -> Any:
    """The node under conversions and the named operations, if these do nothing."""
    node = peel(node)
    while isinstance(node, fx.Node) and name_of(node.target) in names and not node.args[2]:
        node = peel(node.args[0])
    return node


def spelled_attention(step: Ledger, found: Found) -> Value:
    """Bound what `attention_of` found, with values in the place of nodes."""
    k, most = pick(step, found["transposed_k"], lambda t: t.mT), -_FAR_BELOW / 10
    if not sum(_largest(step, constant) * abs(factor) for constant, factor in found["added"]) <= most:
        raise step.refuse("what is added to its logits may be as low as what masks them; mask with -inf")
    result = attend(step, found["q"], k, found["v"], found["scale"])
    if max(step.largest_logits(result)) > most:
        raise step.refuse("its logits may be as large as what masks them; mask with -inf, or bound queries and keys")
    return result


def _largest(step: Ledger, constant: Any) -> float:
    """The largest absolute entry of a constant that is added to logits."""
    if not isinstance(constant, Stored):
        return abs(float(constant))
    step.require_known(constant)
    return float(constant.tensor.double().abs().max()) if constant.tensor.numel() else 0.0
