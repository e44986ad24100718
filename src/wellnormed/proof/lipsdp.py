"""The joint bound of linear maps and functions of every entry (LipSDP by neurons), from multipliers that a row names.

Let `z_i = f_i(y_i)` entry by entry, where `y_i = sum_j A_ij z_j` up to constants, z_0 is the start, and the sum is over
j < i; and let the end be `sum_j C_j z_j`. The slopes of f_i lie in `[m_i - r_i, m_i + r_i]`, so that the changes of an
entry have `|dz_i - m_i dy_i| <= r_i |dy_i|`, and so have these times any number. Now if, for one positive multiplier
for each entry, which d_i holds,

    L^2 |dz_0|^2 + sum_i |d_i (dz_i - m_i dy_i)|^2 - sum_i |d_i r_i dy_i|^2 - |sum_j C_j dz_j|^2 >= 0

for all vectors dz, then the end changes by at most `L |dz_0|`, because the first sum is not larger than the second.
(Fazlyab et al., NeurIPS 2019. Its first version also had multipliers for pairs of neurons, which are false.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from wellnormed.proof.claims import matrix
from wellnormed.proof.decimals import float_up, least, rounding_up
from wellnormed.proof.inference import Inference, weight_of
from wellnormed.proof.reading import Positive, require
from wellnormed.proof.rows import Bounds
from wellnormed.proof.value import TINY, Base, Term, Value, gamma, unmoved

MOST, DEEPEST, _HELD = 5120, 200, 2**26
"""The most entries of the start, of all functions and of the end together, the most linear maps and functions of one
bound, and the most entries of all maps that they have."""
_LOW, _HIGH = 2.0**-200, 2.0**200
"""Bounds, multipliers, centres and radii lie between these, so that products of three neither over- nor underflow."""


class Map(NamedTuple):
    """A matrix as it was computed: an entry errs by at most gamma_k times the majorant's, where k is `roundings`.

    The majorant has the same sums of absolute values, and `TINY` for underflow.
    """

    matrix: np.ndarray
    majorant: np.ndarray
    roundings: int
    """Zero for the identity only."""


class Function(NamedTuple):
    """A function of every entry: the centre and the radius of its slopes, and the map A_ij for every j."""

    centre: float
    radius: float
    maps: Mapping[int, Map]


class Network:
    """The functions and linear maps that lead from one value to others.

    Args:
        start: The value z_0.
        tensor: Gives the entries of a stored tensor.
    """

    def __init__(self, start: Value, tensor: Callable[[str], np.ndarray]) -> None:
        self.functions: list[Function] = []
        """The functions that were met, in order: number i has the result `z_(i + 1)`."""
        self._start, self._tensor, self._known = start, tensor, dict[int, dict[int, Map]]()

    @np.errstate(all="ignore")
    def maps(self, x: Value) -> dict[int, Map]:
        """The linear map of every z_j of which a value is the sum, up to a constant.

        Raises:
            CheckError: It is no such sum.
        """
        if x is self._start:
            return {0: _identity(x)}
        total: dict[int, Map] = {}
        for term in x.terms:
            if isinstance(term.base, Base):
                require(applies(term, term.base), "entries are moved between its start and its end")
                for j, each in self._of_base(term.base).items():
                    own = each if term.factor is None else _scaled(each, term.factor.reshape(-1, 1), term.roundings)
                    total[j] = _sum(total[j], own) if j in total else own
        require(len(total) > 0, "a constant is between its start and its end")
        return total

    def _of_base(self, base: Base) -> dict[int, Map]:
        if unmoved(self._start) is base:
            return {0: _identity(base)}
        if id(base) not in self._known:
            require(joins(base), "another operation is between its start and its end")
            row: Inference = base.inference
            maps = self.maps(row.inputs[0])
            if row.operation == "linear":
                name, transposed = weight_of(row)
                weight = matrix(self._tensor(name), transposed)
                maps = {j: _product(weight, each) for j, each in maps.items()}
            elif row.operation == "elementwise":
                self.functions.append(Function(*slopes_of(row), maps))
                maps = {len(self.functions): _identity(base)}
            self._known[id(base)] = maps
            held = sum(each.matrix.size for known in self._known.values() for each in known.values())
            require(len(self._known) <= DEEPEST and held <= _HELD, "its maps and functions are too many")
        return self._known[id(base)]

    @np.errstate(all="ignore")
    def proves(self, end: Mapping[int, Map], multipliers: Sequence[np.ndarray], bound: float) -> bool:
        """Whether multipliers prove that a sum of maps changes by at most `bound` times the start.

        The form is `|F z|^2 - |G z|^2`; powers of two times the entries of z make the columns of F about 1 long. With
        s the sum of squares of majorants of F and G, `fl(F^T F - G^T G)` errs by at most `gamma_k s` in the spectral
        norm, where k counts the roundings of two entries and of a sum over all rows. If its Cholesky factorisation
        completes after c was subtracted from the diagonal of n entries, the form has no eigenvalue below
        `c - gamma_k s - gamma_(2n + 3) s` (Rump, BIT 2006; no trace exceeds s).
        """
        numbers = [np.full(self._start.shape[-1], bound), *multipliers]
        slopes = [np.array([each.radius, abs(each.centre) or each.radius]) for each in self.functions]
        if not all(bool(((each >= _LOW) & (each <= _HIGH)).all()) for each in (*numbers, *slopes)):
            return False
        scales = [np.ldexp(1.0, -np.frexp(each)[1]) for each in numbers]
        places = [slice(*ends) for ends in pairwise(np.cumsum([0, *map(len, numbers)]).tolist())]
        n, outputs = places[-1].stop, len(next(iter(end.values())).matrix)
        require(n + outputs <= MOST, f"its start, functions and end have {n + outputs} entries, more than {MOST}")
        f, g = np.diag(np.concatenate(numbers) * np.concatenate(scales)), np.zeros((n + outputs, n))
        blocks = [(g, slice(n, None), np.ones(1), j, each) for j, each in end.items()]
        for place, d, function in zip(places[1:], multipliers, self.functions, strict=True):
            for j, each in function.maps.items():
                blocks += [(f, place, -function.centre * d, j, each), (g, place, function.radius * d, j, each)]
        size, most = float(np.square(np.diagonal(f)).sum()), 0
        for matrix_of, place, factor, j, each in blocks:
            scale = factor[:, None] * scales[j]
            matrix_of[place, places[j]] = scale * each.matrix
            size += float(np.square(abs(scale) * each.majorant + TINY).sum())
            most = max(most, each.roundings)
        form = f.T @ f - g.T @ g
        form[np.diag_indices(n)] -= gamma(2 * most + 4 * n + outputs + 16) * size * (1 + 1e-6) + TINY
        try:
            return math.isfinite(size) and bool(np.isfinite(np.linalg.cholesky(form)).all())
        except np.linalg.LinAlgError:
            return False


def joins(base: Base) -> bool:
    """Whether a base can be part of a network: a linear map, a function of every entry, or the end of a network."""
    return base.inference is not None and (base.divisible or base.inference.operation in ("elementwise", "lipsdp"))


def applies(term: Term, base: Base) -> bool:
    """Whether a term moves no entry of its base, and has one factor for all vectors."""
    return term.index is base.order and (term.factor is None or term.factor.size == (term.factor.shape or (1,))[-1])


def slopes_of(row: Inference) -> tuple[float, float]:
    """Centre and radius of an interval that has all slopes of a row's function; learned slopes have any sign."""
    low, high = map(Fraction, row.function().slopes)
    low = min([low, *(-Fraction(claim.values[0]) for claim in row.claims)])
    centre = float((low + high) / 2)
    radius = max(high - Fraction(centre), Fraction(centre) - low)
    with rounding_up():
        return centre, float_up(Decimal(radius.numerator) / Decimal(radius.denominator))


