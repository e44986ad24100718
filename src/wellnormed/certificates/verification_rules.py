"""What a verifier proves: claims on weights in NumPy, and its own copy of how bounds pass through operations.

Written from the proofs, not from `algebra`, so that a slip in one shows in the other. Expects the caller's decimal
context to round up.
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

    radius: Numbers
    lipschitz: Numbers
    linear: Linear | None = None
    row: str = ""


def prove_spectral(matrix: np.ndarray, claimed: float) -> bool:
    """Whether one Cholesky factorisation proves that no singular value exceeds `claimed` (Rump, BIT 2006).

    With G = fl(W^T W), T = fl(c I - G) and gamma_k = k u / (1 - k u), completion proves
    `sigma_max^2 <= c + 2 gamma_{n+1} tr(T) + gamma_m |W|_F^2 + u (c + max G_ii)`; c is what the claim leaves for it.
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
    "positive_rms": lambda arrays, values: _row_rms([np.maximum(arrays[0], 0)], values),
    "max_abs": _max_abs,
}

_SLOPES = {  # largest |slope|; all have |f(x)| <= |x|
    **dict.fromkeys(("identity", "relu", "tanh"), Decimal(1)),
    "gelu": Decimal("1.128904145185155"),
    "gelu_tanh": Decimal("1.128993068658772"),
    "silu": Decimal("1.099839320128867"),
}

_CLAIMS = {  # what is proved of the weights of a rule that uses any
    "constant": [["row_rms"]],
    "embedding": [["row_rms"]],
    "head_projection": [["spectral"]],
    "linear": [["spectral"], ["spectral", "row_rms"]],
    "convex_potential": [["spectral", "positive_rms"]],
    "position_mixing": [["row_rms", "row_rms"]],
    "join": [["spectral"]],
    "gain": [["max_abs"]],
    "position_mix": [["row_rms"]],
    "normalization": [[], ["max_abs"], ["max_abs", "row_rms"]],
    "attention": [[], ["product"]],
}


def require(condition: bool, what: str) -> None:
    """Raise a `ValueError` if a condition of a proof fails; unlike an assertion, also under `python -O`."""
    if not condition:
        raise ValueError(f"it needs {what}")


