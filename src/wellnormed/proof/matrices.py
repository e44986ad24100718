"""Proved upper bounds of singular values, in float64 with a margin for all rounding errors.

In all formulas u = 2^-53, and gamma_k = k u / (1 - k u).
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice, product
from typing import Any

import numpy as np

from wellnormed.proof.decimals import ZERO
from wellnormed.proof.reading import Size, Sizes, require
from wellnormed.proof.value import TINY, UNIT, gamma

_BLOCK = 2**24  # so many entries of the frequency blocks are in memory at once
_ITERATIONS = 6


def norms_below(stack: np.ndarray, bound: float) -> bool:
    """Whether Cholesky factorisations prove that no singular value of a stack of matrices exceeds a bound.

    With G = fl(W^T W) and T = fl(c I - G), completion proves (Rump, BIT 2006; Higham, theorem 10.5)
    `sigma^2 <= c + gamma_{n+1} / (1 - gamma_{n+1}) tr(T) + gamma_m |W|_F^2 + u (c + max G_ii)`; `shift` chooses c so
    that the right side is `bound^2`.

    Args:
        stack: k matrices, `(k, m, n)`, of finite entries.
        bound: The number in question.
    """
    largest = largest_entry(stack)
    if not largest or not bound:
        return not largest
    w, scale = _scaled(stack, largest)
    m, n = w.shape[1:]
    # no entry exceeds 1
    return bound / scale > math.sqrt(m * n) * (1 + 1e-6) or _completes(w.swapaxes(1, 2) @ w, bound / scale, m)


def _scaled(stack: np.ndarray, largest: float) -> tuple[np.ndarray, float]:
    """The matrices, or their transposes, with at least as many rows as columns and entries below 1; and their unit."""
    scale = 2.0 ** math.frexp(largest)[1]
    return (stack if stack.shape[1] >= stack.shape[2] else stack.swapaxes(1, 2)) / scale, scale


def _completes(gram: np.ndarray, bound: float, m: int) -> bool:
    """Whether the factorisation of `norms_below` completes for the Gram matrices of matrices with m rows."""
    n, diagonal = gram.shape[-1], np.diagonal(gram, axis1=1, axis2=2)
    c = shift(bound, m, n, diagonal.sum(1), diagonal.max(1))
    try:
        factor = np.linalg.cholesky(c[:, None, None] * np.eye(n) - gram)
    except np.linalg.LinAlgError:
        return False
    return bool(np.isfinite(factor).all())


def shift(bound: Any, m: int, n: int, frobenius: Any, largest: Any) -> Any:
    """The `c` of `norms_below`, of numbers, arrays or tensors of float64.

    Args:
        bound: The number in question, at most about `sqrt(m n)`.
        m: The longer side of the matrices, whose entries are at most 1.
        n: The shorter side.
        frobenius: The traces of the Gram matrices.
        largest: Their largest diagonal entries.
    """
    squared, rate = bound * bound * (1 - 4 * UNIT), gamma(n + 1)
    trace = n * squared * (1 + 1e-6) - frobenius * (1 - 1e-6)
    trace = (trace + abs(trace)) / 2  # exactly 0 where it is negative
    margin = rate / (1 - rate) * trace + gamma(m) * frobenius * (1 + 1e-6) + UNIT * (squared + largest)
    return squared - (margin * (1 + 1e-6) + TINY) - 4 * UNIT * squared


def largest_entry(x: np.ndarray) -> float:
    """The largest absolute value of an entry."""
    return max(float(x.max()), -float(x.min()))


def absolute_norm(w: np.ndarray, ordered: bool = False) -> Decimal:
    """An upper bound of the norm of the absolute values of a matrix, or of a convolution of whole images.

    For all positive numbers v of inputs and p of outputs, the squared norm of a matrix A of absolute values, whose
    addends count with shares D from 0 to 1, is at most
    `max_i (sum_j A_ij v_j D_ij^2) / p_i` times `max_j (sum_i A_ij p_i) / v_j`, by the inequality of Cauchy and Schwarz.
    The least of a few v counts, which tend to the singular vector of A.

    Args:
        w: The matrix `(outputs, inputs)`, or the kernel `(outputs, inputs, taps)`.
        ordered: Whether an addend counts with the share of additions that it can meet, in the tree of additions that
            makes the result the largest; see `shares`.
    """
    if not (largest := largest_entry(w) if w.size else 0.0):
        return ZERO
    scale = 2.0 ** min(math.frexp(largest)[1], 1023)
    sizes = abs(w.reshape(*w.shape[:2], -1)) / scale
    columns, v, least = sizes.sum(2), np.ones(w.shape[1]), math.inf
    squares = np.einsum("ijk,ijk->ij", sizes, sizes) if ordered else columns
    most = math.sqrt(float(np.square(shares(sizes[0].size)).sum()))
    for _ in range(_ITERATIONS):
        p = columns @ v
        p = np.minimum(p, np.sqrt(squares @ np.square(v)) * most) if ordered else p
        u = columns.T @ (p + math.sqrt(TINY))  # more than squares that underflow take from a sum
        least = min(least, float((u / v).max()))
        v = np.maximum(u / u.max(), 2.0**-20)
    return Decimal(math.sqrt(least) * (1 + (w.size + 32) * UNIT)) * Decimal(scale)


def shares(addends: int) -> np.ndarray:
    """For the addends of a sum, from the deepest on, how often each is rounded at most, over their number and one.

    A further addend, such as a bias, counts. In a tree of n leaves, the k-th deepest has depth `n - k + floor(log2 k)`
    at most: above depth d, a level of the tree without a leaf has twice as many nodes as the one before, and one with
    l leaves has at least `2^(1 - l)` times as many, so if k leaves have depth d or more, at least `d - log2 k` others
    have less. Products are rounded once, too.

    Returns:
        Squares of these shares, `(addends,)`.
    """
    rank = np.arange(1, addends + 1)
    return np.square(np.minimum(1, (addends + 1 - rank + np.frexp(rank)[1]) / (addends + 1)))


def absolute_kernel(w: np.ndarray, groups: int, pixels: bool, ordered: bool = False) -> Decimal:
    """The same of any convolution with the kernel `(outputs, inputs / groups, *kernel)`.

    Of changes of single pixels (with `pixels`) it is the sum over taps, whatever the order.
    """
    flat = w.reshape(groups, -1, w.shape[1], w[0, 0].size)
    if pixels:
        return sum((max(map(absolute_norm, tap)) for tap in flat.transpose(3, 0, 1, 2)), ZERO)
    return max(absolute_norm(each, ordered) for each in flat)


def proved_norm(stack: np.ndarray) -> float:
    """An upper bound of all singular values of a stack of matrices, at most 1e-8 above the largest one.

    Args:
        stack: k matrices, `(k, m, n)`; none or empty ones have the bound 0.

    Raises:
        CheckError: Entries are not finite.

    Example:
        >>> 3 <= proved_norm(np.diag([3.0, 2.0])[None]) <= 3 * (1 + 1e-8)
        True
    """
    largest = largest_entry(stack) if stack.size else 0.0
    if not largest:
        return 0.0
    require(math.isfinite(largest), "it has entries that are not finite, which have no norm")
    w, scale = _scaled(stack, largest)
    gram = w.swapaxes(1, 2) @ w
    norm, margin = math.sqrt(max(float(np.linalg.eigvalsh(gram)[:, -1].max()), 0.25)), 1e-10
    while not _completes(gram, norm * (1 + margin), w.shape[1]):
        margin *= 4
        require(margin <= 1, "its largest singular value could not be proved")
    return math.nextafter(norm * (1 + margin) * scale, math.inf)


def convolution_norm(w: np.ndarray, *, size: Sizes, stride: Sizes, dilation: Sizes, groups: Size) -> float:
    """A proved upper bound of the Euclidean norm of a convolution without padding, on an image of `size` or less.

    The convolution is part of the circular one on a torus of at least as many pixels. The Fourier transform makes that
    one block diagonal, with the symbol `S(m) = sum_t W_t exp(2 pi i m t dilation / N)`; a stride s that divides N folds
    s frequencies into `[S(m), S(m + N/s), ...] / sqrt(s)` (Sedghi et al., ICLR 2019, theorem 6). With circular padding
    the torus is the image itself.

    Args:
        w: The kernel, `(outputs, inputs / groups, *kernel)`.
        size: Number of pixels along every axis of the image.
        stride: Distance of neighbouring results, along every axis.
        dilation: Distance of neighbouring taps, along every axis.
        groups: Number of groups of channels.
    """
    if not (largest := largest_entry(w)):
        return 0.0
    scale = 2.0 ** math.frexp(largest)[1]
    most = max(proved_norm(blocks) for blocks in _symbols(w / scale, size, stride, dilation, groups))
    error = _symbol_error(w / scale, groups)
    total = (most / math.sqrt(math.prod(stride)) + error) * (1 + 16 * UNIT)
    return math.nextafter(total * scale, math.inf)


def convolution_below(
    w: np.ndarray, values: tuple[float, ...], size: Sizes, stride: Sizes, dilation: Sizes, groups: int
) -> bool:
    """Whether the norm of such a convolution is proved not to exceed the only one of the values."""
    largest, (bound,) = largest_entry(w), values
    if not largest or not bound:
        return not largest
    scale = 2.0 ** math.frexp(largest)[1]
    error = _symbol_error(w / scale, groups)
    rest = (bound / scale * (1 - 8 * UNIT) - error) * math.sqrt(math.prod(stride)) * (1 - 4 * UNIT)
    return rest > 0 and all(norms_below(each, rest) for each in _symbols(w / scale, size, stride, dilation, groups))


def _symbol_error(w: np.ndarray, groups: int) -> float:
    """A bound on the rounding error of a symbol, in the spectral norm.

    Sines, cosines and their products are right within 100 u (18 u from each of three angles, rounding of the functions
    and products), and the sum over K taps adds (K + 2) u, relative to `sum_t |W_t|`.
    """
    sums = abs(w).reshape(groups, -1, w.shape[1], w[0, 0].size).sum(-1)
    return (w[0, 0].size + 102) * UNIT * float(np.linalg.norm(sums, axis=(1, 2)).max()) * (1 + 1e-6)


def _symbols(w: np.ndarray, size: Sizes, stride: Sizes, dilation: Sizes, groups: int) -> Iterator[np.ndarray]:
    """Yield the blocks of all frequencies in stacks `(k, m, n)`, each complex block as a real one of twice the size."""
    fits = w.ndim >= 3 and len(size) == len(stride) == len(dilation) == w.ndim - 2 and w.shape[0] % groups == 0
    require(fits, "the settings of a convolution do not fit its kernel")
    torus, kernel = [-(-n // s) * s for n, s in zip(size, stride, strict=True)], w.shape[2:]
    flat = w.reshape(groups, -1, w.shape[1], w[0, 0].size)  # groups, outputs, inputs, taps
    # along an axis with one tap, the symbol is the same for all frequencies
    counts = [n // s if k > 1 else 1 for n, s, k in zip(torus, stride, kernel, strict=True)]
    entries = math.prod(stride) * max(math.prod(w.shape[:2]), math.prod(kernel))
    require(entries <= max(_BLOCK, 16 * w.size), f"its stride {stride} is too large for its kernel")
    # the conjugate frequency of a real kernel has the same norm
    frequencies = (
        m for m in product(*map(range, counts)) if m <= tuple(-i % n for i, n in zip(m, counts, strict=True))
    )
    while len(some := np.array([*islice(frequencies, max(1, _BLOCK // (4 * entries)))])):
        phase = np.ones((len(some), 1, 1), complex)  # frequencies, folds, taps
        for axis, m in enumerate(some.T):
            n, s, k = torus[axis], stride[axis], kernel[axis]
            turns = (m[:, None, None] + n // s * np.arange(s)[:, None]) * (dilation[axis] * np.arange(k)) % n / n
            factor = np.exp(2j * np.pi * turns)
            phase = (phase[:, :, None, :, None] * factor[:, None, :, None, :]).reshape(
                len(m), phase.shape[1] * s, phase.shape[2] * k
            )
        blocks = np.einsum("goit,mft->mgofi", flat, phase).reshape(len(phase) * groups, flat.shape[1], -1)
        yield np.block([[blocks.real, -blocks.imag], [blocks.imag, blocks.real]])
