"""Norms by the largest entry, whose oracle is the sign (Norm-Constrained LMOs, tables 2 to 4)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed._inputs import require_flags, require_numbers
from wellnormed.matrix._checks import check_finite
from wellnormed.norms.base import Norm, entries


class _LargestEntry(Norm):
    """The largest entry in absolute value, times the number of inputs that a norm counts."""

    measures = "entries"

    def _inputs(self, weight: Tensor) -> int:
        return 1

    def norm(self, weight: Tensor) -> Tensor:
        return entries(weight.abs(), self.ndim).amax(-1) * self._inputs(weight)

    def project(self, weight: Tensor, radius: float) -> Tensor:
        largest = radius / weight.new_tensor(self._inputs(weight))
        return weight.clamp(-largest, largest)

    def blocks(self, weight: Tensor) -> list[tuple[Tensor, float]]:
        return [(weight.reshape(-1, 1, 1), 1 / self._inputs(weight))]

    def dual_norm(self, gradient: Tensor) -> Tensor:
        return entries(gradient.abs(), self.ndim).sum(-1) / self._inputs(gradient)

    def dualize(self, gradient: Tensor) -> Tensor:
        check_finite(gradient, "gradient")  # the sign of NaN is 0 to torch
        return gradient.sign() / self._inputs(gradient)


@dataclass(frozen=True, repr=False)
class Sign(_LargestEntry):
    """1 -> infinity operator norm: the largest entry in absolute value. Its oracle is the sign (Signum).

    It is used for heads that map to logits, and for tables of additive attention biases, where it bounds what one entry
    can add to a logit. `normalized` multiplies it by the number of inputs `d_in` (LMO table 3, last layer; the released
    code's default). Then it bounds the RMS -> infinity and infinity -> infinity norms, and the oracle is `sign / d_in`.

    Args:
        ndim: Dimensions of the weight: 2 for a matrix, 3 to 5 for a convolution's kernel, 1 for a vector.
        output_axis: Axis that indexes outputs; `d_in` is the product of the others. It is 0 if outputs come first, 1
            for transposed convolutions, whose `d_in` counts the inputs of all groups.

    Example:
        >>> Sign(normalized=True).dualize(torch.tensor([[3.0, -1.0]]))
        tensor([[ 0.5000, -0.5000]])
    """

    normalized: bool = False
    ndim: int = 2  # pyrefly: ignore[bad-override]
    output_axis: int = 0

    def __post_init__(self) -> None:
        require_flags("Sign: ", {"normalized": self.normalized})
        require_numbers("Sign: ", {"ndim": self.ndim, "output_axis": self.output_axis}, whole=True)
        if self.normalized and not 0 <= self.output_axis < self.ndim >= 2:
            raise ValueError(
                f"Sign: normalized=True with ndim={self.ndim} and output_axis={self.output_axis} has no inputs "
                "to count; leave normalized out for vectors, and choose output_axis 0 or 1"
            )

    def _inputs(self, weight: Tensor) -> int:
        if not self.normalized:
            return 1
        shape = weight.shape[weight.ndim - self.ndim :]
        return math.prod(shape) // max(1, shape[self.output_axis])

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with random signs."""
        device = weight.device if generator is None else generator.device
        signs = torch.empty(weight.shape, dtype=weight.dtype, device=device).bernoulli_(0.5, generator=generator)
        return weight.copy_(signs.mul_(2).sub_(1).div_(self._inputs(weight)))

    @torch.no_grad()
    def start_(self, weight: Tensor, radius: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Fill with random signs; a vector with zeros."""
        return weight.zero_() if self.ndim == 1 else super().start_(weight, radius, generator)


@dataclass(frozen=True, repr=False)
class Gain(_LargestEntry):
    """The largest gain in absolute value: the RMS -> RMS norm of a diagonal map, such as the gains of a norm layer.

    Gains start at 1, which lies on the sphere; the oracle is the sign. With `ndim=0` the weight is one number that
    multiplies all entries.

    Example:
        >>> Gain().norm(torch.tensor([1.0, -2.0]))
        tensor(2.)
    """

    ndim: int = 1  # pyrefly: ignore[bad-override]

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with ones; nothing is drawn."""
        return weight.fill_(1)

    @torch.no_grad()
    def start_(self, weight: Tensor, radius: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Fill with ones, whatever the radius; all zeros stay, because their layer starts without its branch."""
        return self.initialize_(weight) if bool(weight.any()) else weight
