"""The parts of a step: the momentum of a batch of equal weights, the direction that follows from it, and the step rule.

`conditional_gradient` composes them. With the gradient `g`, its average `m` and the norm's duality map `dualize`, the
step rules are (Norm-Constrained LMOs, algorithms 1 and 2 and ALMOND):

- `"unconstrained"` (uSCG): `w <- (1 - lr * weight_decay) w - lr * radius * dualize(m)`;
- `"constrained"` (SCG): `w <- (1 - lr) w - lr * radius * dualize(m)`, which never leaves the ball of that radius,
  because the oracle's overshoot is divided out. In 16 bits a small `lr` is lost in the rounding of `(1 - lr) w`, and
  the optimizer warns of it;
- `"averaged"` (ALMOND): `m` averages the oracle's outputs, not the gradients, and `w <- w - lr * radius * m`;
- `"sharp"` (stochastic spectral descent): `w <- w - lr * dual_norm(m) * dualize(m)`, which is steepest descent.

uSCG with weight decay `mu` is SCG with radius `radius / mu` and step `lr * mu` (LMO section 3).

The oracle of a norm, `dualize`, is the direction of all published step rules but the last, which scales it by the dual
norm, so that a step is as long as the gradient is large (MD, proposition 1). `directions` has others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from wellnormed.matrix._checks import known_to_hold
from wellnormed.norms import Norm

Group = dict[str, Any]
States = Mapping[Tensor, Mapping[str, Tensor]]
"""The optimizer's state: the tensors that it keeps for every parameter, by name."""


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The value of a closure, which computes the loss and its gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Momentum(ABC):
    """Where an average is kept, of which a step keeps the fraction `kept`: `1 - alpha` of Norm-Constrained LMOs."""

    state: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that it keeps for every weight, in the weight's shape."""

    @abstractmethod
    def average(
        self, values: list[Tensor], parameters: list[Tensor], states: States, kept: float | Tensor, ahead: bool = False
    ) -> list[Tensor]:
        """Bring averages up to date with a value for every parameter; return them, or one step `ahead` (Nesterov)."""

    def after_step(self, gradients: list[Tensor], kept: float | Tensor) -> None:  # noqa: B027
        """What happens to the gradients once the weights have moved; nothing by default."""


class Buffer(Momentum):
    """An exponential moving average in a buffer, which is not corrected for its start at zero."""

    state = ("momentum_buffer",)

    def average(
        self, values: list[Tensor], parameters: list[Tensor], states: States, kept: float | Tensor, ahead: bool = False
    ) -> list[Tensor]:
        buffers = [states[parameter]["momentum_buffer"] for parameter in parameters]
        if isinstance(kept, Tensor):  # `lerp` takes a number
            added = torch._foreach_mul(values, 1 - kept)
            torch._foreach_mul_(buffers, kept)
            torch._foreach_add_(buffers, added)
            return list(torch._foreach_add(torch._foreach_mul(buffers, kept), added)) if ahead else buffers
        torch._foreach_lerp_(buffers, values, 1 - kept)
        return list(torch._foreach_lerp(buffers, values, 1 - kept)) if ahead else buffers


class InGradient(Momentum):
    """The sum in `parameter.grad`, on which the next backward pass adds: no state (LMO's memory-light form)."""

    def average(
        self, values: list[Tensor], parameters: list[Tensor], states: States, kept: float | Tensor, ahead: bool = False
    ) -> list[Tensor]:
        return values

    def after_step(self, gradients: list[Tensor], kept: float | Tensor) -> None:
        torch._foreach_mul_(gradients, kept)


MEMORIES: dict[str, Momentum] = {"buffer": Buffer(), "gradient": InGradient()}


@dataclass(frozen=True)
class DirectionInput:
    """What a direction sees of a batch `(batch, *shape)` of weights that share their shape and their norm.

    `gradient` and `weight` are None unless the direction `sees` them. `state` holds the tensors that it `keeps`, each
    stacked along a new first dimension; it writes their new values there, and changes no tensor in place.
    """

    momentum: Tensor
    gradient: Tensor | None
    weight: Tensor | None
    state: dict[str, Tensor]
    norm: Norm
    length: float | Tensor
    """Learning rate times radius: the norm of a step along a direction of norm 1. A tensor where it is compiled."""
    step: int
    """How many steps were made before this one."""


