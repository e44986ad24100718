"""Claims about stored tensors: how each measure is bounded, and how stated values are proved, in float64.

The values of a claim carry a slack of 1e-9, so that a machine that rounds otherwise proves them too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from wellnormed.proof.matrices import convolution_below, convolution_norm, largest_entry, norms_below, proved_norm
from wellnormed.proof.reading import Size, arguments, read, require, word
from wellnormed.proof.rows import Claim
from wellnormed.proof.value import TINY, UNIT, gamma

_SLACK = 1e-9
_BLOCK = 2**24  # so many entries of differences of rows are in memory at once

Values = tuple[float, ...]
Pairs = tuple[tuple[int, int], ...]


def complete(claim: Claim) -> Claim:
    """Read the settings of a claim, and add the defaults; its values stay as they are."""
    require(claim.measure in MEASURES, f"nothing is known of the measure {claim.measure!r}")
    measure, count = claim.measure, len(claim.tensors)
    require(count in MEASURES[measure].tensors, f"{measure} is claimed of {count} tensors")
    settings = arguments(MEASURES[measure].bound, claim.constants, f"the settings of {measure}")
    return replace(claim, constants=settings)


def stated(claim: Claim) -> Claim:
    """Complete a claim, and check that it has as many values as its measure, none negative; nothing is proved yet."""
    claim = complete(claim)
    values, settings = read(tuple[float, ...], claim.values, f"the values of {claim.measure}"), claim.constants
    count = len(settings["pairs"]) if claim.measure == "product" else settings.get("parts", 1)
    fits = len(values) == count > 0 and min(values) >= 0
    require(fits, f"{claim.measure} has values {values[:4]}, which are not {count} norms")
    return replace(claim, values=values)


def bound(claim: Claim, tensor: Callable[[str], np.ndarray]) -> Claim:
    """Replace the values of a claim, whose settings are complete, by proved ones.

    Args:
        claim: The claim; its own values do not matter.
        tensor: Name of a stored tensor -> its entries.
    """
    arrays, slip = _operands(claim, tensor)
    with np.errstate(all="ignore"):
        values = (np.ravel(MEASURES[claim.measure].bound(*arrays, **claim.constants)) + slip).tolist()
    require(all(map(math.isfinite, values)), f"the {_named(claim)} is beyond all floats; scale the weights down")
    # a domain is chosen by the largest entry or row of a table, so these have no more slack than another order needs
    slack = {"max_abs": 0.0, "row_norm": 4 * (arrays[0].shape[-1] + 8) * UNIT if arrays[0].ndim else 0.0}
    factor = 1 + slack.get(claim.measure, _SLACK)
    slackened = tuple(v if factor == 1 or not v else math.nextafter(v * factor, math.inf) for v in values)
    return Claim(claim.measure, claim.tensors, slackened, claim.constants)


def prove(claim: Claim, tensor: Callable[[str], np.ndarray]) -> None:
    """Raise a `CheckError` unless the values of a claim, whose number was checked, are proved."""
    (arrays, slip), measure = _operands(claim, tensor), MEASURES[claim.measure]
    values = tuple(value - slip for value in claim.values)
    require(min(values) >= 0, f"the {_named(claim)} is rounded by more than {claim.values[:4]}")
    with np.errstate(all="ignore"):
        if measure.below is None:
            least = np.ravel(measure.bound(*arrays, **claim.constants)).tolist()
            proved = all(a <= b for a, b in zip(least, values, strict=True))
        else:
            proved = measure.below(*arrays, values, **claim.constants)
    require(proved, f"{_named(claim)} at {claim.values[:4]} could not be proved")


def _operands(claim: Claim, tensor: Callable[[str], np.ndarray]) -> tuple[list[np.ndarray], float]:
    """What the measure of a claim is of, and by how much at most that has been moved by rounding it."""
    if claim.measure == "product":
        return [tensor(name).astype(np.float64, copy=False) for name in claim.tensors], 0.0
    array, slip = scaled(claim.tensors, tensor)
    return [array], slip


def scaled(names: Sequence[str], tensor: Callable[[str], np.ndarray]) -> tuple[np.ndarray, float]:
    """`w`, `s w` or `s w + t` of the tensors w, s and t, with a number of s and of t for each `w_i`.

    Returns:
        The entries as computed, and twice as much as their roundings, together, may move a measure: an entry is rounded
        twice, and no measure of it exceeds 1 for a kernel with a single entry 1. What is left covers the rounding of a
        value from which this is subtracted, as none that exceeds the sum of all entries is in doubt.
    """
    w, *others = (tensor(name).astype(np.float64, copy=False) for name in names)
    if not others:
        return w, 0.0
    require(all(each.shape == w.shape[:1] for each in others), "its scale or shift is not of the outputs")
    s, *shift = (each.reshape(-1, *[1] * (w.ndim - 1)) for each in others)
    with np.errstate(all="ignore"):
        product = w * s
        total, sizes = sum(shift, product), sum(map(abs, shift), abs(product))
    return total, float(sizes.sum()) * 4 * UNIT * (1 + 1e-6) + w.size * TINY


def _named(claim: Claim) -> str:
    return f"{claim.measure} of {' and '.join(map(word, claim.tensors))}"


def matrix(tensor: np.ndarray, transposed: bool) -> np.ndarray:
    """View a tensor as the matrix `(outputs, inputs)`; a kernel's axes after the first count as inputs."""
    require(tensor.ndim == 2 or (tensor.ndim > 2 and not transposed), f"a tensor of shape {tensor.shape} is no matrix")
    return tensor.T if transposed else tensor.reshape(len(tensor), -1)


