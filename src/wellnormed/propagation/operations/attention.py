"""Dot-product attention, its softmax, and the largest logit."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from wellnormed.propagation import moves
from wellnormed.propagation.decimals import ONE, Decimals, decimals, float_up, hypotenuse, least, rounding_up, sqrt_up
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.registry import Read, operation, primitive
from wellnormed.propagation.rows import Claim, Row
from wellnormed.propagation.value import Base, Bounds, Value, slack

HALF = Decimal("0.5")


@operation("aten.scaled_dot_product_attention.default")
def attention(
    step: Ledger,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """`softmax(scale q k^T + mask) v` for any mask that does not depend on the input."""
    if dropout:
        raise step.refuse("it drops attention weights at random; call `model.eval()` first")
    if isinstance(mask, Value):
        raise step.refuse("its mask depends on the input; add only stored biases to the logits")
    if not all(isinstance(x, Value) for x in (q, k, v)):
        raise step.refuse("its queries, keys or values do not depend on the input; compute all three from it")
    if enable_gqa:
        k, v = (moves.pick(step, x, lambda t, n=q.shape[-3] // x.shape[-3]: t.repeat_interleave(n, -3)) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return attend(step, q, k, v, scale)


def attend(step: Ledger, q: Value, k: Value, v: Value, scale: float) -> Value:
    """The bound of attention: the best that the origin of queries, keys and values allows."""
    if min(len(x.shape) for x in (q, k, v)) < 2:
        raise step.refuse("its queries, keys or values are a single vector; give them an axis of tokens")
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    (tokens,) = torch.broadcast_shapes(k.shape[-2:-1], v.shape[-2:-1])  # a mask spreads the logits of a single key
    q, k, v = (
        moves.spread(step, x, (*batch, count, x.shape[-1])) for x, count in ((q, q.shape[-2]), (k, tokens), (v, tokens))
    )
    reads: list[tuple[Value, Iterable[int]]] = [(q, [-1]), (k, [-1]), (v, [-1])]
    constants: dict[str, Any] = {"scale": scale}
    claims: list[Claim] = []
    query, key, value = (origin_of(x) for x in (q, k, v))
    if key is not None and value is not None and key.together(value):
        reads.append((key.source, [-1]))
        claims = [_norms(step, key), _norms(step, value)]
        constants |= {"key": [key.factor, *key.heads], "value": [value.factor, *value.heads]}
        if query is not None and query.source is key.source and not query.bias:
            pairs = [list(pair) for pair in zip(query.heads, key.heads, strict=True)]
            constants["query"] = [query.factor, *query.heads]
            claims.append(
                step.prove(
                    "product",
                    query.weight,
                    key.weight,
                    pairs=pairs,
                    parts=[query.parts, key.parts],
                    transposed=[query.transposed, key.transposed],
                )
            )
    result = step.derive(
        "attention", reads, shape=(*batch, q.shape[-2], v.shape[-1]), axes=[-1], constants=constants, claims=claims
    )
    step.logits[result.name] = _largest_logits(step.rows[result.name], q, k, key)
    return result


@dataclass(frozen=True, eq=False)
class Origin:
    """Says that head h of token t is `factor (W_h x_t + b_h)`."""

    source: Value
    weight: Stored
    transposed: bool
    parts: int
    heads: list[int]
    """For every matrix of the batch axes but the first, the part of W that it is."""
    tokens: np.ndarray
    """Number of the token of every group."""
    factor: float
    bias: bool

    def together(self, other: "Origin") -> bool:
        """Whether both come from the same tokens, in the same order."""
        return self.source is other.source and np.array_equal(self.tokens, other.tokens)


def origin_of(x: Value) -> Origin | None:
    """None unless every group is one part of a linear map of one token, the same part for all tokens of a head."""
    if len(x.terms) != 1 or not isinstance(x.terms[0].base, Base) or len(x.shape) < 3:
        return None
    (term,), base = x.terms, x.terms[0].base
    if base.linear is None or base.axes != (len(base.shape) - 1,):
        return None
    factors = np.ones(1) if term.factor is None else term.factor.reshape(-1).numpy()
    index, width, entries = term.positions(x.shape).numpy(), base.shape[-1], x.shape[-1]
    if (index < 0).any() or width % entries or (factors != factors[0]).any():
        return None
    token, feature = index // width, index % width
    first = feature[..., :1]
    if not (feature == first + np.arange(entries)).all() or (first % entries).any() or (token != token[..., :1]).any():
        return None
    part = (first[..., 0] // entries).reshape(x.shape[0], -1, x.shape[-2])
    if (part != part[:1, :, :1]).any():
        return None
    linear, heads = base.linear, part[0, :, 0].tolist()
    return Origin(
        linear.source,
        linear.weight,
        linear.transposed,
        width // entries,
        heads,
        token[..., 0],
        float_up(abs(Decimal(float(factors[0]))) * Decimal(slack(term.roundings))),
        linear.bias is not None,
    )


def _norms(step: Ledger, origin: Origin) -> Claim:
    settings = {"transposed": True} if origin.transposed else {}
    return step.prove("spectral", origin.weight, parts=origin.parts, **settings)


def _by_head(factor: float, heads: Sequence[int], values: Sequence[float], batch: Sequence[int]) -> Decimals:
    size = abs(decimals(factor).item())
    return size * decimals([values[int(head)] for head in heads]).reshape([1, *batch[1:], 1, 1])


@primitive("attention")
def _attention(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """The smallest valid bound of each head; any additive mask is free.

    With s the scale, and all keys and all values of a head in balls of radius `R_k` and `R_v` about one centre each,
    the gain is at most `L_v + s R_v (R_q L_k + R_k L_q)`. For keys and values that are linear in the same tokens it is
    at most `|dx| sqrt(|W_v|^2 + (s R_q R_v |W_k|)^2) + s R_k R_v L_q`, where biases are the centres, and for queries
    too, without a bias, `|dx| |W_v| (sqrt(1 + t^2) + t)` with `t = s |W_q^T W_k| R^2`.
    """
    q, k, v = (read.bounds for read in reads[:3])
    scale, tokens, batch = abs(decimals(c["scale"]).item()), len(c["shape"]) - 2, c["shape"][:-2]
    lk, lv, rk, rv = (each.max(tokens, keepdims=True) for each in (k.gain, v.gain, k.radius, v.radius))
    gain = lv + scale * rv * (q.radius * lk + rk * q.gain)
    if len(reads) > 3:
        x = reads[3].bounds
        size, change = x.radius.max(), x.gain.max()
        wk, wv = (_by_head(c[kind][0], c[kind][1:], claims[i].values, batch) for i, kind in enumerate(("key", "value")))
        rk, rv = least(rk, wk * size), least(rv, wv * size)
        joint = change * hypotenuse(wv, scale * q.radius * rv * wk) + scale * rk * rv * q.gain
        gain = least(gain, joint)
        if "query" in c:
            both = abs(decimals(c["query"][0]).item() * decimals(c["key"][0]).item())
            t = scale * size * size * both * decimals(claims[2].values).reshape([1, *batch[1:], 1, 1])
            gain = least(gain, change * wv * (hypotenuse(ONE, t) + t))
    largest = v.radius.max(tokens, keepdims=True)
    return Bounds(largest, gain, largest)


def _largest_logits(row: Row, q: Value, k: Value, key: Origin | None) -> list[Decimal]:
    """For every head, what no logit exceeds, whatever the input: `s |q| |k|`, or `s |W_q^T W_k| R^2`."""
    with rounding_up():
        scale, batch = abs(decimals(row.constants["scale"]).item()), row.shape[:-2]
        radii = (x.gather([-1]).radius.max(-2, keepdims=True) for x in (q, k))
        logits = scale * (next(radii) * next(radii))[..., 0]
        logits = np.broadcast_to(logits[..., 0], batch or (1,)).max(0, keepdims=True).reshape(-1)
        if "query" in row.constants and key is not None and not key.bias:
            size = key.source.gather([-1]).radius.max()
            both = abs(decimals(row.constants["query"][0]).item() * decimals(row.constants["key"][0]).item())
            logits = least(logits, scale * both * size * size * decimals(row.claims[2].values))
        return list(logits)


@operation("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default")
def softmax(step: Ledger, x: Value, dim: int, *_: Any, **keywords: Any) -> Value:
    """Not negative, of sum 1, and 1/2-Lipschitz."""
    axes = x.with_inner_axes([dim])
    return step.derive("softmax", [(x, axes)], shape=x.shape, constants={"over": dim % len(x.shape)})


@primitive("softmax")
def _softmax(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    (x,) = reads
    count = math.prod(x.shape[axis] for axis in x.axes) // x.shape[c["over"]]
    one = decimals(np.ones([1] * len(x.shape), dtype=int))
    return Bounds(one * sqrt_up(count) if count > 1 else one, HALF * x.bounds.gain, one)


@operation("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(step: Ledger, x: Value, dim: int, *_: Any, **keywords: Any) -> Value:
    """`x - log sum exp x`; its Jacobian `I - 1 p^T` has a norm of at most `sqrt n`."""
    axes = x.with_inner_axes([dim])
    return step.derive("log_softmax", [(x, axes)], shape=x.shape, constants={"over": dim % len(x.shape)})


@primitive("log_softmax")
def _log_softmax(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|log p_i| <= log n + max x - min x`."""
    (x,) = reads
    n = x.shape[c["over"]]
    largest = decimals(math.nextafter(math.log(n) * (1 + 1e-15), math.inf)).item() + 2 * x.bounds.largest
    radius = sqrt_up(math.prod(x.shape[axis] for axis in x.axes)) * largest
    return Bounds(radius, sqrt_up(n) * x.bounds.gain if n > 1 else x.bounds.gain, largest)
