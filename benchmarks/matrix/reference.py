"""The exact results of the functions: functions of the singular values of a float64 SVD, and the distance from them."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from wellnormed.matrix import CoefficientSet


def spectral_norm(x: Tensor) -> float:
    """The norm of one matrix of moderate scale, by the eigenvalues of its small float64 Gram matrix (good to 1e-13)."""
    x = x.double() if x.shape[-2] >= x.shape[-1] else x.double().mT
    if not bool(x.isfinite().all()):
        return float("inf")
    return torch.linalg.eigvalsh(x.mT @ x)[-1].clamp_min(0).sqrt().item()


class Reference:
    """The float64 SVD of one matrix, from which every reference is read off.

    Args:
        w: The matrix as the function under test receives it, already rounded to its dtype.
    """

    def __init__(self, w: Tensor) -> None:
        self.w = w

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(self.w.double(), full_matrices=False)
        zero = max(self.w.shape) * torch.finfo(torch.float64).eps * s[0]  # rounding of zero, as matrix_rank has it
        return u, torch.where(s > zero, s, 0), vh

    @property
    def singular_values(self) -> Tensor:
        return self._svd[1]

    @property
    def norm(self) -> float:
        return self._svd[1][0].item()

    def apply(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The matrix whose nonzero singular values are `function` of those of `w`; zeros stay zero."""
        u, s, vh = self._svd
        return (u * torch.where(s > 0, function(s), 0)) @ vh

    def error(self, value: Tensor, function: Callable[[Tensor], Tensor], unit: float | None = None) -> float:
        """Spectral norm of the error of `value`, over `unit` (the largest singular value of `w`)."""
        unit = unit or self.norm
        return spectral_norm(value.double() / unit - self.apply(function) / unit)


def polynomial(coefficients: CoefficientSet, s: Tensor) -> Tensor:
    """The set's own composition at the singular values `s` of a matrix, in float64."""
    x = s / (coefficients.scale * torch.linalg.vector_norm(s))
    for a, b, c in coefficients.steps:
        square = x * x
        x = x * (a + square * (b + c * square))
    return x


def soft_capped(strength: float, s: Tensor) -> Tensor:
    """`p2(p1(s))` of LT, appendix B: `p1(x) = x - a x^3`, `p2(x) = x + a x^3`."""
    first = s - strength * s**3
    return first + strength * first**3
