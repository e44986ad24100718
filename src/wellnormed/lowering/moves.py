"""Moves: operations that need no bound of their own.

- `pick`: entries of one input, in any order, repeated or left out, with zeros in between. Where an entry comes from is
  written as `offset + sum of tables[axis][position]`, or, if it is no such sum, as a stored tensor of positions.
- `times`: the product with a number or a stored tensor.
- `add`: the sum of inputs of shapes that broadcast.
- `constant`: a stored tensor or a number.
- `idle_ball`: the projection onto a ball that contains every value.
- `rounding`: a conversion to fewer digits, which in real arithmetic is the identity; see `lowering.rounding`.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellnormed.lowering.axes import inner_axes
from wellnormed.lowering.ledger import Ledger, Stored
from wellnormed.proof.decimals import float_up
from wellnormed.proof.functions import ERRORS
from wellnormed.proof.value import UNIT, Base, Value

Move = Callable[[Tensor], Tensor]
Table = int | list[int]


def pick(ledger: Ledger, x: Value, move: Move) -> Value:
    """Apply an operation that only moves entries.

    Args:
        ledger: The ledger that gets the row.
        x: The value.
        move: The operation, as a function of float64 tensors of the shape of x. Zeros that it puts between entries, as
            padding does, are zeros of the result.

    Example:
        >>> from wellnormed.lowering.operations.source import source
        >>> ledger = Ledger(radius=1.0)
        >>> padded = pick(ledger, source(ledger, (1, 4), "x"), lambda entries: torch.nn.functional.pad(entries, (1, 1)))
        >>> padded.shape, float(ledger.bounds(padded, [-1]).radius.max())
        ((1, 6), 2.0)
    """
    count = math.prod(x.shape)
    positions = (move(torch.arange(1.0, count + 1, dtype=torch.float64).reshape(x.shape)) - 1).long()
    if not positions.numel():  # a tensor without entries needs no row
        return Value(x.name, tuple(positions.shape), ())
    if tuple(positions.shape) == x.shape and bool((positions.reshape(-1) == torch.arange(count)).all()):
        return x
    tables = tables_of(positions)
    if tables is None:
        place = ledger.use(ledger.computed(f"{ledger.unique_name(ledger.name)}.positions", positions))
        return ledger.move("pick", [x], positions.shape, {"positions": place})
    return ledger.move("pick", [x], positions.shape, {"offset": tables[0], "tables": tables[1]})


def spread(ledger: Ledger, x: Value, shape: Sequence[int]) -> Value:
    """Broadcast to a shape."""
    return x if x.shape == tuple(shape) else pick(ledger, x, lambda t: t.broadcast_to(shape))


def each_axis(setting: Any, count: int) -> list[Any]:
    """A setting of windows, given as one number for all axes or as a list, as a list with one entry per axis."""
    values = list(setting) if isinstance(setting, list | tuple) else [setting]
    return values * count if len(values) == 1 else values


def tables_of(positions: Tensor) -> tuple[int, list[Table]] | None:
    """Offset and tables of positions that are sums over the axes, or None; a table with equal steps is that step."""
    if not positions.numel() or not bool((positions >= 0).any()):
        return None
    present = tuple(int(each) for each in (positions >= 0).nonzero()[0])
    offset, tables = int(positions[present]), []
    summed, missing = torch.full_like(positions, offset), torch.zeros_like(positions, dtype=torch.bool)
    for axis, size in enumerate(positions.shape):
        line = positions[tuple(slice(None) if i == axis else p for i, p in enumerate(present))]
        table, absent = line - offset, line < 0
        view = [size if i == axis else 1 for i in range(positions.ndim)]
        summed += torch.where(absent, 0, table).view(view)
        missing |= absent.view(view)
        tables.append([None if gone else int(t) for gone, t in zip(absent, table, strict=True)])
    if not bool(torch.where(missing, positions < 0, positions == summed).all()):
        return None
    compact: list[Table] = []
    for table in tables:
        stride = table[1] - table[0] if len(table) > 1 and None not in table[:2] else 0
        if None not in table and all(t == table[0] + stride * i for i, t in enumerate(table)):
            offset += table[0]
            compact.append(stride)
        else:
            least = min(t for t in table if t is not None)
            offset += least
            compact.append([-1 if t is None else t - least for t in table])
    return offset, compact


def side_by_side(ledger: Ledger, xs: Sequence[Value], place: Callable[[list[Tensor]], Tensor]) -> Value:
    """Join values without overlap, such as by concatenation; `place` does so for a list of tensors of their shapes."""

    def alone(number: int) -> Move:
        return lambda x: place([x if i == number else x.new_zeros(other.shape) for i, other in enumerate(xs)])

    return add(ledger, [pick(ledger, x, alone(number)) for number, x in enumerate(xs)], roundings=0)


def add(ledger: Ledger, xs: Sequence[Value], roundings: int | None = None, beside: float = 0.0) -> Value:
    """The sum; shapes broadcast. Each addend is rounded as often as in any order of sums, or more often if stated.

    With `roundings=0`, no two values have an entry at one place; for `beside` see `proof.arithmetic.Executed`.
    """
    if len(xs) == 1:
        return xs[0]
    shape = np.broadcast_shapes(*(x.shape for x in xs))
    return _in_place(ledger, xs, ledger.move("add", xs, shape, {}, roundings, beside))


def _in_place(ledger: Ledger, xs: Sequence[Value], total: Value) -> Value:
    """Bound a sum of values that do not overlap as one entrywise function of x, if that gives a smaller bound.

    In `cat([a.abs(), b])`, where a and b are the halves of x, each half has a separate bound, as if both could be as
    large as x. But the result is x with a function applied to some entries. With slopes of at most 1 and the value 0 at
    0, that is a contraction of x.
    """
    before = {term.base for x in xs for term in x.terms if isinstance(term.base, Base)}
    if any(x.shape != total.shape for x in xs) or len(set().union(*map(_origins, xs))) >= len(before):
        return total
    present = [np.any([term.index >= 0 for term in x.terms], axis=0) for x in xs if x.terms]
    if np.sum(present, axis=0).max() > 1:
        return total
    with nullcontext() if all(map(_exact, xs)) else ledger.executing(None):
        x = ledger.move("add", [_argument(ledger, each) for each in xs], total.shape, {}, roundings=0)
        contracted = ledger.derive("contraction", [(x, inner_axes(x))], shape=total.shape, roundings=0)
    return ledger.least(total, contracted)


def _exact(x: Value) -> bool:
    """Whether the functions that a value results from round nothing, nor does a factor of it."""
    if (function := _function(x)) is None:
        return True
    argument, _, name = function
    return not any(ERRORS[name]) and not x.terms[0].error and _exact(argument)


def _function(x: Value) -> tuple[Value, float, str] | None:
    """Argument, largest slope and name of the entrywise function that x results from, if it maps 0 to 0; else None."""
    term = x.terms[0] if len(x.terms) == 1 else None
    if term is None or not isinstance(term.base, Base) or (term.factor is not None and term.factor.ndim):
        return None
    row = term.base.inference
    if row is None or row.operation != "elementwise" or row.claims:
        return None
    shape = row.function()
    return None if shape.at_zero else (row.inputs[0], float_up(shape.slope), row.constants["function"])


def _origins(x: Value) -> set[Base]:
    """The bases of a value's argument, behind all entrywise functions."""
    if (function := _function(x)) is not None:
        return _origins(function[0])
    return {term.base for term in x.terms if isinstance(term.base, Base)}


