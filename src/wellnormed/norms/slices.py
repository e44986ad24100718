"""Norms of weights that hold several matrices: heads, fused projections, experts (the mechanism is in `lifted`).

An understated norm is what they avoid: that of the whole can lie below a part's by the root of their number.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wellnormed.norms.base import MatrixNorm
from wellnormed.norms.lifted import Lifted, require_matrix_norm
from wellnormed.norms.spectral import RMS_TO_RMS


class _Parts(Lifted):
    """Parts that lie along one dimension; `parts` is their number, or the size of each."""

    parts: int | tuple[int, ...]
    dim: int

    def __post_init__(self) -> None:
        require_matrix_norm(self)
        sizes = (self.parts,) if isinstance(self.parts, int) else self.parts
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{self!r}: the number of parts, or the size of each, must be positive")
        if not 0 <= self.dim < self.inner.ndim:
            raise ValueError(f"{self!r}: dim={self.dim} must be a dimension of one weight, in [0, {self.inner.ndim})")

    @property
    def ndim(self) -> int:
        return self.inner.ndim

    def _sizes(self, length: int) -> list[int]:
        return list(self.parts) if isinstance(self.parts, tuple) else [length // self.parts] * self.parts

    def _dim(self, weight: Tensor) -> int:
        return weight.ndim - self.ndim + self.dim

    def cut(self, weight: Tensor) -> list[Tensor]:
        dim = self._dim(weight)
        sizes = self._sizes(weight.shape[dim])
        chunks = list(zip(sizes, weight.split(sizes, dim), strict=True))
        alike = [[chunk for own, chunk in chunks if own == size] for size in dict.fromkeys(sizes)]
        return [torch.stack(chunks, weight.ndim - self.ndim) for chunks in alike]

    def join(self, batches: list[Tensor], weight: Tensor) -> Tensor:
        dim = self._dim(weight)
        queues = {x.shape[dim + 1]: iter(x.unbind(weight.ndim - self.ndim)) for x in batches}
        return torch.cat([next(queues[size]) for size in self._sizes(weight.shape[dim])], dim)

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
    """The largest inner norm over parts of a fused weight, cut along one dimension: queries, keys and values, say.

    Args:
        parts: How many of equal size, or the size of each.
        inner: Norm of one part.
        dim: Dimension of one weight along which the parts lie; 0 is the outputs of a matrix.

    Raises:
        ValueError: No part or an empty one, a dimension that a part has not, or an inner norm that is not of matrices
            (give `Sign`, `ColNorm` or `BiasRMS` to the whole weight).

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
    """The largest inner norm over a projection's `heads` row slices, each of shape `(d_out / heads, d_in)`.

    Several heads may attend to different tokens, so a bound on attention needs the norm of each head's own slice;
    the whole matrix's norm can understate it by `sqrt(heads)` (LT theorem D.1 is one head; its
    equations 21-23 use it for many).

    Args:
        heads: Number of slices of equal height, stacked along the output dimension.
        inner: Norm of one slice.

    Example:
        >>> PerHead(4).norm(torch.eye(8))
        tensor(2.)
    """

    dim: ClassVar[int] = 0  # pyrefly: ignore[bad-override]
    heads: int
    inner: MatrixNorm = RMS_TO_RMS  # pyrefly: ignore[bad-override]

    @property
    def parts(self) -> int:  # pyrefly: ignore[bad-override]
        """Their number."""
        return self.heads


@dataclass(frozen=True, repr=False)
class Experts(Lifted):
    """The largest inner norm over the experts of one weight `(experts, *shape)`.

    Args:
        inner: Norm of one expert's weight.

    Example:
        >>> Experts().norm(torch.stack([torch.eye(4), 5 * torch.eye(4)]))
        tensor(5.)
    """

    inner: MatrixNorm = RMS_TO_RMS  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        require_matrix_norm(self)

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
