"""Moves: rows that rearrange, scale and add their inputs, and so need no bounds of their own."""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from wellnormed.proof import value
from wellnormed.proof.decimals import rounding_up
from wellnormed.proof.gather import gather
from wellnormed.proof.reading import field, integers, number, require
from wellnormed.proof.value import Term, Value

ROUNDED = ("float32", "bfloat16", "float16")
"""A conversion to one of these dtypes counts as the identity in real arithmetic; to 8 bits, it is a step function."""


def _constant(inputs: Sequence[Value], name: str, shape: tuple[int, ...], c: dict[str, Any], tensor: Callable) -> Value:
    require(not inputs and ("tensor" in c) != ("number" in c), "a constant is a tensor or a number")
    content = tensor(c["tensor"]) if "tensor" in c else np.array(number(c["number"], "number"))
    index = np.arange(content.size).reshape(content.shape)
    return Value(name, content.shape, (Term(content.astype(float).reshape(-1), index),))


def _idle_ball(x: Value, name: str, shape: tuple[int, ...], c: dict[str, Any], tensor: Callable) -> Value:
    """A projection onto balls in which all vectors of the domain lie already."""
    scale = Decimal(number(field(c, "scale", "its constants"), "scale"))
    over = integers(field(c, "over", "its constants"), "over")
    require(scale > 0 and len(over) > 0 and list(over) == sorted({*over}), "its scale or its axes are malformed")
    require(max(over) < len(x.shape), f"its input has no axis {max(over)}")
    entries = math.prod(x.shape[axis] for axis in over)
    with rounding_up():
        idle = all(r * r * scale <= entries for r in gather(x, over).radius.flat)
    require(idle, "its ball is not shown to leave all vectors of the domain as they are")
    return x


def _rounding(x: Value, name: str, shape: tuple[int, ...], c: dict[str, Any], tensor: Callable) -> Value:
    """A conversion to fewer digits, which in real arithmetic is the identity."""
    known, dtype = c.keys() == {"dtype"} and c["dtype"] in ROUNDED, str(c.get("dtype"))[:60]
    require(known, f"it rounds to {dtype!r}; only {', '.join(ROUNDED)} count as the identity")
    return value.rounded(x, name)


_OF_ONE = {"pick": value.pick, "times": value.times, "idle_ball": _idle_ball, "rounding": _rounding}
_OF_SEVERAL = {"add": value.add, "constant": _constant}
MOVES = (*_OF_ONE, *_OF_SEVERAL)


def moved(
    operation: str, inputs: Sequence[Value], name: str, shape: tuple[int, ...], c: dict[str, Any], tensor: Callable
) -> Value:
    """Apply a move.

    Args:
        operation: One of `MOVES`.
        inputs: Results of earlier rows.
        name: Name of the result.
        shape: The shape that the row states; the caller checks that the result has it.
        c: The row's constants.
        tensor: Name of a stored tensor -> its entries.

    Raises:
        CheckError: The move is malformed.
    """
    if operation in _OF_ONE:
        require(len(inputs) == 1, f"it has {len(inputs)} inputs instead of 1")
        return _OF_ONE[operation](inputs[0], name, shape, c, tensor)
    return _OF_SEVERAL[operation](inputs, name, shape, c, tensor)
