"""The rules of products: of a value with a stored matrix or kernel, and of two values."""

import math
from decimal import Decimal

import numpy as np

from wellnormed.proof.arithmetic import FORMATS
from wellnormed.proof.decimals import ONE, TWO, ZERO, decimals, least, root, roots
from wellnormed.proof.functions import COUPLINGS
from wellnormed.proof.inference import Inference, bias_of, map_of, weight_of
from wellnormed.proof.reading import Axes, CheckError, Size, Sizes, require
from wellnormed.proof.rows import Bounds
from wellnormed.proof.value import UNIT, Base, Value, unmoved


def linear(row: Inference, *, parts: Size) -> Bounds:
    """`W x + b` along the last axis; with several parts, equal parts of the outputs lie along an axis of their own."""
    row.only(1, (1, 2))
    (x,), (r,) = row.inputs, row.bounds
    values = [Decimal(value) for value in row.claim(0, "spectral", parts=parts).values]
    shape, last = row.shape_of(weight_of(row)[0]), len(x.shape) - 1
    outputs, columns = shape[0], math.prod(shape[1:])
    if weight_of(row)[1]:
        outputs, columns = shape[1], shape[0]
    require(columns == x.shape[-1], f"its weight has {columns} columns for {x.shape[-1]} entries")
    expected = (outputs,) if parts == 1 else (parts, outputs // parts)
    require(row.shape == (*x.shape[:-1], *expected), f"its result cannot have shape {row.shape}")
    (read,) = row.reads
    axes = read if parts == 1 else (*read[:-1], last + 1)
    require(last in read and row.axes == axes, "it must read and leave groups along its last axis")
    vectors = root(math.prod(x.shape[axis] for axis in read) // x.shape[-1])
    bias = bias_of(row, "group_norm", outputs, parts=parts)
    view = [1] if parts == 1 else [parts, 1]
    size, shift = (np.array(each, dtype=object).reshape(view) for each in (values, bias))
    x_radius, x_gain = (each if parts == 1 else each[..., None] for each in r[:2])
    radius = size * x_radius + shift * vectors
    x_error = r.error if parts == 1 else r.error[..., None]
    shifted = row.change(1).reshape(view if len(row.claims) > 1 else ())
    total, ordered = (
        np.array(row.absolute(row.claims[0].tensors, parts, weight_of(row)[1], ordered=each), dtype=object).reshape(
            view
        )
        * (x_radius + x_error)
        + (shift + shifted) * vectors
        for each in (False, True)
    )
    local = row.summed(columns + 1, total, row.entries(), ordered)
    local = local + row.carried(x_radius, x_error, size.shape) + shifted * vectors
    error = row.stored(radius, local, row.entries(), len(row.claims))
    return Bounds(radius, size * x_gain, radius, error)


def average(row: Inference, *, parts: Sizes) -> Bounds:
    """`P x` along the last axis but one, which holds tokens; the leading axes of P broadcast."""
    row.only(1, (1,))
    row.groups()
    (x,), (r,), rank = row.inputs, row.bounds, len(row.shape)
    require(len(parts) == rank - 2, "it needs two axes, and a number of matrices for every other")
    along, count, tokens = rank - 2 in row.axes, math.prod(parts), x.shape[-2]  # whether groups have several tokens
    claim = row.claim(0, "spectral", parts=count, transposed=False) if along else row.claim(0, "row_sum", parts=count)
    tensor = row.shape_of(claim.tensors[0])
    require(not along or len(tensor) == 2, "its spectral norm is not that of rows one below another")
    fits = tensor[-1] == tokens and math.prod(tensor) == count * row.shape[-2] * tokens
    require(fits, "its matrix misfits")
    require(all(n in (1, m) for n, m in zip(parts, row.shape, strict=False)), "its matrices are too many")
    require(x.shape == (*row.shape[:-2], tokens, row.shape[-1]), f"its result cannot have shape {row.shape}")
    require(not any(parts[axis] > 1 for axis in row.axes if axis < rank - 2), "its groups extend over several matrices")
    size = decimals(claim.values).reshape(*parts, 1, 1)
    radius, gain, largest, error = r if along else (each.max(rank - 2, keepdims=True) for each in r)
    absolute = row.absolute(claim.tensors, count) if along else row.changes(claim)[1]
    local = row.summed(tokens + 1, decimals(absolute).reshape(size.shape) * (radius + error), row.entries())
    # a mean may be a quotient of a sum, which has so many addends and is not stored
    row.require_held((row.how.roundings or 0) * (largest + error), of_sums=True)
    error = row.stored(size * radius, row.carried(radius, error, size.shape) + local, row.entries())
    return Bounds(size * radius, size * gain, size * (radius if along else largest), error)


def matrix_product(row: Inference) -> Bounds:
    """The product of two matrices that depend on the input, from bounds of the first's rows and the whole second.

    If the first consists of entries of a softmax, the row is an attention; its logits are what enters the softmax, but
    for a mask, or any other constant, that is added to them.
    """
    row.only(2)
    (a, b), (ra, rb), rank = row.inputs, row.bounds, len(row.shape)
    fits = a.shape[:-2] == b.shape[:-2] == row.shape[:-2] and a.shape[-1] == b.shape[-2]
    require(fits and row.shape[-2:] == (a.shape[-2], b.shape[-1]), "its matrices misfit")
    require(row.reads == [(rank - 1,), (rank - 2, rank - 1)] and row.axes == (rank - 1,), "it reads other groups")
    radius = ra.radius * rb.radius
    gain = ra.gain * rb.radius + ra.radius * rb.gain
    total = (ra.radius + ra.error) * (rb.radius + rb.error)
    carried = ra.error * (rb.radius + rb.error) + ra.radius * rb.error
    error = row.stored(radius, carried + row.summed(a.shape[-1], total, row.entries()), row.entries())
    shares = [each.inference for each, _ in _variable(a) if each.inference]
    if entering := [each.inputs[0] for each in shares if each.operation == "softmax"]:
        sizes = [sum(most * base.bounds.largest.max() for base, most in _variable(x)) for x in entering]
        row.logits = decimals([max(sizes)])
    return Bounds(radius, gain, radius, error)


def _variable(x: Value) -> list[tuple[Base, Decimal]]:
    """The bases of the addends that depend on the input, with the largest factor of each."""
    return [(each.base, each.most) for each in x.terms if isinstance(each.base, Base)]


def product(row: Inference) -> Bounds:
    """The product of two values, entry by entry.

    The sizes and slopes of some functions are coupled: `f(x)^2 + (f'(x) / slope)^2 / k <= 1`. So for an entry of
    `f(x) b`, by Cauchy and Schwarz, `(f(x) db + b f'(x) dx)^2 <= db^2 + k b^2 (slope dx)^2`; and the gain of f(x) is
    slope times that of x.
    """
    row.keeps_shape(inputs=2)
    a, b = row.bounds
    gain = a.largest * b.gain + b.largest * a.gain
    for x, own, other in zip(row.inputs, (a, b), (b, a), strict=True):
        if k := _coupling(x):
            steep = other.largest * own.gain
            gain = least(gain, roots(other.gain * other.gain + k * steep * steep))
    radius = least(a.largest * b.radius, a.radius * b.largest)
    carried = a.error * (b.largest + b.error) + a.largest * b.error
    error = carried + row.rate(1) * (radius + carried) + row.format.floor * root(row.entries())
    return Bounds(radius, gain, a.largest * b.largest, error)


def _coupling(x: Value) -> Decimal | None:
    """The coupling of the function whose results, or zeros, the entries of a value are; None for any other value."""
    (term, *others) = x.terms
    row = term.base.inference if isinstance(term.base, Base) and term.factor is None and not others else None
    return COUPLINGS.get(row.constants.get("function")) if row else None


def convolution(
    row: Inference, *, stride: Sizes, dilation: Sizes, groups: Size, adjoint: bool = False, circular: Axes = ()
) -> Bounds:
    """A convolution without padding but for `circular` axes, which wrap around; or the adjoint of such a convolution.

    The adjoint maps results to images. The claim is about the circular convolution on the image, of which the one
    without padding is a part.

    Each channel of the result may be scaled, and then shifted, as by a batch norm: the claims are then of the scaled
    kernel, and of the scaled and shifted bias or of the shift. The row states how often the scale, the shift and the
    result are rounded and, as `beside`, the largest entry of what is added up to the shift.
    """
    row.only(1, (1, 2))
    (x,), (r,) = row.inputs, row.bounds
    image, result = (row.shape, x.shape) if adjoint else (x.shape, row.shape)
    count = len(image) - 2
    require(image[0] == result[0], "its result has another number of samples")
    token_wise = row.axes == (1,) and not adjoint
    settings = {} if token_wise else {"size": image[2:], "stride": stride, "dilation": dilation}
    claim = row.claim(0, "taps" if token_wise else "convolution", groups=groups, **settings)
    kernel = row.shape_of(claim.tensors[0])
    require(kernel[1] * groups == image[1] and kernel[0] == result[1], "its channels are not those of its kernel")
    whole = not (circular and (adjoint or token_wise)) and all(
        a < count and image[2 + a] % stride[a] == 0 for a in circular
    )
    require(whole, "it wraps around an axis that is none of its own, or that its stride does not divide")
    pixels = tuple(
        n // s if axis in circular else (n - d * (k - 1) - 1) // s + 1
        for axis, (n, d, k, s) in enumerate(zip(image[2:], dilation, kernel[2:], stride, strict=True))
    )
    require(result[2:] == pixels, f"its pixels must be {pixels}")
    row.groups(*((1,) if token_wise else range(1, count + 2)))
    require(0 not in row.axes, "its groups extend over several samples")
    radius, gain, _, error = r
    if token_wise:
        radius, gain, error = (each.max(tuple(range(1, count + 2)), keepdims=True) for each in (radius, gain, error))
    size, shift = Decimal(claim.values[0]), bias_of(row, "group_norm", row.shape[1], parts=1)[0]
    scaled, pixels, entering = len(claim.tensors) > 1, root(row.entries() // row.shape[1]), radius + error
    require(not (adjoint and (shift or scaled)), "an adjoint has no bias")
    bias, (shifted,) = shift * pixels, row.change(1) * pixels
    ((absolute,), (ordered,)) = (
        row.absolute(claim.tensors, groups=groups, pixels=token_wise, ordered=each) for each in (False, not adjoint)
    )
    taps = math.prod(kernel[2:])
    addends = taps * (kernel[0] // groups if adjoint else kernel[1]) + 1
    carried = row.carried(radius, error, ()) + shifted
    added, radius, floors = bias + shifted, size * radius + bias, ZERO
    if scaled:  # the result before and the scale must not overflow; where that underflows, the other is multiplied
        (plain,) = row.absolute(claim.tensors[:1], groups=groups, pixels=token_wise)
        (scale,), of_bias = row.absolute(claim.tensors[1:]), sum((each.tensors for each in row.claims[1:]), ())
        parts = [row.absolute(each)[0] * pixels for each in (of_bias[:1], of_bias[:2], of_bias[2:]) if len(of_bias) > 1]
        before, floor = plain * entering + sum(parts[:1], ZERO), row.format.floor
        row.require_held(before, scale)
        added = added + sum(parts[1:], ZERO) + Decimal(abs(row.how.beside)) * root(row.entries())
        each = addends * FORMATS[row.format.sums].floor + (max(2, row.how.roundings or 0) + 2) * floor
        floors = each * (ONE + scale) * root(row.entries()) + 2 * floor * before
    total = absolute * entering + added
    local = row.summed(addends, total, row.entries(), ordered * entering + added) + carried
    reached = size * entering + added  # beside its errors, the result has no larger norm, and is rounded as a whole
    local = local + row.rate(2) * (reached + local) + floors if scaled else local
    # an adjoint's products with every tap may be stored before they are added up, as many as meet at a pixel
    meet = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in zip(kernel[2:], stride, dilation, strict=True))
    rounded, often = (total, meet + 1) if adjoint else (reached if scaled else radius, len(row.claims))
    return Bounds(radius, size * gain, radius, row.stored(rounded, local, row.entries(), often))


def convex_potential(row: Inference, *, factor: float) -> Bounds:
    """`x - f A^T relu(A x + b)`: the Jacobian `I - f A^T D A` has eigenvalues between 1 and `1 - f |A|^2`.

    With the relative error g, an entry of `A x + b` errs by `g (a + |b|)`, where a is the sum of the products' absolute
    values. Where neither the executed nor the real entry is positive, the error ends in the ReLU. Elsewhere a negative
    b has `|b| <= a (1 + g) / (1 - g)`, so the error is at most `g (2 a / (1 - g) + max(b, 0))`, but for underflows.
    """
    row.keeps_shape(claims=(1, 2))
    (x,), entries, strength = row.bounds, row.shape[-1], abs(Decimal(factor))
    claim = row.claim(0, "spectral", parts=1, transposed=False)
    shape, vectors = row.shape_of(claim.tensors[0]), row.entries() // entries
    row.groups(len(row.shape) - 1)
    require(len(shape) == 2 and shape[1] == entries, f"its weight is no matrix of {entries} columns")
    norm, (shift,) = Decimal(claim.values[0]), bias_of(row, "positive_norm", shape[0])
    squared, bias = strength * norm * norm, shift * root(vectors)
    slope = max(ONE, squared - ONE) if factor >= 0 else ONE + squared
    radius = slope * x.radius + strength * norm * bias
    (absolute,), size, hidden = row.absolute(claim.tensors), x.radius + x.error, shape[0]
    (moved,), (shifted,) = row.change(0), row.change(1, "group_norm") * root(vectors)
    of_hidden, bias = moved * size + shifted, bias + shifted
    changed = strength * (moved * ((norm + moved) * size + bias) + norm * of_hidden)
    norm = norm + moved
    share = row.of_sum(entries + 1, products=True)
    if 2 * share > ONE or row.format.sums != (row.executed and row.executed.dtype):  # 16 bits would round in between
        row.without_error()
    first = row.summed(entries + 1, (TWO + 4 * share) * absolute * size + bias, 4 * hidden * vectors)
    read = norm * size + bias + first
    row.require_held(max(ONE, strength) * max(ONE, absolute) * read + size)
    sums, others = row.of_sum(hidden + 1, products=True), row.rate(4)  # f, two products with it, and the difference
    floors = (hidden + 4) * (ONE + strength) * root(row.entries()) + absolute * root(hidden * vectors)
    last = (sums + others + sums * others) * (size + strength * absolute * read) + 4 * row.format.floor * floors
    return Bounds(radius, slope * x.gain, radius, slope * x.error + changed + strength * norm * first + last)


def margin(row: Inference, *, factor: float) -> Bounds:
    """The difference of any two entries of `factor (W x + b)`."""
    row.only(1, (1, 2))
    claim, strength, last = row.claim(0, "row_difference"), abs(Decimal(factor)), len(row.shape) - 1
    shape = row.shape_of(claim.tensors[0])
    columns = shape[0] if claim.constants["transposed"] else math.prod(shape[1:])
    (x,), (r,) = row.inputs, row.bounds
    require(x.shape == (*row.shape[:-1], columns) and row.shape[-1] == 1, "its weight or its result misfits")
    require(row.reads == [(last,)] and row.axes == (last,), "it reads other groups")
    size, (largest,) = strength * Decimal(claim.values[0]), bias_of(row, "max_abs", math.prod(shape) // columns)
    shift = TWO * strength * largest
    radius = size * r.radius + shift
    lengths = row.absolute(claim.tensors, math.prod(shape) // columns, claim.constants["transposed"])
    (shifted,) = strength * row.change(1)
    total = strength * max(lengths) * (r.radius + r.error) + strength * largest + shifted
    local = row.of_sum(columns + 1, products=True) * total + (columns + 1) * row.format.floor
    row.require_held(total)
    carried = strength * row.carried(r.radius, r.error, ()) + TWO * shifted
    error = carried + TWO * row.stored(total, local, 1, len(row.claims))  # of either entry
    return Bounds(radius, size * r.gain, radius, error)


def margin_of(row: Inference, logits: Value) -> Decimal:
    """Return the largest change of a difference of two logits, if the row of margins has the map of these logits."""
    floor = logits.floor
    if (whole := unmoved(logits)) is not None and whole.inference and whole.inference.operation == "lipsdp":
        logits = whole.inference.inputs[0]  # which it is
    term = logits.terms[0]
    if len(logits.terms) > 1 or not isinstance(term.base, Base):
        raise CheckError("the margin is of a result that is a sum")
    require(logits.shape[-1] == term.base.shape[-1], "the margin is of several vectors side by side")
    source = term.base.inference
    require(source is not None, "the margin is of a result that is rounded")
    claim, factors = row.claims[0], np.ones(1) if term.factor is None else term.factor.reshape(-1)
    require(source.operation == "linear" and source.inputs[0] is row.inputs[0], "the margin is of another map's input")
    require(map_of(source) == map_of(row), "the margin is of another weight or bias")
    in_order = np.array_equal(term.index.reshape(-1), np.arange(term.index.size))
    require(bool((factors == factors[0]).all()), "entries of the margin's result have factors of their own")
    if row.executed is not None:
        require(row.executed == source.executed, "the margin is executed otherwise than the map")
        require(not (term.error or floor or logits.floor), "the margin's result is rounded after the map")
    needed = abs(Decimal(float(factors[0]))) * (1 + Decimal(term.roundings * UNIT * 1.01))
    strength = abs(Decimal(row.constants["factor"]))
    require(in_order and needed <= strength, "the margin has a factor that is too small")
    return row.bounds[0].gain.max() * strength * Decimal(claim.values[0])
