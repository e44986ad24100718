"""Claims on stored tensors, proved in float64 with a margin for all rounding. u = 2^-53, gamma_k = k u / (1 - k u)."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from wellnormed.proof.reading import integer, integers, number, of_type, require, texts, word
from wellnormed.proof.rows import Claim
from wellnormed.proof.value import UNIT

_TINY = 2.0**-900
_BLOCK = 2**24  # entries of the frequency blocks that are held at once


def complete(claim: Claim) -> Claim:
    """The claim with all settings of its measure, if their types and numbers are as they must be; not proved yet."""
    require(claim.measure in _PROOFS, f"nothing is known of the measure {claim.measure!r}")
    measure, defaults = claim.measure, _PROOFS[claim.measure][1]
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


def prove(claim: Claim, tensor: Callable[[str], np.ndarray]) -> None:
    """Raise a `CheckError` unless the claim is true."""
    arrays = [tensor(name).astype(np.float64, copy=False) for name in claim.tensors]
    with np.errstate(all="ignore"):
        proved = _PROOFS[claim.measure][0](*arrays, claim.values, **claim.constants)
    require(
        proved, f"{claim.measure} of {', '.join(map(word, claim.tensors))} at {claim.values[:4]} could not be proved"
    )


def matrix(tensor: np.ndarray, transposed: bool) -> np.ndarray:
    """A stored tensor as the matrix from inputs to outputs."""
    require(tensor.ndim == 2 or (tensor.ndim > 2 and not transposed), f"a tensor of shape {tensor.shape} is no matrix")
    return tensor.T if transposed else tensor.reshape(len(tensor), -1)


def parts_of(array: np.ndarray, parts: int) -> np.ndarray:
    """Equal groups of the first axis, along an axis of their own."""
    require(len(array) % parts == 0, f"{len(array)} rows are no {parts} equal parts")
    return array.reshape(parts, -1, *array.shape[1:])


def norms_below(stack: np.ndarray, bound: float) -> bool:
    """Whether Cholesky factorisations prove that no singular value of `(k, m, n)` exceeds a bound.

    With G = fl(W^T W) and T = fl(c I - G), completion proves (Rump, BIT 2006; Higham, theorem 10.5)
    `sigma^2 <= c + gamma_{n+1} / (1 - gamma_{n+1}) tr(T) + gamma_m |W|_F^2 + u (c + max G_ii)`; c is what the bound
    leaves for it.
    """
    w = stack if stack.shape[1] >= stack.shape[2] else stack.swapaxes(1, 2)
    largest = _largest(w)
    if not largest or not bound:
        return not largest
    scale = 2.0 ** math.frexp(largest)[1]
    w, target = w / scale, bound / scale
    m, n = w.shape[1:]
    if target > math.sqrt(m * n) * (1 + 1e-6):  # no entry exceeds 1
        return True
    gram = w.swapaxes(1, 2) @ w
    diagonal = np.diagonal(gram, axis1=1, axis2=2)
    squared, frobenius = target * target * (1 - 4 * UNIT), diagonal.sum(1)
    gamma = _gamma(n + 1)
    trace = np.maximum(n * squared * (1 + 1e-6) - frobenius * (1 - 1e-6), 0)
    margin = gamma / (1 - gamma) * trace + _gamma(m) * frobenius * (1 + 1e-6) + UNIT * (squared + diagonal.max(1))
    c = squared - (margin * (1 + 1e-6) + _TINY) - 4 * UNIT * squared
    try:
        factor = np.linalg.cholesky(c[:, None, None] * np.eye(n) - gram)
    except np.linalg.LinAlgError:
        return False
    return bool(np.isfinite(factor).all())


def _largest(x: np.ndarray) -> float:
    return max(float(x.max()), -float(x.min()))


def _gamma(k: int) -> float:
    return k * UNIT / (1 - k * UNIT) * (1 + 1e-12)


def _spectral(w: np.ndarray, values: tuple[float, ...], parts: int, transposed: bool) -> bool:
    groups = parts_of(matrix(w, transposed), parts)
    return len(values) == parts and all(norms_below(w[None], v) for w, v in zip(groups, values, strict=True))


def _product(
    left: np.ndarray, right: np.ndarray, values: tuple[float, ...], pairs: list, parts: tuple, transposed: tuple
) -> bool:
    """The computed product differs from `A^T B` by at most `gamma_k |A|_F |B|_F`, k being the rows of a group."""
    require(len(parts) == len(transposed) == 2 and len(pairs) == len(values), "a product has two factors")
    groups = [parts_of(matrix(w, t), n) for w, t, n in zip((left, right), transposed, parts, strict=True)]
    require(groups[0].shape[1] == groups[1].shape[1], "the factors of a product have groups of other sizes")
    for pair, value in zip(pairs, values, strict=True):
        require(all(i < n for i, n in zip(pair, parts, strict=True)), f"there is no pair {pair}")
        a, b = (group[i] for group, i in zip(groups, pair, strict=True))
        if not (a.any() and b.any()):
            continue
        for w in (a, b):  # powers of two
            value = value / 2.0 ** math.frexp(_largest(w))[1]
        a, b = (w / 2.0 ** math.frexp(_largest(w))[1] for w in (a, b))
        error = _gamma(len(a) + 1) * float(np.linalg.norm(a)) * float(np.linalg.norm(b)) * (1 + 1e-6)
        rest = value * (1 - 4 * UNIT) - error - _TINY
        if not (rest > 0 and norms_below((a.T @ b)[None], rest)):
            return False
    return True


def rows_below(rows: np.ndarray, value: float) -> bool:
    """Whether no row's Euclidean norm exceeds a number."""
    if not value or _largest(rows) > value:
        return not rows.any()
    return float(np.square(rows / value).sum(1).max()) * (1 + (rows.shape[1] + 6) * UNIT) + _TINY <= 1


