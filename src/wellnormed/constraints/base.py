"""What every constraint says of itself, and the bases that constraints share; here promises are made safe.

A constraint is a value: what it remembers of a weight from step to step is handed in and out as tensors.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed.matrix import spectral_hardcap
from wellnormed.norms import MatrixNorm, Norm

TARGET = 1 - 2e-5
"""Where a constraint aims, as a share of its cap. Matrix functions end at most 1e-5 above their bound in float32, and a
proof exceeds the norm by 1e-8; the rest is room."""
SLACK = 2e-5
"""Growth beyond the declared update that a constraint also undoes, relative: rounding never accumulates."""

State = dict[str, Tensor]
"""What a constraint remembers: of one weight, or of a batch of them stacked along a new first dimension."""


class Constraint(ABC):
    """What happens to a weight after every step, and what that promises about its norm."""

    uses_update_norm: ClassVar[bool] = False
    """Whether `apply` looks at the bound on the step's norm."""
    acts_at_rest: ClassVar[bool] = False
    """Whether `apply` has something to do after a step of length 0 as well."""

    def acts_on(self, norm: Norm) -> bool:
        """Whether the constraint is defined for weights of this norm: by default those measured by singular values."""
        return isinstance(norm, MatrixNorm)

    def promised(self, state: State) -> float | None:
        """The bound on the norm of a weight with this state, in units of its norm, that holds after every step.

        None, the default, if the constraint makes the norm smaller, or keeps it near a value, but proves nothing.
        """
        return None

    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:  # noqa: B027
        """Refuse, before a step, what the constraint cannot hold, by a `ValueError` that names the parameter.

        `update_norm` bounds the norm of the coming step; it is None if the optimizer gives no bound.
        """

    def project(self, weights: Tensor, norm: Norm) -> Tensor:
        """The weights `(*batch, *shape)` brought from anywhere to where training may start; as they are by default."""
        return weights

    def initial_state(self, weights: Tensor, norm: Norm) -> State:
        """What the constraint remembers of each projected weight of a batch at the start; nothing by default."""
        return {}

    @abstractmethod
    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        """The constrained weights of a batch `(*batch, *shape)` after a step, and their new state, of the same keys.

        `update_norm` bounds that step as in `check`; `state` is what `initial_state` or the last call returned.
        """

    def seen_step(self, update_norm: float | None, weight: Tensor) -> float | None:
        """What `apply` is told of a step of that bound: by default the bound, or None if the constraint ignores it.

        Weights of which it is told the same are constrained in one batch.
        """
        return update_norm if self.uses_update_norm else None

    def first_reach(self) -> Tensor | None:
        """A bound on the norm of a projected weight, for a constraint that need not act after every step; else None.

        A float64 number on the CPU, counted on from step to step by `may_wait`: no step asks a device for it.
        """
        return None

    def may_wait(self, reach: Tensor, step: float | None) -> bool:
        """Whether the promise holds after a `seen_step` even if `apply` is left out; brings `first_reach` up to date.

        What `reach` holds afterwards bounds the norm, after `apply` if that is not left out.
        """
        return False

    def _require_positive(self, **values: float) -> None:
        """Refuse a norm, in a constraint's settings, that is not positive and finite."""
        require_numbers(f"{type(self).__name__}: ", values)
        for name, value in values.items():
            limits = torch.finfo(torch.float32)
            if not limits.tiny <= value <= limits.max:
                raise ValueError(
                    f"{type(self).__name__}: {name}={value} must be positive and finite, in float32 as well, where "
                    f"numbers below {limits.tiny:.2g} lose digits; leave the entry out for no constraint"
                )

    def _require_update_norm(self, update_norm: float | None, name: str) -> float:
        """The bound on the step's norm, refused if there is none, for constraints that are nothing without it."""
        if update_norm is None:
            raise ValueError(
                f"{type(self).__name__} on {name!r} needs a bound on the step's norm, which this optimizer does not "
                "give; use HardCap or SpectralNormalize, or an optimizer of wellnormed.optim"
            )
        return update_norm


