"""Claims on stored tensors: what bounds them, and whether given values are proved, in float64.

Values carry a slack of 1e-9, so that the rounding of another machine proves them too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from wellnormed.proof.matrices import (
    TINY,
    convolution_below,
    convolution_norm,
    gamma,
    largest_entry,
    norms_below,
    proved_norm,
)
from wellnormed.proof.reading import integer, integers, number, of_type, require, texts, word
from wellnormed.proof.rows import Claim
from wellnormed.proof.value import UNIT

_SLACK = 1e-9
_BLOCK = 2**24  # entries of the differences of rows that are held at once

Values = tuple[float, ...]


def complete(claim: Claim) -> Claim:
    """The claim with all settings of its measure, if their types and numbers are as they must be; not proved yet."""
    require(claim.measure in MEASURES, f"nothing is known of the measure {claim.measure!r}")
    measure, defaults = claim.measure, MEASURES[claim.measure].settings
    names = texts(claim.tensors, "a claim's tensors")
    require(len(names) == 1 + (measure == "product"), f"{measure} is claimed of {len(names)} tensors")
    given = of_type(claim.constants, dict, "a claim's constants")
    require(given.keys() <= defaults.keys(), f"{measure} has no settings {sorted(given.keys() - defaults.keys())}")
    settings: dict[str, Any] = {}
    for key, default in defaults.items():
        each = given.get(key, default)
        require(each is not None, f"{measure} lacks {key}")
        if key == "pairs":
            pairs = [integers(pair, key) for pair in of_type(each, (list, tuple), key)]
            require(all(len(pair) == 2 for pair in pairs), "a pair of heads has two numbers")
            settings[key] = pairs
        elif key == "transposed":
            several = measure == "product"
            flags = [of_type(t, bool, key) for t in (of_type(each, (list, tuple), key) if several else [each])]
            settings[key] = tuple(flags) if several else flags[0]
        else:
            settings[key] = integers(each, key, 1) if default is None and key != "groups" else integer(each, key, 1)
    values = of_type(claim.values, (list, tuple), "a claim's values")
    norms = tuple(number(each, "a claim's value") for each in values)
    require(len(norms) > 0 and min(norms, default=-1) >= 0, f"{measure} has values {norms[:4]}, which are no norms")
    return Claim(measure, names, norms, settings)


def bound(claim: Claim, tensor: Callable[[str], np.ndarray]) -> Claim:
    """The claim, whose settings are complete, with values that are proved."""
    arrays = _wide(claim, tensor)
    with np.errstate(all="ignore"):
        values = MEASURES[claim.measure].bound(*arrays, **claim.constants)
    require(all(map(math.isfinite, values)), f"the {_named(claim)} is beyond all floats; scale the weights down")
    # a domain is chosen by the largest entry or row of a table: these are as near as sums in another order are
    slack = {"max_abs": 0.0, "row_norm": 4 * (arrays[0].shape[-1] + 8) * UNIT if arrays[0].ndim else 0.0}
    factor = 1 + slack.get(claim.measure, _SLACK)
    grown = tuple(v if factor == 1 or not v else math.nextafter(v * factor, math.inf) for v in values)
    return Claim(claim.measure, claim.tensors, grown, claim.constants)


def prove(claim: Claim, tensor: Callable[[str], np.ndarray]) -> None:
    """Raise a `CheckError` unless the claim is true."""
    arrays, (least, _, below) = _wide(claim, tensor), MEASURES[claim.measure]
    with np.errstate(all="ignore"):
        if below is None:
            needed = least(*arrays, **claim.constants)
            proved = len(needed) == len(claim.values) and all(a <= b for a, b in zip(needed, claim.values, strict=True))
        else:
            proved = below(*arrays, claim.values, **claim.constants)
    require(proved, f"{_named(claim)} at {claim.values[:4]} could not be proved")


def _wide(claim: Claim, tensor: Callable[[str], np.ndarray]) -> list[np.ndarray]:
    return [tensor(name).astype(np.float64, copy=False) for name in claim.tensors]


def _named(claim: Claim) -> str:
    return f"{claim.measure} of {' and '.join(map(word, claim.tensors))}"


def matrix(tensor: np.ndarray, transposed: bool) -> np.ndarray:
    """A stored tensor as the matrix from inputs to outputs."""
    require(tensor.ndim == 2 or (tensor.ndim > 2 and not transposed), f"a tensor of shape {tensor.shape} is no matrix")
    return tensor.T if transposed else tensor.reshape(len(tensor), -1)


def parts_of(array: np.ndarray, parts: int) -> np.ndarray:
    """Equal groups of the first axis, along an axis of their own."""
    require(len(array) % parts == 0, f"{len(array)} rows are no {parts} equal parts")
    return array.reshape(parts, -1, *array.shape[1:])


def _spectral(w: np.ndarray, parts: int, transposed: bool) -> Values:
    """Largest singular value of each of equal groups of rows of a matrix, or of its transpose."""
    return tuple(proved_norm(part[None]) for part in parts_of(matrix(w, transposed), parts))


def _spectral_below(w: np.ndarray, values: Values, parts: int, transposed: bool) -> bool:
    groups = parts_of(matrix(w, transposed), parts)
    return len(values) == parts and all(norms_below(w[None], v) for w, v in zip(groups, values, strict=True))


def _factors(
    left: np.ndarray, right: np.ndarray, pairs: Sequence, parts: tuple, transposed: tuple
) -> Iterator[tuple[np.ndarray, float, list[float]]]:
    """For every pair of groups of rows the computed product `A^T B`, its distance from the exact one, and two scales.

    Computed, it differs by at most `gamma_k |A|_F |B|_F`, k being the rows of a group.
    """
    require(len(parts) == len(transposed) == 2, "a product has two factors")
    groups = [parts_of(matrix(w, t), n) for w, t, n in zip((left, right), transposed, parts, strict=True)]
    require(groups[0].shape[1] == groups[1].shape[1], "the factors of a product have groups of other sizes")
    for pair in pairs:
        require(all(i < n for i, n in zip(pair, parts, strict=True)), f"there is no pair {pair}")
        a, b = (group[i] for group, i in zip(groups, pair, strict=True))
        scales = [2.0 ** math.frexp(largest_entry(w))[1] if w.any() else 1.0 for w in (a, b)]
        a, b = a / scales[0], b / scales[1]
        error = gamma(len(a) + 1) * float(np.linalg.norm(a)) * float(np.linalg.norm(b)) * (1 + 1e-6)
        yield a.T @ b, error + TINY if error else 0.0, scales


def _product(left: np.ndarray, right: np.ndarray, **settings: Any) -> Values:
    """Largest singular value of `A_i^T B_j`."""
    return tuple(
        _times(proved_norm(w[None]) + error, *scales) for w, error, scales in _factors(left, right, **settings)
    )


def _times(value: float, *scales: float) -> float:
    """A product with powers of two, rounded up where it underflows."""
    for scale in scales:
        value = math.nextafter(value * scale, math.inf) if value else 0.0
    return value


def _product_below(left: np.ndarray, right: np.ndarray, values: Values, **settings: Any) -> bool:
    require(len(values) == len(settings["pairs"]), "a product has a value for each pair")
    for (w, error, scales), value in zip(_factors(left, right, **settings), values, strict=True):
        rest = value / scales[0] / scales[1] * (1 - 4 * UNIT) - error
        if error and not (rest > 0 and norms_below(w[None], rest)):
            return False
    return True


def _lengths(rows: np.ndarray) -> np.ndarray:
    """Euclidean norms of rows, or more."""
    largest = largest_entry(rows) if rows.size else 0.0
    if not largest:
        return np.zeros(len(rows))
    scale = 2.0 ** math.frexp(largest)[1]
    squares = np.square(rows / scale).sum(1)
    lengths = np.sqrt(squares + TINY) * (1 + (rows.shape[1] + 8) * UNIT)
    return np.where(rows.any(1), np.nextafter(lengths * scale, np.inf), 0.0)


def _group_norm(x: np.ndarray, parts: int = 1) -> Values:
    """Euclidean norm of each of equal groups of a vector's entries."""
    return tuple(_lengths(parts_of(x.reshape(-1), parts)).tolist())


