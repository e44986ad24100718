"""The rules: for each primitive, a function that derives the bounds of its result and checks all that they rest on.

A rule gets an `Inference` with the row's inputs and the bounds of their groups, and the row's constants by name. Its
keyword-only parameters declare these constants: whatever else a row has is refused before. A gain bounds differences as
well as derivatives, since the domain is convex.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np

from wellnormed.proof.arithmetic import FORMATS, Dtype
from wellnormed.proof.attention import ANY_WEIGHTS, EXPONENTIAL, attention, weights_error
from wellnormed.proof.decimals import ONE, TWO, UP, ZERO, Decimals, decimals, least, root, roots
from wellnormed.proof.functions import ERRORS, SHORT, STEEPEST, UNDERFLOW, shape_of, sizes_at
from wellnormed.proof.inference import Inference
from wellnormed.proof.lipsdp import lipsdp
from wellnormed.proof.matrices import absolute_norm
from wellnormed.proof.products import average, convex_potential, convolution, linear, margin, matrix_product, product
from wellnormed.proof.reading import Axes, CheckError, Positive, require
from wellnormed.proof.rows import Bounds
from wellnormed.proof.value import TINY, UNIT, Base


def _input(
    row: Inference, *, dtype: Dtype, radius: Positive | None = None, low: float | None = None, high: float | None = None
) -> Bounds:
    """A certified variable, whose groups lie in a ball or a box; or, with two claims, vectors that are looked up."""
    row.only(0, (0, 2))
    require(len(row.axes) > 0, "its groups have no axes")
    box, largest_rms = domain_of(radius, low, high)
    if row.claims:
        claim, width = row.claim(0, "max_abs" if box else "row_norm"), row.shape[-1]
        require(row.axes == (len(row.shape) - 1,), "the groups of an embedding are its vectors")
        require(row.shape_of(claim.tensors[0])[-1:] == (width,), f"its table has not {width} columns")
        require(row.claim(1, "diameter").tensors == claim.tensors, "its diameter is that of another table")
        largest = Fraction(claim.values[0])
        if box:
            require(box[0] <= -largest and largest <= box[1], "its table has a row outside the box")
        else:
            require(largest * largest <= Fraction(largest_rms) ** 2 * width, "its table has a row beyond the radius")
    gain = decimals(root(row.entries())).reshape([1] * len(row.shape))
    norm = gain * largest_rms
    largest = np.full(gain.shape, largest_rms, dtype=object) if box else norm
    # it is exact as given, in the table or in the original's
    changed = row.change(0).reshape(gain.shape) * (root(row.entries()) if box else ONE)
    return Bounds(norm, gain, largest, ZERO * norm + changed)


def domain_of(
    radius: Decimal | None, low: float | None, high: float | None
) -> tuple[tuple[float, float] | None, Decimal]:
    """Return the ends of a box, or None for a ball, and the largest RMS of a group."""
    if radius is not None and low is None and high is None:
        return None, radius
    if radius is not None or low is None or high is None:
        raise CheckError("its domain is neither a ball nor a box")
    require(low < high, "the ends of its box stand in the wrong order")
    return (low, high), Decimal(max(abs(low), abs(high)))


def _output(row: Inference) -> Bounds:
    """The model's result, which is its input unchanged."""
    row.keeps_shape()
    return row.bounds[0]


def _contraction(row: Inference, *, growth: float = 1.0) -> Bounds:
    """A map of each group that increases neither differences nor norms, and no entry by more than the factor `growth`.

    The result may have size 1 along axes of a group.
    """
    bounds = _contracted(row, growth)
    return bounds._replace(error=bounds.error + _of_selection(row, *row.bounds))


def _contracted(row: Inference, growth: float = 1.0) -> Bounds:
    """The bounds of a contraction of its only input, but for its own rounding errors."""
    row.only(1)
    row.groups()
    (x,) = row.inputs
    pairs = list(zip(x.shape, row.shape, strict=True))
    require(all(a == b or (i in row.axes and b == 1) for i, (a, b) in enumerate(pairs)), "its groups are not kept")
    require(growth >= 1, "its growth is less than 1")
    (x,) = row.bounds
    return x if growth == 1 else x._replace(largest=least(x.radius, Decimal(growth) * x.largest))


def _of_selection(row: Inference, x: Bounds) -> Decimals:
    """The rounding errors of a contraction: none if it only selects entries, or by the stated number of roundings."""
    size, count = x.radius + x.error, row.how.roundings
    if count is None:
        return x.radius * row.without_error()
    row.require_held(size * size + Decimal(abs(row.how.beside)) if count else size)
    floor = root(count * row.format.floor) * root(row.entries())  # what a root makes of an underflow
    return (row.rate(0, of_sums=True) + row.rate(0)) * size + floor


