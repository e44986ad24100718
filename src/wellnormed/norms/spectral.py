"""Norms by singular values, and the usual one, the RMS -> RMS operator norm of a matrix.

Norms of weights that hold several matrices are in `slices`, those of kernels in `convolution`. The usual norm of a
weight of shape `(d_out, d_in)` is `|W| = sqrt(d_in / d_out) * sigma_max(W)`: the largest factor by which W multiplies
the RMS of a vector (LT section 3.1; Modular Duality, section 3).
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from wellnormed._inputs import require_choice
from wellnormed.matrix import coefficients as registry
from wellnormed.matrix import (
    msign,
    overshoot,
    semi_orthogonal,
    spectral_hardcap,
    spectral_norm,
    spectral_norm_upper_bound,
)
from wellnormed.matrix._checks import check_finite
from wellnormed.matrix.bounds import proved_bound, spectral_norm_within
from wellnormed.matrix.msign import METHODS, coarse_msign
from wellnormed.norms.base import Norm, normal_like

Units = Literal["rms", "l2", "pixels", "one-hot", "match-rms-adamw"]

LARGE = 2**20
"""The number of entries from which on a weight's start is computed by products; a float64 SVD would take seconds."""


class MatrixNorm(Norm):
    """A norm that is the largest, over one or more slices, of a multiple of the slice's largest singular value.

    So the dual norm is the sum of the slices' dual norms, and the oracle acts on every slice alone (Modular Duality,
    section 4.1, has this for kernels). Slices of equal size form one batch, and spectral constraints act on them.
    """

    measures = "singular values"

    @property
    @abstractmethod
    def msign_settings(self) -> tuple[str, str]:
        """Coefficient set and method of the oracle's `msign`."""

    def _measure(self, weight: Tensor, function: Callable[[Tensor, float], Tensor]) -> Tensor:
        """A number for every slice, `(*batch, slices)`."""
        batch = weight.shape[: weight.ndim - self.ndim]
        values = map(function, self.slices(weight), self.slice_units(weight))
        return torch.cat([numbers.reshape(*batch, -1) for numbers in values], -1)

    def norm(self, weight: Tensor) -> Tensor:
        return self._measure(weight, lambda x, unit: spectral_norm(x) / unit).amax(-1)

    def dual_norm(self, gradient: Tensor) -> Tensor:
        check_finite(gradient, "gradient")
        wide = gradient.double()
        nuclear = self._measure(wide, lambda x, unit: torch.linalg.svdvals(x).sum(-1) * unit)
        return nuclear.sum(-1).to(gradient.dtype)

    def dualize(self, gradient: Tensor) -> Tensor:
        return self.on_slices(gradient, lambda x, unit: coarse_msign(x, unit, *self.msign_settings))

    @torch.no_grad()
    def initialize_(self, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill every slice with a random semi-orthogonal matrix of norm 1; nothing happens on the meta device.

        It is computed in float64 by an SVD, or for weights of 2^20 entries or more in float32 by products.
        """
        if weight.is_meta:
            return weight
        products = weight.numel() >= LARGE and weight.dtype != torch.float64

        def orthogonal(normal: Tensor) -> Tensor:
            return semi_orthogonal(normal.to(weight.device)) if products else msign(normal, method="svd")

        def start(slices: Tensor, unit: float) -> Tensor:
            normal = (normal_like(one, generator, torch.float64) for one in slices.reshape(-1, *slices.shape[-2:]))
            filled = [(orthogonal(one) * unit).to(slices.dtype) for one in normal]
            return torch.stack(filled).reshape(slices.shape)

        return weight.copy_(self.on_slices(weight, start))

    def project(self, weight: Tensor, radius: float) -> Tensor:
        return self.on_slices(weight, lambda slices, unit: spectral_hardcap(slices, radius * unit))

    def blocks(self, weight: Tensor) -> list[tuple[Tensor, float]]:
        slices = (x.reshape(-1, *x.shape[-2:]) for x in self.slices(weight))
        return list(zip(slices, self.slice_units(weight), strict=True))

    def upper_bound(self, weight: Tensor) -> Tensor:
        return self._bound(weight, lambda x: torch.as_tensor(spectral_norm_upper_bound(x[None]), device="cpu"))

    def bound_on_device(self, weight: Tensor) -> Tensor:
        return self.upper_bound(weight) if weight.device.type == "cpu" else self._bound(weight, proved_bound)

    def _bound(self, weight: Tensor, bound: Callable[[Tensor], Tensor]) -> Tensor:
        bounds = self._measure(weight.detach(), lambda x, unit: bound(x) / unit)
        return bounds.amax(-1) * (1 + 2.0**-50)  # roundings of the unit, quotient and product

    def within(self, weight: Tensor, bound: float | Tensor) -> Tensor:
        def proved(x: Tensor, unit: float) -> Tensor:
            upper = bound * unit * (1 - 2.0**-51)  # roundings of the unit and both products
            if isinstance(upper, Tensor):
                upper = upper.reshape(upper.shape + (1,) * (x.ndim - 2 - upper.ndim))
            return spectral_norm_within(x, upper)

        return self._measure(weight.detach(), proved).all(-1)

    @property
    def overshoot(self) -> float:
        return overshoot(*self.msign_settings)


@dataclass(frozen=True, repr=False)
class Spectral(MatrixNorm):
    """RMS -> RMS operator norm of `(d_out, d_in)` matrices; its oracle is Muon's orthogonalised update.

    Args:
        coefficients: The coefficient set with which `dualize` approximates the matrix sign; `overshoot` is its bound.
        method: Method of `msign`.
        units: The largest singular value of a matrix of norm 1. "rms": `sqrt(d_out / d_in)`. "l2": 1. "pixels", for a
            first layer that may have more pixels as inputs than outputs: `max(1, sqrt(d_out / d_in))`, without which a
            learning rate found at a small width does not transfer (LMO table 3, insight 3.2 iii); it is also Muon's
            original choice. "one-hot", the 2 -> RMS norm: `sqrt(d_out)` (LMO table 4, which prefers `ColNorm`).
            "match-rms-adamw": `0.2 sqrt(max(d_out, d_in))`, so that entries of an update are as large as AdamW's (Liu
            et al., 2025).
        input_axis: 1 if inputs index columns (`nn.Linear`), 0 if they index rows (`nn.Embedding`, GPT-2's `Conv1D`).

    Example:
        >>> import torch
        >>> norm = Spectral()
        >>> w = norm.initialize_(torch.empty(8, 2), torch.Generator().manual_seed(0))
        >>> round(float(norm.norm(w)), 4)
        1.0
    """

    coefficients: str = "you-5-nanogpt"
    method: str = "auto"
    units: Units = "rms"
    input_axis: int = 1

    def __post_init__(self) -> None:
        require_choice("Spectral: units", self.units, get_args(Units))
        registry.get(self.coefficients)
        require_choice("Spectral: method", self.method, METHODS, "they are those of msign")
        if not isinstance(self.input_axis, int) or self.input_axis not in (0, 1):
            raise ValueError(f"Spectral: input_axis={self.input_axis!r} must be 1 (matrix columns) or 0 (rows)")

    @property
    def msign_settings(self) -> tuple[str, str]:
        return self.coefficients, self.method

    def slices(self, weight: Tensor) -> list[Tensor]:
        return [weight]

    def from_slices(self, slices: list[Tensor], weight: Tensor) -> Tensor:
        return slices[0]

    def slice_units(self, weight: Tensor) -> list[float]:
        d_out, d_in = weight.shape[-2:] if self.input_axis == 1 else weight.shape[:-3:-1]
        return [self.unit_of(d_out, d_in)]

    def unit_of(self, d_out: int, d_in: int) -> float:
        """The largest singular value of a matrix of norm 1 with `d_out` outputs and `d_in` inputs."""
        rms, adamw = math.sqrt(d_out / d_in), 0.2 * math.sqrt(max(d_out, d_in))
        units = {"rms": rms, "l2": 1.0, "pixels": max(1.0, rms), "one-hot": math.sqrt(d_out), "match-rms-adamw": adamw}
        return units[self.units]

    def with_settings(self, **settings: str) -> Self:
        return replace(self, **settings)  # pyrefly: ignore


RMS_TO_RMS = Spectral()
