"""Functions that models write out in several operations, such as a GELU or attention, and the bounds of these."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import fx

from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.matching import SQUARE, Anything, Found, Number, Op, X, add, mul, op, peel
from wellnormed.lowering.moves import pick
from wellnormed.lowering.operations.activation import apply
from wellnormed.lowering.operations.attention import attend, largest_shown
from wellnormed.lowering.operations.convolution import normalized
from wellnormed.lowering.operations.linear import convex_potential
from wellnormed.lowering.operations.normalization import axes_of, normalize, project, standardize, to_unit
from wellnormed.lowering.rounding import rounds
from wellnormed.program.operation import family_of
from wellnormed.proof.value import Value

_OVER, _EPS, _CORRECTION = Anything("dims"), Number("eps"), Anything("correction")


def _by(x: Any, divisor: Any) -> tuple[Op, ...]:
    """`x / divisor`, in the forms in which it is written."""
    wide = op("expand_as.default", divisor, X), op("expand.default", divisor, Anything("shape"))
    inverse = op("reciprocal.default", divisor)
    return op("div", x, (divisor, *wide)), mul(x, (inverse, mul(inverse, 1)))


def _by_root(x: Any, squared: Any) -> tuple[Op, ...]:
    """`x / sqrt(squared)`."""
    root = op("sqrt.default", squared)
    return mul(x, op("rsqrt.default", squared)), mul(x, op("pow.Tensor_Scalar", squared, -0.5)), *_by(x, root)


def _spread(measure: str) -> tuple[Op, ...]:
    """The standard deviation or the variance of x over some axes, which are kept with size 1."""
    of = f"{measure}.correction"
    return op(f"{measure}.dim", X, _OVER, _CORRECTION, True), op(of, X, _OVER, correction=_CORRECTION, keepdim=True)


_MEAN_SQUARE = op("mean.dim", SQUARE, _OVER, True, rest="mean_rest")
_SCALED_MEAN_SQUARE = (mul(_MEAN_SQUARE, Number("scale")), _MEAN_SQUARE)
_BALL = mul(X, op("rsqrt.default", op("clamp.default clamp_min.default", _SCALED_MEAN_SQUARE, 1)))
_SUM = op("sum.dim_IntList", SQUARE, _OVER, True, rest="sum_rest")
_LENGTH = op("linalg_vector_norm.default", X, 2, _OVER, True, rest="norm_rest"), op("sqrt.default", _SUM)
_INVERSE = op("reciprocal.default", _LENGTH)
_RADIAL = mul(X, op("clamp.default", (mul(_INVERSE, Number("radius")), _INVERSE), None, 1))
_SHARED = mul(_LENGTH, Number("share")), op("div", _LENGTH, Number("count")), _LENGTH
_UNIT = _by(X, (op("clamp_min.default clamp.default", _LENGTH, _EPS), add(_SHARED, _EPS)))
_CENTRED = op("sub", X, op("mean.dim", X, _OVER, True, rest="mean_rest"))
_CUBE = (op("pow.Tensor_Scalar", X, 3), mul(mul(X, X), X))
_TANH = op("tanh.default", mul(add(X, mul(_CUBE, 0.044715)), math.sqrt(2 / math.pi)))
_ERF = op("erf.default", (op("div", X, math.sqrt(2)), mul(X, 1 / math.sqrt(2)), mul(X, math.sqrt(0.5))))
_SIGMOID = op("sigmoid.default", (mul(X, Number("steepness")), X))


def _gated(gate: Op) -> tuple[Op, ...]:
    """`x (1 + gate) / 2`, in the orders in which it is written."""
    one = add(gate, 1)
    return mul(mul(X, 0.5), one), mul(X, mul(one, 0.5)), mul(mul(X, one), 0.5)


_WEIGHT, _FACTOR = Anything("weight"), Number("factor")


def _back(hidden: Any) -> tuple[Op, ...]:
    """`W^T hidden`."""
    return (
        op("matmul", hidden, _WEIGHT),
        op("linear.default", hidden, op("t.default numpy_T.default", _WEIGHT)),
    )


_HIDDEN = op("relu.default", op("linear.default", X, _WEIGHT, rest="bias"))
_POTENTIAL = op("sub", X, (*_back((mul(_HIDDEN, _FACTOR), _HIDDEN)), mul(_back(_HIDDEN), _FACTOR)))
_FUSED_POTENTIAL = op("addmm.default", X, _HIDDEN, _WEIGHT, alpha=Number("minus_factor"))


def _convex(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    factor = f["factor"] if "factor" in f else -f.get("minus_factor", -1.0)
    return convex_potential(ledger, f["x"], f["weight"], next(iter(f.get("bias", [])), None), factor)


def _by_mean_square(ledger: Ledger, f: Mapping[str, Any]) -> Value:
    """`x / (root of the mean square + eps)`."""
    count = math.prod(f["x"].shape[d] for d in axes_of(f["x"], f["dims"]))
    return to_unit(ledger, f["x"], f["dims"], f["eps"], 1 / math.sqrt(count))


def _standardized(ledger: Ledger, f: Mapping[str, Any], squared: bool) -> Value:
    return standardize(ledger, f["x"], f["dims"], float(f["correction"]), f["eps"], squared=squared)


_CONVOLUTIONS = " ".join(f"conv{n}d.{padding}" for n in (1, 2, 3) for padding in ("default", "padding"))
_CONVOLVED = op(_CONVOLUTIONS, X, Anything("kernel"), rest="settings")
_STATISTICS = _CONVOLVED, *map(Anything, ("gain", "offset", "mean", "variance"))
_SETTINGS = Anything("momentum"), Number("eps")
_NORMALIZED = (
    op("batch_norm.default", *_STATISTICS, False, *_SETTINGS, Anything("cudnn")),
    # as recorded of models that overwrite results, for example by `nn.ReLU(inplace=True)`
    Op(
        ("<built-in function getitem>",),
        (op("_native_batch_norm_legit_no_training.default", *_STATISTICS, *_SETTINGS), 0),
    ),
)
_SLOPED = mul(X, Number("slope"))
_LEAKY = tuple(
    op("where", op(names, X, 0), *branches)
    for pair, branches in (("gt ge", (X, _SLOPED)), ("lt le", (_SLOPED, X)))
    for names in pair.split()
)
"""`leaky_relu` by a comparison."""
Lowering = Callable[[Ledger, Mapping[str, Any]], Value]


@dataclass(frozen=True)
class Stated:
    """A lowering of a pattern whose rows state the roundings of all operations that the pattern stands for."""

    lowering: Lowering
    short: bool = True
    """Whether they do so for floats of 16 bits, which every operation rounds to."""

    def __call__(self, ledger: Ledger, found: Mapping[str, Any]) -> Value:
        return self.lowering(ledger, found)


def entrywise(function: str) -> Stated:
    """A function of every entry that is executed operation by operation."""
    return Stated(lambda ledger, f: apply(ledger, function, f["x"], stored=True))


PATTERNS: list[tuple[Any, Lowering]] = [
    (
        _by_root(X, add(_MEAN_SQUARE, _EPS)),
        Stated(lambda ledger, f: normalize(ledger, f["x"], f["dims"], f["eps"], False)),
    ),
    (
        _by_root(X, add(_SUM, _EPS)),
        Stated(lambda ledger, f: to_unit(ledger, f["x"], f["dims"], f["eps"], squared=True)),
    ),
    (_by_root(_CENTRED, add(_spread("var"), _EPS)), Stated(partial(_standardized, squared=True))),
    (_by(_CENTRED, add(_spread("std"), _EPS)), Stated(partial(_standardized, squared=False))),
    (_BALL, Stated(lambda ledger, f: project(ledger, f["x"], f["dims"], scale=f.get("scale", 1.0)))),
    (_RADIAL, Stated(lambda ledger, f: project(ledger, f["x"], f["dims"], radius=f.get("radius", 1.0)))),
    (
        _UNIT,
        Stated(lambda ledger, f: to_unit(ledger, f["x"], f["dims"], f["eps"], f.get("share", 1 / f.get("count", 1.0)))),
    ),
    (_by(X, add(op("sqrt.default", _MEAN_SQUARE), _EPS)), Stated(_by_mean_square)),
    (op("div", X, add(op("abs.default", X), 1)), entrywise("softsign")),
    (_LEAKY, Stated(lambda ledger, f: apply(ledger, "leaky_relu", f["x"], f["slope"]))),
    (_gated(_TANH), entrywise("gelu_tanh")),
    (_gated(_ERF), entrywise("gelu")),
    (mul(X, _SIGMOID), entrywise("silu")),
    ((_POTENTIAL, _FUSED_POTENTIAL), Stated(_convex, False)),
    (_NORMALIZED, Stated(normalized)),
]
"""Patterns, each with the function that bounds it. It takes the bindings of a match, with values and stored tensors
instead of nodes."""


def attention_of(node: fx.Node, dependent: Callable[[Any], bool]) -> Found | None:
    """Queries, transposed keys, values and scale of a node that computes `softmax(scale q k^T + constants) v`, or None.

    If some logits are masked by finite numbers, `added` lists the constants that are added to logits, each with the
    factor that multiplies it afterwards; `spelled_attention` checks that none is as low as the masks.

    Args:
        node: The last product.
        dependent: Whether a node depends on the input.
    """
    if family_of(node) != "matmul" or rounds(node):
        return None
    weights, v = _under(node.args[0], "dropout.default"), node.args[1]
    if not isinstance(weights, fx.Node) or family_of(weights) != "softmax" or rounds(weights):
        return None
    if int(weights.args[1]) not in (-1, weights.meta["val"].ndim - 1):  # type: ignore[arg-type]
        return None
    logits = _Logits(dependent)
    factors = logits.factors_of(weights.args[0])
    if len(factors) != 2 or not all(map(dependent, (*factors, v))):
        return None
    # a logit that is replaced by a number takes part in the softmax, unless the number is far below all other logits
    if not all(fill < math.inf and fill * factor <= _FAR_BELOW for fill, factor in logits.fills):
        return None
    below = all(fill == -math.inf for fill, _ in logits.fills)  # all others, whatever is added to them
    q, transposed_k = factors
    # between factors above and below 1, numbers may over- or underflow that the scale and the logits do not show
    steps = None if logits.shrinks and logits.grows else logits.steps
    parts = {"q": q, "transposed_k": transposed_k, "v": v, "scale": logits.scale, "steps": steps}
    return parts | {"added": [] if below else logits.added, "biases": logits.added}


@dataclass
class _Logits:
    """The operations between the product of queries and keys and the softmax, read backwards from the softmax."""

    dependent: Callable[[Any], bool]
    """Whether a node depends on the input."""
    scale: float = 1.0
    """The absolute value of the product of all factors. It is rounded up, because the bound grows with it."""
    factor: float = 1.0
    """The product of the factors that were read so far, with its sign."""
    added: list[tuple[Any, float]] = field(default_factory=list)
    """Constants, each with the factor that multiplies it after it was added."""
    steps: int = 0
    """The number of operations that were read."""
    shrinks: bool = False
    """Whether a factor was below 1, in absolute value."""
    grows: bool = False
    """Whether a factor was above 1."""
    fills: list[tuple[float, float]] = field(default_factory=list)
    """Numbers that replace some logits, each with its factor; infinity stands for an unknown number."""

    def factors_of(self, logits: Any) -> tuple[Any, ...]:
        """The two factors of the product; empty if an operation between is not one of `_STEPS`."""
        logits = _under(logits)
        while isinstance(logits, fx.Node) and not rounds(logits):
            family, keywords = family_of(logits), dict[str, Any](logits.kwargs)
            self.steps += 1
            if family == "matmul":
                return logits.args
            if family == "baddbmm.default":
                return self._factors_of_sum(*logits.args, **keywords)
            reader = self._STEPS.get(family)
            logits = _under(reader and reader(self, *logits.args, **keywords))
        return ()

    def _multiplied(self, logits: Any, by: Any, divides: bool = False) -> Any:
        if not isinstance(by, float | int) or not by:
            return None
        self._multiply(abs(1 / float(by)) * (1 + 2.0**-52) if divides else abs(float(by)), by)
        return logits

    def _multiply(self, size: float, sign: float) -> None:
        self.shrinks, self.grows = self.shrinks or size < 1, self.grows or size > 1
        self.scale *= size * (1 + 2.0**-52) if self.scale != 1 else size
        self.factor *= math.copysign(size, sign)

    def _sum(self, logits: Any, constant: Any, alpha: float = 1) -> Any:
        if not self.dependent(logits):
            logits, constant = constant, logits
        if self.dependent(constant) or alpha != 1:
            return None
        self.added.append((constant, self.factor))
        return logits

    def _masked(self, logits: Any, mask: Any, fill: Any) -> Any:
        return None if self.dependent(mask) else self._filled(logits, fill)

    def _chosen(self, mask: Any, logits: Any, fill: Any) -> Any:
        return None if self.dependent(mask) or self.dependent(fill) else self._filled(logits, fill)

    def _filled(self, logits: Any, fill: Any) -> Any:
        self.fills.append((_number(fill), self.factor))
        return logits

    def _factors_of_sum(self, constants: Any, *factors: Any, beta: float = 1, alpha: float = 1) -> tuple[Any, ...]:
        """The factors q and k^T of `beta constants + alpha q k^T`."""
        if self.dependent(constants):
            return ()
        self.added.append((constants, self.factor * float(beta)))
        self._multiply(abs(float(alpha)), alpha)
        return factors

    _STEPS: ClassVar[dict[str, Callable[..., Any]]] = {
        "mul": _multiplied,
        "div": partial(_multiplied, divides=True),
        "add": _sum,
        "masked_fill": _masked,
        "where": _chosen,
    }
    """Family -> the method that reads it: it returns the logits before the operation, or None to give up."""


_FAR_BELOW = -1e25
"""A masked logit below this, plus at most 1e24, has a softmax weight below 10 to the -10^24 next to a logit of at least
-2e24."""


def _number(node: Any) -> float:
    """A number, or the number that a tensor is filled with; infinity for anything else."""
    if isinstance(node, fx.Node) and family_of(node) in ("full.default", "scalar_tensor.default"):
        node = node.args[-1]
    return float(node) if isinstance(node, float | int) else math.inf


def _under(node: Any, *families: str) -> Any:
    """The node behind conversions and inactive operations of the named families, such as dropout in evaluation."""
    node = peel(node)
    while isinstance(node, fx.Node) and family_of(node) in families and not node.args[2]:
        node = peel(node.args[0])
    return node


def spelled_attention(ledger: Ledger, found: Found) -> Value:
    """Bound the attention that `attention_of` recognised, with values instead of nodes."""
    k, most = pick(ledger, found["transposed_k"], lambda t: t.mT), -_FAR_BELOW / 10
    if not sum(_largest(ledger, constant) * abs(factor) for constant, factor in found["added"]) <= most:
        raise ledger.refuse("a constant added to its logits may be as low as their mask; mask with -inf")
    factors = [max(1.0, abs(factor)) for _, factor in found["biases"]]  # a constant is added before its factor
    sizes = [largest_shown(ledger, each) for each, _ in found["biases"]]
    known = [size * factor for size, factor in zip(sizes, factors, strict=True) if size is not None]
    added = sum(known) if found["steps"] and len(known) == len(sizes) else None
    result = attend(
        ledger, found["q"], k, found["v"], found["scale"], added, (found["steps"] or 0) + 4, found["biases"]
    )
    if max(ledger.largest_logits()) > most:
        raise ledger.refuse("its logits may be as large as their mask; mask with -inf, or bound queries and keys")
    return result


def _largest(ledger: Ledger, constant: Any) -> float:
    """The largest absolute entry of a constant that is added to logits."""
    if not isinstance(constant, Stored):
        return abs(float(constant))
    ledger.require_known(constant)
    return float(constant.tensor.double().abs().max()) if constant.tensor.numel() else 0.0
