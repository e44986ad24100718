"""Bounds of dot-product attention, softmax, log-softmax and logsumexp."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from wellnormed.lowering import moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.operations.normalization import axes_of
from wellnormed.lowering.operations.selection import paired
from wellnormed.program.operation import operation
from wellnormed.proof import Claim
from wellnormed.proof.attention import Origin, origin_of
from wellnormed.proof.inference import weight_of
from wellnormed.proof.value import UNIT, Value


@operation("aten.scaled_dot_product_attention.default", executed=True)
def attention(
    ledger: Ledger,
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
    """`softmax(scale q k^T + mask) v`, for any mask that does not depend on the certified input.

    Queries q have the shape `(*batch, queries, width)`, keys k `(*batch, tokens, width)`, and values v
    `(*batch, tokens, outputs)`. The scale is `width^(-1/2)` if it is None.
    """
    if dropout:
        raise ledger.refuse("it drops attention weights at random; call `model.eval()` first")
    if isinstance(mask, Value):
        raise ledger.refuse("its mask depends on the input; add only stored biases to the logits")
    if not all(isinstance(x, Value) for x in (q, k, v)):
        raise ledger.refuse("its queries, keys or values do not depend on the input; compute all three from it")
    if enable_gqa:
        k, v = (
            moves.pick(ledger, x, lambda t, n=q.shape[-3] // x.shape[-3]: t.repeat_interleave(n, -3)) for x in (k, v)
        )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return attend(ledger, q, k, v, scale, largest_shown(ledger, mask), biases=[(mask, 1.0)])


def largest_shown(ledger: Ledger, mask: Any) -> float | None:
    """The largest size of an entry that is added to a logit; None if unknown. Lower than -1e24 is hidden, like -inf."""
    if not isinstance(mask, Stored):
        return abs(float(mask or 0.0))
    if ledger.unknown(mask) or bool(mask.tensor.isnan().any()):
        return None
    if not mask.tensor.is_floating_point():
        return 0.0
    shown = mask.tensor.double().where(mask.tensor >= -_HIDDEN, 0.0)
    some = bool((mask.tensor >= -_HIDDEN).any(-1).all()) and mask.tensor.shape[-1:] != (1,)
    return float(shown.abs().max()) if some or not bool((mask.tensor < -_HIDDEN).any()) else None


_HIDDEN = 1e24
"""A mask's entries below the negative of this hide a logit: its weight, executed, is 0."""


def attend(
    ledger: Ledger,
    q: Value,
    k: Value,
    v: Value,
    scale: float,
    added: float | None = None,
    roundings: int | None = None,
    biases: Sequence[tuple[Any, float]] = (),
) -> Value:
    """Bound `softmax(scale q k^T + constants) v`, using the weights of the linear maps to q, k and v if there are any.

    If keys and values are linear maps of the same tokens, the bound uses the norms of the maps of each head. If the
    queries are a linear map of these tokens too, without a bias, it also uses the norms of the products `W_q^T W_k`.
    The rule is `proof.attention.attention`, and the shapes are those of `attention`. Rounding errors have a bound if
    the largest size of a constant that is `added` to a logit is known.
    """
    if added is None and ledger.executed is not None:
        with ledger.executing(None):
            return attend(ledger, q, k, v, scale, biases=biases)
    if min(len(x.shape) for x in (q, k, v)) < 2:
        raise ledger.refuse("its queries, keys or values are a single vector; give them an axis of tokens")
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    # the numbers of keys and values may differ: a mask can broadcast the logits of a single key to several tokens
    (tokens,) = torch.broadcast_shapes(k.shape[-2:-1], v.shape[-2:-1])
    q, k, v = (
        moves.spread(ledger, x, (*batch, count, x.shape[-1]))
        for x, count in ((q, q.shape[-2]), (k, tokens), (v, tokens))
    )
    reads: list[tuple[Value, Iterable[int]]] = [(q, [-1]), (k, [-1]), (v, [-1])]
    claims: list[Claim] = []
    query, key, value = (origin_of(x) for x in (q, k, v))
    if key and value and key.source is value.source and np.array_equal(key.tokens, value.tokens):
        reads.append((key.source, [-1]))
        claims = [_claim(ledger, "spectral", key), _claim(ledger, "spectral", value)]
        if query and query.source is key.source and not query.bias:
            pairs = [list(pair) for pair in zip(query.heads, key.heads, strict=True)]
            claims.append(_claim(ledger, "product", query, key, pairs=pairs))
    shape = (*batch, q.shape[-2], v.shape[-1])
    constants: dict[str, Any] = {"scale": scale} | ({"added": added} if added else {})
    settings: dict[str, Any] = {"shape": shape, "axes": [-1], "claims": claims, "roundings": roundings}
    result = ledger.derive("attention", reads, constants=constants, **settings)
    ledger.biases[result.name] = biases
    # if all keys and all values lie in one small ball, bounding the product, the softmax (norm 1/2) and the second
    # product one by one gives less
    rq, rk, rv = (ledger.bounds(x, axes) for x, axes in ((q, [-1]), (k, [-2, -1]), (v, [-2, -1])))
    logits = float(rq.gain.max() * rk.radius.max() + rq.radius.max() * rk.gain.max()) * abs(scale)
    less = logits / 2 * float(rv.radius.max()) + float(rv.gain.max()) < float(ledger.bounds(result, [-1]).gain.max())
    if not ledger.choose(lambda: int(less)):
        return result
    result = ledger.derive("attention", reads, constants=constants | {"together": True}, **settings)
    ledger.biases[result.name] = biases
    return result


