"""What a verifier proves: claims on weights in NumPy, and its own copy of how bounds pass through operations.

Written from the proofs, not from `algebra`, so that a slip in one shows in the other. Expects the caller's
decimal context to round up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from wellnormed.certificates.certificate import Claim

_UNIT = 2.0**-53
_TINY = 2.0**-900
Numbers = tuple[Decimal, ...]


@dataclass(frozen=True)
class Linear:
    """`W x` for the value x of a row, with the RMS -> RMS norm of each head's slice of W."""

    source: str
    source_radius: Decimal
    source_lipschitz: Decimal
    weight: str
    shape: tuple[int, ...]
    norms: Numbers


@dataclass(frozen=True)
class Value:
    """Radius and Lipschitz constant per head, and what the value is linear in."""

    row: str
    radius: Numbers
    lipschitz: Numbers
    linear: Linear | None = None


def prove_spectral(matrix: np.ndarray, claimed: float) -> bool:
    """Whether one Cholesky factorisation proves that no singular value exceeds `claimed` (Rump, BIT 2006).

    With G = fl(W^T W), T = fl(c I - G) and gamma_k = k u / (1 - k u), completion proves
    `sigma_max^2 <= c + 2 gamma_{n+1} tr(T) + gamma_m |W|_F^2 + u (c + max G_ii)`; c is what the claim leaves
    for it.
    """
    w = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    largest = float(np.abs(w).max(initial=0.0))
    if not largest:
        return claimed >= 0
    if not claimed:
        return False
    scale = 2.0 ** math.frexp(largest)[1]
    w, target = w / scale, claimed / scale
    m, n = w.shape
    gram = w.T @ w
    diagonal = np.diagonal(gram)
    squared = target * target * (1 - 4 * _UNIT)
    trace = n * squared
    margin = (
        2 * _gamma(n + 1) * trace
        + 2 * _gamma(m) * float(diagonal.sum())
        + 2 * _UNIT * (squared + float(diagonal.max()))
        + _TINY
    ) * (1 + 1e-6)
    c = (squared - margin) * (1 - 4 * _UNIT)
    try:
        factor = np.linalg.cholesky(c * np.eye(n) - gram)
    except np.linalg.LinAlgError:
        return False
    return bool(np.isfinite(factor).all())


def _gamma(k: int) -> float:
    return k * _UNIT / (1 - k * _UNIT) * (1 + 1e-12)


def _spectral(arrays: Sequence[np.ndarray], values: Sequence[float]) -> bool:
    parts = arrays[0].reshape(len(values), -1, arrays[0].shape[1])
    return all(prove_spectral(part, value) for part, value in zip(parts, values, strict=True))


def _product(arrays: Sequence[np.ndarray], values: Sequence[float]) -> bool:
    left, right = (array.reshape(len(values), -1, array.shape[1]) for array in arrays)
    for a, b, value in zip(left, right, values, strict=True):
        error = 2 * _gamma(len(a) + 2) * float(np.linalg.norm(a)) * float(np.linalg.norm(b))
        rest = math.nextafter(value - error, -math.inf)
        if not (rest >= 0 and prove_spectral(a.T @ b, rest)):
            return False
    return True


def _row_rms(arrays: Sequence[np.ndarray], values: Sequence[float]) -> bool:
    """Compares each row's sum of squares with that of the claim, with the rounding margin of the sum."""
    (value,) = values
    rows = np.atleast_1d(arrays[0])
    if not value:
        return not rows.any()
    largest = float(np.square(rows / value).sum(-1).max(initial=0.0))
    return largest * (1 + (rows.shape[-1] + 6) * _UNIT) <= rows.shape[-1]


def _max_abs(arrays: Sequence[np.ndarray], values: Sequence[float]) -> bool:
    (value,) = values
    return float(np.abs(arrays[0]).max(initial=0.0)) <= value


CHECKS: dict[str, Callable[[Sequence[np.ndarray], Sequence[float]], bool]] = {
    "spectral": _spectral,
    "product": _product,
    "row_rms": _row_rms,
    "max_abs": _max_abs,
}

_SLOPES = {  # largest |slope|; all have |f(x)| <= |x|
    "identity": "1", "relu": "1", "tanh": "1", "gelu": "1.128904145185155", "gelu_tanh": "1.128993068658772",
    "silu": "1.099839320128867",
}  # fmt: skip


