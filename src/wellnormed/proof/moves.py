"""Moves: rows that rearrange, scale and add their inputs, and so need no bounds of their own.

As with rules, the keyword-only parameters of a move declare the row's constants.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import numpy as np

from wellnormed.proof.decimals import rounding_up
from wellnormed.proof.gather import gather
from wellnormed.proof.positions import Table, positions_of
from wellnormed.proof.reading import Axes, CheckError, Offset, Positive, arguments, require
from wellnormed.proof.rows import Row
from wellnormed.proof.value import LARGE, SMALL, Base, Term, Value, require_few, spread, taken

_TERMS = 2**12
"""The most terms of a value."""
_POSITION, _FACTOR = 4, 8
"""The bytes of a position, and of a factor."""


class Move(NamedTuple):
    """What a move sees of its row, apart from the constants."""

    inputs: Sequence[Value]
    shape: tuple[int, ...]
    """The shape that the row states."""
    tensor: Callable[[str], np.ndarray]
    """Gives the entries of a stored tensor."""
    room: int
    """How many bytes the arrays of its result may need."""

    def require_room(self, needed: int) -> None:
        """Refuse a result that would need so many bytes, before memory is asked for."""
        require(needed <= self.room, f"its result would hold {needed} bytes, and {self.room} are left")

    def entries(self, constant: str | float) -> np.ndarray:
        """The entries of a stored tensor, or a number."""
        return np.array(constant) if isinstance(constant, float) else self.tensor(constant)

    @property
    def input(self) -> Value:
        """The only input."""
        require(len(self.inputs) == 1, f"it has {len(self.inputs)} inputs instead of 1")
        return self.inputs[0]


def _pick(
    row: Move, *, positions: str | None = None, offset: Offset | None = None, tables: tuple[Table, ...] | None = None
) -> Value:
    """Entries of the input at the positions that a stored tensor, or an offset and a table for every axis, names."""
    x = row.input
    count, size = math.prod(x.shape), math.prod(row.shape)
    require_few(x, size)
    row.require_room(sum(size * (_POSITION + _FACTOR * bool(term.span)) for term in x.terms))
    if positions is not None and offset is None and tables is None:
        places = row.tensor(positions)
        require(places.dtype == np.int64, "its positions are no 64-bit integers")
        require(places.shape == row.shape, f"its positions have shape {places.shape} instead of {row.shape}")
    elif positions is None and offset is not None and tables is not None:
        places = positions_of(row.shape, tables, offset, count)
    else:
        raise CheckError("it must have either positions, or an offset and tables")
    require(places.min() >= -1 and places.max() < count, f"it takes entries beyond the {count} of its input")
    return taken(x, places)


def _times(row: Move, *, factor: str | float | None = None, divisor: str | float | None = None) -> Value:
    """The product with a number or a stored tensor, or the quotient."""
    x, given, inexact = (row.input, [each for each in (factor, divisor) if each is not None], False)
    require(len(given) == 1, "it must have either a factor or a divisor")
    new = row.entries(given[0]).astype(float)
    if factor is None:
        require(bool((new != 0).all()), "it divides by zero")
        inexact = bool((np.frexp(new)[0] != np.copysign(0.5, new)).any())  # 1 / 2^k is exact
        with np.errstate(all="ignore"):
            new = 1 / new
    x, terms = spread(x, row.shape, new.shape), []
    shapes = [np.broadcast_shapes(new.shape, term.span) for term in x.terms if term.span]
    require_few(x, math.prod(np.broadcast_shapes(new.shape, *shapes)))
    row.require_room(_FACTOR * sum(math.prod(each) for each in shapes))
    for term in x.terms:
        with np.errstate(all="ignore"):
            product = new if term.factor is None else term.factor * new
        zero = (new == 0) | (False if term.factor is None else term.factor == 0)
        moderate = (abs(product) >= SMALL) & (abs(product) <= LARGE)
        require(bool((zero | moderate).all()), "the product of its factors leaves [2^-1000, 2^1000]")
        roundings = term.roundings + inexact + (term.factor is not None)
        terms.append(Term(term.base, term.index, product, roundings))
    return Value(x.name, x.shape, tuple(terms))


def _add(row: Move) -> Value:
    """The sum of inputs, whose shapes broadcast; terms that take the same entries become one."""
    require(len(row.inputs) > 0, "it adds nothing")
    shapes, alike = [x.shape for x in row.inputs], dict[Any, list[Term]]()
    terms = [term for x in row.inputs for term in spread(x, row.shape, *shapes).terms]
    count, made = Counter(id(term.base) for term in terms), 0
    for place, term in enumerate(terms):
        content = np.ascontiguousarray(term.index).data  # which it need not copy
        key = (id(term.base), sha256(content).digest()) if count[id(term.base)] > 1 else place
        same = alike.setdefault(key, [])
        if same:
            made += _FACTOR * math.prod(np.broadcast_shapes(same[-1].span, term.span))
            row.require_room(made)
        joined = _joined(same[-1], term) if same else None
        same[-1:] = [*same[-1:], term] if joined is None else [joined]
    result = tuple(term for same in alike.values() for term in same)
    require(len(result) <= _TERMS, f"it is a sum of {len(result)} terms, more than {_TERMS}")
    return Value(row.inputs[0].name, row.shape, result)


def _joined(a: Term, b: Term) -> Term | None:
    """The sum of two terms that take the same entries; None if its factors cannot be rounded without a large error."""
    first, second = (np.ones(()) if each.factor is None else each.factor for each in (a, b))
    factor, exact = first + second, a.roundings == b.roundings == 0
    moderate = (factor == 0) | ((abs(factor) >= SMALL) & (abs(factor) <= LARGE))
    alike = ((first >= 0) & (second >= 0)) | ((first <= 0) & (second <= 0))
    if not bool((moderate & (exact | alike)).all()):
        return None
    return Term(a.base, a.index, factor, max(a.roundings, b.roundings) + 1)


def _constant(row: Move, *, tensor: str | None = None, number: float | None = None) -> Value:
    """A stored tensor, or a number."""
    given = [each for each in (tensor, number) if each is not None]
    require(len(given) == 1 and not row.inputs, "a constant is a tensor or a number")
    content = row.entries(given[0])
    index = np.arange(content.size, dtype=np.int32).reshape(content.shape)
    return Value("", content.shape, (Term(content.astype(float).reshape(-1), index),))


def _idle_ball(row: Move, *, scale: Positive, over: Axes) -> Value:
    """A projection onto balls in which all vectors of the domain lie already."""
    x = row.input
    require(len(over) > 0 and list(over) == sorted({*over}), f"over={over} must be axes in rising order")
    require(max(over) < len(x.shape), f"its input has no axis {max(over)}")
    entries = math.prod(x.shape[axis] for axis in over)
    with rounding_up():
        idle = all(r * r * scale <= entries for r in gather(x, over).radius.flat)
    require(idle, "its ball is not shown to leave all vectors of the domain as they are")
    return x


def _rounding(row: Move, *, dtype: Literal["float32", "bfloat16", "float16"]) -> Value:
    """A conversion to fewer digits, which in real arithmetic is the identity; to 8 bits, it is a step function.

    The result has copies of the input's bases that know nothing but their bounds.
    """
    x, copies, terms = row.input, dict[int, Base](), []
    for term in x.terms:
        if isinstance(exact := term.base, Base):
            base = copies.setdefault(id(exact), replace(exact, inference=None, parts={}))
            term = replace(term, base=base, index=base.order if term.index is exact.order else term.index)
        terms.append(term)
    return Value(x.name, x.shape, tuple(terms))


MOVES: dict[str, Callable[..., Value]] = {
    "pick": _pick, "times": _times, "add": _add, "constant": _constant, "idle_ball": _idle_ball, "rounding": _rounding,
}  # fmt: skip
"""Name of a move -> its function."""


def moved(row: Row, inputs: Sequence[Value], tensor: Callable[[str], np.ndarray], room: int) -> Value:
    """Apply the move of a row to its inputs.

    Args:
        row: A row whose operation is one of `MOVES`.
        inputs: Results of earlier rows.
        tensor: Name of a stored tensor -> its entries.
        room: How many bytes the arrays of its result may need.

    Raises:
        CheckError: The move is malformed, or its result has another shape than the row states.
    """
    move, shape = MOVES[row.operation], tuple(row.shape)
    result = move(Move(inputs, shape, tensor, room), **arguments(move, row.constants, "its constants"))
    require(result.shape == shape, f"its shape must be {result.shape}")
    return Value(row.name, shape, result.terms)