def derive(rule: str, inputs: Sequence[Value], c: Mapping[str, Decimal], claims: Sequence[Claim]) -> Value:
    """The smallest radius and Lipschitz constant that the verifier can justify for a row."""
    one, zero = Decimal(1), Decimal(0)
    measures = [claim.measure for claim in claims]
    require(measures in _CLAIMS.get(rule, [measures]), "other proofs on its weights")
    proved = [Decimal(claim.values[0]) for claim in claims]
    count = {"input": 0, "embedding": 0, "constant": 0, "add": 2, "join": 2, "attention": 3}.get(rule, 1)
    require(len(inputs) == count, f"{count} inputs")
    if rule == "constant":
        return Value((proved[0],), (zero,))
    if rule in ("input", "embedding"):
        require(c["radius"] > 0 and max(proved, default=zero) <= c["radius"], "a positive radius that no row exceeds")
        return Value((c["radius"],), (one,))
    x = inputs[0]
    if rule in _SLOPES:
        return _affine(x, one, slope=_SLOPES[rule])
    match rule:
        case "attention":
            q, k, v = inputs
            return _attend(q, k, v, c["scale"], claims)
        case "add":
            size = max(len(each.radius) for each in inputs)
            fit = all(len(v.radius) == size or (len(v.radius) == 1 and not any(v.lipschitz)) for v in inputs)
            require(fit, "as many heads in both, or a constant")
            a, b = (Value(v.radius * (size // len(v.radius)), v.lipschitz * (size // len(v.radius))) for v in inputs)
            return Value(_sum(a.radius, b.radius), _sum(a.lipschitz, b.lipschitz))
        case "rotary":  # lengths stay; which linear map it is depends on the position
            return _affine(x, one)
        case "merge_heads":
            return Value((_rms(x.radius),), (_rms(x.lipschitz),))
        case "ball_projection":
            require(c["radius"] > 0, "a positive radius")
            linear = x.linear if all(r <= c["radius"] for r in x.radius) else None
            return Value(tuple(min(r, c["radius"]) for r in x.radius), x.lipschitz, linear)
        case "head_projection":
            (radius,), (lipschitz,), norms = x.radius, x.lipschitz, _rms_norms(claims[0])
            linear = Linear(x.row, radius, lipschitz, claims[0].tensors[0], claims[0].shape, norms)
            return Value(tuple(radius * g for g in norms), tuple(lipschitz * g for g in norms), linear)
        case "normalization":
            require(c["eps"] > 0, "a positive eps")
            gain = proved[0] if proved else one
            size, slope = gain + sum(proved[1:], zero), gain / c["eps"].sqrt().next_minus()
            return Value((size,) * len(x.radius), tuple(slope * e for e in x.lipschitz))
        case "convex_potential":
            require(len(x.radius) == len(claims[0].values) == 1, "one sequence and one whole weight")
            (hidden, width), size = claims[0].shape, proved[0]
            at_zero = 2 * size * proved[1] * _root(Decimal(hidden) / width)
            return _affine(x, max(one, 2 * size * size - one), shift=at_zero)
        case "join":
            y, (rows, columns), share = inputs[1], claims[0].shape, c["share"]
            require(len(x.radius) == len(y.radius) == len(claims[0].values) == 1, "two sequences and one whole weight")
            require(0 <= share <= 1, "a share between 0 and 1")
            gain = proved[0] * _root(Decimal(columns) / rows / 2) * (1 + Decimal("1e-15"))
            mean = lambda a, b: gain * _root(a * a * (1 - share) + b * b * share)  # noqa: E731
            return Value((mean(x.radius[0], y.radius[0]),), (mean(x.lipschitz[0], y.lipschitz[0]),))
        case "position_mixing":
            require(len(x.radius) == len(claims[0].shape) == 1, "one sequence and one gain a head")
            return Value((proved[0] * max(x.radius[0], proved[1]),), (proved[0] * x.lipschitz[0],))
        case "linear":
            (norm,) = _rms_norms(claims[0])
            return _affine(x, norm, shift=sum(proved[1:], zero))
        case "position_mix":
            return _affine(x, abs(c["token_share"]), shift=abs(c["position_share"]) * proved[0])
        case "scaled_gelu":
            factor = abs(c["sharpness"] * c["factor"])
            return _affine(x, factor, slope=factor * _SLOPES["gelu"])
        case "offset":
            return _affine(x, one, shift=abs(c["offset"]))
        case "scale":
            return _affine(x, abs(c["factor"]))
        case "divide":
            return _affine(x, one / abs(c["divisor"]))
        case "gain":
            return _affine(x, proved[0])
    raise ValueError(f"unknown rule {rule!r}")


def _affine(x: Value, factor: Decimal, shift: Decimal = Decimal(0), slope: Decimal | None = None) -> Value:
    """`|f(x)| <= factor |x| + shift`, and the slope is at most `slope`, by default the factor."""
    slope = factor if slope is None else slope
    return Value(tuple(r * factor + shift for r in x.radius), tuple(e * slope for e in x.lipschitz))


def _attend(q: Value, k: Value, v: Value, scale: Decimal, claims: Sequence[Claim]) -> Value:
    require(len(q.radius) == len(k.radius) == len(v.radius), "as many heads in queries, keys and values")
    require(scale >= 0, "a scale that is not negative")
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
                weights = (q.linear.weight, k.linear.weight)
                require(claim.tensors == weights, f"the product of {weights}")
                require(len(claim.values) == len(q.radius), "one product for each head")
                entries = q.linear.shape[0] // len(q.radius)
                t = scale * q.linear.shape[1] / entries * Decimal(claim.values[h])
                t *= k.linear.source_radius * k.linear.source_radius
                found.append(k.linear.source_lipschitz * value_norm * (_root(1 + t * t) + t))
        bounds.append(min(found))
    return Value(v.radius, tuple(bounds))


def _rms_norms(claim: Claim) -> Numbers:
    rows = claim.shape[0] // len(claim.values)
    require(rows * len(claim.values) == claim.shape[0], "parts of equal size")
    return tuple(_root(Decimal(claim.shape[1]) / rows) * Decimal(value) for value in claim.values)


def _root(x: Decimal) -> Decimal:
    return x.sqrt().next_plus() if x else x


def _sum(a: Numbers, b: Numbers) -> Numbers:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _rms(values: Numbers) -> Decimal:
    return _root(sum((v * v for v in values), Decimal(0)) / len(values))