def _identity(x: Value | Base) -> Map:
    require(x.shape[-1] <= MOST, f"its vectors have {x.shape[-1]} entries, more than {MOST}")
    return Map(np.eye(x.shape[-1]), np.eye(x.shape[-1]), 0)


def _product(weight: np.ndarray, x: Map) -> Map:
    if not x.roundings:
        return Map(weight, abs(weight), 1)
    return Map(weight @ x.matrix, abs(weight) @ x.majorant + TINY, x.roundings + weight.shape[1])


def _scaled(x: Map, factor: np.ndarray, roundings: int) -> Map:
    return Map(factor * x.matrix, abs(factor) * x.majorant + TINY, x.roundings + roundings + 1)


def _sum(a: Map, b: Map) -> Map:
    return Map(a.matrix + b.matrix, a.majorant + b.majorant, max(a.roundings, b.roundings) + 1)


def lipsdp(row: Inference, *, multipliers: tuple[str, ...], bound: Positive) -> Bounds:
    """The end of a network, which is the first input, as it is; the second input is its start."""
    row.only(2)
    end, start = row.inputs
    row.groups(len(row.shape) - 1)
    require(end.shape == row.shape, "its result is not the end")
    network = Network(start, row.tensor)
    maps = network.maps(end)
    given = [row.tensor(name) for name in multipliers]
    widths = [(len(next(iter(each.maps.values())).matrix),) for each in network.functions]
    require([each.shape for each in given] == widths, "it needs a multiplier for every entry of every function")
    require(network.proves(maps, given, float(bound)), f"its multipliers do not prove the bound {bound}")
    (radius, gain, largest, error), of_start = row.bounds
    return Bounds(radius, least(gain, bound * of_start.gain), largest, error)
