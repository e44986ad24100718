"""Bounds of the primitives, written a second time, from those of the inputs, the constants and the claims."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from campaigns.oracle.upper import ONE, ZERO, Upper, Uppers, hypotenuse, least, root_up, uppers
from campaigns.oracle.value import Bounds
from wellnormed.proof import Claim

HALF = Upper("0.5")


class Read(NamedTuple):
    """One input of a primitive: bounds of the groups that its rule reads, wherever the entries come from."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    """Axes of its groups."""
    bounds: Bounds


Primitive = Callable[[Sequence[Read], Mapping[str, Any], Sequence[Claim]], Bounds]
PRIMITIVES: dict[str, Primitive] = {}
"""Name of a primitive -> its bounds, in arithmetic that rounds up."""


def primitive(name: str) -> Callable[[Primitive], Primitive]:
    """Register the bounds of a primitive."""
    return lambda function: PRIMITIVES.setdefault(name, function)


class Shape(NamedTuple):
    """Known properties of a function f of one number."""

    slope: Upper
    """Largest absolute slope."""
    growth: Upper | None = None
    """`|f(x)| <= growth |x| + at_zero`; the slope if None."""
    at_zero: Upper = ZERO
    """`|f(0)|`."""
    ceiling: Upper | None = None
    """Largest `|f(x)|`."""


def _d(x: float | str) -> Upper:
    return Upper(x)


def _exponential(most: Upper) -> Shape:
    """Of arguments up to the one where it has this value, and this slope."""
    return Shape(most, at_zero=ONE, ceiling=most)


FUNCTIONS: dict[str, Callable[..., Shape]] = {
    "relu": lambda: Shape(ONE),
    "abs": lambda: Shape(ONE),
    "relu6": lambda: Shape(ONE, ceiling=_d(6)),
    "tanh": lambda: Shape(ONE, ceiling=ONE),
    "sin": lambda: Shape(ONE, ceiling=ONE),
    "cos": lambda: Shape(ONE, at_zero=ONE, ceiling=ONE),
    "atan": lambda: Shape(ONE, ceiling=_d("1.5707963267948967")),
    "asinh": lambda: Shape(ONE),
    "softsign": lambda: Shape(ONE, ceiling=ONE),
    "tanhshrink": lambda: Shape(ONE),
    "softshrink": lambda: Shape(ONE),
    "log_sigmoid": lambda: Shape(ONE, at_zero=_d("0.69314718055994531")),
    "sigmoid": lambda: Shape(_d("0.25"), at_zero=_d("0.5"), ceiling=ONE),
    # torch multiplies by 1/6 rounded to float32, which is larger
    "hardsigmoid": lambda: Shape(_d("0.16666667163372041"), at_zero=_d("0.5"), ceiling=ONE),
    "hardswish": lambda: Shape(_d("1.5"), growth=ONE),
    "erf": lambda: Shape(_d("1.1283791670955126"), ceiling=ONE),  # 2 / sqrt pi
    # Phi(sqrt 2) + sqrt 2 phi(sqrt 2); LT's 1.1289 is rounded down
    "gelu": lambda: Shape(_d("1.12890414518516"), growth=ONE),
    "gelu_tanh": lambda: Shape(_d("1.12899306865878"), growth=ONE),
    "silu": lambda: Shape(_d("1.09983932012887"), growth=ONE),
    "mish": lambda: Shape(_d("1.08849836"), growth=ONE),
    "leaky_relu": lambda slope: Shape(max(ONE, abs(_d(slope)))),
    # alpha (exp(x) - 1) below zero
    "elu": lambda alpha, scale, inner: Shape(abs(_d(scale)) * max(ONE, abs(_d(alpha) * _d(inner)))),
    "exp": lambda limit: _exponential(_d(math.exp(limit) * (1 + 1e-12))),
    "clamp_min": lambda low: Shape(ONE, at_zero=max(ZERO, _d(low))),
    "clamp_max": lambda high: Shape(ONE, at_zero=max(ZERO, -_d(high))),
    "clamp": lambda low, high: Shape(
        ONE, at_zero=max(ZERO, _d(low), -_d(high)), ceiling=max(abs(_d(low)), abs(_d(high)))
    ),
}
"""Name -> its shape, for the numbers that the executed operation passes. The checker has a table of its own."""

BELOW: dict[str, Callable[[float], float]] = {
    "relu": lambda t: 0.0,
    "gelu": lambda t: t * math.exp(-t * t / 2) / 2,
    "gelu_tanh": lambda t: t * math.exp(-1.59 * t),
    "silu": lambda t: t * math.exp(-t),
    "mish": lambda t: t * math.exp(-t),
}
"""Name -> an upper bound of `|f(-t)|`, which falls from t = 1 on."""


@primitive("input")
def _input(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """A ball for every group, or a box for every entry; the change of the input has size 1 by definition."""
    entries = math.prod(c["shape"][axis] for axis in c["axes"])
    root = uppers(root_up(entries)).reshape([1] * len(c["shape"]))
    if "radius" in c:
        radius = root * uppers(c["radius"])
        return Bounds(radius, root, radius)
    largest = np.maximum(*(abs(uppers(c[end])) for end in ("low", "high"))) * uppers(1).reshape(root.shape)
    return Bounds(root * largest, root, largest)


@primitive("output")
def _output(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """The model's result, in the groups that the certificate speaks of."""
    return reads[0].bounds


