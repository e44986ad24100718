"""Bounds of sums, differences, products, quotients and powers, entry by entry, of shapes that broadcast."""

from dataclasses import replace
from typing import Any

import numpy as np

from wellnormed.lowering import moves
from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.lowering.operations.movement import as_value, shifted
from wellnormed.program.operation import operation
from wellnormed.proof.value import Value

Operand = Value | Stored | float | int


@operation("aten.add.Tensor", "aten.add.Scalar", kind="affine", family="add", executed=True)
def add(ledger: Ledger, a: Operand, b: Operand, alpha: float = 1, *, roundings: int | None = None) -> Value:
    """`a + alpha b`, each of which is rounded once, or as often as stated, if it is an addend of a larger sum.

    A parameter whose entries are unknown, because a constraint promises only a norm of it, is bounded by that promise.
    """
    if alpha == 1 and isinstance(a, Value) and ledger.unknown(b):
        return shifted(ledger, a, b, roundings)
    if isinstance(b, Value) and ledger.unknown(a):
        return shifted(ledger, moves.times(ledger, b, float(alpha)) if alpha != 1 else b, a, roundings)
    values = [as_value(ledger, a), as_value(ledger, b)]
    if alpha != 1:
        values[1] = moves.times(ledger, values[1], float(alpha))
    return moves.add(ledger, values, roundings)


@operation("aten.sub.Tensor", "aten.sub.Scalar", kind="affine", family="sub", executed=True)
def subtract(ledger: Ledger, a: Operand, b: Operand, alpha: float = 1) -> Value:
    """`a - alpha b`."""
    return add(ledger, a, b, -alpha)


@operation("aten.rsub.Scalar", "aten.rsub.Tensor", kind="affine", family="rsub", executed=True)
def subtract_from(ledger: Ledger, a: Operand, b: Operand, alpha: float = 1) -> Value:
    """`b - alpha a`."""
    return add(ledger, b, a, -alpha)


@operation("aten.neg.default", kind="affine", executed=True)
def negate(ledger: Ledger, x: Value) -> Value:
    """`-x`."""
    return moves.times(ledger, x, -1.0)


@operation("aten.mul.Tensor", "aten.mul.Scalar", kind="product", family="mul", executed=True)
def multiply(ledger: Ledger, a: Operand, b: Operand) -> Value:
    """`a b`, where one factor may be a number or a stored tensor. An unknown parameter is bounded as in `add`."""
    if not isinstance(a, Value):
        a, b = b, a
    assert isinstance(a, Value)  # the walk bounds only products with a factor that depends on the input
    if ledger.unknown(b):
        return _scaled(ledger, a, b)
    if isinstance(b, Stored) and b.value_of:
        b = b.value_of()
    return _product(ledger, a, b) if isinstance(b, Value) else moves.times(ledger, a, b)


@operation("aten.square.default", executed=True)
def square(ledger: Ledger, x: Value) -> Value:
    """`x^2`."""
    return _product(ledger, x, x)


@operation("aten.pow.Tensor_Scalar", executed=True)
def power(ledger: Ledger, x: Value, exponent: float) -> Value:
    """`x^n` for n = 1, 2, 3, ..., as products of squares."""
    if exponent != int(exponent) or exponent < 1:
        raise ledger.refuse(f"it raises to the power {exponent}; only the powers 1, 2, 3, ... have a bound")
    if exponent == 1:
        return x
    if exponent > 3 and ledger.executed is not None:  # which is executed by a logarithm
        with ledger.executing(None):
            return power(ledger, x, exponent)
    half = power(ledger, x, exponent // 2)
    squared = _product(ledger, half, half)
    return _product(ledger, squared, x) if exponent % 2 else squared


@operation("aten.div.Tensor", "aten.div.Scalar", family="div", executed=True)
def divide(ledger: Ledger, a: Operand, b: Operand) -> Value:
    """`a / b`, where b is a number or a stored tensor."""
    if not isinstance(a, Value) or isinstance(b, Value):
        raise ledger.refuse(
            "its divisor depends on the input, or on weights of which only a norm is known, and may come near 0; "
            "divide by a constant, or x by its own norm plus a positive number; multiply by exp(-x) in the place of "
            "a division by exp(x), and write torch.softmax"
        )
    return moves.times(ledger, a, b, divide=True)


@operation("aten.div.Tensor_mode", "aten.div.Scalar_mode", executed=True)
def divide_and_round(ledger: Ledger, a: Operand, b: Operand, *, rounding_mode: str | None = None) -> Value:
    """`a / b`, which must not be rounded to an integer."""
    if rounding_mode is not None:
        raise ledger.refuse(f"rounding_mode={rounding_mode!r} makes it a step, which is not continuous; leave it out")
    return divide(ledger, a, b)


def _scaled(ledger: Ledger, x: Value, factors: Any) -> Value:
    """The product with a parameter whose entries are unknown, bounded by the promise of its constraint."""
    x, parameter = moves.spread(ledger, x, np.broadcast_shapes(x.shape, factors.tensor.shape)), ledger.unknown(factors)
    assert parameter is not None  # the caller has asked
    claim = ledger.prove("max_abs", parameter)
    return ledger.derive("scaling", [(x, inner_axes(x))], shape=x.shape, claims=[claim])


def along_channels(ledger: Ledger, stored: Any, after: int) -> Any:
    """Reshape a stored vector with an entry for every channel so that it broadcasts along `after` axes behind them."""
    if stored is None or not after:
        return stored
    tensor = stored.tensor.reshape(-1, *[1] * after)
    if parameter := ledger.unknown(stored):
        return replace(stored, tensor=tensor, rows_of=parameter)
    return ledger.computed(f"{stored.name} by channel", tensor, made_of=[stored])


def _product(ledger: Ledger, a: Value, b: Value) -> Value:
    shape = tuple(np.broadcast_shapes(a.shape, b.shape))
    a, b = (moves.spread(ledger, x, shape) for x in (a, b))
    axes = inner_axes(a, b)
    return ledger.derive("product", [(a, axes), (b, axes)], shape=shape)
