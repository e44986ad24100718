"""Norms of weights that hold several matrices: heads, fused projections, experts.

Each is the largest norm of a part. The norm of the whole matrix would understate it, by up to the root of their number.
"""

from abc import abstractmethod
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed.norms.spectral import RMS_TO_RMS, MatrixNorm


class Lifted(MatrixNorm):
    """The largest norm `inner` over the parts of a weight; subclasses cut a weight into parts and join them again."""

    inner: MatrixNorm

    def __post_init__(self) -> None:
        if not isinstance(self.inner, MatrixNorm):
            raise ValueError(
                f"{type(self).__name__}: inner must be a norm of matrices, got {self.inner!r}; give a norm by entries "
                "or columns to the whole weight, since it is a maximum over the parts already"
            )

    @abstractmethod
    def cut(self, weight: Tensor) -> list[Tensor]:
        """Batches `(*batch, parts, *part)` of the parts; one batch for every size."""

    @abstractmethod
    def join(self, batches: list[Tensor], weight: Tensor) -> Tensor:
        """Undo `cut`, for a weight of this one's shape."""

    def slices(self, weight: Tensor) -> list[Tensor]:
        return [slices for x in self.cut(weight) for slices in self.inner.slices(x)]

    def from_slices(self, slices: list[Tensor], weight: Tensor) -> Tensor:
        left = iter(slices)
        batches = [self.inner.from_slices([next(left) for _ in self.inner.slices(x)], x) for x in self.cut(weight)]
        return self.join(batches, weight)

    def slice_units(self, weight: Tensor) -> list[float]:
        return [unit for x in self.cut(weight) for unit in self.inner.slice_units(x)]

    @property
    def msign_settings(self) -> tuple[str, str]:
        return self.inner.msign_settings

    def with_settings(self, **settings: str) -> Self:
        return replace(self, inner=self.inner.with_settings(**settings))  # pyrefly: ignore


class _Parts(Lifted):
    """Parts along one dimension; `parts` is their number, or the size of each."""

    parts: int | tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = tuple(self.parts) if isinstance(self.parts, tuple | list) else (self.parts,)
        names = [f"parts[{i}]" if len(sizes) > 1 else "parts" for i in range(len(sizes))]
        require_numbers(f"{type(self).__name__}: ", dict(zip(names, sizes, strict=True)), whole=True)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{self!r}: the number of parts, or the size of each, must be positive")
        if not 0 <= self.dim < self.inner.ndim:
            raise ValueError(f"{self!r}: dim={self.dim} must be a dimension of one weight, in [0, {self.inner.ndim})")

    @property
    def ndim(self) -> int:
        return self.inner.ndim

    def _sizes(self, length: int) -> list[int]:
        return list(self.parts) if isinstance(self.parts, tuple) else [length // self.parts] * self.parts

    def cut(self, weight: Tensor) -> list[Tensor]:
        batch = weight.ndim - self.ndim
        chunks: dict[int, list[Tensor]] = defaultdict(list)
        for chunk in weight.split(self._sizes(weight.shape[batch + self.dim]), batch + self.dim):
            chunks[chunk.shape[batch + self.dim]].append(chunk)
        return [torch.stack(alike, batch) for alike in chunks.values()]

    def join(self, batches: list[Tensor], weight: Tensor) -> Tensor:
        batch = weight.ndim - self.ndim
        queues = {x.shape[batch + 1 + self.dim]: iter(x.unbind(batch)) for x in batches}
        sizes = self._sizes(weight.shape[batch + self.dim])
        return torch.cat([next(queues[size]) for size in sizes], batch + self.dim)

    def check_shape(self, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
        super().check_shape(shape, name)
        length = shape[self.dim]
        sizes = self._sizes(length)
        if sum(sizes) != length or 0 in sizes:
            raise ValueError(
                f"{name} has {length} entries along dimension {self.dim}, which the parts of {self!r} do not divide or "
                "do not add up to; choose parts that make up the whole dimension"
            )
        for size in dict.fromkeys(sizes):
            self.inner.check_shape((*shape[: self.dim], size, *shape[self.dim + 1 :]), f"a part of {name}")


@dataclass(frozen=True, repr=False)
class Split(_Parts):
    """The largest norm, `inner`, over the parts of a fused weight: queries, keys and values, say.

    `parts` is the number of parts of equal size, or the size of each. They lie along the dimension `dim` of one weight;
    0 is the axis of a matrix's outputs.

    Example:
        >>> qkv = torch.cat([torch.eye(4), 3 * torch.eye(4), torch.eye(4)])
        >>> Split(3).norm(qkv), Split((4, 8)).cut(qkv)[1].shape
        (tensor(3.), torch.Size([1, 8, 4]))
    """

    parts: int | tuple[int, ...]  # pyrefly: ignore[bad-override]
    inner: MatrixNorm = RMS_TO_RMS  # pyrefly: ignore[bad-override]
    dim: int = 0  # pyrefly: ignore[bad-override]


@dataclass(frozen=True, repr=False)
class PerHead(_Parts):
    """The largest norm, `inner`, over a projection's `heads` slices of rows, each of shape `(d_out / heads, d_in)`.

    Heads may attend to different tokens, so a bound on attention needs the norm of each head's slice. The slices lie
    along the dimension `dim` of one weight; 0 is the axis of a matrix's outputs.

    Example:
        >>> PerHead(4).norm(torch.eye(8))
        tensor(2.)
    """

    heads: int
    inner: MatrixNorm = RMS_TO_RMS  # pyrefly: ignore[bad-override]
    dim: int = 0  # pyrefly: ignore[bad-override]

    @property
    def parts(self) -> int:  # pyrefly: ignore[bad-override]
        """The number of heads."""
        return self.heads


@dataclass(frozen=True, repr=False)
class Experts(Lifted):
    """The largest norm, `inner`, over the experts of one weight `(experts, *shape)`.

    Example:
        >>> Experts().norm(torch.stack([torch.eye(4), 5 * torch.eye(4)]))
        tensor(5.)
    """

    inner: MatrixNorm = RMS_TO_RMS  # pyrefly: ignore[bad-override]

    @property
    def ndim(self) -> int:
        return self.inner.ndim + 1

    def cut(self, weight: Tensor) -> list[Tensor]:
        return [weight]

    def join(self, batches: list[Tensor], weight: Tensor) -> Tensor:
        return batches[0]

    def check_shape(self, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
        super().check_shape(shape, name)
        self.inner.check_shape(tuple(shape[1:]), f"an expert of {name}")
