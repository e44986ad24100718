"""The rule of attention, and where its queries, keys and values come from."""

from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from wellnormed.proof.decimals import ONE, TWO, Decimals, decimals, least, root, roots, rounding_up
from wellnormed.proof.gather import gather
from wellnormed.proof.inference import Inference, weight_of
from wellnormed.proof.reading import CheckError, require, word
from wellnormed.proof.rows import Bounds
from wellnormed.proof.value import UNIT, Base, Value


@dataclass(frozen=True, eq=False)
class Origin:
    """The map that a value comes from: its head h is `factor (W_h x_t + b_h)`, for every token t of the source x.

    The value has shape `(batch, heads, tokens, width)`, or any number of axes of heads.
    """

    linear: Inference
    """The row of the linear map."""
    parts: int
    """The number of equal parts of the map's outputs of which each head is one."""
    heads: list[int]
    """For every head, the number of its part."""
    tokens: np.ndarray
    """The flat number of the token that every vector of the value is computed from, `(batch, heads, tokens)`."""
    factor: Decimal

    @property
    def source(self) -> Value:
        """The tokens x."""
        return self.linear.inputs[0]

    @property
    def bias(self) -> bool:
        """Whether the map has a bias b."""
        return len(self.linear.claims) > 1


def origin_of(x: Value) -> Origin | None:
    """Find the linear map that queries, keys or values come from; None unless each vector is a part of one token's."""
    term, width = x.terms[0], x.shape[-1]
    base = term.base
    if len(x.terms) != 1 or len(x.shape) < 3 or not isinstance(base, Base) or base.inference is None:
        return None
    outputs = base.shape[-1]
    divisible = base.divisible and base.axes == (len(base.shape) - 1,) and outputs % width == 0
    if not divisible or (term.index < 0).any():
        return None
    factors = np.ones(1) if term.factor is None else term.factor.reshape(-1)
    token, feature = np.divmod(term.index, outputs)
    first = feature[..., :1]
    in_order = (feature == first + np.arange(width, dtype=np.int32)).all() and (first % width == 0).all()
    alike = (token == token[..., :1]).all() and (factors == factors[0]).all()
    part = (first // width).reshape(x.shape[0], -1, x.shape[-2])
    if not (in_order and alike and (part == part[:1, :, :1]).all()):
        return None
    with rounding_up():
        factor = abs(Decimal(float(factors[0]))) * (1 + Decimal(term.roundings * UNIT * 1.01))
    return Origin(base.inference, outputs // width, part[0, :, 0].tolist(), token[..., 0], factor)


def _origin_in(x: Value, source: Value) -> Origin:
    """The origin of queries, keys or values, which must be a map of the given tokens."""
    origin = origin_of(x)
    if origin is None or origin.source is not source:
        raise CheckError(f"{word(x.name)} is not made of heads of a linear map of {word(source.name)}")
    return origin


def attention(
    row: Inference, *, scale: float, added: float = 0.0, together: bool = False, moved: float = 0.0
) -> Bounds:
    """`softmax(s q k^T + mask) v` for any mask, of q, k, v `(*batch, tokens, width)`.

    The rounding errors, which are of logits, weights and sums, need to know how large a finite entry of the mask is:
    `added`. Entries so low that their weights, executed, are 0, count as -infinity. An original's mask has entries that
    differ by at most `moved`, which changes the weights, all together, by no more than that.

    All keys and values lie in balls about 0, whose radii are the largest over tokens: with other centres for other
    tokens the bounds would not hold. From
    `df = sum_j P_j dv_j + s Cov_P(v, k) dq + s sum_j P_j (v_j - mean v) (q . dk_j)` the gain is at most
    `L_v + s R_v (R_q L_k + R_k L_q)`. If keys and values are linear in the same tokens, which the row then has as its
    fourth input, the cross terms of the first and the last part cancel, so that the two together are at most
    `|dx| sqrt(|W_v|^2 + (s R_q R_v |W_k|)^2)`. If queries are linear in these tokens too, without a bias, the whole is
    at most `|dx| |W_v| (sqrt(1 + t^2) + t)` with `t = s |W_q^T W_k| R^2`.

    With `together`, all keys K of a head are one group, and all values V, whose bounds may be less than those of their
    vectors say. The logits of a query have the gain `s (L_q R_K + R_q L_K)`, their weights half of it, and a norm of at
    most 1, so the result has at most `R_V` times that of the weights, and `L_V`.
    """
    require(len(row.inputs) in (3, 4), "it needs queries, keys and values, and perhaps their tokens")
    (q, k, v), rank, strength = row.inputs[:3], len(row.shape), abs(Decimal(scale))
    batch = row.shape[:-2]
    fits = q.shape == (*batch, row.shape[-2], k.shape[-1]) and k.shape[:-1] == v.shape[:-1]
    require(fits and v.shape[:-2] == batch and v.shape[-1] == row.shape[-1], "its queries, keys or values misfit")
    require(row.axes == (rank - 1,) and all(read == (rank - 1,) for read in row.reads[:3]), "it reads other groups")
    rq, rk, rv = row.bounds[:3]
    k_radius, k_gain, v_radius, v_gain = (
        each.max(rank - 2, keepdims=True) for each in (rk.radius, rk.gain, rv.radius, rv.gain)
    )
    result, q_radius = v_radius, rq.radius.max(rank - 2, keepdims=True)
    gain = v_gain + strength * v_radius * (rq.radius * k_gain + k_radius * rq.gain)
    logits = strength * q_radius * k_radius
    if together:
        keys, values = (gather(each, (rank - 2, rank - 1)) for each in (k, v))
        of_logits = strength * (rq.gain * keys.radius + rq.radius * keys.gain)
        gain = least(gain, values.gain + of_logits * values.radius / TWO)
    error = _error(row, strength, abs(Decimal(added)), abs(Decimal(moved)) * row.of_original)
    if len(row.inputs) == 4:
        x, (radius, change, *_) = row.inputs[3], row.bounds[3]
        require(row.reads[3] == (len(x.shape) - 1,), "it reads other groups of its tokens")
        radius, change = radius.max(), change.max()
        heads, key, value = [1, *batch[1:], 1, 1], _origin_in(k, x), _origin_in(v, x)
        require(np.array_equal(key.tokens, value.tokens), "its keys and values do not come from the same tokens")
        sizes = []
        for place, origin in enumerate((key, value)):
            name, transposed = weight_of(origin.linear)
            claim = row.claim(place, "spectral", parts=origin.parts, transposed=transposed)
            require(claim.tensors == (name,), f"its claim {place} is not of {word(name)}")
            sizes.append(origin.factor * decimals([claim.values[head] for head in origin.heads]).reshape(heads))
        k_size, v_size = sizes
        k_radius, v_radius = least(k_radius, k_size * radius), least(v_radius, v_size * radius)
        slope = strength * rq.radius * v_radius * k_size
        gain = least(gain, change * roots(v_size * v_size + slope * slope) + strength * k_radius * v_radius * rq.gain)
        if len(row.claims) == 3:
            query = _origin_in(q, x)
            require(not query.bias, "its queries have a bias")
            (a, turned_a), (b, turned_b) = weight_of(query.linear), weight_of(key.linear)
            pairs = tuple(zip(query.heads, key.heads, strict=True))
            settings = {"pairs": pairs, "parts": (query.parts, key.parts), "transposed": (turned_a, turned_b)}
            claim = row.claim(2, "product", **settings)
            require(claim.tensors == (a, b), f"its product is not of {word(a)} and {word(b)}")
            t = strength * radius * radius * query.factor * key.factor * decimals(claim.values).reshape(heads)
            gain = least(gain, change * v_size * (roots(ONE + t * t) + t))
            logits = least(logits, t) if not key.bias else logits
    row.only(len(row.inputs), (2, 3) if len(row.inputs) == 4 else (0,))
    row.counted.update(name for claim in row.claims for name in claim.tensors)  # in queries, keys and values
    row.logits = np.broadcast_to(logits[..., 0, 0], batch or (1,)).max(0, keepdims=True).reshape(-1)
    return Bounds(result, gain, result, error)


def _error(row: Inference, strength: Decimal, added: Decimal, moved: Decimal) -> Decimals:
    """The rounding errors of an attention: those of its inputs by the sum form of the gain, and its own.

    Errors of queries and keys move the result by no more than twice the largest value, however large they are.
    A logit of size m errs by at most `g(d + 6) m`, with the scale's and the mask's roundings, which changes a weight by
    that share. An online softmax of blocks of 16 keys or more rescales its sums for each block.
    """
    (rq, rk, rv), keys, width = row.bounds[:3], row.inputs[1].shape[-2], row.inputs[0].shape[-1]
    axis = len(row.shape) - 2
    q, (k, v) = rq.radius + rq.error, ((each.radius + each.error).max(axis, keepdims=True) for each in (rk, rv))
    k_error, v_error = (each.error.max(axis, keepdims=True) for each in (rk, rv))
    k_radius, v_radius = (each.radius.max(axis, keepdims=True) for each in (rk, rv))
    carried = v_error + least(strength * (q * k_error + k_radius * rq.error) + moved, TWO) * v_radius
    size = (strength * q * k + added).max()
    most = max(ONE, strength)  # the scale may come before or after the product, or in parts
    row.require_held(most * (q * k).max() + added, most * q, most * k)
    lost = width * row.format.floor * most * (ONE + (q + k).max())
    logits = row.of_sum(width + 6, products=True) * size + row.rate(6) * size + lost
    share = weights_error(row, size, logits, keys, blocks=-(-keys // 16))
    floor = keys * row.format.floor * (root(row.entries()) + 4 * v)
    own = (share + row.of_sum(keys, products=True) * (ONE + share)) * v + floor
    return row.stored(v, carried + own, row.entries())


def weights_error(row: Inference, size: Decimal, logits: Decimal, keys: int, blocks: int = 0) -> Decimal:
    """The largest relative error of a softmax's weight, up to what is less than `keys` times the floor of its dtype.

    If rounding can change weights by a quarter or more, it is `ANY_WEIGHTS`, which the errors of all weights together
    do not exceed: executed weights are not negative either, and their sum is at most 2.

    Args:
        row: The row.
        size: The largest size of a logit.
        logits: The largest error of a logit.
        keys: The number of logits.
        blocks: The number of blocks of an online softmax.
    """
    unit = row.rate(1, of_sums=True)
    log = logits + 4 * size * unit + row.rate(EXPONENTIAL + (EXPONENTIAL + 2) * blocks, of_sums=True)
    one, sums = log * (ONE + log), row.of_sum(keys)
    if one + sums > _SMALL:
        return ANY_WEIGHTS if sums + row.rate(4) <= _SMALL else row.without_error()
    share = (TWO * one + sums) * (ONE + TWO * (one + sums))
    return share + row.rate(4) * (ONE + share)


ANY_WEIGHTS = Decimal(3)
"""The sum of the absolute values of two vectors of weights, one of a sum of 1 and one of a sum of at most 2."""
_SMALL = Decimal("0.25")
EXPONENTIAL = 8
"""The relative error of an exponential, in units of one rounding; it is at most 4 units in the last place."""
