"""How radius and Lipschitz constant pass through one operation: every primitive a certificate's row may name.

A primitive sees decimals only. It takes the bounds of the inputs, the constants that the executed layer
applies and the proved claims on its weights; `rules` reads those from modules. `verification` has its own
copy of this table.
Proofs: "Sound bounds", in the documentation.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from wellnormed.certificates.bound import Bound, LinearIn, hypotenuse, root_mean_square, sqrt_up
from wellnormed.certificates.certificate import Claim

Constants = Mapping[str, Decimal]
Primitive = Callable[[Sequence[Bound], Constants, Sequence[Claim]], Bound]

ONE, ZERO = Decimal(1), Decimal(0)

# (largest |slope|, largest |f(x) / x|), rounded up; f(0) = 0. GELU: Phi(sqrt 2) + sqrt 2 phi(sqrt 2); LT's
# 1.1289 is rounded down.
ACTIVATIONS: dict[str, tuple[Decimal, Decimal]] = {
    "identity": (ONE, ONE),
    "relu": (ONE, ONE),
    "tanh": (ONE, ONE),
    "gelu": (Decimal("1.12890414518516"), ONE),
    "gelu_tanh": (Decimal("1.12899306865878"), ONE),
    "silu": (Decimal("1.09983932012887"), ONE),
}


def multiplied(x: Bound, radius: Decimal, lipschitz: Decimal) -> Bound:
    """Every head's radius and Lipschitz constant times a factor each."""
    return Bound(tuple(r * radius for r in x.radius), tuple(e * lipschitz for e in x.lipschitz))


def rms_gain(claim: Claim) -> tuple[Decimal, ...]:
    """RMS -> RMS norms of a matrix's parts: `sqrt(inputs / outputs of a part)` times the singular value."""
    outputs = claim.shape[0] // len(claim.values)
    unit = sqrt_up(Decimal(claim.shape[1]) / outputs)
    return tuple(Decimal(value) * unit for value in claim.values)


def _source(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    return Bound((c["radius"],), (ONE,))


def _constant(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    return Bound((Decimal(claims[0].values[0]),), (ZERO,))


def _linear(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    (gain,) = rms_gain(claims[0])
    bias = Decimal(claims[1].values[0]) if len(claims) > 1 else ZERO
    out = multiplied(inputs[0], gain, gain)
    return Bound(tuple(r + bias for r in out.radius), out.lipschitz)


def _head_projection(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    (x,), gain = inputs, rms_gain(claims[0])
    rows, columns = claims[0].shape
    linear_in = LinearIn(x, claims[0].tensors[0], (rows, columns), gain)
    return Bound(tuple(g * x.radius[0] for g in gain), tuple(g * x.lipschitz[0] for g in gain), linear_in=linear_in)


def _position_mix(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    mixed = multiplied(inputs[0], c["token_share"], c["token_share"])
    position = abs(c["position_share"]) * Decimal(claims[0].values[0])
    return Bound(tuple(r + position for r in mixed.radius), mixed.lipschitz)


def _ball_projection(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    (x,) = inputs
    inactive = max(x.radius) <= c["radius"]
    # An active projection's Jacobian differs from position to position, so the value is no longer linear.
    return Bound(tuple(min(r, c["radius"]) for r in x.radius), x.lipschitz, linear_in=x.linear_in if inactive else None)


def _attention(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    """Smallest valid bound of each head; RMS units, logits `scale / K <q, k>` plus any additive mask."""
    q, k, v = inputs
    scale = c["scale"] * Decimal("1.000000000000001")  # the layer divides it by K in float64
    ell = [
        lv + scale * rv * (rq * lk + rk * lq)
        for rq, rk, rv, lq, lk, lv in zip(
            q.radius, k.radius, v.radius, q.lipschitz, k.lipschitz, v.lipschitz, strict=True
        )
    ]
    if k.linear_in and v.linear_in and k.linear_in.source == v.linear_in.source:
        (lx,) = k.linear_in.source.lipschitz
        for h, (b, gain) in enumerate(zip(k.linear_in.gain, v.linear_in.gain, strict=True)):
            both = hypotenuse(gain, scale * q.radius[h] * v.radius[h] * b)
            ell[h] = min(ell[h], lx * both + scale * k.radius[h] * v.radius[h] * q.lipschitz[h])
        if claims and q.linear_in and q.linear_in.source == k.linear_in.source:
            (rx,) = k.linear_in.source.radius
            entries = Decimal(q.linear_in.shape[0]) / q.heads
            for h, (sigma, gain) in enumerate(zip(claims[0].values, v.linear_in.gain, strict=True)):
                t = scale * (q.linear_in.shape[1] / entries) * Decimal(sigma) * rx * rx
                ell[h] = min(ell[h], lx * gain * (hypotenuse(ONE, t) + t))
    return Bound(v.radius, tuple(ell))


def _merge_heads(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    (x,) = inputs
    return Bound((root_mean_square(x.radius),), (root_mean_square(x.lipschitz),))


def _activation(slope: Decimal, ratio: Decimal) -> Primitive:
    return lambda inputs, c, claims: multiplied(inputs[0], ratio, slope)


def _scaled_gelu(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    factor = abs(c["sharpness"]) * abs(c["factor"])
    return multiplied(inputs[0], factor, ACTIVATIONS["gelu"][0] * factor)


def _scale(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    return multiplied(inputs[0], abs(c["factor"]), abs(c["factor"]))


def _divide(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    return multiplied(inputs[0], 1 / abs(c["divisor"]), 1 / abs(c["divisor"]))


def _gain(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    largest = Decimal(claims[0].values[0])
    return multiplied(inputs[0], largest, largest)


def _offset(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    return Bound(tuple(r + abs(c["offset"]) for r in inputs[0].radius), inputs[0].lipschitz)


def _add(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    heads = max(x.heads for x in inputs)
    a, b = (x if x.heads == heads else Bound(x.radius * heads, x.lipschitz * heads) for x in inputs)
    return Bound(
        tuple(x + y for x, y in zip(a.radius, b.radius, strict=True)),
        tuple(x + y for x, y in zip(a.lipschitz, b.lipschitz, strict=True)),
    )


def _normalization(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    """LayerNorm, RMSNorm: slope at most `|gain|_inf / sqrt(eps)`, RMS at most `|gain|_inf + RMS(bias)`."""
    gain = Decimal(claims[0].values[0]) if claims else ONE
    bias = Decimal(claims[1].values[0]) if len(claims) > 1 else ZERO
    slope = gain * sqrt_up(1 / c["eps"])
    return Bound((gain + bias,) * inputs[0].heads, tuple(slope * e for e in inputs[0].lipschitz))


PRIMITIVES: dict[str, Primitive] = {
    "input": _source,
    "embedding": _source,
    "constant": _constant,
    "linear": _linear,
    "head_projection": _head_projection,
    "position_mix": _position_mix,
    "ball_projection": _ball_projection,
    "attention": _attention,
    "merge_heads": _merge_heads,
    **{name: _activation(*bounds) for name, bounds in ACTIVATIONS.items()},
    "scaled_gelu": _scaled_gelu,
    "scale": _scale,
    "divide": _divide,
    "gain": _gain,
    "offset": _offset,
    "add": _add,
    "normalization": _normalization,
}
