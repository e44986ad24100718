"""LT's soft cap, hard cap and hammer as its released code has them, where that code is not what the paper says."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from papers.published_matrix import hard_cap, soft_cap_strength_as_published
from wellnormed.constraints import Hammer
from wellnormed.constraints.base import TARGET, SpectralConstraint, State
from wellnormed.matrix import soft_cap
from wellnormed.matrix.leading import Triplet


@dataclass(frozen=True)
class SoftCapAsPublished(SpectralConstraint):
    """The soft cap of LT's code, which takes the step's norm for `sqrt(d_in / d_out)` times what it is.

    Weights that map to fewer entries are so held further below the cap; nothing is promised.
    """

    cap: float
    uses_update_norm: ClassVar[bool] = True

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        step = self._require_update_norm(update_norm, "a matrix") / unit
        return unit * soft_cap(slices / unit, soft_cap_strength_as_published(self.cap, step)), state


@dataclass(frozen=True)
class HardCapAsPublished(SpectralConstraint):
    """The hard cap of LT's code, four polynomials on the singular values over the cap (`published_matrix.hard_cap`).

    They let norms sink to `hard_cap_equilibrium_as_published()` of the cap; nothing is promised.
    """

    cap: float

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        size = unit * self.cap
        return size * hard_cap(slices / size), state


@dataclass(frozen=True)
class HammerAsPublished(Hammer):
    """LT's hammer, which also raises a largest singular value below the cap to it, after every step."""

    def _moved(self, slices: Tensor, unit: float, triplet: Triplet) -> Tensor:
        change = (self.cap * TARGET * unit - triplet.s.double()).to(slices.dtype)
        return slices + (change[..., None, None] * triplet.u[..., :, None]) * triplet.v[..., None, :]


def hard_cap_equilibrium_as_published() -> float:
    """Where the hard cap of LT's code leaves singular values, over its cap, while ever smaller steps push them up."""
    size = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(1000):
        size = hard_cap(size)
    return float(size)
