"""Sums, differences, products and quotients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wellnormed.propagation import moves
from wellnormed.propagation.decimals import least
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.operations.movement import as_value
from wellnormed.propagation.registry import Read, operation, primitive
from wellnormed.propagation.rows import Claim
from wellnormed.propagation.value import Bounds, Value

Operand = Value | Stored | float | int


@operation("aten.add.Tensor", "aten.add.Scalar")
def add(step: Ledger, a: Operand, b: Operand, alpha: float = 1) -> Value:
    """`a + alpha b`."""
    values = [as_value(step, a), as_value(step, b)]
    if alpha != 1:
        values[1] = moves.times(step, values[1], float(alpha))
    return moves.add(step, values)


@operation("aten.sub.Tensor", "aten.sub.Scalar")
def subtract(step: Ledger, a: Operand, b: Operand, alpha: float = 1) -> Value:
    """`a - alpha b`."""
    return add(step, a, b, -alpha)


@operation("aten.rsub.Scalar", "aten.rsub.Tensor")
def subtract_from(step: Ledger, a: Operand, b: Operand, alpha: float = 1) -> Value:
    """`b - alpha a`."""
    return add(step, b, a, -alpha)


@operation("aten.neg.default")
def negate(step: Ledger, x: Value) -> Value:
    """`-x`."""
    return moves.times(step, x, -1.0)


@operation("aten.mul.Tensor", "aten.mul.Scalar")
def multiply(step: Ledger, a: Operand, b: Operand) -> Value:
    """A number or a stored tensor times a value, or the product of two bounded values."""
    if not isinstance(a, Value):
        a, b = b, a
    assert isinstance(a, Value)  # nothing is bounded that does not depend on the input
    return _product(step, a, b) if isinstance(b, Value) else moves.times(step, a, b)


@operation("aten.square.default")
def square(step: Ledger, x: Value) -> Value:
    """`x x`."""
    return _product(step, x, x)


@operation("aten.pow.Tensor_Scalar")
def power(step: Ledger, x: Value, exponent: float) -> Value:
    """`x^n` for n = 1, 2, ..., by squares."""
    if exponent != int(exponent) or exponent < 1:
        raise step.refuse(f"the power {exponent} has no finite slope everywhere; only 1, 2, 3, ... have a bound")
    if exponent == 1:
        return x
    half = power(step, x, exponent // 2)
    squared = _product(step, half, half)
    return _product(step, squared, x) if exponent % 2 else squared


@operation("aten.div.Tensor", "aten.div.Scalar")
def divide(step: Ledger, a: Operand, b: Operand) -> Value:
    """A value over what does not depend on the input."""
    if not isinstance(a, Value) or isinstance(b, Value):
        raise step.refuse("its divisor depends on the input, and may come near 0; divide by a constant")
    return moves.times(step, a, b, divide=True)


def _product(step: Ledger, a: Value, b: Value) -> Value:
    shape = tuple(np.broadcast_shapes(a.shape, b.shape))
    a, b = (moves.spread(step, x, shape) for x in (a, b))
    axes = [axis for axis in a.inner_axes() if axis in b.inner_axes()]
    return step.derive("product", [(a, axes), (b, axes)], shape=shape)


@primitive("product")
def _bound_product(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`|d(ab)| <= |a|_inf |db| + |b|_inf |da|`, in the Euclidean norm."""
    a, b = (read.bounds for read in reads)
    radius = least(a.largest * b.radius, a.radius * b.largest)
    return Bounds(radius, a.largest * b.gain + b.largest * a.gain, a.largest * b.largest)
