"""The Shakespeare transformer of LT, with what its appendix F varies.

LT is Training Transformers with Enforced Lipschitz Bounds.

Three blocks of attention and feed-forward layer, output projections and head zero at the start, a soft cap on every
matrix, Muon with a momentum that keeps 0.9, rates that fall linearly to 0. A step is shared among the weights by mass
and sensitivity: mass 1 for the embedding, the positions and the head, and one mass for all blocks together. LT has
rotary positions where this model learns a vector for each and a bias of attention for each distance, caps whole
matrices where this one caps every head, and ran without the factors of residuals and attention in the forward pass,
which stand here and make a logit scale necessary.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import wellnormed as wn
from papers._shakespeare import shakespeare
from papers.characters import CharacterTask
from wellnormed.constraints import Constraints, SoftCap
from wellnormed.constraints.base import SpectralConstraint, State
from wellnormed.matrix import soft_cap_strength
from wellnormed.models.config import GPTConfig
from wellnormed.models.files import Model
from wellnormed.models.gpt import GPT
from wellnormed.modular import NormedModule, modular_tree
from wellnormed.nn import constraints_of
from wellnormed.norms import ColNorm
from wellnormed.routing import assign_norms
from wellnormed.train.config import TrainConfig
from wellnormed.train.optimizer import weight_roles
from wellnormed.train.presets import PRESETS

Floor = Literal["as published", "largest symbol"]
Projection = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TransformerRun:
    """One training run. The sizes are LT's unless given."""

    lr: float
    """Of the whole step, in the modular norm."""
    inflation: float = 16
    """The most by which the gradient of a symbol's vector is multiplied."""
    floor: Floor = "largest symbol"
    """What is multiplied: a gradient over that of the batch's largest symbol, or the gradient itself (LT's code)."""
    blocks_mass: float = 32
    halved: bool = False
    """Whether a rate is halved once for every residual connection that follows, and no factor of the model counts."""
    projection: Projection = "float32"
    cap: float = 2.0
    logit_scale: float = 8.0
    """LT takes 1, with no factors of residuals and attention in the forward pass; with them logits stay small."""
    width: int = 256
    blocks: int = 3
    length: int = 256
    batch: int = 64
    steps: int = 2000
    seed: int = 0


@dataclass(frozen=True, repr=False)
class InflatedAsPublished(ColNorm):
    """Divides by the RMS of a symbol's gradient, but by no less than 1 over the largest inflation: in LT's code."""

    def _divisors(self, sizes: Tensor) -> Tensor:
        return sizes.clamp(min=1 / self.max_inflation)


@dataclass(frozen=True)
class Bfloat16SoftCap(SpectralConstraint):
    """The soft cap computed in bfloat16, to which weights are so rounded in every step; it promises nothing."""

    max_norm: float
    uses_update_norm: ClassVar[bool] = True

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        step = self._require_update_norm(update_norm, "a matrix") * unit
        strength, values = soft_cap_strength(self.max_norm * unit, step), slices.bfloat16()
        for sign in (-1, 1):
            gram = values @ values.mT if values.shape[-2] <= values.shape[-1] else values.mT @ values
            cube = gram @ values if values.shape[-2] <= values.shape[-1] else values @ gram
            values = values + sign * strength * cube
        return values.to(slices.dtype), state


CAPS = {"float32": SoftCap, "bfloat16": Bfloat16SoftCap}
SMALL: dict[str, Any] = {"width": 64, "length": 64, "batch": 12, "steps": 600}
"""The sizes of a run that takes less than a minute on a CPU."""


def lt_transformer(run: TransformerRun, device: torch.device) -> CharacterTask:
    """The training of a run."""
    text, paper = shakespeare(), PRESETS["paper"]
    assert isinstance(paper.model, GPTConfig)
    shapes = {"width": run.width, "blocks": run.blocks, "length": run.length, "logit_scale": run.logit_scale}
    model = replace(
        paper.model, **shapes, relative_bias=True, residual_strength=0.5 / run.blocks, vocabulary_size=len(text.symbols)
    )
    training = {"learning_rate": run.lr, "batch": run.batch, "steps": run.steps, "seed": run.seed}
    return CharacterTask(replace(paper, model=model, **training), text, device, partial(_optimizer, run))


def largest_norm(task: CharacterTask) -> float:
    """Of the capped matrices, estimated."""
    assert task.constraints is not None
    assert isinstance(task.model, GPT)
    norms = task.constraints.norms()
    return max(norms[name] for name, role in weight_roles(task.model).items() if role != "embedding")


def _optimizer(run: TransformerRun, model: Model, config: TrainConfig) -> tuple[wn.Scion, Constraints]:
    assert isinstance(model, GPT)
    kind = ColNorm if run.floor == "largest symbol" else InflatedAsPublished
    norms = assign_norms(model, overrides={"embedding": kind(input_axis=0, max_inflation=run.inflation)})
    factors = rate_factors(run, modular_tree(model, norms).tare(run.blocks_mass, "layers"))
    optimizer = wn.Scion(norms, lr=run.lr, momentum=0.9, nesterov=False, radius=1.0, lr_factors=factors)
    own = constraints_of(model)
    held = {name: CAPS[run.projection](run.cap) for name in weight_roles(model) if name not in own}
    return optimizer, wn.constrain(optimizer, own | held)


def rate_factors(run: TransformerRun, tree: NormedModule) -> dict[str, float]:
    """Those of the modular norm; or the shares of the mass, halved once for each residual connection that follows."""
    if not run.halved:
        return tree.lr_factors()
    shares, residuals = {place.name: place.mass / tree.mass for place in tree.places()}, 2 * run.blocks
    follow = dict.fromkeys(shares, residuals) | {"head.weight": 0}
    follow |= {name: residuals - 1 - int(name.split(".")[1]) for name in shares if name.startswith("layers.")}
    return {name: share / 2 ** follow[name] for name, share in shares.items()}
