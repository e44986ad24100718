"""Norms from sums of squares: of vectors, or of a tensor's entries taken together.

Biases live in the RMS norm (Norm-Constrained LMOs, table 3). What multiplies entry by entry is a `Gain` in `entries`.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed.norms.base import Norm, entries, normal_like, rms, widened


class _RootSum(Norm):
    """`unit^-1 |w|_2`, with a `unit` that may depend on the number of entries; the oracle is a normalised gradient."""

    def _rms(self, weight: Tensor) -> Tensor:
        return rms(entries(weight, self.ndim), -1)

    @abstractmethod
    def _unit(self, weight: Tensor) -> float:
        """The RMS of a weight of norm 1."""

    def norm(self, weight: Tensor) -> Tensor:
        return self._rms(weight) / self._unit(weight)

    def dual_norm(self, gradient: Tensor) -> Tensor:
        return self._rms(gradient) * (_count(gradient, self.ndim) * self._unit(gradient))

    def dualize(self, gradient: Tensor) -> Tensor:
        wide = widened(gradient)
        size = self._rms(wide).clamp(min=torch.finfo(wide.dtype).tiny)
        return (wide / size.reshape(size.shape + (1,) * self.ndim) * self._unit(gradient)).to(gradient.dtype)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with a random direction."""
        weight.copy_(normal_like(weight, generator))
        return weight.div_(self._rms(weight) / self._unit(weight))


@dataclass(frozen=True, repr=False)
class BiasRMS(_RootSum):
    """The RMS norm of a vector; its oracle is the gradient normalised to RMS 1 (LMO table 3).

    Args:
        ndim: Dimensions of the vector; more than 1 for the biases of a layer norm over several dimensions.

    Example:
        >>> BiasRMS().norm(torch.tensor([3.0, 4.0]))
        tensor(3.5355)
    """

    ndim: int = 1  # pyrefly: ignore[bad-override]

    def _unit(self, weight: Tensor) -> float:
        return 1.0


@dataclass(frozen=True, repr=False)
class Euclidean(_RootSum):
    """The l2 norm of all entries of a tensor; its oracle is the normalised gradient (LMO table 1).

    With `ndim=2` it is the Frobenius norm of a matrix, which has no class of its own.

    Args:
        ndim: Dimensions of the tensor.

    Example:
        >>> Euclidean(ndim=2).norm(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        tensor(5.)
    """

    ndim: int = 1  # pyrefly: ignore[bad-override]

    def _unit(self, weight: Tensor) -> float:
        return 1 / math.sqrt(_count(weight, self.ndim))


def _count(weight: Tensor, ndim: int) -> int:
    return math.prod(weight.shape[weight.ndim - ndim :])
