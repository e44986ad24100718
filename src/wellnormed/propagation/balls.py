"""What is claimed of all weights whose norm is at most a promised one, whatever their entries are.

The norm bounds the singular values of parts of a weight (`Norm.blocks`), and of a matrix that is made of parts
`|W|^2 <= sum |part|^2`, in which a measure of some rows needs the parts that have an entry in them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed.norms import Norm
from wellnormed.propagation import claims


@dataclass(frozen=True)
class Ball:
    """All weights of a shape whose norm is at most a radius."""

    norm: Norm
    radius: float
    shape: tuple[int, ...]

    def spectral(self, parts: int = 1, transposed: bool = False) -> tuple[float, ...]:
        """As `claims.spectral`."""
        rows = self.shape[-1] if transposed else self.shape[0]
        owner = torch.arange(rows) // (rows // parts)
        return self._sizes(owner if transposed else owner.reshape(-1, *[1] * (len(self.shape) - 1)), parts)

    def group_norm(self, parts: int = 1) -> tuple[float, ...]:
        """As `claims.group_norm`."""
        return self._sizes(torch.arange(self.shape[0]) // (self.shape[0] // parts), parts)

    def row_norm(self, transposed: bool = False) -> tuple[float]:
        """As `claims.row_norm`, of a matrix or of its transpose."""
        rows = torch.arange(self.shape[-1] if transposed else self.shape[0])
        return (max(self._sizes(rows if transposed else rows[:, None], len(rows))),)

    def max_abs(self) -> tuple[float]:
        """As `claims.max_abs`: of a vector by its entries, of a matrix by its rows."""
        entries = torch.arange(self.shape[0])
        return (max(self._sizes(entries.reshape(-1, *[1] * (len(self.shape) - 1)), self.shape[0])),)

    def cuts_rows_and_columns(self) -> bool:
        """Whether the parts lie in rows and columns of the weight as a matrix with a row for each of its first axis."""
        columns = math.prod(self.shape[1:])
        for positions, _ in self.norm.blocks(torch.arange(self.shape[0] * columns).reshape(self.shape)):
            rows, places = positions // columns, positions % columns
            if not any(_alike(rows, a) and _alike(places, b) for a, b in ((-1, -2), (-2, -1))):
                return False
        return True

    def taps(self, groups: int) -> tuple[float]:
        """As the claim `taps` of a kernel `(outputs, inputs, *kernel)`: no convolution by it has a larger norm."""
        count = math.prod(self.shape[2:])
        group = torch.arange(self.shape[0]) // (self.shape[0] // groups)
        tap = torch.arange(count).reshape(self.shape[2:])
        owner = group.reshape(-1, *[1] * (len(self.shape) - 1)) * count + tap
        sums = torch.tensor(self._sizes(owner, groups * count)).double().reshape(groups, count).sum(1)
        return (float(sums.max()) * (1 + (count + 4) * 2.0**-52),)

    def _sizes(self, owner: Tensor, parts: int) -> tuple[float, ...]:
        """For every part, the root of the sum of squares of the blocks in it; `owner` is the part of every entry."""
        squares, batches = torch.zeros(parts, dtype=torch.float64), self.norm.blocks(owner.expand(self.shape))
        for entries, size in batches:
            block = torch.arange(len(entries))[:, None] * parts
            found = torch.unique(block + entries.flatten(1)) % parts
            squares += torch.bincount(found, minlength=parts) * size**2
        margin = 1 + (len(batches) + 8) * 2.0**-52  # of the sum, its products, and the root
        return tuple((squares.sqrt() * margin * self.radius).tolist())


def _alike(x: Tensor, axis: int) -> bool:
    return bool((x == x.narrow(axis, 0, 1)).all())


def claim(measure: str, tensors: Sequence[Tensor | Ball], **constants: object) -> tuple[float, ...] | None:
    """A measure of tensors and of all weights of balls; None if nothing is known of it."""
    first = tensors[0]
    dimensions = len(first.shape)
    match measure, dimensions:
        case "product", 2:
            return _product(*tensors, **constants)  # pyrefly: ignore
        case "spectral", 2:
            return first.spectral(**constants)  # pyrefly: ignore
        case "spectral", 3 | 4 | 5 if first.cuts_rows_and_columns() and not constants.get("transposed"):  # pyrefly: ignore
            return first.spectral(**constants)  # pyrefly: ignore
        case "group_norm" | "positive_norm", 1:
            return first.group_norm(**constants)  # pyrefly: ignore
        case "row_norm", 1:
            return first.group_norm(**constants)  # pyrefly: ignore
        case "row_norm", 2:
            return first.row_norm(**constants)  # pyrefly: ignore
        case "max_abs", 1 | 2:
            return first.max_abs(**constants)  # pyrefly: ignore
        case "taps" | "convolution", 3 | 4 | 5:
            return first.taps(constants["groups"])  # pyrefly: ignore
        case "diameter" | "row_difference", 2:
            (size,) = first.row_norm(**constants)  # pyrefly: ignore
            return (2 * size,)
        case _:
            return None


def _product(
    left: Tensor | Ball, right: Tensor | Ball, pairs: Sequence[Sequence[int]], parts: Sequence[int],
    transposed: Sequence[bool],
) -> tuple[float, ...]:  # fmt: skip
    """As `claims.product`, by the singular values of both factors."""
    a, b = (
        x.spectral(n, t) if isinstance(x, Ball) else claims.spectral(x, n, t)
        for x, n, t in zip((left, right), parts, transposed, strict=True)
    )
    return tuple(math.nextafter(a[i] * b[j], math.inf) for i, j in pairs)
