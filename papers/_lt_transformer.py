"""LT's Shakespeare transformer with the variations of appendix F: inflation, masses, halved rates, the projection.

LT is Training Transformers with Enforced Lipschitz Bounds. Every matrix has a soft cap; the rest is `_shakespeare`'s.
A step is shared among the weights by mass: mass 1 for the embedding and the head, and one mass for all blocks together.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import wellnormed as wn
from papers._shakespeare import BLOCKS_MASS, MATRICES, LTShape, lt_model, rate_factors, text_task
from papers.characters import Precision, TextTask
from wellnormed.constraints import SoftCap
from wellnormed.constraints.base import SpectralConstraint, State
from wellnormed.matrix import soft_cap_strength
from wellnormed.models import GPT
from wellnormed.modular import modular_tree
from wellnormed.norms import ColNorm
from wellnormed.routing import assign_norms

Floor = Literal["as published", "largest symbol"]


@dataclass(frozen=True)
class TransformerRun(LTShape):
    """One training run."""

    lr: float
    """The length of the whole step, in the modular norm."""
    inflation: float = 16
    """The most by which the gradient of a symbol's vector is multiplied."""
    floor: Floor = "largest symbol"
    """What is multiplied: a gradient over that of the batch's largest symbol, or the gradient itself (LT's code)."""
    blocks_mass: float = BLOCKS_MASS
    halved: bool = False
    """Whether a rate is halved once for every residual connection that follows, and no factor of the model counts."""
    projection: Precision = "float32"
    cap: float = 2.0
    """In RMS -> RMS units. LT names about 2 for its Shakespeare runs, and none for these."""


@dataclass(frozen=True, repr=False)
class InflatedAsPublished(ColNorm):
    """Divides by the RMS of a symbol's gradient, but by no less than 1 over the largest inflation: in LT's code."""

    def _divisors(self, sizes: Tensor) -> Tensor:
        return sizes.clamp(min=1 / self.max_inflation)


@dataclass(frozen=True)
class Bfloat16SoftCap(SpectralConstraint):
    """The soft cap computed in bfloat16, to which weights are so rounded in every step; it promises nothing."""

    cap: float
    uses_update_norm: ClassVar[bool] = True

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        step = self._require_update_norm(update_norm, "a matrix") * unit
        strength, values = soft_cap_strength(self.cap * unit, step), slices.bfloat16()
        for sign in (-1, 1):
            gram = values @ values.mT if values.shape[-2] <= values.shape[-1] else values.mT @ values
            cube = gram @ values if values.shape[-2] <= values.shape[-1] else values @ gram
            values = values + sign * strength * cube
        return values.to(slices.dtype), state


CAPS = {"float32": SoftCap, "bfloat16": Bfloat16SoftCap}
SMALL: dict[str, Any] = {"width": 64, "length": 64, "batch": 12, "steps": 600}
"""The sizes of a run that takes less than a minute on a CPU."""


def lt_transformer(run: TransformerRun, device: torch.device) -> TextTask[GPT]:
    """The training of a run."""
    model = lt_model(run, torch.Generator().manual_seed(run.seed)).to(device)
    kind = ColNorm if run.floor == "largest symbol" else InflatedAsPublished
    embedding = kind(input_axis=0, max_inflation=run.inflation)
    norms = assign_norms(model, recipe="modular", overrides=MATRICES | {"embedding": embedding})
    if run.halved:
        factors = rate_factors(run.blocks, run.blocks_mass)
    else:
        factors = modular_tree(model, norms).tare(run.blocks_mass, "layers").lr_factors()
    optimizer = wn.Scion(norms, lr=run.lr, momentum=0.9, nesterov=False, lr_factors=factors)
    return text_task(run, model, optimizer, norms, CAPS[run.projection](run.cap))


def largest_norm(task: TextTask[GPT]) -> float:
    """The largest estimated norm of a capped matrix."""
    assert task.constraints is not None
    return max(norm for name, norm in task.constraints.norms().items() if not name.startswith("embedding"))