def _group_norm(x: np.ndarray, values: tuple[float, ...], parts: int) -> bool:
    groups = parts_of(x.reshape(-1), parts)
    return len(values) == parts and all(rows_below(g[None], v) for g, v in zip(groups, values, strict=True))


def _row_sum(x: np.ndarray, values: tuple[float, ...], parts: int) -> bool:
    sums = parts_of(abs(x).reshape(-1, x.shape[-1]), parts).sum(-1).max(1) * (1 + (x.shape[-1] + 2) * UNIT)
    return len(values) == parts and bool((sums <= np.array(values)).all())


def _convolution(
    w: np.ndarray, values: tuple[float, ...], size: tuple, stride: tuple, dilation: tuple, groups: int
) -> bool:
    """Valid convolution on `size` pixels is part of the circular one on a torus of at least as many pixels.

    Fourier transform makes that one block diagonal, with the symbol `S(m) = sum_t W_t exp(2 pi i m t dilation / N)`;
    a stride s that divides N folds s frequencies into `[S(m), S(m + N/s), ...] / sqrt(s)` (Sedghi et al., ICLR 2019).
    Every complex block is proved as a real one of twice the size. Sines, cosines and their products are right within
    100 u (18 u from each of three angles, rounding of the functions and products), and the sum over K taps adds
    (K + 2) u, relative to `sum_t |W_t|`.
    """
    require(w.ndim >= 3 and len(size) == len(stride) == len(dilation) == w.ndim - 2, "a convolution's settings misfit")
    largest = _largest(w)
    if len(values) != 1 or not largest or not values[0]:
        return len(values) == 1 and not largest
    scale = 2.0 ** math.frexp(largest)[1]
    w, target = w / scale, values[0] / scale
    torus, kernel, taps = [-(-n // s) * s for n, s in zip(size, stride, strict=True)], w.shape[2:], w[0, 0].size
    flat = parts_of(w.reshape(*w.shape[:2], -1), groups)  # groups, outputs, inputs, taps
    folds = math.prod(stride)
    error = (taps + 102) * UNIT * float(np.linalg.norm(abs(flat).sum(-1), axis=(1, 2)).max()) * (1 + 1e-6)
    rest = (target * (1 - 8 * UNIT) - error) * math.sqrt(folds) * (1 - 4 * UNIT)
    if rest <= 0:
        return False
    counts = [n // s for n, s in zip(torus, stride, strict=True)]
    # the conjugate frequency of a real kernel has the same norm
    seen = [m for m in product(*map(range, counts)) if m <= tuple(-i % n for i, n in zip(m, counts, strict=True))]
    step = max(1, _BLOCK // (4 * folds * math.prod(w.shape[:2])))
    for start in range(0, len(seen), step):
        phase = np.ones((len(seen[start : start + step]), 1, 1), complex)  # frequencies, folds, taps
        for axis, m in enumerate(np.array(seen[start : start + step]).T):
            n, s, k = torus[axis], stride[axis], kernel[axis]
            turns = (m[:, None, None] + n // s * np.arange(s)[:, None]) * (dilation[axis] * np.arange(k)) % n / n
            factor = np.exp(2j * np.pi * turns)
            phase = (phase[:, :, None, :, None] * factor[:, None, :, None, :]).reshape(
                len(m), phase.shape[1] * s, phase.shape[2] * k
            )
        blocks = np.einsum("goit,mft->mgofi", flat, phase).reshape(len(phase) * groups, flat.shape[1], -1)
        real = np.block([[blocks.real, -blocks.imag], [blocks.imag, blocks.real]])
        if not norms_below(real, rest):
            return False
    return True


def _taps(w: np.ndarray, values: tuple[float, ...], groups: int) -> bool:
    """The sum over taps of the norms of their matrices, each of which is raised until it is proved."""
    require(w.ndim >= 3 and len(values) == 1, "a convolution's kernel has three axes or more")
    taps = np.moveaxis(w.reshape(*w.shape[:2], -1), -1, 0)
    total = math.fsum(max(proved_norms(parts_of(tap, groups))) for tap in taps)
    return total * (1 + 4 * UNIT) <= values[0]


def proved_norms(stack: np.ndarray) -> tuple[float, ...]:
    """For each of several matrices a number, little above its largest singular value, that is proved to be above it."""
    found = []
    for w in stack:
        norm, margin = float(np.linalg.norm(w, 2)), 1e-10
        while not norms_below(w[None], norm * (1 + margin)):
            margin *= 4
            require(margin <= 1, "the norm of a matrix could not be proved")
        found.append(norm * (1 + margin))
    return tuple(found)


def _row_difference(w: np.ndarray, values: tuple[float, ...], transposed: bool) -> bool:
    rows = matrix(w, transposed)
    return len(values) == 1 and all(rows_below(rows - row, values[0] * (1 - 2 * UNIT)) for row in rows)


def _diameter(x: np.ndarray, values: tuple[float, ...]) -> bool:
    """No two rows are further apart than the two most distant from a centre are from it: from the mean, or from 0."""
    largest = _largest(x)
    if len(values) != 1 or not largest:
        return len(values) == 1
    rows = x.reshape(-1, x.shape[-1]) / 2.0 ** math.frexp(largest)[1]
    step, most = max(1, _BLOCK // rows.shape[1]), math.inf
    for centre in (rows.mean(0), 0.0):
        blocks = [rows[start : start + step] - centre for start in range(0, len(rows), step)]
        distances = np.sort(np.concatenate([np.sqrt(np.square(block).sum(1)) for block in blocks]))
        most = min(most, float(distances[-2:].sum()) * (1 + (rows.shape[1] + 12) * UNIT) + math.sqrt(_TINY))
    return most <= values[0] / 2.0 ** math.frexp(largest)[1]


_PROOFS: dict[str, tuple[Callable[..., bool], dict[str, Any]]] = {
    "spectral": (_spectral, {"parts": 1, "transposed": False}),
    "product": (_product, {"pairs": None, "parts": None, "transposed": None}),
    "group_norm": (_group_norm, {"parts": 1}),
    "positive_norm": (lambda x, values: _group_norm(np.maximum(x, 0), values, 1), {}),
    "row_norm": (lambda x, v: len(v) == 1 and rows_below(x.reshape(-1, x.shape[-1]), v[0]), {}),
    "row_difference": (_row_difference, {"transposed": False}),
    "row_sum": (_row_sum, {"parts": 1}),
    "diameter": (_diameter, {}),
    "max_abs": (lambda x, values: len(values) == 1 and _largest(x) <= values[0], {}),
    "convolution": (_convolution, {"size": None, "stride": None, "dilation": None, "groups": None}),
    "taps": (_taps, {"groups": None}),
}
"""Name of a measure -> its proof, and its settings with their defaults; None where there is none."""