def _row_norm(x: np.ndarray) -> Values:
    """Largest Euclidean norm over the last axis."""
    return (float(_lengths(x.reshape(-1, x.shape[-1] if x.ndim else 1)).max()),)


def _row_difference(w: np.ndarray, transposed: bool) -> Values:
    """Largest Euclidean norm of the difference of two rows of a matrix, or of its transpose."""
    rows = matrix(w, transposed)
    return (max(float(_lengths(rows - row).max()) for row in rows) * (1 + 2 * UNIT),)


def _row_sum(x: np.ndarray, parts: int) -> Values:
    """Largest sum of absolute values over the last axis, for each of equal groups of rows."""
    sums = parts_of(abs(x).reshape(-1, x.shape[-1]), parts).sum(-1).max(1)
    return tuple((sums * (1 + (x.shape[-1] + 2) * UNIT)).tolist())


def _diameter(x: np.ndarray) -> Values:
    """Largest distance of two vectors along the last axis, or more.

    No two are further apart than the two most distant from a centre are from it: from the mean, or from 0 if that is
    less. With the mean it is at most twice the largest distance; the largest distance itself takes the square of their
    number.
    """
    if not (largest := largest_entry(x)):
        return (0.0,)
    scale = 2.0 ** math.frexp(largest)[1]
    rows = x.reshape(-1, x.shape[-1]) / scale
    step, most = max(1, _BLOCK // rows.shape[1]), math.inf
    for centre in (rows.mean(0), 0.0):
        blocks = [rows[start : start + step] - centre for start in range(0, len(rows), step)]
        distances = np.sort(np.concatenate([np.sqrt(np.square(block).sum(1)) for block in blocks]))
        most = min(most, float(distances[-2:].sum()) * (1 + (rows.shape[1] + 12) * UNIT) + math.sqrt(TINY))
    return (_times(most, scale),)


def _convolution(w: np.ndarray, **settings: Any) -> Values:
    """Largest gain of a convolution without padding, in the Euclidean norm."""
    _require_kernel(w, **settings)
    return (convolution_norm(w, **settings),)


def _convolution_below(w: np.ndarray, values: Values, **settings: Any) -> bool:
    _require_kernel(w, **settings)
    return len(values) == 1 and convolution_below(w, values[0], **settings)


def _require_kernel(w: np.ndarray, size: tuple, stride: tuple, dilation: tuple, groups: int) -> None:
    require(w.ndim >= 3 and len(size) == len(stride) == len(dilation) == w.ndim - 2, "a convolution's settings misfit")
    require(w.shape[0] % groups == 0, f"{w.shape[0]} outputs are no {groups} equal parts")


def _taps(w: np.ndarray, groups: int) -> Values:
    """The sum over taps of the norms of their matrices: of a convolution, in the largest norm of a pixel."""
    require(w.ndim >= 3, "a convolution's kernel has three axes or more")
    taps = np.moveaxis(w.reshape(*w.shape[:2], -1), -1, 0)
    return (math.fsum(proved_norm(parts_of(tap, groups)) for tap in taps) * (1 + 4 * UNIT),)


class Measure(NamedTuple):
    """What a claim bounds."""

    bound: Callable[..., Values]
    """Of its tensors and settings: values that are proved."""
    settings: dict[str, Any] = {}  # noqa: RUF012 (a field of a tuple)
    """With their defaults; None where there is none."""
    below: Callable[..., bool] | None = None
    """Of its tensors, given values and settings: whether these are proved. None to compare them with the bound."""


MEASURES = {
    "spectral": Measure(_spectral, {"parts": 1, "transposed": False}, _spectral_below),
    "product": Measure(_product, {"pairs": None, "parts": None, "transposed": None}, _product_below),
    "group_norm": Measure(_group_norm, {"parts": 1}),
    "positive_norm": Measure(lambda x: _group_norm(np.maximum(x, 0))),
    "row_norm": Measure(_row_norm),
    "row_difference": Measure(_row_difference, {"transposed": False}),
    "row_sum": Measure(_row_sum, {"parts": 1}),
    "diameter": Measure(_diameter),
    "max_abs": Measure(lambda x: (largest_entry(x),)),
    "convolution": Measure(
        _convolution, {"size": None, "stride": None, "dilation": None, "groups": None}, _convolution_below
    ),
    "taps": Measure(_taps, {"groups": None}),
}
"""Name of a measure -> how it is bounded."""
