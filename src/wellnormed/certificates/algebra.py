"""How radius and Lipschitz constant pass through one operation: every primitive a certificate's row may name.

A primitive sees decimals only. It takes the bounds of the inputs, the constants that the executed layer applies and
the proved claims on its weights; `rules` reads those from modules. `verification` has its own copy of this table.
Proofs: "Sound bounds", in the documentation.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from operator import add

from wellnormed.certificates.bound import Bound, LinearIn, hypotenuse, root_mean_square, sqrt_up
from wellnormed.certificates.certificate import Claim

Constants = Mapping[str, Decimal]
Primitive = Callable[[Sequence[Bound], Constants, Sequence[Claim]], Bound]

ONE, ZERO = Decimal(1), Decimal(0)
_ROUNDED = Decimal("1.000000000000001")
"""Covers some float64 operations by which a layer makes its constants."""

SLOPES = {  # the largest |slope|, rounded up; |f(x)| <= |x| holds for all
    "identity": ONE,
    "relu": ONE,
    "tanh": ONE,
    "gelu": Decimal("1.12890414518516"),  # Phi(sqrt 2) + sqrt 2 phi(sqrt 2); LT's 1.1289 is rounded down
    "gelu_tanh": Decimal("1.12899306865878"),
    "silu": Decimal("1.09983932012887"),
}


def affine(x: Bound, factor: Decimal, shift: Decimal = ZERO, slope: Decimal | None = None) -> Bound:
    """Of f with `|f(x)| <= factor |x| + shift`, in every head; its slope is at most `slope`, or else `factor`."""
    slope = factor if slope is None else slope
    return Bound(tuple(r * factor + shift for r in x.radius), tuple(e * slope for e in x.lipschitz))


def largest(claims: Sequence[Claim], index: int, default: Decimal = ZERO) -> Decimal:
    """The number that a claim proves; the default if there are not as many claims."""
    return Decimal(claims[index].values[0]) if index < len(claims) else default


def rms_gain(claim: Claim) -> tuple[Decimal, ...]:
    """RMS -> RMS norms of a matrix's parts: `sqrt(inputs / outputs of a part)` times the singular value."""
    outputs = claim.shape[0] // len(claim.values)
    unit = sqrt_up(Decimal(claim.shape[1]) / outputs)
    return tuple(Decimal(value) * unit for value in claim.values)


