"""The RMS -> RMS operator norm of a matrix; its lifts to slices and kernels are in `slices` and `convolution`.

`|W| = sqrt(d_in / d_out) * sigma_max(W)` for a weight of shape `(d_out, d_in)`: the most that the RMS of a vector can
grow (LT section 3.1; Modular Duality, section 3).
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, get_args

from torch import Tensor

from wellnormed.matrix import coefficients as registry
from wellnormed.matrix.msign import METHODS
from wellnormed.norms.base import MatrixNorm

Units = Literal["rms", "l2", "pixels", "one-hot", "match-rms-adamw"]


@dataclass(frozen=True, repr=False)
class Spectral(MatrixNorm):
    """RMS -> RMS operator norm of `(d_out, d_in)` matrices; its oracle is Muon's orthogonalised update.

    Args:
        coefficients: Set of the registry with which `dualize` approximates the matrix sign. Its overshoot is declared.
        method: Method of `msign`.
        units: The unit of the norm, as a largest singular value. "rms": `sqrt(d_out / d_in)`. "l2": 1. "pixels", for a
            first layer that may see more pixels than it has outputs: `max(1, sqrt(d_out / d_in))`, without which a
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

    always_shown: ClassVar[tuple[str, ...]] = ("coefficients", "method")  # they decide the step's true norm

    coefficients: str = "you-5-nanogpt"
    method: str = "auto"
    units: Units = "rms"
    input_axis: int = 1

    def __post_init__(self) -> None:
        if self.units not in get_args(Units):
            raise ValueError(f"Spectral: units={self.units!r} must be one of {', '.join(get_args(Units))}")
        registry.get(self.coefficients)
        if self.method not in METHODS:
            raise ValueError(f"Spectral: method={self.method!r} must be one of {', '.join(METHODS)}, as in msign")
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
