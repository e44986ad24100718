"""The RMS -> RMS operator norm and its lift to the heads of an attention projection.

`|W| = sqrt(d_in / d_out) * sigma_max(W)` for a weight of shape `(d_out, d_in)`: the most that the RMS of a vector can
grow (LT section 3.1; Modular Duality, section 3).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellnormed.matrix import coefficients as registry
from wellnormed.matrix import msign, spectral_norm, spectral_norm_upper_bound
from wellnormed.norms.base import MatrixNorm


@dataclass(frozen=True)
class Spectral(MatrixNorm):
    """RMS -> RMS operator norm of `(d_out, d_in)` matrices; its oracle is Muon's orthogonalised update.

    Args:
        coefficients: Set of the registry with which `dualize` approximates the matrix sign. Its overshoot is declared.
        method: Method of `msign`.

    Example:
        >>> import torch
        >>> norm = Spectral()
        >>> w = norm.initialize_(torch.empty(8, 2), torch.Generator().manual_seed(0))
        >>> round(float(norm.norm(w)), 4)
        1.0
    """

    coefficients: str = "you-5-nanogpt"
    method: str = "auto"

    def norm(self, weight: Tensor) -> Tensor:
        return spectral_norm(weight) / self.unit(weight)

    def dual_norm(self, gradient: Tensor) -> Tensor:
        return torch.linalg.svdvals(gradient.double()).sum(-1).to(gradient.dtype) * self.unit(gradient)

    def dualize(self, gradient: Tensor) -> Tensor:
        return msign(gradient, self.coefficients, self.method) * self.unit(gradient)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill with a random semi-orthogonal matrix of norm 1."""
        normal = torch.empty(weight.shape, dtype=torch.float64).normal_(generator=generator)
        return weight.copy_(msign(normal, method="svd") * self.unit(weight))

    def upper_bound(self, weight: Tensor) -> Tensor:
        return self.slice_upper_bounds(weight)

    def slice_upper_bounds(self, weight: Tensor) -> Tensor:
        bound = torch.as_tensor(spectral_norm_upper_bound(weight.detach()), dtype=torch.float64)
        return bound / self.unit(weight) * (1 + 2.0**-51)  # two more roundings

    def matrices(self, weight: Tensor) -> Tensor:
        return weight

    def unit(self, weight: Tensor) -> float:
        d_out, d_in = weight.shape[-2:]
        return math.sqrt(d_out / d_in)

    @property
    def overshoot(self) -> float:
        return 1.0 if self.method in ("svd", "eigh") else registry.get(self.coefficients).overshoot


@dataclass(frozen=True)
class PerHead(MatrixNorm):
    """The largest inner norm over a projection's `heads` row slices, each of shape `(d_out / heads, d_in)`.

    Several heads may attend to different tokens, so a bound on attention needs the norm of each head's own slice;
    the whole matrix's norm can understate it by `sqrt(heads)` (LT theorem D.1 is one head; its
    equations 21-23 use it for many).

    Args:
        heads: Number of slices of equal height, stacked along the output dimension.
        inner: Norm of one slice.
    """

    heads: int
    inner: Spectral = Spectral()

    def norm(self, weight: Tensor) -> Tensor:
        return self.inner.norm(self.matrices(weight)).amax(-1)

    def dual_norm(self, gradient: Tensor) -> Tensor:
        return self.inner.dual_norm(self.matrices(gradient)).sum(-1)

    def dualize(self, gradient: Tensor) -> Tensor:
        return self.inner.dualize(self.matrices(gradient)).flatten(-3, -2)

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        for head in self.matrices(weight):
            self.inner.initialize_(head, generator)
        return weight

    def upper_bound(self, weight: Tensor) -> Tensor:
        return self.slice_upper_bounds(weight).amax(-1)

    def slice_upper_bounds(self, weight: Tensor) -> Tensor:
        return self.inner.slice_upper_bounds(self.matrices(weight))

    def matrices(self, weight: Tensor) -> Tensor:
        return weight.unflatten(-2, (self.heads, -1))

    def unit(self, weight: Tensor) -> float:
        d_out, d_in = weight.shape[-2:]
        return math.sqrt(d_out / (self.heads * d_in))

    @property
    def overshoot(self) -> float:
        return self.inner.overshoot

    def check_shape(self, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
        super().check_shape(shape, name)
        if shape[0] % self.heads:
            raise ValueError(
                f"{name} has {shape[0]} rows, which {self.heads} heads do not divide; "
                "choose a head count that divides the output dimension"
            )
