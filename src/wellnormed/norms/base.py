"""What every norm of a weight promises.

A norm acts on the trailing `ndim` dimensions of a tensor; leading dimensions are a batch. It knows nothing of
optimizers: an update is `-lr * norm.dualize(momentum)`, whoever computes it.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Norm(ABC):
    """A norm on a weight's space, with its dual norm and its linear minimization oracle.

    The laws, all tested: `<g, dualize(g)> = dual_norm(g)`; `norm(dualize(g)) <= overshoot`;
    `norm(initialize_(w)) = 1`; `upper_bound(w) >= norm(w)`; `dualize(0) = 0`.
    """

    ndim: int = 2
    """Trailing dimensions that one weight occupies."""

    @abstractmethod
    def norm(self, weight: Tensor) -> Tensor:
        """The norm of each weight of a batch, shape `(*batch,)`."""

    @abstractmethod
    def dual_norm(self, gradient: Tensor) -> Tensor:
        """The largest `<gradient, w>` over `norm(w) <= 1`, shape `(*batch,)`."""

    @abstractmethod
    def dualize(self, gradient: Tensor) -> Tensor:
        """The `w` of norm 1 (up to `overshoot`) that attains the dual norm; the steepest ascent direction."""

    @abstractmethod
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill one weight with a random point of norm 1, in place."""

    def upper_bound(self, weight: Tensor) -> Tensor:
        """A proved bound from above on `norm(weight)`, float64, shape `(*batch,)`.

        The default serves norms that are finite sums of squares or absolute values, where float64 evaluation with
        the rounding margin of the sum is a proof.
        """
        count = math.prod(weight.shape[-self.ndim :])
        return self.norm(weight.detach().double()) * (1 + 2 * (count + 4) * 2.0**-53)

    @property
    def overshoot(self) -> float:
        """The largest norm that `dualize` returns; 1 unless an iteration approximates the oracle from above."""
        return 1.0

    def check_shape(self, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
        """Refuse a weight that this norm is not defined on.

        Raises:
            ValueError: The shape does not have `ndim` dimensions.
        """
        if len(shape) != self.ndim:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, but {self!r} is a norm on {self.ndim}-dimensional weights; "
                "choose another norm for it in the overrides of `assign_norms`"
            )


class MatrixNorm(Norm):
    """A norm that is the largest, over one or more slices, of a multiple of the slice's largest singular value.

    Spectral constraints act on the slices: `matrices` shows them, `unit` converts one unit of this norm to the
    largest singular value of a slice.
    """

    @abstractmethod
    def matrices(self, weight: Tensor) -> Tensor:
        """The slices of a weight `(*batch, m, n)`, a view of shape `(*batch', m', n')`."""

    @abstractmethod
    def unit(self, weight: Tensor) -> float:
        """The largest singular value of a slice whose norm is 1."""

    @abstractmethod
    def slice_upper_bounds(self, weight: Tensor) -> Tensor:
        """A proved bound on the norm of every slice, float64, one entry per slice."""


def rms(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Root mean square along one dimension, without underflow or overflow for entries from 1e-30 to 1e30."""
    scale = x.abs().amax(dim, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    result = (x / scale).square().mean(dim, keepdim=True).sqrt() * scale
    return result if keepdim else result.squeeze(dim)
