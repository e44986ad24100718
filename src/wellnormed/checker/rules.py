"""What a certificate's rows may compute, and the bounds of their results; every rule checks all that it rests on.

A rule gets a `Row` with its inputs and the bounds of the groups that it reads. Gains are bounds on derivatives as
well, since the domain is convex.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from wellnormed.checker.graph import UNIT, Base, Bounds, Value, gather
from wellnormed.checker.proofs import Claim
from wellnormed.checker.reading import (
    ONE,
    UP,
    ZERO,
    CheckError,
    field,
    integer,
    integers,
    number,
    of_type,
    require,
    root,
)

HALF, TWO = Decimal("0.5"), Decimal(2)
LARGEST = {
    "float64": (2 - 2.0**-52) * 2.0**1023, "float32": (2 - 2.0**-23) * 2.0**127,
    "bfloat16": (2 - 2.0**-7) * 2.0**127, "float16": 65504.0,
}  # fmt: skip
"""Dtype of an input -> the largest finite number that it holds."""


@dataclass(eq=False)
class Row:
    """A row that computes, as the document states it."""

    name: str
    operation: str
    inputs: list[Value]
    shape: tuple[int, ...]
    constants: dict[str, Any]
    claims: list[Claim]
    reads: list[tuple[int, ...]]
    axes: tuple[int, ...]
    tensor: Callable[[str], np.ndarray]
    bounds: list[Bounds]
    logits: np.ndarray | None = None

    def number(self, key: str) -> float:
        """A finite constant."""
        return number(field(self.constants, key, "its constants"), key)

    def claim(self, place: int, measure: str, **settings: Any) -> Claim:
        """One of its claims, which must be of that measure and with these settings."""
        require(place < len(self.claims), f"it lacks a claim of {measure}")
        claim = self.claims[place]
        differs = [key for key, each in settings.items() if claim.settings.get(key) != each]
        require(claim.measure == measure and not differs, f"its claim {place} must be {measure} with {settings}")
        return claim

    def only(self, inputs: int, claims: tuple[int, ...] = (0,)) -> None:
        """Check how many inputs and claims it has."""
        require(len(self.inputs) == inputs, f"it has {len(self.inputs)} inputs instead of {inputs}")
        require(len(self.claims) in claims, f"it has {len(self.claims)} claims instead of {claims}")

    def groups(self, *axes: int) -> None:
        """Check that it reads and leaves the same groups, which extend along given axes."""
        for read in [*self.reads, self.axes]:
            require(read == self.axes and set(axes) <= set(read), f"it must read and leave groups along {axes}")

    def keeps_shape(self) -> None:
        """Check that the result has the shape of all inputs."""
        require(all(x.shape == self.shape for x in self.inputs), "its result has another shape than its inputs")

    def entries(self) -> int:
        """Entries of a group."""
        return math.prod(self.shape[axis] for axis in self.axes)

    def over(self) -> int:
        """Entries of the vectors that it works on, which must lie in a group."""
        over = integers(field(self.constants, "over", "its constants"), "over")
        require(len(set(over)) == len(over) > 0, f"over={over} must be axes, each once")
        self.groups(*over)
        return math.prod(self.shape[axis] for axis in over)


def _exact(values: Any) -> np.ndarray:
    found = np.empty(np.shape(values), dtype=object)
    found[...] = np.frompyfunc(Decimal, 1, 1)(np.asarray(values, dtype=object))
    return found


def _least(a: Any, b: Any) -> Any:
    return np.minimum(a, b)


def _bias(row: Row, place: int, outputs: int, parts: int = 1) -> list[Decimal]:
    if len(row.claims) <= place:
        return [ZERO] * parts
    claim = row.claim(place, "group_norm", parts=parts)
    require(row.tensor(claim.tensors[0]).size == outputs, f"its bias has not {outputs} entries")
    return [Decimal(value) for value in claim.values]


def _input(row: Row) -> Bounds:
    row.only(0, (0, 2))
    require(len(row.axes) > 0, "its groups have no axes")
    box, radius = domain_of(row)
    if row.claims:  # an embedding: its vectors lie in the domain
        claim, width = row.claim(0, "max_abs" if box else "row_norm"), row.shape[-1]
        require(row.axes == (len(row.shape) - 1,), "the groups of an embedding are its vectors")
        require(row.tensor(claim.tensors[0]).shape[-1:] == (width,), f"its table has not {width} columns")
        require(row.claim(1, "diameter").tensors == claim.tensors, "its diameter is that of another table")
        value = Fraction(claim.values[0])
        if box:
            require(box[0] <= -value and value <= box[1], "its table has a row outside the box")
        else:
            require(value * value <= Fraction(radius) ** 2 * width, "its table has a row beyond the radius")
    gain = _exact(root(row.entries())).reshape([1] * len(row.shape))
    largest = np.full(gain.shape, radius, dtype=object)
    return Bounds(gain * largest, gain, largest if box else gain * largest)


def domain_of(row: Row) -> tuple[tuple[float, float] | None, Decimal]:
    """The ends of a box, None for a ball, and the largest RMS of a group."""
    ends = row.constants.keys() & {"low", "high"}
    require(row.constants.keys() == {"dtype", *(ends or {"radius"})}, "its domain is neither a ball nor a box")
    require(row.constants["dtype"] in LARGEST, f"nothing is known of the dtype {str(row.constants['dtype'])[:60]!r}")
    if not ends:
        radius = row.number("radius")
        require(radius > 0, "its radius is not positive")
        return None, Decimal(radius)
    low, high = row.number("low"), row.number("high")
    require(low < high, "the ends of its box stand in the wrong order")
    return (low, high), Decimal(max(abs(low), abs(high)))


def _same(row: Row) -> Bounds:
    row.only(1)
    row.groups()
    row.keeps_shape()
    return row.bounds[0]


def _contraction(row: Row) -> Bounds:
    """1-Lipschitz in every group; the result is no larger than its group, in norm and in its largest entry."""
    row.only(1)
    row.groups()
    (x,) = row.inputs
    require(len(x.shape) == len(row.shape), "its result has another number of axes")
    pairs = list(zip(x.shape, row.shape, strict=True))
    require(all(a == b or (i in row.axes and b == 1) for i, (a, b) in enumerate(pairs)), "its groups are not kept")
    return row.bounds[0]


def weight_of(row: Row) -> tuple[str, bool]:
    """The matrix of a linear row."""
    return row.claims[0].tensors[0], row.claims[0].settings["transposed"]


def _linear(row: Row) -> Bounds:
    row.only(1, (1, 2))
    (x,), (r,), parts = row.inputs, row.bounds, integer(row.constants.get("parts"), "parts", 1)
    values = [Decimal(value) for value in row.claim(0, "spectral", parts=parts).values]
    shape, last = row.tensor(weight_of(row)[0]).shape, len(x.shape) - 1
    outputs, columns = shape[0], math.prod(shape[1:])
    if weight_of(row)[1]:
        require(len(shape) == 2, "only a matrix can be transposed")
        outputs, columns = shape[1], shape[0]
    require(columns == x.shape[-1], f"its weight has {columns} columns for {x.shape[-1]} entries")
    require(outputs % parts == 0, f"{outputs} outputs are no {parts} equal parts")
    expected = (outputs,) if parts == 1 else (parts, outputs // parts)
    require(row.shape == (*x.shape[:-1], *expected), f"its result cannot have shape {row.shape}")
    (read,) = row.reads
    axes = read if parts == 1 else (*read[:-1], last + 1)
    require(last in read and row.axes == axes, "it must read and leave groups along its last axis")
    vectors = root(math.prod(x.shape[axis] for axis in read) // x.shape[-1])
    bias = _bias(row, 1, outputs, parts)
    view = [1] * len(row.shape) if parts == 1 else [1] * last + [parts, 1]
    size, shift = (np.array(each, dtype=object).reshape(view) for each in (values, bias))
    x_radius, x_gain = (each if parts == 1 else each[..., None] for each in r[:2])
    radius = size * x_radius + shift * vectors
    return Bounds(radius, size * x_gain, radius)


def _average(row: Row) -> Bounds:
    """`P x` along the last axis but one; the leading axes of P broadcast."""
    row.only(1, (1,))
    row.groups()
    (x,), (r,), rank = row.inputs, row.bounds, len(row.shape)
    lead = integers(row.constants.get("parts"), "parts", 1)
    require(rank >= 2 and len(lead) == rank - 2, "it needs two axes, and a number of matrices for every other")
    measure = row.claims[0].measure
    claim = row.claim(0, "row_sum" if measure == "row_sum" else "spectral", parts=math.prod(lead))
    require(not claim.settings.get("transposed"), "its matrix is transposed")
    tensor, tokens = row.tensor(claim.tensors[0]).shape, x.shape[-2]
    require(measure == "row_sum" or len(tensor) == 2, "its spectral norm is not that of rows one below another")
    require(
        tensor[-1] == tokens and math.prod(tensor) == math.prod(lead) * row.shape[-2] * tokens, "its matrix misfits"
    )
    require(all(n in (1, m) for n, m in zip(lead, row.shape, strict=False)), "its matrices are too many")
    require(x.shape == (*row.shape[:-2], tokens, row.shape[-1]), f"its result cannot have shape {row.shape}")
    require(not any(lead[axis] > 1 for axis in row.axes if axis < rank - 2), "its groups extend over several matrices")
    size = _exact(claim.values).reshape(*lead, 1, 1)
    along = rank - 2 in row.axes
    require(along == (measure == "spectral"), "tokens of one group need a spectral norm, others a sum of their shares")
    radius, gain, largest = r if along else (each.max(rank - 2, keepdims=True) for each in r)
    return Bounds(size * radius, size * gain, size * (radius if along else largest))


def _matrix_product(row: Row) -> Bounds:
    row.only(2)
    (a, b), (ra, rb), rank = row.inputs, row.bounds, len(row.shape)
    require(rank >= 2 and len(a.shape) == len(b.shape) == rank, "its inputs need as many axes as its result")
    fits = a.shape[:-2] == b.shape[:-2] == row.shape[:-2] and a.shape[-1] == b.shape[-2]
    require(fits and row.shape[-2:] == (a.shape[-2], b.shape[-1]), "its matrices misfit")
    require(row.reads == [(rank - 1,), (rank - 2, rank - 1)] and row.axes == (rank - 1,), "it reads other groups")
    radius = ra.radius * rb.radius
    return Bounds(radius, ra.gain * rb.radius + ra.radius * rb.gain, radius)


def _product(row: Row) -> Bounds:
    row.only(2)
    row.groups()
    row.keeps_shape()
    a, b = row.bounds
    radius = _least(a.largest * b.radius, a.radius * b.largest)
    return Bounds(radius, a.largest * b.gain + b.largest * a.gain, a.largest * b.largest)


def _scaling(row: Row) -> Bounds:
    """Every entry times one of a tensor, whichever it is."""
    row.only(1, (1,))
    row.groups()
    row.keeps_shape()
    size = Decimal(row.claim(0, "max_abs").values[0])
    return Bounds(*(size * each for each in row.bounds[0]))


def _shift(row: Row) -> Bounds:
    """The sum with entries of a tensor, or with whole vectors of it along an axis, whichever they are."""
    row.only(1, (1,))
    row.groups()
    row.keeps_shape()
    whole = "over" in row.constants
    claim, vector = row.claim(0, "row_norm" if whole else "max_abs"), row.over() if whole else 1
    require(not whole or row.tensor(claim.tensors[0]).shape[-1:] == (vector,), f"its vectors have not {vector} entries")
    (x,), size = row.bounds, Decimal(claim.values[0])
    return Bounds(x.radius + size * root(row.entries() // vector), x.gain, x.largest + size)


# largest |slope|; growth with |f(x)| <= growth |x| + |f(0)|; |f(0)|; largest |f(x)|; all rounded up
_FUNCTIONS: dict[str, tuple[str, str, str, str | None]] = {
    **dict.fromkeys(("relu", "abs", "asinh", "tanhshrink", "softshrink"), ("1", "1", "0", None)),
    **dict.fromkeys(("tanh", "sin", "softsign"), ("1", "1", "0", "1")),
    "relu6": ("1", "1", "0", "6"),
    "cos": ("1", "1", "1", "1"),
    "atan": ("1", "1", "0", "1.570796326794896619231322"),
    "log_sigmoid": ("1", "1", "0.6931471805599453094172322", None),
    "sigmoid": ("0.25", "0.25", "0.5", "1"),
    "hardsigmoid": ("0.1666666716337203979492188", "0.1666666716337203979492188", "0.5", "1"),
    "hardswish": ("1.5", "1", "0", None),
    "erf": ("1.128379167095512573896159", "1.128379167095512573896159", "0", "1"),
    "gelu": ("1.128904145185154786340745", "1", "0", None),
    "gelu_tanh": ("1.128993068658771765455905", "1", "0", None),
    "silu": ("1.099839320128866916958185", "1", "0", None),
    "mish": ("1.088498161251727861228294", "1", "0", None),
}


def _elementwise(row: Row) -> Bounds:
    row.only(1, (0, 1))
    row.groups()
    row.keeps_shape()
    given = of_type(row.constants.get("numbers", []), list, "numbers")
    numbers, name = [Decimal(number(each, "a number of its function")) for each in given], row.constants.get("function")
    counts = {"leaky_relu": 1, "elu": 3, "clamp": 2, "clamp_min": 1, "clamp_max": 1}
    known = isinstance(name, str) and name in {*counts, *_FUNCTIONS} and len(numbers) == counts.get(name, 0)
    require(known, f"nothing is known of {str(name)[:60]!r} of {len(numbers)} numbers")
    at_zero, ceiling = ZERO, None
    if name == "leaky_relu":
        slope = growth = max(ONE, abs(numbers[0]))
    elif name == "elu":  # scale alpha (exp(inner x) - 1) below zero, which is steep for a negative inner
        alpha, scale, inner = numbers
        require(inner >= 0, "the exponential grows without bound")
        slope = growth = abs(scale) * max(ONE, abs(alpha) * inner)
    elif name == "clamp":
        low, high = numbers
        require(low <= high, "its limits stand in the wrong order")
        slope = growth = ONE
        at_zero, ceiling = max(ZERO, low, -high), max(abs(low), abs(high))
    elif name in ("clamp_min", "clamp_max"):
        slope = growth = ONE
        at_zero = max(ZERO, numbers[0] if name == "clamp_min" else -numbers[0])
    else:
        *sizes, limit = _FUNCTIONS[str(name)]
        slope, growth, at_zero = (Decimal(str(each)) for each in sizes)
        ceiling = None if limit is None else Decimal(limit)
    if row.claims:  # learned slopes
        claim = row.claim(0, "max_abs")
        require(name == "leaky_relu" and claim.values[0] <= numbers[0], "its slope is less than its claim")
    (x,), count = row.bounds, root(row.entries())
    radius, largest = growth * x.radius + at_zero * count, growth * x.largest + at_zero
    if ceiling is not None:
        radius, largest = _least(radius, ceiling * count), _least(largest, ceiling)
    return Bounds(radius, slope * x.gain, largest)


def _normalization(row: Row) -> Bounds:
    """`x / sqrt(mean x^2 + eps)`, with or without its mean taken off first."""
    row.only(1)
    row.keeps_shape()
    (x,), vector, eps = row.bounds, row.over(), Decimal(row.number("eps"))
    require(eps > 0, "its eps is not positive")
    slope = root(ONE / eps)
    radius = _least(slope * x.radius, root(row.entries()))
    return Bounds(radius, slope * x.gain, _least(radius, root(vector)))


def _ball(row: Row) -> Bounds:
    """Projection of every vector onto the ball of root mean square `scale^(-1/2)`."""
    row.only(1)
    row.keeps_shape()
    (x,), vector, scale = row.bounds, row.over(), Decimal(row.number("scale"))
    require(scale > 0, "its scale is not positive")
    radius = _least(x.radius, root(row.entries() / scale))
    return Bounds(radius, x.gain, _least(_least(x.largest, root(vector / scale)), radius))


def _unit(row: Row) -> Bounds:
    """`x / max(|x|, eps)`."""
    row.only(1)
    row.keeps_shape()
    (x,), vector, eps = row.bounds, row.over(), Decimal(row.number("eps"))
    require(eps > 0, "its eps is not positive")
    slope, vectors = ONE / eps, row.entries() // vector
    radius = _least(slope * x.radius, root(vectors) if vectors > 1 else ONE)
    return Bounds(radius, slope * x.gain, _least(radius, ONE))


def _softmax(row: Row) -> Bounds:
    row.only(1)
    row.keeps_shape()
    axis = integer(row.constants.get("over"), "over")
    row.groups(axis)
    vectors, one = row.entries() // row.shape[axis], np.full([1] * len(row.shape), ONE, dtype=object)
    return Bounds(one * root(vectors) if vectors > 1 else one, HALF * row.bounds[0].gain, one)


def _log_softmax(row: Row) -> Bounds:
    """`|log p_i| <= log n + max x - min x`, and the Jacobian `I - 1 p^T` has a norm of at most `sqrt n`."""
    row.only(1)
    row.keeps_shape()
    axis = integer(row.constants.get("over"), "over")
    row.groups(axis)
    (x,), n = row.bounds, row.shape[axis]
    largest = (UP.next_plus(UP.ln(Decimal(n))) if n > 1 else ZERO) + TWO * x.largest
    return Bounds(root(row.entries()) * largest, (root(n) if n > 1 else ONE) * x.gain, largest)


def _convolution(row: Row) -> Bounds:
    """A convolution without padding, or the adjoint of one whose input is the result."""
    row.only(1, (1, 2))
    (x,), (r,), adjoint = row.inputs, row.bounds, of_type(row.constants.get("adjoint", False), bool, "adjoint")
    image, result = (row.shape, x.shape) if adjoint else (x.shape, row.shape)
    count = len(image) - 2
    require(count >= 1 and len(result) == count + 2 and image[0] == result[0], "it needs a sample, channels and pixels")
    stride, dilation = (integers(row.constants.get(key), key, 1) for key in ("stride", "dilation"))
    require(len(stride) == len(dilation) == count, f"it needs a stride and a dilation for each of {count} axes")
    groups = integer(row.constants.get("groups"), "groups", 1)
    token_wise = row.axes == (1,) and not adjoint
    settings = {"groups": groups} if token_wise else {"groups": groups, "size": image[2:], "stride": stride}
    claim = (
        row.claim(0, "taps", **settings) if token_wise else row.claim(0, "convolution", **settings, dilation=dilation)
    )
    kernel = row.tensor(claim.tensors[0]).shape
    require(len(kernel) == count + 2 and kernel[0] % groups == 0, "its kernel misfits")
    require(kernel[1] * groups == image[1] and kernel[0] == result[1], "its channels are not those of its kernel")
    pixels = tuple(
        (n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(image[2:], dilation, kernel[2:], stride, strict=True)
    )
    require(result[2:] == pixels and min(pixels) > 0, f"its pixels must be {pixels}")
    row.groups(*((1,) if token_wise else range(1, count + 2)))
    require(0 not in row.axes, "its groups extend over several samples")
    radius, gain = r.radius, r.gain
    if token_wise:
        radius, gain = (each.max(tuple(range(2, count + 2)), keepdims=True) for each in (radius, gain))
    size, shift = Decimal(claim.values[0]), _bias(row, 1, row.shape[1])[0]
    require(not (adjoint and shift), "an adjoint has no bias")
    radius = size * radius + shift * root(row.entries() // row.shape[1])
    return Bounds(radius, size * gain, radius)


def _convex_potential(row: Row) -> Bounds:
    """`x - f A^T relu(A x + b)`: the Jacobian `I - f A^T D A` has eigenvalues between 1 and `1 - f |A|^2`.

    A is a matrix, or a convolution of stride 1 of an image that is padded with zeros; A^T is its adjoint.
    """
    row.only(1, (1, 2))
    row.keeps_shape()
    factor, (x,), entries = Decimal(row.number("factor")), row.bounds, row.shape[-1]
    if "padding" in row.constants:
        padding = integers(row.constants["padding"], "padding")
        size = tuple(n + 2 * p for n, p in zip(row.shape[2:], padding, strict=True))
        claim = row.claim(0, "convolution", size=size, stride=(1,) * len(size))
        kernel, inputs = row.tensor(claim.tensors[0]).shape, row.shape[1] // claim.settings["groups"]
        row.groups(*range(1, len(row.shape)))
        vectors = row.entries() // math.prod(row.shape[1:]) * math.prod(size)
        require(len(kernel) == len(row.shape), "its kernel misfits")
    else:
        claim = row.claim(0, "spectral", parts=1, transposed=False)
        kernel, inputs, vectors = row.tensor(claim.tensors[0]).shape, entries, row.entries() // entries
        row.groups(len(row.shape) - 1)
        require(len(kernel) == 2, "its weight is no matrix")
    require(kernel[1] == inputs, f"its weight has not {inputs} columns")
    norm, shift = Decimal(claim.values[0]), ZERO
    if len(row.claims) > 1:
        bias = row.claim(1, "positive_norm")
        require(row.tensor(bias.tensors[0]).shape == kernel[:1], f"its bias has not {kernel[0]} entries")
        shift = Decimal(bias.values[0])
    squared = abs(factor) * norm * norm
    slope = max(ONE, squared - ONE) if factor >= 0 else ONE + squared
    radius = slope * x.radius + abs(factor) * norm * shift * root(vectors)
    return Bounds(radius, slope * x.gain, radius)


@dataclass(frozen=True, eq=False)
class _Origin:
    """Head h of a value is `factor (W_h x_t + b_h)`, the same part of W for every token t."""

    row: Row
    parts: int
    heads: list[int]
    tokens: np.ndarray
    factor: Decimal


def _origin(x: Value, source: Value) -> _Origin:
    """What is derived from where the entries of a value come from; a `CheckError` if that is nothing of the kind."""
    term, width, what = x.terms[0], x.shape[-1], f"{x.name} is not made of heads of a linear map of {source.name}"
    base = term.base
    if not isinstance(base, Base) or base.row.operation != "linear" or len(x.terms) > 1 or len(x.shape) < 3:
        raise CheckError(what)
    factors, outputs = np.ones(1) if term.factor is None else term.factor.reshape(-1), base.shape[-1]
    whole = base.axes == (len(base.shape) - 1,) and base.row.constants["parts"] == 1 and outputs % width == 0
    token, feature = np.divmod(term.index, outputs)
    first = feature[..., :1]
    in_order = (feature == first + np.arange(width)).all() and (first % width == 0).all() and (term.index >= 0).all()
    alike = (token == token[..., :1]).all() and (factors == factors[0]).all()
    require(whole and base.row.inputs[0] is source and bool(in_order and alike), what)
    part = (first // width).reshape(x.shape[0], -1, x.shape[-2])
    require(bool((part == part[:1, :, :1]).all()), what)
    factor = abs(Decimal(float(factors[0]))) * (1 + Decimal(term.roundings * UNIT * 1.01))
    heads = part[0, :, 0].tolist()
    return _Origin(base.row, outputs // width, heads, token[..., 0], factor)


def _attention(row: Row) -> Bounds:
    """`softmax(s q k^T + mask) v` for any mask; balls of keys and values must have one centre for all tokens.

    `df = sum_j P_j dv_j + s Cov_P(v, k) dq + s sum_j P_j (v_j - mean v) (q . dk_j)`, so the gain is at most
    `L_v + s R_v (R_q L_k + R_k L_q)`. Where keys and values are linear in the same tokens, the first and the last
    part together are at most `|dx| sqrt(|W_v|^2 + (s R_q R_v |W_k|)^2)`, for their cross terms cancel; where queries
    are linear in such tokens without a bias, all is at most `|dx| |W_v| (sqrt(1 + t^2) + t)` with
    `t = s |W_q^T W_k| R^2`.
    """
    require(len(row.inputs) in (3, 4), "it needs queries, keys and values, and perhaps their tokens")
    (q, k, v), rank, scale = row.inputs[:3], len(row.shape), abs(Decimal(row.number("scale")))
    batch = row.shape[:-2]
    fits = q.shape == (*batch, row.shape[-2], k.shape[-1]) and k.shape[:-1] == v.shape[:-1] and len(k.shape) == rank
    require(rank >= 2 and fits and v.shape[:-2] == batch and v.shape[-1] == row.shape[-1], "its queries, keys misfit")
    require(row.axes == (rank - 1,) and all(read == (rank - 1,) for read in row.reads[:3]), "it reads other groups")
    rq, rk, rv = row.bounds[:3]
    k_radius, k_gain, v_radius, v_gain = (
        each.max(rank - 2, keepdims=True) for each in (rk.radius, rk.gain, rv.radius, rv.gain)
    )
    result, q_radius = v_radius, rq.radius.max(rank - 2, keepdims=True)
    gain = v_gain + scale * v_radius * (rq.radius * k_gain + k_radius * rq.gain)
    logits = scale * q_radius * k_radius
    if len(row.inputs) == 4:
        x, (radius, change, _) = row.inputs[3], row.bounds[3]
        require(row.reads[3] == (len(x.shape) - 1,), "it reads other groups of its tokens")
        radius, change = radius.max(), change.max()
        heads, key, value = [1, *batch[1:], 1, 1], _origin(k, x), _origin(v, x)
        require(np.array_equal(key.tokens, value.tokens), "its keys and values do not come from the same tokens")
        sizes = []
        for place, origin in enumerate((key, value)):
            name, transposed = weight_of(origin.row)
            claim = row.claim(place, "spectral", parts=origin.parts, transposed=transposed)
            require(claim.tensors == (name,), f"its claim {place} is not of {name}")
            require(len(claim.values) == origin.parts, f"its claim {place} has not {origin.parts} values")
            sizes.append(origin.factor * _exact([claim.values[head] for head in origin.heads]).reshape(heads))
        k_size, v_size = sizes
        k_radius, v_radius = _least(k_radius, k_size * radius), _least(v_radius, v_size * radius)
        slope = scale * rq.radius * v_radius * k_size
        gain = _least(gain, change * _roots(v_size * v_size + slope * slope) + scale * k_radius * v_radius * rq.gain)
        if len(row.claims) == 3:
            query = _origin(q, x)
            require(len(query.row.claims) == 1, "its queries have a bias")
            (a, turned_a), (b, turned_b) = weight_of(query.row), weight_of(key.row)
            pairs = [tuple(pair) for pair in zip(query.heads, key.heads, strict=True)]
            settings = {"pairs": pairs, "parts": (query.parts, key.parts), "transposed": (turned_a, turned_b)}
            claim = row.claim(2, "product", **settings)
            require(claim.tensors == (a, b) and len(claim.values) == len(pairs), f"its product is not of {a} and {b}")
            t = scale * radius * radius * query.factor * key.factor * _exact(claim.values).reshape(heads)
            gain = _least(gain, change * v_size * (_roots(ONE + t * t) + t))
            logits = _least(logits, t) if len(key.row.claims) == 1 else logits
    row.only(len(row.inputs), (2, 3) if len(row.inputs) == 4 else (0,))
    row.logits = np.broadcast_to(logits[..., 0, 0], batch or (1,)).max(0, keepdims=True).reshape(-1)
    return Bounds(result, gain, result)


def _roots(values: np.ndarray) -> np.ndarray:
    found = np.empty(np.shape(values), dtype=object)
    found[...] = np.frompyfunc(root, 1, 1)(values)
    return found


def _margin(row: Row) -> Bounds:
    """The difference of any two entries of `factor (W x + b)`."""
    row.only(1, (1, 2))
    claim, factor, last = row.claim(0, "row_difference"), abs(Decimal(row.number("factor"))), len(row.shape) - 1
    shape = row.tensor(claim.tensors[0]).shape
    columns = shape[0] if claim.settings["transposed"] else math.prod(shape[1:])
    (x,), (r,) = row.inputs, row.bounds
    require(x.shape == (*row.shape[:-1], columns) and row.shape[-1] == 1, "its weight or its result misfits")
    require(row.reads == [(last,)] and row.axes == (last,), "it reads other groups")
    size, shift = factor * Decimal(claim.values[0]), ZERO
    if len(row.claims) > 1:
        bias = row.claim(1, "max_abs")
        require(row.tensor(bias.tensors[0]).size == row.tensor(claim.tensors[0]).size // columns, "its bias misfits")
        shift = TWO * factor * Decimal(bias.values[0])
    return Bounds(size * r.radius + shift, size * r.gain, size * r.radius + shift)


def margin_of(row: Row, logits: Value) -> Decimal:
    """What a row of margins says of the model's result, which must be the map that it is of."""
    term = logits.terms[0]
    require(len(logits.terms) == 1 and isinstance(term.base, Base), "the margin is of a result that is a sum")
    require(logits.shape[-1] == term.base.shape[-1], "the margin is of several vectors side by side")
    own: Row = term.base.row  # type: ignore[union-attr]
    claim, factors = row.claims[0], np.ones(1) if term.factor is None else term.factor.reshape(-1)
    require(own.operation == "linear" and own.inputs[0] is row.inputs[0], "the margin is of another map's input")
    require(weight_of(own) == (claim.tensors[0], claim.settings["transposed"]), "the margin is of another weight")
    require([c.tensors for c in own.claims[1:]] == [c.tensors for c in row.claims[1:]], "the margin has another bias")
    in_order = np.array_equal(term.index.reshape(-1), np.arange(term.index.size))
    require(bool((factors == factors[0]).all()), "entries of the margin's result have factors of their own")
    most = abs(Decimal(float(factors[0]))) * (1 + Decimal(term.roundings * UNIT))
    require(in_order and most <= abs(Decimal(row.number("factor"))), "the margin has a factor that is too small")
    return row.bounds[0].gain.max() * abs(Decimal(row.number("factor"))) * Decimal(claim.values[0])


RULES: dict[str, Callable[[Row], Bounds]] = {
    "input": _input, "output": _same, "contraction": _contraction, "linear": _linear, "average": _average,
    "matrix_product": _matrix_product, "product": _product, "elementwise": _elementwise, "ball": _ball, "unit": _unit,
    "normalization": _normalization, "softmax": _softmax, "log_softmax": _log_softmax, "attention": _attention,
    "scaling": _scaling, "shift": _shift, "convolution": _convolution, "convex_potential": _convex_potential,
    "margin": _margin,
}  # fmt: skip


def idle_ball(x: Value, constants: dict[str, Any]) -> None:
    """Check that a projection onto a ball moves nothing."""
    scale = Decimal(number(field(constants, "scale", "its constants"), "scale"))
    over = integers(field(constants, "over", "its constants"), "over")
    require(scale > 0 and len(over) > 0 and list(over) == sorted({*over}), "its scale or its axes are malformed")
    require(max(over) < len(x.shape), f"its input has no axis {max(over)}")
    entries = math.prod(x.shape[axis] for axis in over)
    idle = all(r * r * scale <= entries for r in gather(x, over).radius.flat)
    require(idle, "its ball is not shown to leave all vectors of the domain as they are")