def derive(name: str, rule: str, inputs: Sequence[Value], c: Mapping[str, Decimal], claims: Sequence[Claim]) -> Value:
    """The smallest radius and Lipschitz constant that the verifier can justify for a row."""
    measures = [claim.measure for claim in claims]
    if rule in ("input", "embedding", "constant"):
        return _start(name, rule, inputs, c, claims)
    x = inputs[0]
    if rule == "attention":
        q, k, v = inputs
        return _attend(name, q, k, v, c["scale"], claims)
    if rule == "add":
        a, b = inputs
        size = max(len(a.radius), len(b.radius))
        assert all(len(each.radius) == size or not any(each.lipschitz) for each in inputs)
        (ra, la), (rb, lb) = (
            (v.radius * (size // len(v.radius)), v.lipschitz * (size // len(v.radius))) for v in inputs
        )
        return Value(name, _sum(ra, rb), _sum(la, lb))
    assert len(inputs) == 1
    if rule == "merge_heads":
        return Value(name, (_rms(x.radius),), (_rms(x.lipschitz),))
    if rule == "ball_projection":
        assert c["radius"] > 0
        linear = x.linear if all(r <= c["radius"] for r in x.radius) else None
        return Value(name, tuple(min(r, c["radius"]) for r in x.radius), x.lipschitz, linear)
    if rule == "head_projection":
        assert measures == ["spectral"]
        (radius,), (lipschitz,), norms = x.radius, x.lipschitz, _rms_norms(claims[0])
        linear = Linear(x.row, radius, lipschitz, claims[0].tensors[0], claims[0].shape, norms)
        return Value(name, tuple(radius * g for g in norms), tuple(lipschitz * g for g in norms), linear)
    if rule == "offset":
        return Value(name, _sum(x.radius, (abs(c["offset"]),) * len(x.radius)), x.lipschitz)
    if rule == "normalization":
        assert c["eps"] > 0
        assert measures in ([], ["max_abs"], ["max_abs", "row_rms"])
        gain = Decimal(claims[0].values[0]) if claims else Decimal(1)
        bias = Decimal(claims[1].values[0]) if len(claims) == 2 else Decimal(0)
        slope = gain / _root_down(c["eps"])
        return Value(name, (gain + bias,) * len(x.radius), tuple(slope * e for e in x.lipschitz))
    radius_factor, lipschitz_factor, shift = _factors(rule, c, claims, measures)
    return Value(
        name,
        tuple(r * radius_factor + shift for r in x.radius),
        tuple(e * lipschitz_factor for e in x.lipschitz),
    )


def _start(name: str, rule: str, inputs: Sequence[Value], c: Mapping[str, Decimal], claims: Sequence[Claim]) -> Value:
    assert not inputs
    if rule == "constant":
        assert claims[0].measure == "row_rms"
        return Value(name, (Decimal(claims[0].values[0]),), (Decimal(0),))
    if rule == "embedding":
        assert claims[0].measure == "row_rms"
        assert Decimal(claims[0].values[0]) <= c["radius"]
    assert c["radius"] > 0
    return Value(name, (c["radius"],), (Decimal(1),))


def _factors(
    rule: str, c: Mapping[str, Decimal], claims: Sequence[Claim], measures: list[str]
) -> tuple[Decimal, Decimal, Decimal]:
    """Operations with `|f(x)| <= a |x| + shift` and slope at most b: (a, b, shift)."""
    zero, one = Decimal(0), Decimal(1)
    if rule in _SLOPES:
        return one, Decimal(_SLOPES[rule]), zero
    if rule == "scaled_gelu":
        factor = abs(c["sharpness"] * c["factor"])
        return factor, factor * Decimal(_SLOPES["gelu"]), zero
    if rule == "scale":
        return abs(c["factor"]), abs(c["factor"]), zero
    if rule == "divide":
        return one / abs(c["divisor"]), one / abs(c["divisor"]), zero
    if rule == "gain":
        assert measures == ["max_abs"]
        return Decimal(claims[0].values[0]), Decimal(claims[0].values[0]), zero
    if rule == "linear":
        assert measures in (["spectral"], ["spectral", "row_rms"])
        (norm,) = _rms_norms(claims[0])
        return norm, norm, Decimal(claims[1].values[0]) if len(claims) == 2 else zero
    if rule == "position_mix":
        assert measures == ["row_rms"]
        share = abs(c["token_share"])
        return share, share, abs(c["position_share"]) * Decimal(claims[0].values[0])
    raise ValueError(f"unknown rule {rule!r}")


def _attend(name: str, q: Value, k: Value, v: Value, scale: Decimal, claims: Sequence[Claim]) -> Value:
    assert len(q.radius) == len(k.radius) == len(v.radius)
    assert scale >= 0
    scale *= 1 + Decimal("1e-15")  # scale / K is rounded by the layer
    bounds = []
    for h in range(len(q.radius)):
        rq, rk, rv = q.radius[h], k.radius[h], v.radius[h]
        found = [v.lipschitz[h] + scale * rv * rq * k.lipschitz[h] + scale * rv * rk * q.lipschitz[h]]
        if k.linear and v.linear and k.linear.source == v.linear.source:
            value_norm, key_term = v.linear.norms[h], scale * rq * rv * k.linear.norms[h]
            found.append(
                k.linear.source_lipschitz * _root(value_norm * value_norm + key_term * key_term)
                + scale * rk * rv * q.lipschitz[h]
            )
            if claims and q.linear and q.linear.source == k.linear.source:
                (claim,) = claims
                assert claim.measure == "product"
                assert claim.tensors == (q.linear.weight, k.linear.weight)
                assert len(claim.values) == len(q.radius)
                entries = q.linear.shape[0] // len(q.radius)
                t = scale * q.linear.shape[1] / entries * Decimal(claim.values[h])
                t *= k.linear.source_radius * k.linear.source_radius
                found.append(k.linear.source_lipschitz * value_norm * (_root(1 + t * t) + t))
        bounds.append(min(found))
    return Value(name, v.radius, tuple(bounds))


def _rms_norms(claim: Claim) -> Numbers:
    rows = claim.shape[0] // len(claim.values)
    assert rows * len(claim.values) == claim.shape[0]
    return tuple(_root(Decimal(claim.shape[1]) / rows) * Decimal(value) for value in claim.values)


def _root(x: Decimal) -> Decimal:
    return x.sqrt().next_plus() if x else x


def _root_down(x: Decimal) -> Decimal:
    return x.sqrt().next_minus()


def _sum(a: Numbers, b: Numbers) -> Numbers:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _rms(values: Numbers) -> Decimal:
    return _root(sum((v * v for v in values), Decimal(0)) / len(values))
