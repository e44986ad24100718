"""Norms by root mean squares: of a matrix's columns or rows, of a vector, of all entries of a tensor.

Sources: Norm-Constrained LMOs, tables 1 to 4; Modular Duality, table 1. Vectors that multiply entry by entry have the
norm `entries.Gain`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed.norms.base import Norm, entries, normal_like, rms, widened

_INSIDE = 1 - 1e-6  # the norm of random groups at the start: float32 rounding must not move them out of the unit ball


class _LargestRMS(Norm):
    """The largest RMS of a group of entries, in units of `_unit`; the oracle normalises every group alone."""

    measures = "lengths"

    def _dims(self) -> tuple[int, ...]:
        """The dimensions, from the end, along which the entries of one group lie; all by default."""
        return tuple(range(-self.ndim, 0))

    def _unit(self, count: int) -> float:
        """The RMS of a group of so many entries whose norm is 1."""
        return 1.0

    def _count(self, weight: Tensor) -> int:
        return math.prod([weight.shape[dim] for dim in self._dims()])  # a list, since torch.compile refuses generators

    def _sizes(self, weight: Tensor) -> Tensor:
        """The RMS of every group, with the dimensions of the weight."""
        return rms(weight, self._dims()) if self._dims() else weight.abs()

    def group_norms(self, weight: Tensor) -> Tensor:
        """The norm of every group alone, with the dimensions of the weight."""
        return self._sizes(weight) / self._unit(self._count(weight))

    def norm(self, weight: Tensor) -> Tensor:
        return entries(self.group_norms(weight), self.ndim).amax(-1)

    def project(self, weight: Tensor, radius: float) -> Tensor:
        return weight * (radius / self.group_norms(weight).clamp(min=radius))

    def blocks(self, weight: Tensor) -> list[tuple[Tensor, float]]:
        dims, count = self._dims(), self._count(weight)
        groups = weight.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, count, 1)
        return [(groups, self._unit(count) * math.sqrt(count))]

    def dual_norm(self, gradient: Tensor) -> Tensor:
        count = self._count(gradient)
        return entries(self._sizes(gradient), self.ndim).sum(-1) * (count * self._unit(count))

    def _divisors(self, sizes: Tensor) -> Tensor:
        """The numbers by which the oracle divides groups of these sizes."""
        return sizes

    def dualize(self, gradient: Tensor) -> Tensor:
        wide = widened(gradient)
        divisors = self._divisors(self._sizes(wide)).clamp(min=torch.finfo(wide.dtype).tiny)
        return (wide / divisors * self._unit(self._count(wide))).to(gradient.dtype)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with Gaussian groups, each brought to norm 1."""
        weight.copy_(normal_like(weight, generator))
        return weight.mul_(_INSIDE / self._sizes(weight) * self._unit(self._count(weight)))


@dataclass(frozen=True, repr=False)
class ColNorm(_LargestRMS):
    """1 -> RMS operator norm: the largest RMS of the image of one input symbol. MD's norm of an embedding.

    Args:
        input_axis: 1 if inputs index columns, as in an `nn.Linear` of shape `(d_out, d_in)`; 0 if they index rows, as
            in an `nn.Embedding` of shape `(symbols, width)`.
        max_inflation: `dualize` enlarges no symbol's gradient by more than this factor relative to the largest one.
            Without it, the stale momentum of a rare symbol gives full steps for hundreds of steps (LT appendix F, which
            uses 16). `float("inf")` is the exact oracle, which attains the dual norm.

    Example:
        >>> ColNorm(input_axis=0).norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor(3.5355)
    """

    input_axis: int = 1
    max_inflation: float = float("inf")

    def __post_init__(self) -> None:
        if not isinstance(self.input_axis, int) or self.input_axis not in (0, 1):
            raise ValueError(f"input_axis={self.input_axis!r} must be 0 (embedding rows) or 1 (matrix columns)")
        require_numbers("ColNorm: ", {"max_inflation": self.max_inflation})
        if not self.max_inflation >= 1:
            raise ValueError(f"max_inflation={self.max_inflation} must be at least 1 (infinity is the exact oracle)")

    def _dims(self) -> tuple[int, ...]:
        return (-2,) if self.input_axis == 1 else (-1,)  # along which one symbol's image lies

    def _divisors(self, sizes: Tensor) -> Tensor:
        return torch.maximum(sizes, sizes.amax((-2, -1), keepdim=True) / self.max_inflation)


@dataclass(frozen=True, repr=False)
class RowNorm(_LargestRMS):
    """RMS -> infinity operator norm of `(d_out, d_in)` matrices: `max_j sqrt(d_in) |row_j|_2`.

    It bounds the largest logit of a last layer whose inputs have RMS 1 (LMO tables 2 and 3).

    Example:
        >>> RowNorm().norm(torch.tensor([[0.3, 0.4], [0.0, 0.1]]))
        tensor(0.7071)
    """

    def _dims(self) -> tuple[int, ...]:
        return (-1,)

    def _unit(self, count: int) -> float:
        return 1 / count


@dataclass(frozen=True, repr=False)
class BiasRMS(_LargestRMS):
    """The RMS norm of a vector; its oracle is the gradient normalised to RMS 1 (LMO table 3).

    `ndim` is more than 1 for the biases of a layer norm over several dimensions.

    Example:
        >>> BiasRMS().norm(torch.tensor([3.0, 4.0]))
        tensor(3.5355)
    """

    ndim: int = 1  # pyrefly: ignore[bad-override]

    @torch.no_grad()
    def start_(self, weight: Tensor, radius: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Fill with zeros, the centre of the ball."""
        return weight.zero_()


@dataclass(frozen=True, repr=False)
class Euclidean(_LargestRMS):
    """The l2 norm of all entries of a tensor of `ndim` dimensions; its oracle is the normalised gradient (LMO table 1).

    With `ndim=2` it is the Frobenius norm of a matrix, which has no class of its own.

    Example:
        >>> Euclidean(ndim=2).norm(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        tensor(5.)
    """

    ndim: int = 1  # pyrefly: ignore[bad-override]

    def _unit(self, count: int) -> float:
        return 1 / math.sqrt(count)
