"""Bounds that hold for every weight within its caps, used by `certify(within=...)`.

A promise divides the entries of a parameter into parts, which are matrices, and says that no singular value of a part
exceeds a number. The claims about the parameter follow from that: a matrix W of several parts has
`|W|^2 <= sum |part|^2`, and for some of its rows the sum needs only the parts that have an entry in them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np

from wellnormed.proof.claims import matrix, parts_of
from wellnormed.proof.decimals import assumed, root, rounding_up
from wellnormed.proof.matrices import norms_below, proved_norm
from wellnormed.proof.positions import Table, positions_of
from wellnormed.proof.reading import Offset, Sizes, require, word
from wellnormed.proof.rows import Claim
from wellnormed.proof.value import LARGE, SMALL, TINY, UNIT

_ENTRIES = 2**26
"""The most entries of a promised parameter, each of which has a position: 1 GB with what is made of these."""


@dataclass(frozen=True)
class Parts:
    """Parts of equal shape of a parameter: matrices, none of which has a singular value beyond `size`."""

    shape: Sizes
    """Numbers of parts, rows and columns."""
    size: float
    offset: Offset
    tables: tuple[Table, ...]
    """With `offset`, the positions of their entries in the flat parameter, as in the move `pick`."""


@dataclass(frozen=True)
class Promise:
    """Bounds on a parameter that hold after every step of its training."""

    name: str
    shape: Sizes
    parts: tuple[Parts, ...]

    def __str__(self) -> str:
        """The caps in words, from their numbers."""
        caps, name = [], word(self.name)
        for each in self.parts:
            (count, rows, columns), size = each.shape, assumed(each.size, ".6g")
            if rows == columns == 1:
                caps.append(f"no entry of {name} beyond {size}")
            elif min(rows, columns) > 1:
                caps.append(f"no singular value of {'' if count == 1 else f'{count} parts of '}{name} beyond {size}")
            elif count == 1:
                caps.append(f"{name} not longer than {size}")
            else:
                caps.append(f"none of {count} vectors of {name} longer than {size}")
        return ", ".join(caps)

    @cached_property
    def blocks(self) -> list[tuple[np.ndarray, float]]:
        """For each of `parts`, the flat positions of the entries, `(count, rows, columns)`, and the largest norm."""
        require(math.prod(self.shape) <= _ENTRIES, f"{word(self.name)} has more than {_ENTRIES} entries")
        count, blocks = math.prod(self.shape), []
        once = sum(math.prod(each.shape) for each in self.parts) == count
        require(once, f"the parts of {word(self.name)} do not have each of its entries once")
        for each in self.parts:
            require(len(each.shape) == 3, f"the parts of {word(self.name)} misfit")
            positions = positions_of(each.shape, each.tables, each.offset, count)
            moderate = each.size == 0 or SMALL <= each.size <= LARGE
            require(moderate and bool((positions >= 0).all()), f"the parts of {word(self.name)} misfit")
            blocks.append((positions, each.size))
        every = np.concatenate([np.zeros(0, int), *(positions.reshape(-1) for positions, _ in blocks)])
        once = bool((np.bincount(every, minlength=count) == 1).all())
        require(once, f"the parts of {word(self.name)} do not have each of its entries once")
        return blocks

    def require_kept_by(self, array: np.ndarray) -> None:
        """Refuse a tensor that is not proved to keep the promise."""
        require(array.shape == self.shape, f"{word(self.name)} has shape {array.shape} instead of {self.shape}")
        flat = array.reshape(-1)
        for positions, size in self.blocks:
            vectors = min(positions.shape[1:]) == 1  # all at once; matrices need the memory of their Gram matrices
            stacks = [positions.reshape(len(positions), -1, 1)] if vectors else positions[:, None]
            kept = all(norms_below(flat[stack], size) for stack in stacks)
            require(kept, f"{word(self.name)} is not proved to keep its promise, {self}")

    def bound(self, measure: str, settings: dict[str, Any]) -> tuple[float, ...]:
        """The least values of a measure that follow.

        Raises:
            CheckError: No bound on this measure follows from the promise.
        """
        known: dict[str, Callable[..., tuple[float, ...]]] = {
            "spectral": self.spectral, "group_norm": self._group_norm, "row_norm": self._row_norm,
            "positive_norm": self._group_norm, "max_abs": self._max_abs, "taps": self._taps,
            "convolution": lambda groups, **_: self._taps(groups),
            "diameter": lambda: (2 * self._row_norm()[0],),
            "row_difference": lambda transposed: (2 * self._row_norm(transposed)[0],),
        }  # fmt: skip
        require(measure in known, f"no bound on the {measure} of {word(self.name)} follows from its norm")
        return known[measure](**settings)

    def spectral(self, parts: int = 1, transposed: bool = False) -> tuple[float, ...]:
        """Bound the norm of each of equal parts of the rows of the parameter as a matrix, or of its transpose."""
        require(len(self.shape) > 1 and (len(self.shape) == 2 or not transposed), f"{word(self.name)} is no matrix")
        return self._along(-1 if transposed else 0, parts)

    def absolute(self, parts: int = 1, transposed: bool = False) -> list[Decimal]:
        """Bound the Frobenius norm of each of equal parts of the rows of the parameter as a matrix, or its transpose.

        A part of the promise has singular values of at most its size, as many as the shorter side of it.
        """
        size = self.shape[-1 if transposed else 0]
        part = np.arange(size) // (size // parts)
        owner = part if transposed else part.reshape(-1, *[1] * (len(self.shape) - 1))
        return [Decimal(each) for each in self._squares(owner, parts, ranks=True)]

    def absolute_kernel(self) -> Decimal:
        """Bound the sum of the Frobenius norms of the taps of a kernel: no more than that of all, times their root."""
        with rounding_up():
            return self.absolute()[0] * root(math.prod(self.shape[2:]))

    def _group_norm(self, parts: int = 1) -> tuple[float, ...]:
        require(len(self.shape) == 1, f"{word(self.name)} is no vector")
        return self._along(0, parts)

    def _row_norm(self, transposed: bool = False) -> tuple[float]:
        """Bound every vector along the last axis, or every column of a matrix."""
        require(len(self.shape) == 2 or not transposed, f"{word(self.name)} is no matrix")
        if transposed:
            return (max(self._along(-1, self.shape[-1])),)
        leading = self.shape[:-1]
        rows = np.arange(math.prod(leading)).reshape((*leading, *[1] * len(self.shape[-1:])))
        return (max(self._owned(rows, rows.size)),)

    def _max_abs(self) -> tuple[float]:
        count = math.prod(self.shape)
        return (max(self._owned(np.arange(count).reshape(self.shape), count)),)

    def _taps(self, groups: int) -> tuple[float]:
        """Bound a convolution with the kernel `(outputs, inputs, *kernel)` by the sum of the norms of its taps."""
        require(len(self.shape) > 2 and self.shape[0] % groups == 0, f"{word(self.name)} is no kernel")
        count = math.prod(self.shape[2:])
        group = np.arange(self.shape[0]) // (self.shape[0] // groups) * count
        owner = group.reshape(-1, *[1] * (len(self.shape) - 1)) + np.arange(count).reshape(self.shape[2:])
        sums = np.array(self._owned(owner, groups * count, count)).reshape(groups, count)
        return (max(math.fsum(each) for each in sums) * (1 + 4 * UNIT),)

    def _require_blocks(self, taps: int) -> None:
        """Refuse parts that do not lie in rows and columns of the matrix of every tap; vectors may lie anywhere."""
        for positions, _ in self.blocks:
            first, rest = np.divmod(positions, math.prod(self.shape[1:]))
            second, tap = np.divmod(rest, taps)
            aligned = any(
                _alike(first, a) and _alike(second, b) and (_alike(tap, a) or _alike(tap, b))
                for a, b in ((-1, -2), (-2, -1))
            )
            lies = aligned or min(positions.shape[1:]) == 1
            require(lies, f"the parts of {word(self.name)} do not lie in rows and columns")

    def _along(self, axis: int, parts: int) -> tuple[float, ...]:
        """As `_owned`, for equal parts of the indices along the first axis (0) or the last (-1)."""
        size = self.shape[axis]
        require(size % parts == 0, f"{size} rows of {word(self.name)} are no {parts} equal parts")
        part = np.arange(size) // (size // parts)
        return self._owned(part if axis else part.reshape(-1, *[1] * (len(self.shape) - 1)), parts)

    def _owned(self, group: np.ndarray, count: int, taps: int = 1) -> tuple[float, ...]:
        """For every group of entries, the root of the sum of squares of the norms of the parts with an entry in it.

        For unit vectors u and v, `u^T W v` is at most the sum over parts of `size_k` times the root of the sum of
        `u_i^2 v_j^2` over the entries of the part, and no two parts share an entry. The parts must lie in rows and
        columns of W, which is the matrix with a row for each of the first axis, or that of every tap; or be vectors.

        Args:
            group: The number of every entry's group, of a shape that broadcasts to the parameter's.
            count: Number of groups.
            taps: Number of taps of a kernel; 1 for a matrix.
        """
        self._require_blocks(taps)
        return self._squares(group, count)

    def _squares(self, group: np.ndarray, count: int, ranks: bool = False) -> tuple[float, ...]:
        """The roots of `_owned`; with `ranks`, each square counts as often as the shorter side of the part is long."""
        groups, squares = np.broadcast_to(group, self.shape).reshape(-1), np.zeros(count)
        largest = max((size for _, size in self.blocks), default=0.0)
        scale = 2.0 ** math.frexp(largest)[1]  # against underflow and overflow
        for positions, size in self.blocks:
            part = np.arange(len(positions))[:, None] * count
            met = np.unique(part + groups[positions].reshape(len(positions), -1)) % count  # each once for a part
            rank = min(positions.shape[1:]) if ranks else 1
            squares += np.bincount(met, minlength=count) * (max((size / scale) ** 2, TINY) if size else 0.0) * rank
        margin = 1 + (len(self.blocks) + 9) * 2 * UNIT  # of the sum, its products, and the root
        return tuple((np.sqrt(squares) * margin * scale).tolist())


def _alike(x: np.ndarray, axis: int) -> bool:
    return bool((x == x.take([0], axis)).all())


def follow(claim: Claim, known: Sequence["Promise | np.ndarray"]) -> tuple[float, ...]:
    """The least values of a claim that follow, where at least one of its tensors is a promised parameter.

    Args:
        claim: A claim with complete settings; its values do not matter.
        known: For each of its tensors, the promise or the entries.
    """
    if claim.measure != "product":
        (promise, *others) = known
        require(not others, "only a cap is known of a tensor that is scaled, or scales")
        assert isinstance(promise, Promise)
        return promise.bound(claim.measure, claim.constants)
    parts, transposed = claim.constants["parts"], claim.constants["transposed"]
    sizes = [
        x.spectral(n, t) if isinstance(x, Promise) else [proved_norm(part[None]) for part in parts_of(matrix(x, t), n)]
        for x, n, t in zip(known, parts, transposed, strict=True)
    ]
    pairs = claim.constants["pairs"]
    require(all(i < n for pair in pairs for i, n in zip(pair, parts, strict=True)), f"there are no pairs {pairs}")
    return tuple(math.nextafter(sizes[0][i] * sizes[1][j], math.inf) for i, j in pairs)