def _scaling(row: Inference) -> Bounds:
    """The product of each entry with any entry of a tensor."""
    row.keeps_shape(claims=(1,))
    size = Decimal(row.claim(0, "max_abs").values[0])
    radius, gain, largest, error = (size * each for each in row.bounds[0])
    return Bounds(radius, gain, largest, error + _one_rounding(row, radius + error))


def _one_rounding(row: Inference, size: Decimals) -> Decimals:
    """The error of results of a size that are rounded once."""
    return row.rate(1) * size + row.format.floor * root(row.entries())


def _shift(row: Inference, *, over: Axes | None = None) -> Bounds:
    """The sum of each entry with any entry of a tensor, or of each vector along an axis with any vector of it."""
    row.keeps_shape(claims=(1,))
    claim, vector = row.claim(0, "max_abs" if over is None else "row_norm"), 1 if over is None else row.along(over)
    fits = over is None or row.shape_of(claim.tensors[0])[-1:] == (vector,)
    require(fits, f"its vectors have not {vector} entries")
    (x,), size = row.bounds, Decimal(claim.values[0])
    radius = x.radius + size * root(row.entries() // vector)
    return Bounds(radius, x.gain, x.largest + size, x.error + _one_rounding(row, radius + x.error))


def _elementwise(row: Inference, *, function: str, numbers: tuple[float, ...] = ()) -> Bounds:
    """A function of every entry, with its settings; the claim of a learned slope says that no slope exceeds it.

    `product` rests on a gain that is the largest slope, wherever x lies, times that of x. For formulas executed step by
    step, the table's errors hold with the unit of what the steps store.
    """
    row.keeps_shape(claims=(0, 1))
    shape = executed = row.function()
    if row.claims:
        claim = row.claim(0, "max_abs")
        require(function == "leaky_relu" and claim.values[0] <= numbers[0], "its slope is less than its claim")
    (x,), count = row.bounds, root(row.entries())
    if function == "exp":
        most = (x.largest + x.error).max()
        row.faulty = most > STEEPEST
        executed = shape_of(function, min(most, STEEPEST))
    radius, largest = shape.growth * x.radius + shape.at_zero * count, shape.growth * x.largest + shape.at_zero
    if (resting := _at_bias(row, function)) is not None:
        norm, most, apart = resting
        radius, largest = least(radius, norm + shape.slope * apart), least(largest, most + shape.slope * apart)
    if shape.ceiling is not None:
        radius, largest = least(radius, shape.ceiling * count), least(largest, shape.ceiling)
    (moved,) = row.change(0)
    error = executed.slope * x.error + moved * (x.radius + x.error)
    units, beside = ERRORS[function], Decimal(abs(row.how.beside))
    error = error if executed.ceiling is None else least(error, TWO * executed.ceiling * count)
    if any(units):
        by_size, by_input, constant = map(Decimal, units)
        constant *= max([ONE, *(abs(Decimal(each)) for each in numbers)]) ** 2
        own = by_size * (radius + error) + by_input * (x.radius + x.error) + constant * count
        row.require_held(8 * (x.largest + x.error))
        at_once = not row.how.roundings  # or step by step
        unit = row.rate(1, of_sums=at_once)
        unit = max(unit, FORMATS["float32"].unit) if unit and function in SHORT else unit
        floor = FORMATS[row.format.sums].floor if at_once else row.format.floor
        own = unit * own + UNDERFLOW * floor * count
        error = row.stored(radius, error + own, row.entries())
    if beside:  # a limit is rounded
        error = error + (row.rate(1) * beside + row.format.floor) * count
    return Bounds(radius, shape.slope * x.gain, largest, error)


def _at_bias(row: Inference, function: str) -> tuple[Decimal, Decimal, Decimals] | None:
    """Of a function of `c (W h + b)`: norm and largest entry of `f(c b)`, and the norm of `c W h`; or None.

    As computed, `c b` differs from it by a rounding, and by those of c, which count as part of `c W h`.
    """
    (term, *others) = row.inputs[0].terms
    base, factor = term.base, 1.0 if term.factor is None else term.factor
    if others or not isinstance(base, Base) or term.index is not base.order or np.size(factor) > 1:
        return None
    source = base.inference if base.axes == row.axes else None
    if source is None or source.operation != "linear" or len(source.claims) < 2 or source.constants["parts"] > 1:
        return None
    name, strength = source.claims[1].tensors[0], float(np.ravel(factor)[0])
    if name in row.promised or (sizes := sizes_at(function, strength * row.tensor(name).reshape(1, -1))) is None:
        return None
    size, shift = (Decimal(claim.values[0]) for claim in source.claims)
    vectors, rounded = root(row.entries() // sizes.size), ZERO
    if term.factor is not None:
        rounded = (term.most * shift * (term.roundings + 1) * Decimal(2 * UNIT) + Decimal(TINY)) * vectors
    return (
        absolute_norm(sizes) * vectors,
        Decimal(float(sizes.max())),
        term.most * size * source.bounds[0].radius + rounded,
    )


def _mixture(row: Inference) -> Bounds:
    """`s a + (1 - s) b` with `s = sigmoid(x)`, entry by entry, which lies between a and b.

    Let `w = s (1 - s) <= 1/4` and `D >= |a - b|`. As `s^2 + (1 - s)^2 + 8 w^2 = 1 - 2 w + 8 w^2 <= 1`, by Cauchy and
    Schwarz `(s da + (1 - s) db + (a - b) w dx)^2 <= da^2 + db^2 + (D dx)^2 / 8`.

    Executed is `(a - b) s + b`. Its sigmoid errs by 10 units, and its three operations by one each, relative to
    `|a - b| s` and to the result, which are at most `|a| + |b|`.
    """
    row.keeps_shape(inputs=3)
    x, a, b = row.bounds
    most, gained = np.maximum(a.largest, b.largest), (a.largest + b.largest) * x.gain
    radius = least(roots(a.radius * a.radius + b.radius * b.radius), most * root(row.entries()))
    joint = roots(a.gain * a.gain + b.gain * b.gain + gained * gained / 8)
    size, apart = a.radius + a.error + b.radius + b.error, a.largest + a.error + b.largest + b.error
    row.require_held(TWO * size, 8 * (x.largest + x.error))
    error = roots(a.error * a.error + b.error * b.error + apart * apart * x.error * x.error / 8)
    error = error + row.rate(16) * size + UNDERFLOW * row.format.floor * (ONE + apart) * root(row.entries())
    return Bounds(radius, least(joint, a.gain + b.gain + gained / 4), most, error)


def _normalization(row: Inference, *, eps: Positive, over: Axes, centred: bool = True, squares: bool = False) -> Bounds:
    """`x / sqrt(mean x^2 + eps)`, of vectors x from which the mean may have been subtracted first, if `centred`.

    Let g be `g(n)`, and B the root of the mean square. The executed mean m errs by at most `g B`, and so do the results
    that it is subtracted from. By two passes, or by Welford's recursion, whose addends are never negative, the root of
    the executed variance errs by at most `6 g B + g sqrt(v)`: either is a sum of squares of differences from means that
    err by `1.5 g B`, and the recursion besides errs by `sum 2 d_k e_k`, of these errors e and of differences d with
    `sum d^2 <= 2 n v`. As neither root of `v + eps` is less than that of eps, the two change the result of norm
    `sqrt(n)` by at most `7 g sqrt(n) B / sqrt(eps)`, and `7 g sqrt(n)` are left for all relative errors.

    With `squares`, v may be the mean of squares less the square of m, or 0 if that is larger. It errs by `4 g B^2`,
    which changes the result by at most half of that divided by eps, or by its root divided by that of eps.

    Whatever errors the input has, the real result moves by at most twice its largest norm.
    """
    row.keeps_shape()
    (x,), vector, slope = row.bounds, row.along(over), root(ONE / eps)
    radius = least(slope * x.radius, root(row.entries()))
    size = x.radius + x.error
    own = row.of_norm(vector, ONE / eps, roots(size * size + eps)) * least(slope * size, root(row.entries()))
    if centred:
        sums, mean = row.of_sum(vector + 8) + row.rate(8), slope * size
        own = own + 7 * sums * (mean + root(row.entries()))
        cancelled = 4 * sums * mean * mean / vector
        own = own + least(cancelled, roots(cancelled)) * root(row.entries()) if squares else own
    own = own + row.format.floor * (slope + ONE) * root(row.entries())
    error = least(slope * x.error, TWO * root(row.entries())) + own
    return Bounds(radius, slope * x.gain, least(radius, root(vector)), error)


def _ball(row: Inference, *, scale: Positive, over: Axes) -> Bounds:
    """Projection of every vector onto the ball of root mean square `scale^(-1/2)`."""
    row.keeps_shape()
    (x,), vector = row.bounds, row.along(over)
    radius = least(x.radius, root(row.entries() / scale))
    size = x.radius + x.error
    own = row.of_norm(vector, max(scale, ONE), size, scale * size) * least(size, root(row.entries() / scale))
    largest = least(least(x.largest, root(vector / scale)), radius)
    error = least(x.error, TWO * root(row.entries() / scale)) + own + row.format.floor * root(row.entries())
    return Bounds(radius, x.gain, largest, error)


def _unit(row: Inference, *, eps: Positive, over: Axes) -> Bounds:
    """`x / max(|x|, eps)`, `x / (|x| + eps)` or `x / sqrt(|x|^2 + eps^2)`, whose slopes are at most 1 / eps.

    If its roundings are stated, the norm may be of other executed numbers than x, with errors that x has, too. Then
    what is executed may be longer than 1.
    """
    row.keeps_shape()
    (x,), vectors, slope = row.bounds, row.entries() // row.along(over), ONE / eps
    radius = least(slope * x.radius, root(vectors))
    size = x.radius + x.error
    longest, carried = slope * size, slope * x.error
    if not row.how.roundings:
        longest, carried = least(longest, root(vectors)), least(carried, TWO * root(vectors))
    own = row.of_norm(row.along(over), slope * slope, size + eps) * longest
    own = own + row.format.floor * root(row.entries())
    return Bounds(radius, slope * x.gain, least(radius, ONE), carried + own)


def _softmax(row: Inference, *, over: int) -> Bounds:
    """Softmax along one axis: the norm of a vector of it is at most 1, and that of the Jacobian at most 1/2."""
    row.keeps_shape()
    vectors, one = row.entries() // row.along((over,)), np.full_like(row.bounds[0].radius, ONE)
    (x,), n, half = row.bounds, row.along((over,)), Decimal("0.5")
    size = (x.largest + x.error).max()
    own = weights_error(row, size, ZERO, n) + 4 * n * row.format.floor
    carried = least(half * x.error, one * TWO * root(vectors))
    error = row.stored(one * root(vectors), carried + own * root(vectors), row.entries())
    return Bounds(one * root(vectors), half * x.gain, one, error)


def _log_softmax(row: Inference, *, over: int) -> Bounds:
    """`|log p_i| <= log n + max x - min x`, and the Jacobian `I - 1 p^T` has a norm of at most `sqrt n`."""
    row.keeps_shape()
    (x,), n = row.bounds, row.along((over,))
    largest = (UP.next_plus(UP.ln(Decimal(n))) if n > 1 else ZERO) + TWO * x.largest
    size = (x.largest + x.error).max()
    sums = _of_logarithm(row, size, ZERO, n) + row.rate(EXPONENTIAL, of_sums=True) * largest.max()
    own = (sums + row.rate(4) * (largest.max() + 4 * size) + n * row.format.floor) * root(row.entries())
    return Bounds(root(row.entries()) * largest, root(n) * x.gain, largest, root(n) * x.error + own)


def _logsumexp(row: Inference) -> Bounds:
    """`log(mean(exp(x)))` of the entries that become one: its gradient is a softmax, so it is a contraction.

    Executed is the logarithm of the sum, to which a next row adds the logarithm of their number without an error. The
    difference from the largest entry, the exponentials and the sum may be stored.
    """
    bounds = _contracted(row)
    (x,), results, n = row.bounds, row.entries(), math.prod(row.inputs[0].shape) // math.prod(row.shape)
    size, log = (x.largest + x.error).max(), UP.next_plus(UP.ln(Decimal(n))) if n > 1 else ZERO
    share = _of_logarithm(row, size, 4 * row.rate(2) * size, n)
    own = share + row.rate(EXPONENTIAL, of_sums=True) * log + row.rate(4) * (log + 4 * size) + n * row.format.floor
    return bounds._replace(error=row.stored(size + log, bounds.error + own * root(results), results))


def _of_logarithm(row: Inference, size: Decimal, logits: Decimal, n: int) -> Decimal:
    """The error of the logarithm of a sum of n exponentials; see `weights_error`."""
    share = weights_error(row, size, logits, n)
    return share if share < ANY_WEIGHTS else row.without_error()


RULES: dict[str, Callable[..., Bounds]] = {
    "input": _input, "output": _output, "contraction": _contraction, "linear": linear, "average": average,
    "matrix_product": matrix_product, "product": product, "elementwise": _elementwise, "ball": _ball, "unit": _unit,
    "normalization": _normalization, "softmax": _softmax, "log_softmax": _log_softmax, "attention": attention,
    "scaling": _scaling, "shift": _shift, "convolution": convolution, "convex_potential": convex_potential,
    "margin": margin, "mixture": _mixture, "lipsdp": lipsdp, "logsumexp": _logsumexp,
}  # fmt: skip
"""Name of a primitive -> its rule."""
