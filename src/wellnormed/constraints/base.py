"""The methods of every constraint, and the base of constraints that remember something of singular values.

A constraint is a value: what it remembers of a weight from step to step is handed in and out as tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from wellnormed._devices import recording
from wellnormed._inputs import require_numbers
from wellnormed._ranges import Range
from wellnormed.matrix._checks import known_to_hold
from wellnormed.norms import Norm

TARGET = 1 - 2e-5
"""The share of its cap at which a constraint aims. Matrix functions end at most 1e-5 above their bound in float32, and
a proof exceeds the norm by 1e-8; the rest is room."""
SLACK = 2e-5
"""The share by which a step may exceed its bound. Constraints undo that as well, so that rounding never accumulates."""

_FLOAT32 = torch.finfo(torch.float32)
_IN_FLOAT32 = Range(
    lambda x: _FLOAT32.tiny <= x <= _FLOAT32.max,
    f"be positive and finite, in float32 as well, where numbers below {_FLOAT32.tiny:.2g} lose digits",
)
State = dict[str, Tensor]
"""What a constraint remembers: of one weight, or of a batch of them stacked along a new first dimension."""


class Constraint(ABC):
    """What happens to a weight after every step, and what that promises about its norm.

    `project` brings a weight to where training may start, `check` is asked before a step, `apply` acts after it. The
    norms of steps are bounds; None stands for a step without a bound.
    """

    serves: ClassVar[tuple[str, ...]] = ("singular values",)
    """What the norms of its weights measure (`Norm.measures`)."""
    uses_update_norm: ClassVar[bool] = False
    """Whether `apply` looks at the bound on the step's norm."""
    acts_at_rest: ClassVar[bool] = False
    """Whether `apply` has something to do after a step of length 0 as well."""
    tolerance: ClassVar[float] = 0.0
    """For constraints that hold a weight at its bound, and not only below it: how far from the bound they may leave it,
    as a share of the bound. They bring every weight there when they begin; other constraints leave a weight alone that
    is proved to lie below its bound."""

    @property
    def bound(self) -> float | None:
        """The largest norm after any step, in units of the weight's norm; None if no bound holds for all steps."""
        return None

    def acts_on(self, norm: Norm) -> bool:
        """Whether the constraint is defined for weights of this norm."""
        return norm.measures in self.serves

    def promised(self, state: State) -> float | None:
        """The bound on the norm of a weight with this state; None if the constraint proves nothing."""
        return self.bound

    def stored_as(self, dtype: torch.dtype) -> Self:
        """The constraint for weights that are then rounded to a dtype: itself, unless it leaves room for that."""
        return self

    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:  # noqa: B027
        """Refuse, before a step of that norm, what the constraint cannot hold; the parameter has this name."""

    def project(self, weights: Tensor, norm: Norm) -> Tensor:
        """The weights `(*batch, *shape)` brought from anywhere to where training may start; as they are by default."""
        return weights

    def begin(self, weights: Tensor, norm: Norm) -> Tensor:
        """As `project`, for `constrain(..., prove=False)`: by the constraint's own function, and no proof after it."""
        return self.project(weights, norm)

    def initial_state(self, weights: Tensor, norm: Norm) -> State:
        """What the constraint remembers of each projected weight of a batch at the start; nothing by default."""
        return {}

    @property
    def acts_before(self) -> bool:
        """Whether `before_step` has something to do."""
        return False

    def before_step(self, weights: Tensor, norm: Norm, state: State) -> tuple[Tensor, State]:
        """The weights of a batch and their state as a step begins with them, once its gradients are known."""
        return weights, state

    @abstractmethod
    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        """The constrained weights of a batch `(*batch, *shape)` after a step, and their new state, of the same keys.

        `update_norm` is what `seen_step` makes of the step's bound; `state` is what `initial_state` or the last call
        returned.
        """

    def seen_step(self, update_norm: float | None, weight: Tensor) -> float | None:
        """The `update_norm` that `apply` receives. Weights with equal values are processed together."""
        return update_norm if self.uses_update_norm else None

    def first_reach(self) -> float | None:
        """The bound on the norm of a projected weight, for a constraint that need not act every step; else None."""
        return None

    def wait(self, reach: float, step: float | None) -> tuple[bool, float]:
        """Whether the promise holds after a `seen_step` even if `apply` is left out, given the bound before the step.

        The number bounds the norm afterwards, after `apply` if that is not left out.
        """
        return False, reach

    def alike(self, update_norm: float | None) -> Hashable:
        """Equal for constraints that act on one batch by `apply_each`, after a `seen_step`."""
        return self, update_norm

    @classmethod
    def apply_each(
        cls, constraints: Sequence[Self], weights: Tensor, norm: Norm, steps: Sequence[float | None], state: State
    ) -> tuple[Tensor, State]:
        """As `apply`, with a constraint and a `seen_step` for each weight of the batch, which are all `alike`."""
        return constraints[0].apply(weights, norm, steps[0], state)

    def _require_positive(self, **values: float) -> None:
        """Refuse a norm, in a constraint's settings, that is not positive and finite."""
        require_numbers(f"{type(self).__name__}: ", values, _IN_FLOAT32, "leave the entry out for no constraint")

    def _require_update_norm(self, update_norm: float | None, name: str) -> float:
        """The bound on the step's norm, for constraints that need one; a step without a bound is refused."""
        if update_norm is None:
            raise ValueError(
                f"{type(self).__name__} on {name!r} needs a bound on the step's norm, which this optimizer does not "
                "give; use HardCap or SpectralNormalize, or wrap the optimizer in wellnormed.optim.Clipped"
            )
        return update_norm


