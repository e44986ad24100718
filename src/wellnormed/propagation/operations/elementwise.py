"""Bounds of sums, differences, products, quotients and powers, entry by entry, of shapes that broadcast."""

from dataclasses import replace
from typing import Any

import numpy as np

from wellnormed.program.operation import operation
from wellnormed.proof.value import Value
from wellnormed.propagation import moves
from wellnormed.propagation.axes import inner_axes
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.operations.movement import as_value

Operand = Value | Stored | float | int


@operation("aten.add.Tensor", "aten.add.Scalar")
def add(step: Ledger, a: Operand, b: Operand, alpha: float = 1) -> Value:
    """`a + alpha b`.

    A parameter whose entries are unknown, because a constraint promises only a norm of it, is bounded by that promise.
    """
    if alpha == 1 and isinstance(a, Value) and step.unknown(b):
        return _shifted(step, a, b)
    if isinstance(b, Value) and step.unknown(a):
        return _shifted(step, moves.times(step, b, float(alpha)) if alpha != 1 else b, a)
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
    """`a b`, where one factor may be a number or a stored tensor. An unknown parameter is bounded as in `add`."""
    if not isinstance(a, Value):
        a, b = b, a
    assert isinstance(a, Value)  # a bound is asked for only if a factor depends on the input
    if step.unknown(b):
        return _scaled(step, a, b)
    return _product(step, a, b) if isinstance(b, Value) else moves.times(step, a, b)


@operation("aten.square.default")
def square(step: Ledger, x: Value) -> Value:
    """`x^2`."""
    return _product(step, x, x)


@operation("aten.pow.Tensor_Scalar")
def power(step: Ledger, x: Value, exponent: float) -> Value:
    """`x^n` for n = 1, 2, 3, ..., as products of squares."""
    if exponent != int(exponent) or exponent < 1:
        raise step.refuse(f"it raises to the power {exponent}; only the powers 1, 2, 3, ... have a bound")
    if exponent == 1:
        return x
    half = power(step, x, exponent // 2)
    squared = _product(step, half, half)
    return _product(step, squared, x) if exponent % 2 else squared


@operation("aten.div.Tensor", "aten.div.Scalar")
def divide(step: Ledger, a: Operand, b: Operand) -> Value:
    """`a / b`, where b is a number or a stored tensor."""
    if not isinstance(a, Value) or isinstance(b, Value):
        raise step.refuse("its divisor depends on the input, and may come near 0; divide by a constant")
    return moves.times(step, a, b, divide=True)


def _scaled(step: Ledger, x: Value, factors: Any) -> Value:
    """The product with a parameter whose entries are unknown, bounded by the promise of its constraint."""
    x, parameter = moves.spread(step, x, np.broadcast_shapes(x.shape, factors.tensor.shape)), step.unknown(factors)
    assert parameter is not None  # the caller has asked
    claim = step.prove("max_abs", parameter)
    return step.derive("scaling", [(x, inner_axes(x))], shape=x.shape, claims=[claim])


def _shifted(step: Ledger, x: Value, shift: Any) -> Value:
    """The sum with a parameter whose entries are unknown, bounded by the promise of its constraint.

    The bound uses the norms of whole rows where the groups of the result contain them, and the largest absolute entry
    otherwise.
    """
    x = moves.spread(step, x, np.broadcast_shapes(x.shape, tuple(shift.tensor.shape)))
    parameter, axes, sizes = step.unknown(shift), inner_axes(x), shift.tensor.shape
    assert parameter is not None  # the caller has asked
    over = [axis - len(sizes) + len(x.shape) for axis, size in enumerate(sizes) if size > 1][-1:]
    whole = bool(over) and over[0] in axes and x.shape[over[0]] == parameter.tensor.shape[-1]
    claim, constants = step.prove("row_norm" if whole else "max_abs", parameter), {"over": over} if whole else {}
    return step.derive("shift", [(x, axes)], shape=x.shape, claims=[claim], constants=constants)


def along_channels(step: Ledger, stored: Any, after: int) -> Any:
    """Reshape a stored vector with an entry for every channel so that it broadcasts along `after` axes behind them."""
    if stored is None or not after:
        return stored
    tensor = stored.tensor.reshape(-1, *[1] * after)
    if parameter := step.unknown(stored):
        return replace(stored, tensor=tensor, rows_of=parameter)
    return step.computed(f"{stored.name} by channel", tensor)


def _product(step: Ledger, a: Value, b: Value) -> Value:
    shape = tuple(np.broadcast_shapes(a.shape, b.shape))
    a, b = (moves.spread(step, x, shape) for x in (a, b))
    axes = inner_axes(a, b)
    return step.derive("product", [(a, axes), (b, axes)], shape=shape)
