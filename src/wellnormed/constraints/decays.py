"""Decays that hold a norm by balance with steps of known length; `matrix.equilibrium` has the theory."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import wellnormed.matrix as matrix
from wellnormed._inputs import require_flags, require_numbers
from wellnormed._ranges import PART
from wellnormed.constraints.base import SLACK, SpectralConstraint, State
from wellnormed.constraints.caps import Cap
from wellnormed.norms import Norm


@dataclass(frozen=True)
class WeightDecay(Cap):
    """Shrink the whole weight by `1 - update_norm / cap`: the decay that holds the cap.

    `(1 - u/M)(M + u) = M - u^2/M <= M`. Aligned steps of norm u end at `M - u`, where `w = (1 - u/M)(w + u)`: at the
    cap before the decay, and one step below it afterwards. With learning rate eta that is the weight decay
    `overshoot / M` of LT section 3.
    """

    uses_update_norm: ClassVar[bool] = True
    undoes_steps: ClassVar[bool] = True

    @property
    def longest_step(self) -> float:
        return self.cap  # where the decay leaves nothing

    def _cap(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        return slices * max(0.0, 1 - update_norm / cap - SLACK)


@dataclass(frozen=True)
class ClippedWeightDecay(SpectralConstraint):
    """Singular values above `upper` lose the fraction `decay` of their excess (Spectral Clipping, section 3.4).

    After a step of norm `u` a norm of at most `b` is at most `upper + (1 - decay) max(0, b + u - upper)`, or `b + u` if
    that is smaller. The constraint keeps this bound for every weight, from a proved one at the start, and promises
    it: it tends to `matrix.clipped_weight_decay_equilibrium(upper, decay, u)`, follows a learning rate that changes,
    and sinks to `upper` with it. An optimizer that gives no bound on its steps is served too; then only `decay=1`, a
    hard cap, promises anything.

    Args:
        upper: Norm above which the decay acts, in units of the weight's norm.
        decay: Fraction of the excess removed by every step, in (0, 1].
        before: Decay before the step, with its gradients known, and not after it; the bound is then one decay larger.
            With `decay` the learning rate times a constant, it does not depend on the rate (SC's decoupled form).
    """

    uses_update_norm: ClassVar[bool] = True

    upper: float
    decay: float
    before: bool = False

    @property
    def acts_before(self) -> bool:
        return self.before

    def __post_init__(self) -> None:
        self._require_positive(upper=self.upper)
        require_numbers("ClippedWeightDecay: ", {"decay": self.decay}, PART)
        require_flags("ClippedWeightDecay: ", {"before": self.before})

    def promised(self, state: State) -> float | None:
        bound = max(float(one) for one in state.values())
        return bound if math.isfinite(bound) else None

    def _initial_state(self, slices: Tensor, bound: Tensor) -> State:
        return {"bound": bound.clamp(min=torch.finfo(bound.dtype).tiny)}  # weights of 0 begin at something to divide by

    def before_step(self, weights: Tensor, norm: Norm, state: State) -> tuple[Tensor, State]:
        return replace(self, before=False).apply(weights, norm, 0.0, state)

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        bound = grown = state["bound"] + (math.inf if update_norm is None else update_norm * (1 + SLACK))
        # The clip's own error, and rounding of every entry, which moves the norm by that share of the Frobenius norm.
        rounding = 2 * torch.finfo(slices.dtype).eps * math.sqrt(min(slices.shape[-2:]))
        if not self.before:
            slices = matrix.spectral_clipped_weight_decay(slices, self.upper * unit, self.decay)
            rounding += SLACK
            bound = grown.clamp(max=self.upper)
            if self.decay < 1:
                bound = bound + (1 - self.decay) * (grown - self.upper).clamp(min=0)
        return slices, {"bound": bound * (1 + rounding)}