def _head_projection(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    (x,), gain = inputs, rms_gain(claims[0])
    linear_in = LinearIn(x, claims[0].tensors[0], claims[0].shape, gain)
    return Bound(tuple(g * x.radius[0] for g in gain), tuple(g * x.lipschitz[0] for g in gain), linear_in=linear_in)


def _ball_projection(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    (x,) = inputs
    inactive = max(x.radius) <= c["radius"]
    # An active projection's Jacobian differs from position to position, so the value is no longer linear.
    return Bound(tuple(min(r, c["radius"]) for r in x.radius), x.lipschitz, linear_in=x.linear_in if inactive else None)


def _attention(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    """Smallest valid bound of each head; RMS units, logits `scale / K <q, k>` plus any additive mask."""
    q, k, v = inputs
    scale = c["scale"] * _ROUNDED  # the layer divides it by K in float64
    ell = []
    for h in range(len(v.radius)):
        rq, rk, rv, lq = q.radius[h], k.radius[h], v.radius[h], q.lipschitz[h]
        ell.append(v.lipschitz[h] + scale * rv * (rq * k.lipschitz[h] + rk * lq))
        if not (k.linear_in and v.linear_in and k.linear_in.source == v.linear_in.source):
            continue
        x, gain = k.linear_in.source, v.linear_in.gain[h]
        both = hypotenuse(gain, scale * rq * rv * k.linear_in.gain[h])
        ell[h] = min(ell[h], x.lipschitz[0] * both + scale * rk * rv * lq)
        if claims and q.linear_in and q.linear_in.source == x:
            outputs, columns = q.linear_in.shape
            unit = columns / (Decimal(outputs) / q.heads)
            t = scale * unit * Decimal(claims[0].values[h]) * x.radius[0] * x.radius[0]
            ell[h] = min(ell[h], x.lipschitz[0] * gain * (hypotenuse(ONE, t) + t))
    return Bound(v.radius, tuple(ell))


def _convex_potential(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    """`I - 2 W^T D W` has eigenvalues in [1 - 2 w^2, 1]; zero goes to `-2 W^T relu(b)`."""
    (x,), norm = inputs, largest(claims, 0)
    hidden, width = claims[0].shape
    slope = max(ONE, 2 * norm * norm - 1)
    return affine(x, slope, shift=2 * norm * largest(claims, 1) * sqrt_up(Decimal(hidden) / width))


def _join(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    """`W [sqrt(1 - share) x, sqrt(share) y]`: the squares of two vectors of equal width add up before W."""
    x, y = inputs
    rows, columns = claims[0].shape
    size = largest(claims, 0) * sqrt_up(Decimal(columns) / (2 * rows)) * _ROUNDED
    both = lambda a, b: size * sqrt_up((1 - c["share"]) * a * a + c["share"] * b * b)  # noqa: E731
    return Bound((both(x.radius[0], y.radius[0]),), (both(x.lipschitz[0], y.lipschitz[0]),))


def _position_mixing(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    """Averages of tokens and of one vector, each times a gain, side by side: the RMS of the gains multiplies."""
    (x,), gain = inputs, largest(claims, 0)
    return Bound((gain * max(x.radius[0], largest(claims, 1)),), (gain * x.lipschitz[0],))


def _scaled_gelu(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    factor = abs(c["sharpness"]) * abs(c["factor"])
    return affine(inputs[0], factor, slope=SLOPES["gelu"] * factor)


def _add(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    heads = max(x.heads for x in inputs)
    a, b = (x if x.heads == heads else Bound(x.radius * heads, x.lipschitz * heads) for x in inputs)
    return Bound(tuple(map(add, a.radius, b.radius)), tuple(map(add, a.lipschitz, b.lipschitz)))


def _normalization(inputs: Sequence[Bound], c: Constants, claims: Sequence[Claim]) -> Bound:
    """LayerNorm, RMSNorm: slope at most `|gain|_inf / sqrt(eps)`, RMS at most `|gain|_inf + RMS(bias)`."""
    gain = largest(claims, 0, default=ONE)
    slope = gain * sqrt_up(1 / c["eps"])
    return Bound((gain + largest(claims, 1),) * inputs[0].heads, tuple(slope * e for e in inputs[0].lipschitz))


PRIMITIVES: dict[str, Primitive] = {  # of inputs x, constants c and claims w
    "input": lambda x, c, w: Bound((c["radius"],), (ONE,)),
    "embedding": lambda x, c, w: Bound((c["radius"],), (ONE,)),
    "constant": lambda x, c, w: Bound((largest(w, 0),), (ZERO,)),
    "linear": lambda x, c, w: affine(x[0], *rms_gain(w[0]), shift=largest(w, 1)),
    "head_projection": _head_projection,
    "position_mix": lambda x, c, w: affine(x[0], c["token_share"], shift=abs(c["position_share"]) * largest(w, 0)),
    "ball_projection": _ball_projection,
    "attention": _attention,
    "convex_potential": _convex_potential,
    "join": _join,
    "position_mixing": _position_mixing,
    # an isometry that differs from position to position, so that nothing stays linear in what came before
    "rotary": lambda x, c, w: affine(x[0], ONE),
    "merge_heads": lambda x, c, w: Bound((root_mean_square(x[0].radius),), (root_mean_square(x[0].lipschitz),)),
    **{name: lambda x, c, w, slope=slope: affine(x[0], ONE, slope=slope) for name, slope in SLOPES.items()},
    "scaled_gelu": _scaled_gelu,
    "scale": lambda x, c, w: affine(x[0], abs(c["factor"])),
    "divide": lambda x, c, w: affine(x[0], 1 / abs(c["divisor"])),
    "gain": lambda x, c, w: affine(x[0], largest(w, 0)),
    "offset": lambda x, c, w: affine(x[0], ONE, shift=abs(c["offset"])),
    "add": _add,
    "normalization": _normalization,
}
