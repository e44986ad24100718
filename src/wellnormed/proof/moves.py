"""Moves: rows that rearrange, scale and add their inputs, and so need no bounds of their own.

As with rules, the keyword-only parameters of a move declare the row's constants.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import numpy as np

from wellnormed.proof.arithmetic import EXACT, FORMATS, Arithmetic, Executed, gamma, of_norm
from wellnormed.proof.decimals import ONE, ZERO, root, rounding_up
from wellnormed.proof.gather import gather
from wellnormed.proof.matrices import largest_entry
from wellnormed.proof.positions import Table, positions_of
from wellnormed.proof.reading import Axes, CheckError, Offset, Positive, arguments, require
from wellnormed.proof.rows import Row
from wellnormed.proof.value import LARGE, SMALL, UNIT, Base, Term, Value, require_few, spread, taken

_TERMS = 2**12
"""The most terms of a value."""
_BLOCK = 2**16
"""So many entries are tested at once."""
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
    executed: Executed | None
    replaced: Callable[[str], np.ndarray | None] = lambda name: None
    """Gives the entries of the tensor that an original has in the place of a stored one; None if it is the same."""

    def require_room(self, needed: int) -> None:
        """Refuse a result that would need so many bytes, before memory is asked for."""
        require(needed <= self.room, f"its result would hold {needed} bytes, and {self.room} are left")

    def entries(self, constant: str | float) -> np.ndarray:
        """The entries of a stored tensor, or a number."""
        return np.array(constant) if isinstance(constant, float) else self.tensor(constant)

    def others(self, constant: str | float) -> np.ndarray | None:
        """The entries that an original has in the place of a constant's; None if they are the same."""
        return None if isinstance(constant, float) else self.replaced(constant)

    @property
    def input(self) -> Value:
        """The only input."""
        require(len(self.inputs) == 1, f"it has {len(self.inputs)} inputs instead of 1")
        return self.inputs[0]

    def rounded(self, x: Value, own: int) -> Value:
        """The result, each addend of which is rounded so often in the row's dtype, or more often if the row says so."""
        if self.executed is None:
            return replace(x, fault=x.fault or _HERE) if own else x
        beside = Decimal(abs(self.executed.beside))
        return _rounded(x, max(own, self.executed.roundings or 0), self.executed.dtype, beside)


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
        require(row.replaced(positions) is None, "the original has other positions")
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
    stored, other = row.entries(given[0]), row.others(given[0])
    new, every = stored.astype(float), _both(stored, other)
    if factor is None:
        require(bool((new != 0).all()), "it divides by zero")
        inexact = bool((np.frexp(new)[0] != np.copysign(0.5, new)).any())  # 1 / 2^k is exact
        with np.errstate(all="ignore"):
            new, other = 1 / new, other if other is None else 1 / other
    change = ZERO if other is None else _change(new, other)
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
        error = term.error * (_most(new) + change) * (ONE + 2 * Decimal(UNIT)) + change * term.most
        cancelled = term.cancelled or (change > 0 and bool(zero.any()))
        terms.append(replace(term, factor=product, roundings=roundings, error=error, cancelled=cancelled))
    result = replace(x, terms=tuple(terms), floor=x.floor * (_most(new) + change), gathered={})
    new = _both(new, other)
    if row.executed is not None and not x.fault:
        own = row.executed.dtype
        sums = FORMATS[own].sums
        within = _within(every, sums if isinstance(given[0], float) else own)
        result = replace(result, fault=_HERE * (not within or (factor is None and not _within(new, sums))))
    if _every(new, lambda some: (some == 0) | (abs(some) == 1)):
        return row.rounded(result, 0)
    if _every(new, lambda some: (abs(np.frexp(some)[0]) == 0.5) | (some == 0)):
        return row.rounded(result, 1)  # an underflow
    # a quotient may be computed as the product with the rounded inverse
    own = 0 if row.executed is None else _inexact(every, row.executed.dtype)
    return row.rounded(result, 1 + (factor is None) + own)


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
    fault = next((x.fault for x in row.inputs if x.fault), "")
    floor = sum((x.floor for x in row.inputs), ZERO)
    total = Value(row.inputs[0].name, row.shape, result, floor, fault)
    apart = row.executed is not None and row.executed.roundings == 0
    return row.rounded(total, 0 if apart else len(row.inputs) - 1)


