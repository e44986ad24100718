"""Parts of LT's CIFAR-10 runs as its released code has them, where that code is not what the paper says or is usual."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from papers._cifar import BETAS, CifarRun, CifarTask, Method, lt_adamw, lt_start, lt_task
from papers.published_matrix import soft_cap_strength_as_published
from wellnormed.constraints.base import SpectralConstraint, State
from wellnormed.matrix import soft_cap

_HARD_CAP = (
    (0.805032, 0.206361, -0.019763),
    (0.649867, 0.162935, -0.01115),
    (1.810259, -0.200265, 0.008251),
    (1.004384, -0.18349, 0.014413),
)
"""What the hard cap of LT's code applies to singular values over the cap: odd polynomials, one after another."""


def hard_cap_equilibrium_as_published() -> float:
    """Where the hard cap of LT's code leaves singular values, over its cap, while ever smaller steps push them up."""
    size = 1.0
    for _ in range(1000):
        for a, b, c in _HARD_CAP:
            size = a * size + b * size**3 + c * size**5
    return size


def why_bounds_differ(method: Method, strength: float) -> str:
    """What the code of LT does to the norms of the three matrices that is not what its text says."""
    if method == "hard cap":
        share = hard_cap_equilibrium_as_published()
        return (
            f"the polynomials of LT's code let norms sink to {share:.4f} of the cap, and ({share:.4f} x "
            f"{strength:g})^3 = {(share * strength) ** 3:.1f}; here they stay at the cap"
        )
    if method == "soft cap":
        return (
            "the step's norm in LT's code is sqrt(d_in / d_out) times what it is, so norms stay further below the cap"
        )
    return ""


@dataclass(frozen=True)
class SoftCapAsPublished(SpectralConstraint):
    """The soft cap of LT's code, which takes the step's norm for `sqrt(d_in / d_out)` times what it is.

    Weights that map to fewer entries are so held further below the cap; nothing is promised.
    """

    max_norm: float
    uses_update_norm: ClassVar[bool] = True

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        step = self._require_update_norm(update_norm, "a matrix") / unit
        return unit * soft_cap(slices / unit, soft_cap_strength_as_published(self.max_norm, step)), state


def soft_cap_as_published(run: CifarRun, device: torch.device) -> CifarTask:
    """A run of LT's Muon with LT's soft cap."""
    return lt_task(run, device, SoftCapAsPublished(run.strength))


class AdamWAsPublished(CifarTask):
    """AdamW without bias correction, on batches that come in the same order in every epoch.

    torch's AdamW divides its averages in step t by `1 - beta^t`; a learning rate times `(1 - beta_1^t) / sqrt(1 -
    beta_2^t)` takes that back, up to Adam's eps, and changes the weight decay of the first steps by at most a tenth.
    """

    order_of_all: Tensor | None = None

    def rate_factor(self, step: int) -> float:
        """A linear fall to 0, without what torch corrects."""
        first, second = (1 - beta ** (step + 1) for beta in BETAS)
        return super().rate_factor(step) * first / second**0.5

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Images and classes."""
        if self.order_of_all is None:
            self.order_of_all = torch.randperm(len(self.train[1]), generator=self.generator)
        if len(self.order) < self.batch:
            self.order = self.order_of_all
        return super().next_batch()


class HalfSlope(nn.Module):
    """ReLU with the slope 1/2 at zero."""

    def forward(self, x: Tensor) -> Tensor:
        """The larger of x and 0; torch shares the gradient between two that are equal."""
        return torch.maximum(x, torch.zeros_like(x))


def adamw_as_published(run: CifarRun, device: torch.device) -> AdamWAsPublished:
    """A run of LT's AdamW: its first matrix starts at zero and the others orthogonal."""
    model = lt_start(run, zero=0)
    model[2] = model[4] = HalfSlope()
    optimizer = lt_adamw(model.to(device), run)
    return AdamWAsPublished(model, optimizer, steps=run.steps, batch=run.batch, seed=run.seed, device=device)
