"""Functions that models spell out in several operations, found in the captured graph by their form.

A pattern is matched against what is executed, so whoever writes the same formula has the same bound, and a module's
class is never trusted.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wellnormed.proof import Value
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.moves import pick
from wellnormed.propagation.operations.activation import apply
from wellnormed.propagation.operations.attention import attend
from wellnormed.propagation.operations.normalization import normalize, project, to_unit
from wellnormed.propagation.operations.potential import convex_potential, convolutional_potential
from wellnormed.propagation.registry import name_of
from wellnormed.propagation.rounding import rounds

Found = dict[str, Any]


@dataclass(frozen=True)
class Anything:
    """Any node or list; the same one wherever the name stands."""

    name: str


@dataclass(frozen=True)
class Number:
    """A number that stands in the code."""

    name: str


@dataclass(frozen=True)
class Op:
    """One of some operations, of given arguments; further arguments are bound to `rest`."""

    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    either_order: bool = False
    rest: str = ""


def _mul(a: Any, b: Any) -> Op:
    return Op(("aten.mul.Tensor", "aten.mul.Scalar"), (a, b), either_order=True)


def _add(a: Any, b: Any) -> Op:
    return Op(("aten.add.Tensor", "aten.add.Scalar"), (a, b), either_order=True)


def _div(a: Any, b: Any) -> Op:
    return Op(("aten.div.Tensor", "aten.div.Scalar"), (a, b))


def _one(name: str, *arguments: Any, rest: str = "") -> Op:
    return Op((f"aten.{name}",), arguments, rest=rest)


def _either(names: str, *arguments: Any, rest: str = "") -> Op:
    return Op(tuple(f"aten.{name}" for name in names.split()), arguments, rest=rest)


X = Anything("x")
_SQUARE = (_one("square.default", X), _one("pow.Tensor_Scalar", X, 2), _mul(X, X))
_CONVERSIONS = ("to.dtype", "_to_copy.default", "type_as.default")
_COPIES = ("clone.default", "alias.default", "contiguous.default", "detach.default")
_PEELED = tuple(f"aten.{name}" for name in _CONVERSIONS + _COPIES)


def repeats(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Node -> the first one that applies the same operation to the same arguments, for a graph without mutation."""
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}

    def key(each: Any) -> Any:
        if isinstance(each, list | tuple):
            return tuple(map(key, each))
        return same[each] if isinstance(each, fx.Node) else (type(each), each)

    for node in nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            own = (node.target, key(node.args), key(sorted(node.kwargs.items())))
            same[node] = first.setdefault(own, node)
        else:
            same[node] = node
    return same


def match(pattern: Any, node: Any, found: Found, same: Mapping[fx.Node, fx.Node]) -> Found | None:
    """The bindings of a pattern at a node, added to those found; None if it does not match.

    `same` is what `repeats` returns: what a model computes twice is one thing.
    """
    if isinstance(pattern, tuple):
        return next((each for option in pattern if (each := match(option, node, found, same)) is not None), None)
    node = peel(node)
    if isinstance(pattern, Number):
        is_number = isinstance(node, float | int) and not isinstance(node, bool)
        return {**found, pattern.name: float(node)} if is_number else None
    if isinstance(pattern, Anything):
        node = same[node] if isinstance(node, fx.Node) else node
        known = found.get(pattern.name, node)
        equal = known is node or (not isinstance(node, fx.Node) and known == node)
        return {**found, pattern.name: node} if equal else None
    if not isinstance(pattern, Op):
        return found if not isinstance(node, fx.Node) and node == pattern else None
    if not isinstance(node, fx.Node) or name_of(node.target) not in pattern.names or rounds(node):
        return None
    given = list(node.args) + [node.kwargs[key] for key in sorted(node.kwargs)]
    count = len(pattern.arguments)
    if len(given) < count or (len(given) > count and not pattern.rest):
        return None
    orders = [given[:count]] + ([given[count - 1 :: -1]] if pattern.either_order else [])
    for order in orders:
        result: Found | None = {**found, pattern.rest: given[count:]} if pattern.rest else found
        for part, argument in zip(pattern.arguments, order, strict=True):
            result = None if result is None else match(part, argument, result, same)
        if result is not None:
            return result
    return None


def peel(node: Any) -> Any:
    """The node under copies, and under conversions to a floating dtype that holds all numbers of the one before."""
    while isinstance(node, fx.Node) and name_of(node.target) in _PEELED and not rounds(node):
        source = node.args[0]
        if not (isinstance(source, fx.Node) and all(_is_float(each) for each in (node, source))):
            return node
        node = source
    return node


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)


