"""How a norm of matrices lifts to the slices of a weight.

The norm is the largest inner norm of a slice, so the dual norm is the sum of theirs, and the oracle acts on every slice
alone (Modular Duality, section 4.1 says it for kernels). Slices of equal size are treated as one batch.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from wellnormed.norms.base import MatrixNorm


class Lifted(MatrixNorm):
    """The mechanism: cut a weight into batches of equal slices, act on them, and put them together again."""

    inner: MatrixNorm

    @abstractmethod
    def cut(self, weight: Tensor) -> list[Tensor]:
        """Batches `(*batch, slices, *slice)` of the slices; one batch for every size."""

    @abstractmethod
    def join(self, batches: list[Tensor], weight: Tensor) -> Tensor:
        """Undo `cut`, for a weight of this one's shape."""

    def factor(self, weight: Tensor) -> float:
        """This norm over the inner norm of the slices."""
        return 1.0

    def norm(self, weight: Tensor) -> Tensor:
        return torch.stack([self.inner.norm(x).amax(-1) for x in self.cut(weight)]).amax(0) * self.factor(weight)

    def dual_norm(self, gradient: Tensor) -> Tensor:
        duals = [self.inner.dual_norm(x).sum(-1) for x in self.cut(gradient)]
        return torch.stack(duals).sum(0) / self.factor(gradient)

    def dualize(self, gradient: Tensor) -> Tensor:
        return self.join([self.inner.dualize(x) for x in self.cut(gradient)], gradient) / self.factor(gradient)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill every slice with a random point of norm 1."""
        batches = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in self.cut(weight)]
        for batch in batches:
            for one in batch:
                self.inner.initialize_(one, generator)
        return weight.copy_(self.join(batches, weight) / self.factor(weight))

    def upper_bound(self, weight: Tensor) -> Tensor:
        return self.slice_upper_bounds(weight).amax(-1)

    def slice_upper_bounds(self, weight: Tensor) -> Tensor:
        bounds = [self.inner.slice_upper_bounds(x) for x in self.cut(weight)]
        flat = [bound.flatten(weight.ndim - self.ndim) for bound in bounds]  # slices of slices
        return torch.cat(flat, -1) * (self.factor(weight) * (1 + 2.0**-50))  # the factor, and two products

    def slices(self, weight: Tensor) -> list[Tensor]:
        return [slices for x in self.cut(weight) for slices in self.inner.slices(x)]

    def from_slices(self, slices: list[Tensor], weight: Tensor) -> Tensor:
        left = iter(slices)
        batches = [self.inner.from_slices([next(left) for _ in self.inner.slices(x)], x) for x in self.cut(weight)]
        return self.join(batches, weight)

    def slice_units(self, weight: Tensor) -> list[float]:
        factor = self.factor(weight)
        return [unit / factor for x in self.cut(weight) for unit in self.inner.slice_units(x)]

    @property
    def overshoot(self) -> float:
        return self.inner.overshoot

    def with_coefficients(self, coefficients: str) -> Self:
        return replace(self, inner=self.inner.with_coefficients(coefficients))  # pyrefly: ignore

    def with_units(self, units: str) -> Self:
        return replace(self, inner=self.inner.with_units(units))  # pyrefly: ignore


def require_matrix_norm(lifted: Lifted) -> None:
    """Refuse an inner norm that is not of matrices.

    Raises:
        ValueError: Naming it.
    """
    if not isinstance(lifted.inner, MatrixNorm):
        raise ValueError(
            f"{type(lifted).__name__}: inner={lifted.inner!r} is no norm of matrices; give a norm by entries or "
            "columns to the whole weight, where it is the largest over the parts already"
        )