def parts_of(array: np.ndarray, parts: int) -> np.ndarray:
    """Split the first axis `(rows, ...)` into equal parts, `(parts, rows / parts, ...)`."""
    require(len(array) % parts == 0, f"{len(array)} rows are no {parts} equal parts")
    return array.reshape(parts, -1, *array.shape[1:])


def _spectral(w: np.ndarray, *, parts: Size = 1, transposed: bool = False) -> Values:
    """Largest singular value of each of equal parts of the rows of a matrix, or of its transpose."""
    return tuple(proved_norm(part[None]) for part in parts_of(matrix(w, transposed), parts))


def _spectral_below(w: np.ndarray, values: Values, parts: int, transposed: bool) -> bool:
    matrices = parts_of(matrix(w, transposed), parts)
    return all(norms_below(w[None], v) for w, v in zip(matrices, values, strict=True))


def _factors(
    left: np.ndarray, right: np.ndarray, pairs: Sequence, parts: tuple, transposed: tuple
) -> Iterator[tuple[np.ndarray, float, int]]:
    """Yield, for every pair of parts A and B of the rows, `A^T B / 2^n` as computed, its error, and n.

    The error is at most `gamma_k |A|_F |B|_F`, where k is the number of rows of a part.
    """
    factors = [parts_of(matrix(w, t), n) for w, t, n in zip((left, right), transposed, parts, strict=True)]
    require(factors[0].shape[1] == factors[1].shape[1], "the factors of a product have groups of other sizes")
    for pair in pairs:
        require(all(i < n for i, n in zip(pair, parts, strict=True)), f"there is no pair {pair}")
        a, b = (matrices[i] for matrices, i in zip(factors, pair, strict=True))
        exponents = [math.frexp(largest_entry(w))[1] for w in (a, b)]
        a, b = (np.ldexp(w, -exponent) for w, exponent in zip((a, b), exponents, strict=True))
        error = gamma(len(a) + 1) * float(np.linalg.norm(a)) * float(np.linalg.norm(b)) * (1 + 1e-6)
        yield a.T @ b, error + TINY if error else 0.0, sum(exponents)


def _product(
    left: np.ndarray, right: np.ndarray, *, pairs: Pairs, parts: tuple[Size, Size], transposed: tuple[bool, bool]
) -> Values:
    """Largest singular value of `A_i^T B_j` for every pair (i, j)."""
    factors = _factors(left, right, pairs, parts, transposed)
    return tuple(_shifted_up(proved_norm(w[None]) + error, exponent) for w, error, exponent in factors)


def _shifted_up(value: float, exponent: int) -> float:
    """`value * 2^exponent`, rounded up where that underflows; infinity beyond the floats."""
    return float(np.nextafter(np.ldexp(value, exponent), np.inf)) if value else 0.0


def _product_below(left: np.ndarray, right: np.ndarray, values: Values, **settings: Any) -> bool:
    for (w, error, exponent), value in zip(_factors(left, right, **settings), values, strict=True):
        # where this underflows it is less than the error; where it overflows no product is as large
        rest = float(np.ldexp(value, -exponent)) * (1 - 4 * UNIT) - error
        if error and not (rest > 0 and norms_below(w[None], rest)):
            return False
    return True


