"""Norms of a matrix by its columns or rows (Norm-Constrained LMOs, tables 2 to 4; Modular Duality, table 1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed.norms.base import Norm, normal_like, rms, widened

_INSIDE = 1 - 1e-6
"""Where random columns start: rounding in float32 must not carry them out of the unit ball."""


@dataclass(frozen=True, repr=False)
class ColNorm(Norm):
    """1 -> RMS operator norm: the largest RMS of the image of one input symbol.

    For a weight of shape `(d_out, d_in)` that image is a column; `nn.Embedding` stores `(symbols, width)`, so there it
    is a row: `input_axis=0`. MD's norm of an embedding.

    Args:
        input_axis: 1 if inputs index columns (`nn.Linear`), 0 if they index rows (`nn.Embedding`).
        max_inflation: The most by which `dualize` may inflate a symbol's gradient over the batch's largest one. A rare
            symbol's stale momentum would otherwise become a full step for hundreds of steps (LT appendix F, which
            uses 16). The exact oracle, which attains the dual norm, is `float("inf")`.

    Raises:
        ValueError: Another axis, or an inflation below 1.

    Example:
        >>> import torch
        >>> ColNorm(input_axis=0).norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor(3.5355)
    """

    input_axis: int = 1
    max_inflation: float = float("inf")

    def __post_init__(self) -> None:
        if self.input_axis not in (0, 1):
            raise ValueError(f"input_axis={self.input_axis} must be 0 (embedding rows) or 1 (matrix columns)")
        require_numbers("ColNorm: ", {"max_inflation": self.max_inflation})
        if not self.max_inflation >= 1:
            raise ValueError(f"max_inflation={self.max_inflation} must be at least 1 (infinity is the exact oracle)")

    @property
    def feature_dim(self) -> int:
        """The dimension along which one symbol's image lies."""
        return -2 if self.input_axis == 1 else -1

    def norm(self, weight: Tensor) -> Tensor:
        return rms(weight, self.feature_dim).amax(-1)

    def dual_norm(self, gradient: Tensor) -> Tensor:
        return (rms(gradient, self.feature_dim) * gradient.shape[self.feature_dim]).sum(-1)

    def dualize(self, gradient: Tensor) -> Tensor:
        wide = widened(gradient)
        size = rms(wide, self.feature_dim, keepdim=True)
        floor = size.amax((-2, -1), keepdim=True) / self.max_inflation
        return (wide / torch.maximum(size, floor).clamp(min=torch.finfo(wide.dtype).tiny)).to(gradient.dtype)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with Gaussian images, each scaled to RMS 1."""
        weight.copy_(normal_like(weight, generator))
        return weight.mul_(_INSIDE / rms(weight, self.feature_dim, keepdim=True))


@dataclass(frozen=True, repr=False)
class RowNorm(Norm):
    """RMS -> infinity operator norm of `(d_out, d_in)` matrices: `max_j sqrt(d_in) |row_j|_2`.

    It bounds the largest logit of a last layer whose inputs have RMS 1 (LMO tables 2 and 3).

    Example:
        >>> import torch
        >>> RowNorm().norm(torch.tensor([[0.3, 0.4], [0.0, 0.1]]))
        tensor(0.7071)
    """

    def norm(self, weight: Tensor) -> Tensor:
        return rms(weight, -1).amax(-1) * weight.shape[-1]

    def dual_norm(self, gradient: Tensor) -> Tensor:
        return rms(gradient, -1).sum(-1)

    def dualize(self, gradient: Tensor) -> Tensor:
        wide = widened(gradient)
        size = rms(wide, -1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
        return (wide / size / gradient.shape[-1]).to(gradient.dtype)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with Gaussian rows, each scaled to the sphere."""
        weight.copy_(normal_like(weight, generator))
        return weight.mul_(_INSIDE / rms(weight, -1, keepdim=True) / weight.shape[-1])