_MEAN_SQUARE = tuple(_one("mean.dim", square, Anything("dims"), True, rest="mean_rest") for square in _SQUARE)
_ROOT = tuple(
    pattern
    for mean in _MEAN_SQUARE
    for pattern in (
        _mul(X, _one("rsqrt.default", _add(mean, Number("eps")))),
        _mul(X, _one("pow.Tensor_Scalar", _add(mean, Number("eps")), -0.5)),
        _div(X, _one("sqrt.default", _add(mean, Number("eps")))),
        _mul(X, _one("reciprocal.default", _one("sqrt.default", _add(mean, Number("eps"))))),
    )
)
_BALL = tuple(
    _mul(X, _one("rsqrt.default", _either("clamp.default clamp_min.default", inner, 1)))
    for mean in _MEAN_SQUARE
    for inner in (_mul(mean, Number("scale")), mean)
)
_LENGTH = _one("linalg_vector_norm.default", X, 2, Anything("dims"), True, rest="norm_rest")
_FLOOR = _either("clamp_min.default clamp.default", _LENGTH, Number("eps"))
_UNIT = tuple(
    _div(X, length)
    for length in (_FLOOR, _one("expand_as.default", _FLOOR, X), _one("expand.default", _FLOOR, Anything("shape")))
)
_CUBE = (_one("pow.Tensor_Scalar", X, 3), _one("pow.Tensor_Scalar", X, 3.0), _mul(_mul(X, X), X))
_INNER = tuple(_add(X, _mul(cube, 0.044715)) for cube in _CUBE)
_TANH = tuple(_one("tanh.default", _mul(inner, math.sqrt(2 / math.pi))) for inner in _INNER)
_ERF = (
    _one("erf.default", _div(X, math.sqrt(2))),
    _one("erf.default", _mul(X, 1 / math.sqrt(2))),
    _one("erf.default", _mul(X, math.sqrt(0.5))),
)
_SIGMOID = _one("sigmoid.default", (_mul(X, Number("steepness")), X))


def _gated(gates: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(
        pattern
        for gate in gates
        for one in (_add(gate, 1), _add(gate, 1.0))
        for pattern in (_mul(_mul(X, 0.5), one), _mul(X, _mul(one, 0.5)), _mul(_mul(X, one), 0.5))
    )


_HIDDEN = _one("relu.default", _one("linear.default", X, Anything("weight"), rest="bias"))
_RETURN = tuple(
    pattern
    for hidden in (_mul(_HIDDEN, Number("factor")), _HIDDEN)
    for pattern in (
        _either("matmul.default mm.default", hidden, Anything("weight")),
        _mul(_either("matmul.default mm.default", _HIDDEN, Anything("weight")), Number("factor")),
        _one("linear.default", hidden, _either("t.default numpy_T.default", Anything("weight"))),
        _mul(
            _one("linear.default", _HIDDEN, _either("t.default numpy_T.default", Anything("weight"))), Number("factor")
        ),
    )
)
_CONVOLVED = tuple(
    _one("relu.default", _one(name, X, Anything("weight"), rest="forward"))
    for name in ("conv1d.default", "conv2d.default", "conv3d.default")
)
_ADJOINT = ("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
_CONVOLUTIONAL_POTENTIAL = tuple(
    _one("sub.Tensor", X, back)
    for name, hidden in zip(_ADJOINT, _CONVOLVED, strict=True)
    for back in (
        _mul(_one(name, hidden, Anything("weight"), rest="back"), Number("factor")),
        _one(name, _mul(hidden, Number("factor")), Anything("weight"), rest="back"),
        _one(name, hidden, Anything("weight"), rest="back"),
    )
)
_POTENTIAL = tuple(_one("sub.Tensor", X, back) for back in _RETURN)


def _bound_convolutional(step: Ledger, f: Mapping[str, Any]) -> Value:
    bias, *forward = f["forward"] or [None]
    return convolutional_potential(step, f["x"], f["weight"], bias, f.get("factor", 1.0), forward, f["back"])


Lowering = Callable[[Ledger, Mapping[str, Any]], Value]
PATTERNS: list[tuple[Any, Lowering]] = [
    (_ROOT, lambda step, f: normalize(step, f["x"], f["dims"], f["eps"])),
    (_BALL, lambda step, f: project(step, f["x"], f["dims"], f.get("scale", 1.0))),
    (_UNIT, lambda step, f: to_unit(step, f["x"], f["dims"], f["eps"])),
    (_gated(_TANH), lambda step, f: apply(step, "gelu_tanh", f["x"])),
    (_gated(_ERF), lambda step, f: apply(step, "gelu", f["x"])),
    (_mul(X, _SIGMOID), lambda step, f: apply(step, "silu", f["x"])),
    (
        _POTENTIAL,
        lambda step, f: convex_potential(
            step, f["x"], f["weight"], f["bias"][0] if f.get("bias") else None, f.get("factor", 1.0)
        ),
    ),
    (_CONVOLUTIONAL_POTENTIAL, _bound_convolutional),
]
"""Each with what bounds it, of the bindings with values and stored tensors in the place of nodes."""


def attention_of(node: fx.Node, dependent: Callable[[Any], bool]) -> Found | None:
    """Queries, transposed keys, values and scale of `softmax(scale q k^T + constants) v`, if a node is that.

    With what is added, and the factor by which it is multiplied, if some logits are replaced by finite numbers.

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
    """A number, or that of a tensor which is filled with one; infinity if it is neither."""
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
    """The largest absolute entry of what is added, infinity for entries that are not numbers."""
    if not isinstance(constant, Stored):
        return abs(float(constant))
    step.require_known(constant)
    return float(constant.tensor.double().abs().max()) if constant.tensor.numel() else 0.0
