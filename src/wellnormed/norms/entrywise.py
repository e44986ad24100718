"""Norms whose oracle is a formula: columns, entries, biases (Norm-Constrained LMOs, tables 2 to 4)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed.norms.base import Norm, rms


@dataclass(frozen=True)
class ColNorm(Norm):
    """1 -> RMS operator norm: the largest RMS of the image of one input symbol.

    For a weight of shape `(d_out, d_in)` that image is a column; `nn.Embedding` stores `(symbols, width)`, so there it
    is a row: `input_axis=0`.

    Args:
        input_axis: 1 if inputs index columns (`nn.Linear`), 0 if they index rows (`nn.Embedding`).
        max_inflation: The most by which `dualize` may inflate a symbol's gradient over the batch's largest one. A rare
            symbol's stale momentum would otherwise become a full step for hundreds of steps (LT appendix F, which
            uses 16). The exact oracle is `float("inf")`.

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
        size = rms(gradient, self.feature_dim, keepdim=True)
        floor = size.amax((-2, -1), keepdim=True) / self.max_inflation
        return gradient / torch.maximum(size, floor).clamp(min=torch.finfo(gradient.dtype).tiny)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with Gaussian images, each scaled to RMS 1, from below: rounding must not leave the unit ball."""
        weight.normal_(generator=generator)
        return weight.mul_((1 - 1e-6) / rms(weight, self.feature_dim, keepdim=True))


@dataclass(frozen=True)
class Sign(Norm):
    """1 -> infinity operator norm: the largest entry in absolute value. Its oracle is the sign (Signum).

    The norm of heads that map to logits (LMO table 3), and of tables of additive attention biases, where it bounds
    what one entry can add to a logit.
    """

    def norm(self, weight: Tensor) -> Tensor:
        return weight.abs().amax((-2, -1))

    def dual_norm(self, gradient: Tensor) -> Tensor:
        return gradient.abs().sum((-2, -1))

    def dualize(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with random signs."""
        return weight.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)


@dataclass(frozen=True)
class BiasRMS(Norm):
    """The RMS norm of a vector; its oracle is the normalised gradient."""

    ndim = 1

    def norm(self, weight: Tensor) -> Tensor:
        return rms(weight, -1)

    def dual_norm(self, gradient: Tensor) -> Tensor:
        return rms(gradient, -1) * gradient.shape[-1]

    def dualize(self, gradient: Tensor) -> Tensor:
        return gradient / rms(gradient, -1, keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with a random direction of RMS 1."""
        weight.normal_(generator=generator)
        return weight.div_(rms(weight, -1, keepdim=True))