def _argument(ledger: Ledger, x: Value) -> Value:
    """A value y such that x is an entrywise function of y with slopes of at most 1 that maps 0 to 0."""
    if (function := _function(x)) is None:
        return x
    (argument, slope, _), (term,) = function, x.terms
    index = torch.from_numpy(np.array(term.index, np.int64))
    placed = pick(ledger, argument, lambda t: torch.where(index >= 0, t.reshape(-1)[index], 0.0))
    factor = 1.0 if term.factor is None else abs(float(term.factor)) * (1 + UNIT * 4 * (term.roundings + 1))
    return _argument(ledger, placed if slope * factor == 1 else times(ledger, placed, slope * factor))


def times(
    ledger: Ledger, x: Value, factor: float | Stored, *, divide: bool = False, roundings: int | None = None
) -> Value:
    """The product with a number or a stored tensor whose shape broadcasts, or the quotient.

    Raises:
        UncertifiableError: It divides by zero, or a factor is not finite.
    """
    constant = ledger.use(factor) if isinstance(factor, Stored) else float(factor)
    other = tuple(factor.tensor.shape) if isinstance(factor, Stored) else ()
    shape = np.broadcast_shapes(x.shape, other)
    return ledger.move("times", [x], shape, {"divisor" if divide else "factor": constant}, roundings)


def number(ledger: Ledger, content: float) -> Value:
    """A number as a value."""
    return ledger.move("constant", [], (), {"number": float(content)})
