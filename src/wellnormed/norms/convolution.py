"""Norms of convolution kernels that have an oracle (Modular Duality, example 7; Norm-Constrained LMOs, released code).

The kernel is taken as a collection of matrices. Certificates bound the operator on images, whose norm has no oracle.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from wellnormed._inputs import require_choice, require_numbers
from wellnormed._ranges import POSITIVE
from wellnormed.norms.slices import Lifted
from wellnormed.norms.spectral import RMS_TO_RMS, Spectral


@dataclass(frozen=True, repr=False)
class SpectralConv(Lifted):
    """Norm of a kernel `(d_out, d_in / groups, *k)` with K positions.

    The settings of `mode`:

    - `"positions"`: `K max_t |W_t|_{RMS -> RMS}` over the kernel's positions (MD example 7, for 2-D kernels). It bounds
      the largest RMS of a pixel of the output when every pixel of the input has RMS at most 1, and
      `sqrt(d_in / d_out)` times the l2 operator norm, for any stride and zero padding.
    - `"patches"`: `K sqrt(d_in / d_out) sigma_max` of the kernel as one matrix `(d_out, d_in K)`; the oracle takes one
      product instead of K. It is never below the first. (LMO's released code uses it, but starts as for the first, up
      to `sqrt(K)` outside of this ball.)
    - `"matrix"`: the norm `inner` of the kernel as one matrix `(d_out, d_in K)`, in that matrix's unit. The rules of
      Muon's `adjust_lr_fn` treat kernels this way. It bounds no norm of the operator.

    With groups, the largest over the groups. A strided transposed convolution adds fewer than K positions to a pixel,
    so its norm is overstated.

    Args:
        spatial: Dimensions of the image, 1 to 3.
        groups: Groups of the convolution.
        transposed: The weight is `(d_in, d_out / groups, *k)`, as in `nn.ConvTranspose2d`.
        inner: Settings of the oracle; its unit of `(d_out, d_in)`, divided by K, is the unit of this norm. Its
            `input_axis` must be 1, since kernels have a layout of their own.

    Example:
        >>> w = SpectralConv().initialize_(torch.empty(8, 4, 3, 3), torch.Generator().manual_seed(0))
        >>> round(9 * float(Spectral().norm(w[:, :, 0, 0])), 4)
        1.0
    """

    spatial: int = 2
    mode: Literal["positions", "patches", "matrix"] = "positions"
    groups: int = 1
    transposed: bool = False
    inner: Spectral = RMS_TO_RMS  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        require_choice("SpectralConv: mode", self.mode, ("positions", "patches", "matrix"))
        require_choice("SpectralConv: spatial", self.spatial, (1, 2, 3), "it counts the dimensions of the image")
        if not isinstance(self.inner, Spectral) or self.inner.input_axis != 1:
            raise ValueError(
                f"SpectralConv: inner={self.inner!r} must be a Spectral with input_axis=1, since kernels have "
                "a layout of their own; for kernels stored input first, pass transposed=True"
            )
        require_numbers("SpectralConv: ", {"groups": self.groups}, POSITIVE, whole=True)

    @property
    def ndim(self) -> int:
        return 2 + self.spatial

    def _channels(self, weight: Tensor) -> tuple[int, int, int]:
        """Outputs and inputs of one group, and positions."""
        first, second, *kernel = weight.shape[weight.ndim - self.ndim :]
        first //= self.groups
        return (second, first, math.prod(kernel)) if self.transposed else (first, second, math.prod(kernel))

    def cut(self, weight: Tensor) -> list[Tensor]:
        batch = weight.ndim - self.ndim
        x = weight.unflatten(batch, (self.groups, -1)).flatten(batch + 3)  # groups, two kinds of channels, positions
        if self.transposed:
            x = x.transpose(-3, -2)
        return [x.movedim(-1, -3).flatten(-4, -3) if self.mode == "positions" else x.flatten(-2)]

    def join(self, batches: list[Tensor], weight: Tensor) -> Tensor:
        _, d_in, positions = self._channels(weight)
        [x] = batches
        if self.mode == "positions":
            x = x.unflatten(-3, (self.groups, positions)).movedim(-3, -1)
        else:
            x = x.unflatten(-1, (d_in, positions))
        if self.transposed:
            x = x.transpose(-3, -2)
        return x.reshape(weight.shape)

    def slice_units(self, weight: Tensor) -> list[float]:
        d_out, d_in, positions = self._channels(weight)
        if self.mode == "matrix":
            return [self.inner.unit_of(d_out, d_in * positions)]
        return [self.inner.unit_of(d_out, d_in) / positions]

    def with_settings(self, **settings: str) -> Self:
        """As `Norm.with_settings`; units that are set from outside are those of the kernel as one matrix."""
        other = super().with_settings(**settings)
        return replace(other, mode="matrix") if "units" in settings else other

    def check_shape(self, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
        super().check_shape(shape, name)
        if shape[0] % self.groups:
            raise ValueError(
                f"{name} has {shape[0]} channels in its first dimension, which groups={self.groups} does not divide; "
                "give the convolution's own number of groups"
            )