class Direction(ABC):
    """A function from what it sees of a batch of weights to the directions that a step subtracts, times its length.

    Directions are compared by equality, and equal ones of a group and radius are computed in one batch.
    `docs/directions.md` has examples.

    Example:
        >>> import wellnormed as wn
        >>> class Cautious(Direction):  # Liang et al., 2024: no entry moves against the gradient
        ...     sees = ("gradient",)
        ...
        ...     def __call__(self, seen):
        ...         step = seen.norm.dualize(seen.momentum)
        ...         return step * (step * seen.gradient > 0)
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> optimizer = wn.Scion(layer, lr=0.1, directions={"weight": Cautious()})
        >>> print(optimizer.update_norm("weight"))
        None
    """

    sees: ClassVar[tuple[Literal["gradient", "weight"], ...]] = ()
    """What it sees beside the momentum; with many processes all of it is sent to the one that computes."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that it keeps for every weight, in the optimizer's state."""
    returns: ClassVar[Literal["direction", "weight"]] = "direction"
    """What a call returns. "weight" stands for the weights after the step, which are taken as they are, unless its
    length is 0: nothing is decayed, there is no bound, and only a constraint says what their norm is."""
    same_at_any_rate: ClassVar[bool] = False
    """Whether a call reads neither `seen.length` nor `seen.step`. Weights with different learning rates or radii then
    share a batch; otherwise each group and radius has one of its own. Subclasses inherit it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def acts_on(self, norm: Norm) -> bool:
        """Whether it serves weights of this norm; other weights keep the direction of the step rule."""
        return True

    def start(self, name: str, weight: Tensor, norm: Norm) -> Tensor:
        """The first value of a tensor that it `keeps` for one weight: zeros in its shape by default."""
        return torch.zeros_like(weight)

    def bound(self, norm: Norm) -> float | None:
        """The largest norm of a direction; None, the default, if there is no bound, which constraints may need."""
        return None

    @abstractmethod
    def __call__(self, seen: DirectionInput) -> Tensor:
        """The directions of a batch, or its new weights, in the shape of `seen.momentum`."""


def outcome(
    direction: Direction, told: Mapping[str, Tensor], norm: Norm, length: float | Tensor, step: int
) -> tuple[Tensor, ...]:
    """What a direction returns, and the new tensors that it keeps, in the order of `keeps`.

    `told` has the momentum, what the direction `sees`, and what it `keeps`, by name.

    Raises:
        ValueError: One of them is missing, unknown, or of another shape than the tensor that it replaces.
    """
    state = {key: told[key] for key in direction.keeps}
    seen = DirectionInput(told["momentum"], told.get("gradient"), told.get("weight"), state, norm, length, step)
    shapes = {"result": tuple(seen.momentum.shape), **{key: tuple(kept.shape) for key, kept in seen.state.items()}}
    results = {"result": direction(seen), **seen.state}
    for name in {**shapes, **results}:
        shape = tuple(results[name].shape) if isinstance(results.get(name), Tensor) else None
        if shape != shapes.get(name):
            raise ValueError(
                f"{direction!r}: its {name} is of shape {shape} and should be of {shapes.get(name)}; return what has "
                "the shape of the momentum, batch first, and assign to `state` what `keeps` names, in its shape"
            )
    return tuple(results[name] for name in shapes)


class Oracle(Direction):
    """The duality map of the norm."""

    same_at_any_rate = True

    def bound(self, norm: Norm) -> float:
        return norm.overshoot

    def __call__(self, seen: DirectionInput) -> Tensor:
        with known_to_hold():  # an average of gradients, all of which were found to be finite
            return seen.norm.dualize(seen.momentum)


class Sharp(Direction):
    """The duality map times the dual norm."""

    same_at_any_rate = True

    def __call__(self, seen: DirectionInput) -> Tensor:
        norm, momentum = seen.norm, seen.momentum
        return norm.dualize(momentum) * norm.dual_norm(momentum)[..., *(None,) * norm.ndim]


_INSIDE = 1 - 1e-5
"""Share of the oracle's step that SCG takes, so that float32 rounding does not lead out of the ball."""


class StepRule:
    """Subtract the direction, after a weight decay; the other rules say where they differ."""

    averages: ClassVar[Literal["gradients", "directions"]] = "gradients"
    direction: ClassVar[Direction] = Oracle()
    scale_free: ClassVar[bool] = True
    """Whether the length of a step does not depend on that of the gradient."""
    convex: ClassVar[bool] = False
    """Whether a step moves the weight towards a point of the ball of that radius, and so never out of it."""

    def decay(self, group: Group) -> float:
        """The share of a weight that a step removes."""
        return float(group["lr"]) * group["weight_decay"]

    def shares(self, group: Group, radius: float, largest: float | None) -> tuple[float, float]:
        """The share of a weight that stays, and the factor of its direction, of norm `largest` at most, to subtract."""
        return 1 - self.decay(group), float(group["lr"]) * radius

    def bound(self, group: Group, radius: float, largest: float | None) -> float | None:
        """The most by which the norm grows in a step; None without a bound."""
        return None if largest is None else float(group["lr"]) * radius * largest


class ConvexCombination(StepRule):
    """Move towards a point of the ball, so that the weight stays in it."""

    convex = True

    def decay(self, group: Group) -> float:
        return float(group["lr"])

    def shares(self, group: Group, radius: float, largest: float | None) -> tuple[float, float]:
        assert largest is not None  # such a direction is refused
        return 1 - self.decay(group), float(group["lr"]) * (radius * _INSIDE / largest)

    def bound(self, group: Group, radius: float, largest: float | None) -> float | None:
        return float(group["lr"]) * radius


class AveragedDirections(StepRule):
    """Average what the oracle returns."""

    averages = "directions"


class SteepestDescent(StepRule):
    """Make a step as long as the dual norm of the momentum."""

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
    if group["step_rule"] not in STEP_RULES:
        raise ValueError(f"step_rule={group['step_rule']!r} must be one of {', '.join(STEP_RULES)}")
    return STEP_RULES[group["step_rule"]]