def _joined(a: Term, b: Term) -> Term | None:
    """The sum of two terms that take the same entries; None if its factors cannot be rounded without a large error."""
    first, second = (np.ones(()) if each.factor is None else each.factor for each in (a, b))
    factor, exact = first + second, a.roundings == b.roundings == 0
    moderate = (factor == 0) | ((abs(factor) >= SMALL) & (abs(factor) <= LARGE))
    alike = ((first >= 0) & (second >= 0)) | ((first <= 0) & (second <= 0))
    if not bool((moderate & (exact | alike)).all()):
        return None
    cancelled = a.cancelled or b.cancelled or bool(((factor == 0) & (first != 0)).any())
    roundings, error = max(a.roundings, b.roundings) + 1, a.error + b.error
    return replace(a, factor=factor, roundings=roundings, error=error, cancelled=cancelled)


_HERE = "\0"
"""The fault of a value whose own row has no bound of rounding; `moved` writes the row's name."""


def _most(factor: np.ndarray) -> Decimal:
    """The largest absolute value of a factor."""
    return Decimal(largest_entry(factor))


def _change(stored: np.ndarray, executed: np.ndarray) -> Decimal:
    """The largest difference of two entries, which were rounded once each, and once more by their difference."""
    require(bool(np.isfinite(executed).all()), "the original divides by zero")
    return _most(executed - stored) * (ONE + 2 * Decimal(UNIT)) + 4 * Decimal(UNIT) * (_most(stored) + _most(executed))