_TURNS = 100
"""How often `held` scales down at most: each turn but the first ones halves what is too large, and NaN has no end."""


class SpectralConstraint(Constraint):
    """A constraint on the singular values of every slice of a weight, which remembers something of each slice.

    Slices of equal size are one batch. The names of what it remembers of the second batch and later ones end with the
    number of the batch.
    """

    def initial_state(self, weights: Tensor, norm: Norm) -> State:
        bound = norm.upper_bound(weights)
        states = [self._initial_state(x, bound) for x in norm.slices(weights)]
        return {f"{key}{i or ''}": value for i, state in enumerate(states) for key, value in state.items()}

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        batches, after = norm.slices(weights), {}
        keys = {key.rstrip("0123456789") for key in state}
        for i, (slices, unit) in enumerate(zip(batches, norm.slice_units(weights), strict=True)):
            remembered = {key: state[f"{key}{i or ''}"] for key in keys}
            batches[i], remembered = self._act(slices, unit, update_norm, remembered)
            after |= {f"{key}{i or ''}": value for key, value in remembered.items()}
        return norm.from_slices(batches, weights), after

    def _initial_state(self, slices: Tensor, bound: Tensor) -> State:
        """The state to remember of slices whose weights have this proved bound, `(*batch)`; empty by default."""
        return {}

    @abstractmethod
    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        """Act on slices `(*batch, m, n)`, of which one unit of the norm is the largest singular value `unit`."""


def of_each(numbers: Sequence[float], device: torch.device) -> float | Tensor:
    """One number where all are equal; else float64 on a device, for which no copy is waited for."""
    if len({*numbers}) == 1:
        return numbers[0]
    return torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])


def on_slices(numbers: float | Tensor, slices: Tensor) -> float | Tensor:
    """Numbers of weights `(*batch,)`, for each of their slices `(*batch, m, n)` or `(*batch, slices, m, n)`."""
    missing = slices.ndim - 2 - numbers.ndim if isinstance(numbers, Tensor) else 0
    return numbers[(...,) + (None,) * missing] if isinstance(numbers, Tensor) else numbers


def scaled(weights: Tensor, factors: Tensor, norm: Norm) -> Tensor:
    """The weights `(*batch, *shape)`, each times its own factor, in float64."""
    return weights.double() * factors.to(weights.device).reshape(factors.shape + (1,) * norm.ndim)


def held(weights: Tensor, norm: Norm, bound: float | Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The weights `(*batch, *shape)` in a dtype, scaled down where `norm(weight) <= bound` is not proved.

    The bound is as in `Norm.within`. Each turn proves the whole batch and looks at the device once.
    """
    rounded = weights.to(dtype or weights.dtype)
    margin = torch.finfo(rounded.dtype).eps
    if recording(weights.device):
        raise RuntimeError("a CUDA graph cannot record this constraint, which looks at the device for its proof")
    for _ in range(_TURNS):
        with known_to_hold():  # what is not finite is not proved, and found by the same look
            within = norm.within(rounded, bound)
        *proved, finite = torch.cat([within.flatten(), rounded.isfinite().all()[None]]).tolist()
        if all(proved):
            return rounded
        if not finite:
            break
        weights = scaled(weights, torch.where(within, 1.0, 1 - margin), norm)
        rounded = weights.to(rounded.dtype)
        margin = min(2 * margin, 0.5)  # rounding may have lifted the result again
    raise ValueError(f"no weight of norm {bound} or less was found in {rounded.dtype}; do weights hold NaN?")
