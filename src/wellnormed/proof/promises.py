"""Bounds that hold for every weight within its caps, used by `certify(within=...)`.

A promise says into which parts the entries of a parameter fall, as matrices, and that no singular value of a part
exceeds a number. What a row needs to know of the parameter follows from that: a matrix that is made of parts has
`|W|^2 <= sum |part|^2`, and some rows of it need the parts that have an entry in them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wellnormed.proof.claims import matrix, parts_of
from wellnormed.proof.matrices import norms_below, proved_norm
from wellnormed.proof.reading import field, integers, number, of_type, require, word
from wellnormed.proof.rows import Claim
from wellnormed.proof.value import UNIT, positions_of

_ENTRIES = 2**30
"""Of a parameter. A position is kept for each: more are too many for a machine."""


@dataclass(frozen=True)
class Parts:
    """Equal parts of a parameter: matrices, none of which has a singular value beyond `size`."""

    shape: tuple[int, ...]
    """Parts, rows and columns."""
    size: float
    offset: int
    tables: tuple[Any, ...]
    """Where in the flat parameter their entries stand, as in the move `pick`."""


@dataclass(frozen=True)
class Promise:
    """What is promised of a parameter for every step."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Parts, ...]

    def __str__(self) -> str:
        """The caps in words, from their numbers."""
        words = []
        for (count, rows, columns), size in ((each.shape, each.size) for each in self.parts):
            if rows == columns == 1:
                words.append(f"no entry of {word(self.name)} beyond {size:.6g}")
            elif min(rows, columns) == 1:
                which = "" if count == 1 else f"none of {count} vectors of "
                words.append(f"{which}{word(self.name)} {'not ' * (count == 1)}longer than {size:.6g}")
            else:
                which = "" if count == 1 else f"{count} parts of "
                words.append(f"no singular value of {which}{word(self.name)} beyond {size:.6g}")
        return ", ".join(words)

    @cached_property
    def blocks(self) -> list[tuple[np.ndarray, float]]:
        """Flat positions of the entries of all parts, each batch with the size of its parts."""
        require(len(self.shape) > 0, f"{word(self.name)} has no axes")
        require(math.prod(self.shape) <= _ENTRIES, f"{word(self.name)} has more than {_ENTRIES} entries")
        count, found = math.prod(integers(self.shape, "a promised shape", 1)), []
        for each in self.parts:
            shape = integers(each.shape, "the shape of promised parts", 1)
            require(len(shape) == 3 and math.prod(shape) <= count, f"the parts of {word(self.name)} misfit")
            positions = positions_of(shape, of_type(each.tables, (list, tuple), "tables"), each.offset, count)
            size = number(each.size, "the size of promised parts")
            require(size >= 0 and bool((positions >= 0).all()), f"the parts of {word(self.name)} misfit")
            found.append((positions, size))
        seen = np.bincount(np.concatenate([p.reshape(-1) for p, _ in found]), minlength=count) if found else np.zeros(1)
        require(bool((seen == 1).all()), f"the parts of {word(self.name)} do not have each of its entries once")
        return found

    def require_kept_by(self, array: np.ndarray) -> None:
        """Refuse a tensor that is not proved to keep the promise."""
        require(array.shape == self.shape, f"{word(self.name)} has shape {array.shape} instead of {self.shape}")
        flat = array.reshape(-1)
        for parts, size in self.blocks:
            stacks = (
                [flat[parts].reshape(len(parts), -1, 1)]
                if min(parts.shape[1:]) == 1
                else [flat[p[None]] for p in parts]
            )
            kept = all(norms_below(stack, size) for stack in stacks)
            require(kept, f"{word(self.name)} is not proved to keep its promise, {self}")

    def bound(self, measure: str, settings: dict[str, Any]) -> tuple[float, ...]:
        """The least that follows for a measure; a `CheckError` where nothing does."""
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
        """Of each of equal groups of rows of the parameter as a matrix, or of its transpose."""
        require(len(self.shape) > 1 and (len(self.shape) == 2 or not transposed), f"{word(self.name)} is no matrix")
        rows = self.shape[-1] if transposed else self.shape[0]
        require(rows % parts == 0, f"{rows} rows are no {parts} equal parts")
        return self._sizes(np.arange(rows) // (rows // parts), parts, -1 if transposed else 0)

    def _group_norm(self, parts: int = 1) -> tuple[float, ...]:
        require(len(self.shape) == 1 and self.shape[0] % parts == 0, f"{word(self.name)} is no vector of {parts} parts")
        return self._sizes(np.arange(self.shape[0]) // (self.shape[0] // parts), parts)

    def _row_norm(self, transposed: bool = False) -> tuple[float]:
        if len(self.shape) == 1:
            return (max(self._group_norm()),)
        require(len(self.shape) == 2, f"{word(self.name)} is no matrix")
        rows = self.shape[-1] if transposed else self.shape[0]
        return (max(self._sizes(np.arange(rows), rows, -1 if transposed else 0)),)

    def _max_abs(self) -> tuple[float]:
        require(len(self.shape) < 3, f"{word(self.name)} is no matrix")
        return (max(self._sizes(np.arange(self.shape[0]), self.shape[0])),)

    def _taps(self, groups: int) -> tuple[float]:
        """No convolution by a kernel `(outputs, inputs, *kernel)` has a larger norm than the sum over its taps."""
        require(len(self.shape) > 2 and self.shape[0] % groups == 0, f"{word(self.name)} is no kernel")
        count = math.prod(self.shape[2:])
        group = np.arange(self.shape[0]) // (self.shape[0] // groups) * count
        owner = group.reshape(-1, *[1] * (len(self.shape) - 1)) + np.arange(count).reshape(self.shape[2:])
        sums = np.array(self._owned(owner, groups * count, count)).reshape(groups, count)
        return (max(math.fsum(each) for each in sums) * (1 + 4 * UNIT),)

    def _require_blocks(self, taps: int) -> None:
        """Refuse parts, but for single vectors, that do not lie in rows and columns of the matrix of every tap."""
        for positions, _ in self.blocks:
            first, rest = np.divmod(positions, math.prod(self.shape[1:]))
            second, tap = np.divmod(rest, taps)
            aligned = any(
                _alike(first, a) and _alike(second, b) and (_alike(tap, a) or _alike(tap, b))
                for a, b in ((-1, -2), (-2, -1))
            )
            lies = aligned or min(positions.shape[1:]) == 1
            require(lies, f"the parts of {word(self.name)} do not lie in rows and columns")

    def _sizes(self, group: np.ndarray, parts: int, axis: int = 0) -> tuple[float, ...]:
        view = [len(group) if i == axis % len(self.shape) else 1 for i in range(len(self.shape))]
        return self._owned(group.reshape(view), parts)

    def _owned(self, owner: np.ndarray, parts: int, taps: int = 1) -> tuple[float, ...]:
        """For every group of entries, the root of the sum of squares of the parts with an entry in it.

        For unit vectors u and v, `u^T W v` is at most the sum over parts of `size_k` times the root of the sum of
        `u_i^2 v_j^2` over the entries of the part, and no two parts share an entry. It takes parts that lie in rows and
        columns of W, which is the matrix with a row for each of the first axis, or that of every tap; or vectors.
        """
        self._require_blocks(taps)
        owners, squares = np.broadcast_to(owner, self.shape).reshape(-1), np.zeros(parts)
        largest = max((size for _, size in self.blocks), default=0.0)
        scale = 2.0 ** math.frexp(largest)[1]  # against underflow and overflow
        for positions, size in self.blocks:
            block = np.arange(len(positions))[:, None] * parts
            found = np.unique(block + owners[positions].reshape(len(positions), -1)) % parts
            squares += np.bincount(found, minlength=parts) * (size / scale) ** 2
        margin = 1 + (len(self.blocks) + 8) * 2 * UNIT  # of the sum, its products, and the root
        return tuple((np.sqrt(squares) * margin * scale).tolist())


def read_promise(document: Any) -> Promise:
    """A promise from a certificate's file; `Promise.blocks` checks its numbers."""
    parts = []
    for each in of_type(field(document, "parts", "a promise"), (list, tuple), "the parts of a promise"):
        size, offset, tables = (field(each, key, "promised parts") for key in ("size", "offset", "tables"))
        sizes = integers(field(each, "shape", "promised parts"), "the shape of promised parts", 1)
        parts.append(Parts(sizes, size, offset, tuple(of_type(tables, (list, tuple), "tables"))))
    name = of_type(field(document, "name", "a promise"), str, "the name of a parameter")
    shape = integers(field(document, "shape", "a promise"), "a promised shape", 1)
    return Promise(name, shape, tuple(parts))


def _alike(x: np.ndarray, axis: int) -> bool:
    return bool((x == x.take([0], axis)).all())


def follow(claim: Claim, known: Sequence["Promise | np.ndarray"]) -> tuple[float, ...]:
    """The least values with which a claim on promised parameters, whose settings are complete, follows.

    Args:
        claim: Its values are not looked at.
        known: A promise, or the entries, of each of its tensors.
    """
    if claim.measure != "product":
        (promise,) = known
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