def _claim(ledger: Ledger, measure: str, *origins: Origin, **settings: Any) -> Claim:
    """Prove the norms of one weight's parts, one for each head, or of the products of two weights' parts."""
    names, transposed = zip(*(weight_of(each.linear) for each in origins), strict=True)
    parts = [each.parts for each in origins]
    cut = {"parts": parts, "transposed": list(transposed)} if len(origins) > 1 else {"parts": parts[0]}
    cut |= {"transposed": True} if transposed == (True,) else {}
    return ledger.prove(measure, *(ledger.used[name] for name in names), **settings, **cut)


@operation("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default", family="softmax", executed=True)
def softmax(ledger: Ledger, x: Value, dim: int, *_: Any, **keywords: Any) -> Value:
    """Softmax along an axis, whose entries are not negative and have the sum 1. It is 1/2-Lipschitz."""
    axes = ledger.vectors(x, [dim])
    return ledger.derive("softmax", [(x, axes)], shape=x.shape, constants={"over": dim % len(x.shape)})


@operation("aten.log_softmax.int", "aten._log_softmax.default", executed=True)
def log_softmax(ledger: Ledger, x: Value, dim: int, *_: Any, **keywords: Any) -> Value:
    """`x - log(sum(exp(x)))` along an axis of n entries.

    The Jacobian is `I - 1 p^T`, where 1 is the vector of ones and p the softmax. Its norm is at most `sqrt(n)`.
    """
    axes = ledger.vectors(x, [dim])
    return ledger.derive("log_softmax", [(x, axes)], shape=x.shape, constants={"over": dim % len(x.shape)})


@operation("aten.logsumexp.default", executed=True)
def logsumexp(ledger: Ledger, x: Value, dim: Any, keepdim: bool = False, *, counts: Any = None) -> Value:
    """`log(sum(exp(x)))` over some axes with n entries together; `counts` gives each line a number of entries instead.

    Its gradient is a softmax, whose norm is at most 1, and `logsumexp(x) - log n` lies between the smallest and the
    largest entry. So it is a contraction plus `log n`, where n differs between lines if `counts` does.
    """
    dims = axes_of(x, dim)
    kept = [1 if axis in dims else size for axis, size in enumerate(x.shape)]
    result = ledger.derive("logsumexp", [(x, {*dims, *inner_axes(x)})], shape=kept)
    most = math.log(math.prod(x.shape[axis] for axis in dims)) * (1 + 8 * UNIT)
    added = moves.number(ledger, most)
    if counts is not None:
        added = ledger.constant(ledger.computed(f"{ledger.name}.log", counts.double().log() * (1 + 8 * UNIT)))
    result = moves.add(ledger, [result, added], roundings=0)  # a part of the sum's logarithm, which is executed
    return result if keepdim else moves.pick(ledger, result, lambda t: t.squeeze(tuple(dims)))


@operation("aten.logaddexp.default", executed=True)
def logaddexp(ledger: Ledger, a: Any, b: Any) -> Value:
    """`log(exp(a) + exp(b))`, entry by entry."""
    return logsumexp(ledger, paired(ledger, a, b), -1)