def _lengths(rows: np.ndarray) -> np.ndarray:
    """Upper bounds of the Euclidean norms of rows `(count, size)`, of shape `(count,)`."""
    largest = largest_entry(rows) if rows.size else 0.0
    if not largest:
        return np.zeros(len(rows))
    exponent = math.frexp(largest)[1]
    squares = np.square(np.ldexp(rows, -exponent)).sum(1)
    lengths = np.sqrt(squares + TINY) * (1 + (rows.shape[1] + 8) * UNIT)
    return np.where(rows.any(1), np.nextafter(np.ldexp(lengths, exponent), np.inf), 0.0)


def _group_norm(x: np.ndarray, *, parts: Size = 1) -> Values:
    """Euclidean norm of each of equal parts of a vector."""
    return tuple(_lengths(parts_of(x.reshape(-1), parts)).tolist())


def _row_norm(x: np.ndarray) -> Values:
    """Largest Euclidean norm over the last axis."""
    return (float(_lengths(x.reshape(-1, x.shape[-1] if x.ndim else 1)).max()),)


def _row_difference(w: np.ndarray, *, transposed: bool = False) -> Values:
    """Largest Euclidean norm of the difference of two rows of a matrix, or of its transpose."""
    rows = matrix(w, transposed)
    return (max(float(_lengths(rows - row).max()) for row in rows) * (1 + 2 * UNIT),)


def _row_sum(x: np.ndarray, *, parts: Size = 1) -> Values:
    """Largest sum of absolute values over the last axis, for each of equal parts of the rows."""
    sums = parts_of(abs(x).reshape(-1, x.shape[-1]), parts).sum(-1).max(1)
    return tuple((sums * (1 + (x.shape[-1] + 2) * UNIT)).tolist())


def _diameter(x: np.ndarray) -> Values:
    """An upper bound of the largest distance of two vectors along the last axis.

    No two vectors are further apart than the sum of the two largest distances from a centre, which is the mean or 0,
    whichever gives less. With the mean, the bound is at most twice the largest distance, which itself would need all
    pairs.
    """
    if not (largest := largest_entry(x)):
        return (0.0,)
    exponent = math.frexp(largest)[1]
    rows = np.ldexp(x.reshape(-1, x.shape[-1]), -exponent)
    count, bound = max(1, _BLOCK // rows.shape[1]), math.inf
    for centre in (rows.mean(0), 0.0):
        blocks = [rows[start : start + count] - centre for start in range(0, len(rows), count)]
        distances = np.sort(np.concatenate([np.sqrt(np.square(block).sum(1)) for block in blocks]))
        bound = min(bound, float(distances[-2:].sum()) * (1 + (rows.shape[1] + 12) * UNIT) + math.sqrt(TINY))
    return (_shifted_up(bound, exponent),)


def _taps(w: np.ndarray, *, groups: Size) -> Values:
    """The sum over taps of the norms of their matrices, which bounds a convolution in the largest norm of a pixel."""
    require(w.ndim >= 3, "a convolution's kernel has three axes or more")
    taps = np.moveaxis(w.reshape(*w.shape[:2], -1), -1, 0)
    return (math.fsum(proved_norm(parts_of(tap, groups)) for tap in taps) * (1 + 4 * UNIT),)


class Measure(NamedTuple):
    """A number of stored tensors that claims bound."""

    bound: Callable[..., float | Values]
    """Computes proved values from the tensors and settings; its keyword-only parameters declare the settings."""
    below: Callable[..., bool] | None = None
    """Decides from the tensors, stated values and settings whether the values are proved, in less time than `bound`
    takes; None to compare them with those of `bound`."""
    tensors: tuple[int, ...] = (1,)
    """How many tensors it may be of; but for a product, two are scaled to one, and three are scaled and shifted."""


MEASURES = {
    "spectral": Measure(_spectral, _spectral_below), "product": Measure(_product, _product_below, (2,)),
    "group_norm": Measure(_group_norm, tensors=(1, 3)), "taps": Measure(_taps, tensors=(1, 2)),
    "positive_norm": Measure(lambda x: _group_norm(np.maximum(x, 0))),
    "row_norm": Measure(_row_norm), "row_difference": Measure(_row_difference), "row_sum": Measure(_row_sum),
    "diameter": Measure(_diameter), "max_abs": Measure(lambda x: (largest_entry(x),)),
    "convolution": Measure(convolution_norm, convolution_below, (1, 2)),
}  # fmt: skip
"""All measures by name."""
