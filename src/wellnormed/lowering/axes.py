"""Choose the axes of the groups whose bounds an operation's row reads; the proof checks the bounds that follow."""

from collections.abc import Iterable

import numpy as np

from wellnormed.proof.value import Base, Term, Value


def inner_axes(x: Value, *others: Value) -> tuple[int, ...]:
    """The axes along which all entries lie in one group of every base, and are not copies of one entry.

    An entrywise operation reads groups along these axes: finer groups would give no better bound, and coarser ones
    would have to be put together. For an operation on several values of one shape, pass all of them.
    """
    terms = [term for value in (x, *others) for term in value.terms]

    def inner(axis: int) -> bool:
        extends = [_extends(term, axis, x.shape) for term in terms]
        return None not in extends and (True in extends or not any(isinstance(term.base, Base) for term in terms))

    return tuple(axis for axis, size in enumerate(x.shape) if size > 1 and inner(axis))


def with_inner_axes(x: Value, axes: Iterable[int]) -> tuple[int, ...]:
    """The given axes, and the inner axes along which no entry is another output of a linear map.

    So an operation that treats the heads of a projection one by one keeps the bound of each head.
    """
    own = {axis % len(x.shape) for axis in axes}
    return tuple(sorted(own | {axis for axis in inner_axes(x) if axis in own or not _crosses_outputs(x, axis)}))


def parts_of_outputs(x: Value, axes: tuple[int, ...]) -> dict[str, int]:
    """Name of a linear row -> the number of equal parts to cut its outputs into, so that every group lies in one part.

    Every part, such as a head of a projection, then has a bound of its own.
    """
    parts = {}
    for name, terms in _linear_terms(x).items():
        base = terms[0].base
        assert isinstance(base, Base)
        outputs = base.shape[-1]
        if all(term.index is base.order for term in terms):
            continue
        features = [(term.index % outputs, term.index >= 0) for term in terms]  # and which entries there are
        low = np.min([x.min(axis=axes, keepdims=True, initial=outputs, where=there) for x, there in features], axis=0)
        high = np.max([x.max(axis=axes, keepdims=True, initial=-1, where=there) for x, there in features], axis=0)
        some = high >= 0
        width = int((high - low)[some].max(initial=0)) + 1
        if width < outputs and outputs % width == 0 and not (low[some] % width).any():
            parts[name] = outputs // width
    return parts


def _linear_terms(x: Value) -> dict[str, list[Term]]:
    """Name of every linear row from which a value has entries -> the terms with these entries."""
    by_row: dict[str, list[Term]] = {}
    for term in x.terms:
        if isinstance(term.base, Base) and term.base.divisible:
            by_row.setdefault(term.base.name, []).append(term)
    return by_row


def _crosses_outputs(x: Value, axis: int) -> bool:
    """Whether entries along an axis are different outputs of one linear map."""
    terms = (term for of_row in _linear_terms(x).values() for term in of_row)
    features = (term.index % term.base.shape[-1] for term in terms)
    return any((feature != feature.take([0], axis)).any() for feature in features)


def _extends(term: Term, axis: int, shape: tuple[int, ...]) -> bool | None:
    """True if entries along an axis are different and of one group, False if they are copies of one, None otherwise."""
    base, index = term.base, term.index
    if not isinstance(base, Base):
        return False
    if index is base.order:
        return axis in base.axes or None
    if bool((index == index.take([0], axis)).all()) and bool((index >= 0).any()):
        return False
    # missing entries, whose index is negative, count as members of any group
    groups = base.groups(index)
    highest = groups.max(axis, keepdims=True)
    return bool(((groups == highest) | (groups < 0)).all()) or None