def _every(array: np.ndarray, holds: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Whether something holds for every entry, of which some are tested at once."""
    flat = array.reshape(-1)
    return all(bool(holds(flat[start : start + _BLOCK]).all()) for start in range(0, flat.size, _BLOCK))


def _rounded(x: Value, count: int, dtype: str, beside: Decimal = ZERO) -> Value:
    """A value each of whose addends is rounded so often in a dtype, where it must not overflow."""
    form, terms, size = FORMATS[dtype], [], x.floor
    first, most = gamma(count, form.unit) or ZERO, gamma(count + 1, form.unit)
    if x.fault or most is None:
        return replace(x, fault=x.fault or _HERE)
    for term in x.terms:
        base = term.base
        exact = isinstance(base, Base) or not count or not (term.cancelled or _inexact(base, dtype))
        rate = first if exact else most
        factor = term.most
        error = term.error * (ONE + rate) + rate * factor
        reach = base.reach if isinstance(base, Base) else _most(base)
        size += (factor + error) * (reach if term.moved is None else reach + _most(term.moved))
        terms.append(replace(term, error=error))
    floor = x.floor * (ONE + first) + (count + bool(beside)) * form.floor + most * beside
    return replace(x, terms=tuple(terms), floor=floor, fault=_HERE * (size + floor > form.largest), gathered={})


def _both(stored: np.ndarray, other: np.ndarray | None) -> np.ndarray:
    """The entries of a constant, and of the one that an original has in its place."""
    return stored if other is None else np.concatenate([stored.reshape(-1), other.reshape(-1)])


def _inexact(content: np.ndarray, dtype: str) -> int:
    """1 if a dtype does not hold all numbers of a constant, so that the executed program rounds it before, else 0."""
    return int(not _every(content, lambda some: _held(some, dtype)))


def _held(some: np.ndarray, dtype: str) -> np.ndarray:
    """Whether a dtype holds each of some numbers."""
    with np.errstate(all="ignore"):
        short = some.astype({"float64": np.float64, "float16": np.float16}.get(dtype, np.float32))
    if dtype == "bfloat16":
        short = (short.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return short == some


def _within(content: np.ndarray, dtype: str) -> bool:
    """Whether a dtype holds all numbers of a constant, or rounds them by its unit at most."""
    least, most = FORMATS[dtype].normal, float(FORMATS[dtype].largest)
    return _every(content, lambda some: _held(some, dtype) | ((abs(some) >= least) & (abs(some) <= most)))


def _constant(row: Move, *, tensor: str | None = None, number: float | None = None) -> Value:
    """A stored tensor, or a number."""
    given = [each for each in (tensor, number) if each is not None]
    require(len(given) == 1 and not row.inputs, "a constant is a tensor or a number")
    content, other = row.entries(given[0]), row.others(given[0])
    index = np.arange(content.size, dtype=np.int32).reshape(content.shape)
    entries, changed = content.astype(float), other is not None  # the dtype may not hold the other entries
    moved = None if other is None else (other - entries).reshape(-1) * (1 + 4 * UNIT)
    return Value("", content.shape, (Term(entries.reshape(-1), index, cancelled=changed, moved=moved),))


def _idle_ball(row: Move, *, scale: Positive, over: Axes) -> Value:
    """A projection onto balls in which all vectors of the domain lie already.

    Executed, a vector with errors may be shortened by that share of the radius that its error is at most, and any is
    multiplied by a factor near 1, whose relative error that of a norm and a few roundings is.
    """
    x = row.input
    require(len(over) > 0 and list(over) == sorted({*over}), f"over={over} must be axes in rising order")
    require(max(over) < len(x.shape), f"its input has no axis {max(over)}")
    entries = math.prod(x.shape[axis] for axis in over)
    with rounding_up():
        bounds = gather(x, over)
        idle = all(r * r * scale <= entries for r in bounds.radius.flat)
        require(idle, "its ball is not shown to leave all vectors of the domain as they are")
        if x.fault or row.executed is None:
            return replace(x, fault=x.fault or _HERE)
        form, error = FORMATS[row.executed.dtype], bounds.error.max()
        rate = of_norm(entries, row.executed, Arithmetic(), scale / entries)
        size = bounds.radius.max() + error
        if rate is None or size * size * max(ONE, scale) > form.largest:
            return replace(x, fault=_HERE)
        share = rate + error * root(scale / entries) * (ONE + rate)
        terms = tuple(replace(t, error=t.error * (ONE + share) + share * t.most) for t in x.terms)
        return replace(x, terms=terms, floor=x.floor * (ONE + share) + form.floor, gathered={})


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
    return _rounded(replace(x, terms=tuple(terms), gathered={}), 1, "real" if row.executed == EXACT else dtype)


MOVES: dict[str, Callable[..., Value]] = {
    "pick": _pick, "times": _times, "add": _add, "constant": _constant, "idle_ball": _idle_ball, "rounding": _rounding,
}  # fmt: skip
"""Name of a move -> its function."""


def moved(
    row: Row,
    inputs: Sequence[Value],
    tensor: Callable[[str], np.ndarray],
    room: int,
    replaced: Callable[[str], np.ndarray | None] = lambda name: None,
) -> Value:
    """Apply the move of a row to its inputs.

    Args:
        row: A row whose operation is one of `MOVES`.
        inputs: Results of earlier rows.
        tensor: Name of a stored tensor -> its entries.
        room: How many bytes the arrays of its result may need.
        replaced: As in `Move`.

    Raises:
        CheckError: The move is malformed, or its result has another shape than the row states.
    """
    move, shape = MOVES[row.operation], tuple(row.shape)
    seen = Move(inputs, shape, tensor, room, row.executed, replaced)
    result = move(seen, **arguments(move, row.constants, "its constants"))
    require(result.shape == shape, f"its shape must be {result.shape}")
    fault = row.name if result.fault == _HERE else result.fault
    return Value(row.name, shape, result.terms, result.floor, fault)