class SpectralConstraint(Constraint):
    """Acts on the singular values of every slice of a `MatrixNorm`, in batches of slices of equal size.

    What it remembers of the first batch has its own name, of the others a name with their number.
    """

    def initial_state(self, weights: Tensor, norm: Norm) -> State:
        assert isinstance(norm, MatrixNorm)
        bound = norm.upper_bound(weights)
        states = [self._initial_state(x, bound) for x in norm.slices(weights)]
        return {f"{key}{i or ''}": value for i, own in enumerate(states) for key, value in own.items()}

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        assert isinstance(norm, MatrixNorm)
        batches, after = norm.slices(weights), {}
        keys = {key.rstrip("0123456789") for key in state}
        for i, (slices, unit) in enumerate(zip(batches, norm.slice_units(weights), strict=True)):
            own = {key: state[f"{key}{i or ''}"] for key in keys}
            batches[i], own = self._act(slices, unit, update_norm, own)
            after |= {f"{key}{i or ''}": value for key, value in own.items()}
        return norm.from_slices(batches, weights), after

    def _initial_state(self, slices: Tensor, bound: Tensor) -> State:
        """What to remember of slices of weights whose norms `(*batch)` have this proved bound; nothing by default."""
        return {}

    @abstractmethod
    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        """Act on slices `(*batch, m, n)`, of which one unit of the norm is the largest singular value `unit`."""


class Promise(Constraint):
    """A constraint without memory that promises a bound on the norm after every step.

    Weights are proved to lie at or below the bound before the first step. Later they are where the aim and the accuracy
    of the matrix functions put them; 16-bit weights are constrained in float32 and proved again once they are rounded.
    """

    tolerance: ClassVar[float] = 0.0
    """For constraints that hold a weight at its bound, and not only below: how far from there they may leave it, as a
    share of the bound. They bring every weight there when they begin; the others leave what is proved to be below."""

    @property
    @abstractmethod
    def bound(self) -> float:
        """The largest norm, in units of the weight's norm."""

    def promised(self, state: State) -> float | None:
        return self.bound

    def project(self, weights: Tensor, norm: Norm) -> Tensor:
        if not self.tolerance and bool((norm.upper_bound(weights) <= self.bound).all()):
            return weights
        return held(self._project(weights, norm), norm, self.bound)

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        return self._after_step(weights, norm, update_norm), {}

    def _project(self, weights: Tensor, norm: Norm) -> Tensor:
        """Bring weights from anywhere; as after a step by default."""
        return self._after_step(weights, norm, None)

    @abstractmethod
    def _after_step(self, weights: Tensor, norm: Norm, update_norm: float | None) -> Tensor:
        """Bring weights that a step of that norm has moved."""


def scaled(weights: Tensor, factors: Tensor, norm: Norm) -> Tensor:
    """The weights `(*batch, *shape)`, each times its own factor, in float64."""
    return weights.double() * factors.to(weights.device).reshape(factors.shape + (1,) * norm.ndim)


def held(weights: Tensor, norm: Norm, bound: float, dtype: torch.dtype | None = None) -> Tensor:
    """The weights `(*batch, *shape)` in a dtype; those not proved to have `norm(weight) <= bound` are scaled down."""
    rounded = weights.to(dtype or weights.dtype)
    margin = torch.finfo(rounded.dtype).eps
    while bool(((proved := norm.upper_bound(rounded)) > bound).any()):
        weights = scaled(weights, torch.where(proved > bound, (1 - margin) * bound / proved, 1), norm)
        rounded = weights.to(rounded.dtype)
        margin = min(2 * margin, 0.5)  # rounding may have lifted the result again
    return rounded


@dataclass(frozen=True)
class Cap(Promise):
    """Promises `norm(weight) <= max_norm` after every step.

    Args:
        max_norm: The cap, in units of the weight's norm. Weights above it are brought below it at once.
    """

    max_norm: float

    def __post_init__(self) -> None:
        self._require_positive(max_norm=self.max_norm)

    @property
    def bound(self) -> float:
        return self.max_norm


@dataclass(frozen=True)
class SpectralCap(Cap):
    """A cap for every slice of a `MatrixNorm`, hence for the weight."""

    def _project(self, weights: Tensor, norm: Norm) -> Tensor:
        assert isinstance(norm, MatrixNorm)
        return norm.on_slices(weights, lambda slices, unit: self._start(slices, self.max_norm * TARGET * unit))

    def _after_step(self, weights: Tensor, norm: Norm, update_norm: float | None) -> Tensor:
        assert isinstance(norm, MatrixNorm)
        cap, step = self._aim(update_norm) * TARGET, update_norm or 0.0
        return norm.on_slices(weights, lambda slices, unit: self._cap(slices, cap * unit, step * unit))

    def _aim(self, update_norm: float | None) -> float:
        """The norm that a weight is brought to after a step: the cap, by default."""
        return self.max_norm

    def _start(self, slices: Tensor, cap: float) -> Tensor:
        """Bring slices from anywhere to the cap, a largest singular value."""
        return spectral_hardcap(slices, cap)

    @abstractmethod
    def _cap(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        """Bring the slices to the cap; both numbers are largest singular values."""