@primitive("lipsdp")
def _lipsdp(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """The end of a network; that the bound is proved is checked elsewhere."""
    end, start = (read.bounds for read in reads)
    return Bounds(end.radius, least(end.gain, uppers(c["bound"]) * start.gain), end.largest)


@primitive("scaling")
def _bound_scaling(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """Every entry times one of a tensor, whichever it is."""
    ((_, _, x),) = reads
    return Bounds(*(uppers(claims[0].values[0]) * each for each in x))


@primitive("shift")
def _bound_shift(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """A group has this many vectors, or entries, each no larger than the bound of all."""
    ((shape, axes, x),) = reads
    size = uppers(claims[0].values[0]).item()
    entries = math.prod(shape[axis] for axis in axes)
    vector = math.prod(shape[axis] for axis in c.get("over", ()))
    return Bounds(x.radius + size * root_up(entries // vector), x.gain, x.largest + size)


@primitive("product")
def _bound_product(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|d(ab)| <= |a|_inf |db| + |b|_inf |da|`, in the Euclidean norm.

    If a is a sigmoid s or the like, its derivative is small where it is large: for any numbers p and q,
    `|s p + 4 s (1 - s) q| <= sqrt(p^2 + share q^2)`.
    """
    a, b = (read.bounds for read in reads)
    radius = least(a.largest * b.radius, a.radius * b.largest)
    gain = a.largest * b.gain + b.largest * a.gain
    for name, x, y in zip(c["functions"], (a, b), (b, a), strict=True):
        if name in SHARES:
            gain = least(gain, hypotenuse(y.gain, SHARES[name] * (y.largest * x.gain)))
    return Bounds(radius, gain, a.largest * b.largest)


SHARES = {"sigmoid": root_up(_d("1.4427191")), "tanh": ONE, "sin": ONE, "cos": ONE}
"""Roots of the shares of `_bound_product`."""


@primitive("mixture")
def _mixture(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`s a + (1 - s) b` for a sigmoid s.

    With `|a - b| <= D`, the row `(s, 1 - s, sqrt(8) s (1 - s))` multiplies `(da, db, D dx / sqrt(8))`. Its norm is at
    most 1.
    """
    x, a, b = (read.bounds for read in reads)
    largest, change = np.maximum(a.largest, b.largest), (a.largest + b.largest) * x.gain
    entries = math.prod(reads[0].shape[axis] for axis in reads[0].axes)
    gain = least(hypotenuse(hypotenuse(a.gain, b.gain), change / root_up(8)), a.gain + b.gain + change / 4)
    return Bounds(least(hypotenuse(a.radius, b.radius), largest * root_up(entries)), gain, largest)


@primitive("elementwise")
def _elementwise(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    ((shape, axes, x),), numbers = reads, c["numbers"]
    known = FUNCTIONS[c["function"]](*(numbers if c["function"] != "exp" else [float(x.largest.max().exact())]))
    root = root_up(math.prod(shape[axis] for axis in axes))
    growth = known.slope if known.growth is None else known.growth
    radius, largest = growth * x.radius + known.at_zero * root, growth * x.largest + known.at_zero
    if known.ceiling is not None:
        radius = least(radius, known.ceiling * root)
        largest = least(largest, known.ceiling)
    return Bounds(radius, known.slope * x.gain, largest)


@primitive("linear")
def _linear(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """The norm of each part of the outputs; a bias moves the radius only."""
    (x,), parts = reads, c["parts"]
    bounds = Bounds(*(each[..., None] if parts > 1 else each for each in x.bounds))
    size = _along(claims[0].values, bounds.gain.ndim, parts)
    shift = _along(claims[1].values, bounds.gain.ndim, parts) if len(claims) > 1 else uppers(0)
    radius = size * bounds.radius + shift * tokens_of(x, x.shape[-1])
    return Bounds(radius, size * bounds.gain, radius)


@primitive("average")
def _average(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|y_i| <= sum_j |P_ij| max_j |x_j|` of tokens that are groups apart; `|P|` if they are in one group."""
    (x,) = reads
    size = uppers(claims[0].values).reshape([*c["parts"], 1, 1])
    if claims[0].measure == "row_sum":
        along = len(x.shape) - 2
        return Bounds(*(size * each.max(along, keepdims=True) for each in x.bounds))
    return Bounds(size * x.bounds.radius, size * x.bounds.gain, size * x.bounds.radius)


@primitive("matrix_product")
def _matrix_product(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|d(a B)| <= |da| |B| + |a| |dB|` for every row a, with the Frobenius norm of B."""
    a, b = (read.bounds for read in reads)
    radius = a.radius * b.radius
    return Bounds(radius, a.gain * b.radius + a.radius * b.gain, radius)


@primitive("margin")
def _margin(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|(w_a - w_b) . x + b_a - b_b|`, and `|w_a - w_b|` times the change of x."""
    (x,), factor = reads, uppers(c["factor"]).item()
    size = factor * uppers(claims[0].values).item()
    shift = 2 * factor * uppers(claims[1].values).item() if len(claims) > 1 else uppers(0).item()
    radius = size * x.bounds.radius + shift
    return Bounds(radius, size * x.bounds.gain, radius)


def tokens_of(read: Read, inside: int) -> Upper:
    """Square root of how many vectors of so many entries lie in a group."""
    return root_up(math.prod(read.shape[axis] for axis in read.axes) // inside)


def _along(values: Sequence[float], axes: int, parts: int) -> Uppers:
    """Numbers for each part, along the last axis but one."""
    return uppers(values).reshape([1] * (axes - 2) + [parts, 1]) if parts > 1 else uppers(values[0])


@primitive("convolution")
def _convolution(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """The norm of the operator; a bias stands at every pixel of a group."""
    (x,), size = reads, uppers(claims[0].values).item()
    bounds = x.bounds
    if len(c["axes"]) == 1:  # the largest over pixels
        over = tuple(range(2, len(x.shape)))
        bounds = Bounds(*(each.max(over, keepdims=True) for each in bounds))
    pixels = math.prod(c["shape"][axis] for axis in c["axes"] if axis > 1)
    shift = uppers(claims[1].values).item() * root_up(pixels) if len(claims) > 1 else uppers(0).item()
    radius = size * bounds.radius + shift
    return Bounds(radius, size * bounds.gain, radius)


@primitive("convex_potential")
def _convex_potential(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`I - f A^T D A` has eigenvalues between 1 and `1 - f |A|^2`; zero goes to `-f A^T relu(b)`."""
    (x,), factor = reads, uppers(c["factor"]).item()
    norm = uppers(claims[0].values).item()
    squared = abs(factor) * norm * norm
    slope = max(ONE, squared - 1) if factor >= 0 else ONE + squared
    shift = uppers(claims[1].values).item() if len(claims) > 1 else uppers(0).item()
    radius = slope * x.bounds.radius + abs(factor) * norm * shift * _vectors(x, claims[0])
    return Bounds(radius, slope * x.bounds.gain, np.asarray(radius))


def _vectors(x: Read, claim: Claim) -> Upper:
    """Square root of how many times the bias stands in a group, at most."""
    if claim.measure == "spectral":
        return tokens_of(x, x.shape[-1])
    # the result of the first convolution has no more pixels than the padded image
    samples = math.prod(x.shape[axis] for axis in x.axes) // math.prod(x.shape[1:])
    return root_up(samples * math.prod(claim.constants["size"]))


@primitive("normalization")
def _normalization(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """Root mean square at most 1, and slope at most `1 / sqrt(eps)`: never 1."""
    ((shape, axes, x),) = reads
    slope = root_up(ONE / uppers(c["eps"]).item())
    radius = least(slope * x.radius, root_up(math.prod(shape[axis] for axis in axes)))
    vector = root_up(math.prod(shape[axis] for axis in c["over"]))
    return Bounds(radius, slope * x.gain, least(radius, vector))


@primitive("ball")
def _ball(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """1-Lipschitz for each vector, and none is longer than the radius."""
    ((shape, axes, x),) = reads
    one = root_up(math.prod(shape[axis] for axis in c["over"]) / uppers(c["scale"]).item())
    all_vectors = root_up(math.prod(shape[axis] for axis in axes) / uppers(c["scale"]).item())
    radius = least(x.radius, all_vectors)
    return Bounds(radius, x.gain, least(least(x.largest, one), radius))


@primitive("unit")
def _unit(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """Outside the ball of radius eps a projection onto the sphere, over eps."""
    ((shape, axes, x),) = reads
    slope = ONE / uppers(c["eps"]).item()
    vectors = math.prod(shape[axis] for axis in axes) // math.prod(shape[axis] for axis in c["over"])
    radius = least(slope * x.radius, root_up(vectors) if vectors > 1 else ONE)
    return Bounds(radius, slope * x.gain, least(radius, ONE))


@primitive("logsumexp")
@primitive("contraction")
def _contraction(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """A map with `|f(x) - f(y)| <= |x - y|` and `|f(x)| <= |x|` in every group, and entries of so many times those."""
    ((_, _, x),) = reads
    return Bounds(x.radius, x.gain, least(x.radius, uppers(c["growth"]) * x.largest) if "growth" in c else x.largest)


@primitive("attention")
def _attention(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """The smallest valid bound of each head; any additive mask is free.

    With s the scale, and all keys and all values of a head in balls of radius `R_k` and `R_v` about one centre each,
    the gain is at most `L_v + s R_v (R_q L_k + R_k L_q)`. For keys and values that are linear in the same tokens it is
    at most `|dx| sqrt(|W_v|^2 + (s R_q R_v |W_k|)^2) + s R_k R_v L_q`, where biases are the centres, and for queries
    too, without a bias, `|dx| |W_v| (sqrt(1 + t^2) + t)` with `t = s |W_q^T W_k| R^2`. Or all keys and all values of a
    head are one group each: rows of weights have a norm of at most 1, and half the gain of their logits.
    """
    q, k, v = (read.bounds for read in reads[:3])
    scale, tokens, batch = abs(uppers(c["scale"]).item()), len(c["shape"]) - 2, c["shape"][:-2]
    lk, lv, rk, rv = (each.max(tokens, keepdims=True) for each in (k.gain, v.gain, k.radius, v.radius))
    gain = lv + scale * rv * (q.radius * lk + rk * q.gain)
    if "together" in c:
        keys, values = c["together"]
        logits = scale * (q.gain * keys.radius + q.radius * keys.gain)
        gain = least(gain, HALF * logits * values.radius + values.gain)
    if len(reads) > 3:
        x = reads[3].bounds
        size, change = x.radius.max(), x.gain.max()
        wk, wv = (_by_head(c[kind][0], c[kind][1:], claims[i].values, batch) for i, kind in enumerate(("key", "value")))
        rk, rv = least(rk, wk * size), least(rv, wv * size)
        joint = change * hypotenuse(wv, scale * q.radius * rv * wk) + scale * rk * rv * q.gain
        gain = least(gain, joint)
        if "query" in c:
            both = abs(uppers(c["query"][0]).item() * uppers(c["key"][0]).item())
            t = scale * size * size * both * uppers(claims[2].values).reshape([1, *batch[1:], 1, 1])
            gain = least(gain, change * wv * (hypotenuse(ONE, t) + t))
    largest = v.radius.max(tokens, keepdims=True)
    return Bounds(largest, gain, largest)


@primitive("softmax")
def _softmax(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    (x,) = reads
    count = math.prod(x.shape[axis] for axis in x.axes) // x.shape[c["over"]]
    one = uppers(np.ones([1] * len(x.shape), dtype=int))
    return Bounds(one * root_up(count) if count > 1 else one, HALF * x.bounds.gain, one)


@primitive("log_softmax")
def _log_softmax(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|log p_i| <= log n + max x - min x`."""
    (x,) = reads
    n = x.shape[c["over"]]
    largest = uppers(math.nextafter(math.log(n) * (1 + 1e-15), math.inf)).item() + 2 * x.bounds.largest
    radius = root_up(math.prod(x.shape[axis] for axis in x.axes)) * largest
    return Bounds(radius, root_up(n) * x.bounds.gain if n > 1 else x.bounds.gain, largest)


def _by_head(factor: float, heads: Sequence[int], values: Sequence[float], batch: Sequence[int]) -> Uppers:
    size = abs(uppers(factor).item())
    return size * uppers([values[int(head)] for head in heads]).reshape([1, *batch[1:], 1, 1])
