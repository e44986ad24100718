"""The rules: for each primitive, a function that derives the bounds of its result and checks all that they rest on.

A rule gets an `Inference` with the row's inputs and the bounds of their groups, and the row's constants by name. Its
keyword-only parameters declare these constants: whatever else a row has is refused before. A gain bounds differences as
well as derivatives, since the domain is convex.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Literal

import numpy as np

from wellnormed.proof.attention import attention
from wellnormed.proof.decimals import ONE, TWO, UP, ZERO, decimals, least, root, roots
from wellnormed.proof.functions import shape_of
from wellnormed.proof.inference import Inference
from wellnormed.proof.lipsdp import lipsdp
from wellnormed.proof.products import average, convex_potential, convolution, linear, margin, matrix_product, product
from wellnormed.proof.reading import Axes, CheckError, Positive, require
from wellnormed.proof.rows import Bounds

LARGEST = {
    "float64": (2 - 2.0**-52) * 2.0**1023, "float32": (2 - 2.0**-23) * 2.0**127,
    "bfloat16": (2 - 2.0**-7) * 2.0**127, "float16": 65504.0,
}  # fmt: skip
"""Dtype of an input -> its largest finite number."""
Dtype = Literal["float64", "float32", "bfloat16", "float16"]


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
    return Bounds(norm, gain, np.full(gain.shape, largest_rms, dtype=object) if box else norm)


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
    row.only(1)
    row.groups()
    (x,) = row.inputs
    require(len(x.shape) == len(row.shape), "its result has another number of axes")
    pairs = list(zip(x.shape, row.shape, strict=True))
    require(all(a == b or (i in row.axes and b == 1) for i, (a, b) in enumerate(pairs)), "its groups are not kept")
    require(growth >= 1, "its growth is less than 1")
    (x,) = row.bounds
    return Bounds(x.radius, x.gain, x.largest if growth == 1 else least(x.radius, Decimal(growth) * x.largest))


def _scaling(row: Inference) -> Bounds:
    """The product of each entry with any entry of a tensor."""
    row.keeps_shape(claims=(1,))
    size = Decimal(row.claim(0, "max_abs").values[0])
    return Bounds(*(size * each for each in row.bounds[0]))


def _shift(row: Inference, *, over: Axes | None = None) -> Bounds:
    """The sum of each entry with any entry of a tensor, or of each vector along an axis with any vector of it."""
    row.keeps_shape(claims=(1,))
    claim, vector = row.claim(0, "max_abs" if over is None else "row_norm"), 1 if over is None else row.along(over)
    fits = over is None or row.shape_of(claim.tensors[0])[-1:] == (vector,)
    require(fits, f"its vectors have not {vector} entries")
    (x,), size = row.bounds, Decimal(claim.values[0])
    return Bounds(x.radius + size * root(row.entries() // vector), x.gain, x.largest + size)


def _elementwise(row: Inference, *, function: str, numbers: tuple[float, ...] = ()) -> Bounds:
    """A function of every entry, with its settings; the claim of a learned slope says that no slope exceeds it.

    `product` rests on a gain that is the largest slope, wherever x lies, times that of x.
    """
    row.keeps_shape(claims=(0, 1))
    shape = shape_of(function, *numbers)
    if row.claims:
        claim = row.claim(0, "max_abs")
        require(function == "leaky_relu" and claim.values[0] <= numbers[0], "its slope is less than its claim")
    (x,), count = row.bounds, root(row.entries())
    radius, largest = shape.growth * x.radius + shape.at_zero * count, shape.growth * x.largest + shape.at_zero
    if shape.ceiling is not None:
        radius, largest = least(radius, shape.ceiling * count), least(largest, shape.ceiling)
    return Bounds(radius, shape.slope * x.gain, largest)


def _mixture(row: Inference) -> Bounds:
    """`s a + (1 - s) b` with `s = sigmoid(x)`, entry by entry, which lies between a and b.

    Let `w = s (1 - s) <= 1/4` and `D >= |a - b|`. As `s^2 + (1 - s)^2 + 8 w^2 = 1 - 2 w + 8 w^2 <= 1`, by Cauchy and
    Schwarz `(s da + (1 - s) db + (a - b) w dx)^2 <= da^2 + db^2 + (D dx)^2 / 8`.
    """
    row.keeps_shape(inputs=3)
    x, a, b = row.bounds
    most, apart = np.maximum(a.largest, b.largest), (a.largest + b.largest) * x.gain
    radius = least(roots(a.radius * a.radius + b.radius * b.radius), most * root(row.entries()))
    joint = roots(a.gain * a.gain + b.gain * b.gain + apart * apart / 8)
    return Bounds(radius, least(joint, a.gain + b.gain + apart / 4), most)


def _normalization(row: Inference, *, eps: Positive, over: Axes) -> Bounds:
    """`x / sqrt(mean x^2 + eps)`, of vectors x from which the mean may have been subtracted first."""
    row.keeps_shape()
    (x,), vector, slope = row.bounds, row.along(over), root(ONE / eps)
    radius = least(slope * x.radius, root(row.entries()))
    return Bounds(radius, slope * x.gain, least(radius, root(vector)))


def _ball(row: Inference, *, scale: Positive, over: Axes) -> Bounds:
    """Projection of every vector onto the ball of root mean square `scale^(-1/2)`."""
    row.keeps_shape()
    (x,), vector = row.bounds, row.along(over)
    radius = least(x.radius, root(row.entries() / scale))
    return Bounds(radius, x.gain, least(least(x.largest, root(vector / scale)), radius))


def _unit(row: Inference, *, eps: Positive, over: Axes) -> Bounds:
    """`x / max(|x|, eps)`, `x / (|x| + eps)` or `x / sqrt(|x|^2 + eps^2)`, whose slopes are at most 1 / eps."""
    row.keeps_shape()
    (x,), vectors, slope = row.bounds, row.entries() // row.along(over), ONE / eps
    radius = least(slope * x.radius, root(vectors))
    return Bounds(radius, slope * x.gain, least(radius, ONE))


def _softmax(row: Inference, *, over: int) -> Bounds:
    """Softmax along one axis: the norm of a vector of it is at most 1, and that of the Jacobian at most 1/2."""
    row.keeps_shape()
    vectors, one = row.entries() // row.along((over,)), np.full([1] * len(row.shape), ONE, dtype=object)
    return Bounds(one * root(vectors), Decimal("0.5") * row.bounds[0].gain, one)


def _log_softmax(row: Inference, *, over: int) -> Bounds:
    """`|log p_i| <= log n + max x - min x`, and the Jacobian `I - 1 p^T` has a norm of at most `sqrt n`."""
    row.keeps_shape()
    (x,), n = row.bounds, row.along((over,))
    largest = (UP.next_plus(UP.ln(Decimal(n))) if n > 1 else ZERO) + TWO * x.largest
    return Bounds(root(row.entries()) * largest, root(n) * x.gain, largest)


RULES: dict[str, Callable[..., Bounds]] = {
    "input": _input, "output": _output, "contraction": _contraction, "linear": linear, "average": average,
    "matrix_product": matrix_product, "product": product, "elementwise": _elementwise, "ball": _ball, "unit": _unit,
    "normalization": _normalization, "softmax": _softmax, "log_softmax": _log_softmax, "attention": attention,
    "scaling": _scaling, "shift": _shift, "convolution": convolution, "convex_potential": convex_potential,
    "margin": margin, "mixture": _mixture, "lipsdp": lipsdp,
}  # fmt: skip
"""Name of a primitive -> its rule."""
