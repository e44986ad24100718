"""Step rules: what is averaged, the direction that follows, and how far a weight moves along it.

With the gradient `g`, its average `m` and the norm's duality map, `dualize` (LMO, algorithms 1 and 2 and ALMOND):

- `"unconstrained"` (uSCG): `w <- (1 - lr * weight_decay) w - lr * radius * dualize(m)`;
- `"constrained"` (SCG): `w <- (1 - lr) w - lr * radius * dualize(m)`, which never leaves the ball of that radius: the
  oracle's overshoot is divided out. In 16 bits a small `lr` is lost in the rounding of `(1 - lr) w`: it is warned of;
- `"averaged"` (ALMOND): `m` averages the oracle's outputs, not the gradients, and `w <- w - lr * radius * m`;
- `"sharp"` (stochastic spectral descent): `w <- w - lr * dual_norm(m) * dualize(m)`, steepest descent.

uSCG with weight decay `mu` is SCG with radius `radius / mu` and step `lr * mu` (LMO section 3).
"""

from typing import Any, ClassVar, Literal

from wellnormed.norms import Norm
from wellnormed.optim.directions import Direction, NeuronNormalized, Oracle, Sharp, SpectralClip

Group = dict[str, Any]

_INSIDE = 1 - 1e-5
"""Share of the oracle's step that SCG takes, so that float32 rounding does not lead out of the ball."""


class StepRule:
    """Subtract the direction, after a weight decay; the other rules say where they differ."""

    averages: ClassVar[Literal["gradients", "directions"]] = "gradients"
    direction: ClassVar[Direction] = Oracle()
    scale_free: ClassVar[bool] = True
    """Whether the length of a step does not depend on that of the gradient."""
    convex: ClassVar[bool] = False
    """Whether the radius is that of a ball around zero, which holds the weight."""

    def direction_for(self, group: Group, norm: Norm) -> Direction:
        """The direction of weights of this norm, by the settings of their group."""
        direction = self.direction
        if norm.measures == "singular values":
            if group["clip_gain"] is not None:
                direction = SpectralClip(group["clip_gain"])
            if group["normuon"] is not None:
                direction = NeuronNormalized(group["normuon"], direction)
        return direction

    def shares(self, group: Group, radius: float, largest: float | None) -> tuple[float, float]:
        """The share of a weight that stays, and the factor of its direction, of norm `largest` at most, to subtract."""
        lr = float(group["lr"])
        return 1 - lr * group["weight_decay"], lr * radius

    def bound(self, group: Group, radius: float, largest: float | None, norm: Norm) -> float | None:
        """The most by which the norm grows in a step; None without a bound."""
        by_entries = group["cautious_decay"] and group["weight_decay"] > 0
        if largest is None or (by_entries and norm.measures == "singular values"):  # which may grow by such a decay
            return None
        return float(group["lr"]) * radius * largest


class ConvexCombination(StepRule):
    """Move towards a point of the ball, so that the weight stays in it."""

    convex = True

    def shares(self, group: Group, radius: float, largest: float | None) -> tuple[float, float]:
        lr = float(group["lr"])
        assert largest is not None  # such a direction is refused
        return 1 - lr, lr * (radius * _INSIDE / largest)

    def bound(self, group: Group, radius: float, largest: float | None, norm: Norm) -> float | None:
        return float(group["lr"]) * radius


class AveragedDirections(StepRule):
    """Average what the oracle returns."""

    averages = "directions"


class SteepestDescent(StepRule):
    """As long as the dual norm."""

    direction = Sharp()
    scale_free = False


STEP_RULES: dict[str, StepRule | None] = {
    "unconstrained": StepRule(),
    "constrained": ConvexCombination(),
    "averaged": AveragedDirections(),
    "sharp": SteepestDescent(),
    "adamw": None,  # of parameters without a norm
}


def rule_of(group: Group) -> StepRule | None:
    """The step rule of a group; None if AdamW moves it."""
    return STEP_RULES[group["step_rule"]]
