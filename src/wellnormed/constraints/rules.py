"""Rules that bring a weight back below `max_norm` after a step, in the units of the weight's own norm.

Each rule aims a little below its cap, so that the float32 result, rounding included, can be *proved* to lie at or
below it: `TARGET` and `SLACK` are several times the rounding of the products involved (measured: 2e-7 relative at 768).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from wellnormed.matrix import soft_cap, soft_cap_strength, spectral_hardcap, spectral_normalize
from wellnormed.norms import ColNorm, MatrixNorm, Norm
from wellnormed.norms.base import rms

TARGET = 1 - 1e-5
"""Where a rule aims, as a share of its cap."""
SLACK = 1e-5
"""Growth beyond the update that the soft cap also undoes, as a share of the cap: rounding never accumulates."""


@dataclass(frozen=True)
class Constraint(ABC):
    """A promise: after every step, `norm(weight) <= max_norm`.

    Args:
        max_norm: The cap, in units of the weight's norm.
    """

    max_norm: float

    def __post_init__(self) -> None:
        if not 0 < self.max_norm < float("inf"):
            raise ValueError(
                f"{type(self).__name__}: max_norm={self.max_norm} must be positive and finite; "
                "leave the rule out for no constraint"
            )

    needs_update_norm: ClassVar[bool] = False
    """Whether the promise rests on a bound on the step's norm, which only oracle-based optimizers have."""

    @abstractmethod
    def acts_on(self, norm: Norm) -> bool:
        """Whether the rule is defined for weights of this norm."""

    @abstractmethod
    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:
        """Refuse, before a step, what the rule cannot hold.

        Args:
            norm: The weight's norm.
            update_norm: Bound on the norm of the coming step; None if the optimizer gives none.
            name: The parameter's name, for the message.

        Raises:
            ValueError: Naming parameter, value, rule and remedy.
        """

    @abstractmethod
    def apply(self, weights: Tensor, norm: Norm, update_norm: float) -> Tensor:
        """The constrained weights of a batch `(*batch, *shape)`, given a bound on the step that was just taken."""

    @abstractmethod
    def project(self, weights: Tensor, norm: Norm) -> Tensor:
        """The weights brought below the cap from anywhere, for the start of training."""


class _SpectralConstraint(Constraint):
    """A rule that acts on the singular values of every slice of a `MatrixNorm`."""

    def acts_on(self, norm: Norm) -> bool:
        return isinstance(norm, MatrixNorm)

    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:
        if self.needs_update_norm and update_norm is None:
            raise ValueError(
                f"{type(self).__name__} on {name!r} needs a bound on the step's norm, which this optimizer does not "
                "give; use HardCap or SpectralNormalize, or an optimizer of wellnormed.optim"
            )

    def apply(self, weights: Tensor, norm: Norm, update_norm: float) -> Tensor:
        assert isinstance(norm, MatrixNorm)
        unit = norm.unit(weights)
        slices = norm.matrices(weights)
        return self._act(slices, self.max_norm * TARGET * unit, update_norm * unit).reshape(weights.shape)

    def project(self, weights: Tensor, norm: Norm) -> Tensor:
        assert isinstance(norm, MatrixNorm)
        cap = self.max_norm * TARGET * norm.unit(weights)
        return spectral_hardcap(norm.matrices(weights), cap).reshape(weights.shape)

    @abstractmethod
    def _act(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        """Act on slices `(*batch, m, n)`; both numbers are largest singular values."""


@dataclass(frozen=True)
class HardCap(_SpectralConstraint):
    """Singular values above the cap become the cap; the others stay (Spectral Clipping, section 3)."""

    def _act(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        return spectral_hardcap(slices, cap)


@dataclass(frozen=True)
class SpectralNormalize(_SpectralConstraint):
    """A weight above the cap is divided by a bound on its norm, so that it really ends below (LT section 3.1)."""

    def _act(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        return spectral_normalize(slices, cap)


@dataclass(frozen=True)
class SoftCap(_SpectralConstraint):
    """LT's soft cap, `p2(p1(W))`, coupled to the true norm of the step (LT theorem B.1, corrected).

    The strength comes from learning rate x overshoot of the coefficient set. It holds the promise for steps up to
    1.6129 times the cap, and refuses longer ones before they are taken.
    """

    needs_update_norm: ClassVar[bool] = True

    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:
        super().check(norm, update_norm, name)
        try:
            soft_cap_strength(self.max_norm * TARGET, self._growth(update_norm or 0.0, self.max_norm))
        except ValueError as error:
            raise ValueError(f"SoftCap({self.max_norm}) on {name!r}: {error}") from error

    def _act(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        return soft_cap(slices, soft_cap_strength(cap, self._growth(update_norm, cap)))

    @staticmethod
    def _growth(update_norm: float, cap: float) -> float:
        return update_norm + SLACK * cap


@dataclass(frozen=True)
class WeightDecay(_SpectralConstraint):
    """Shrink the whole weight by `1 - update_norm / max_norm`: the decay whose equilibrium is the cap.

    `(1 - u/M)(M + u) = M - u^2/M <= M`. With learning rate eta that is the weight decay `overshoot / M` of LT
    section 3.
    """

    needs_update_norm: ClassVar[bool] = True

    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:
        super().check(norm, update_norm, name)
        if update_norm is not None and update_norm > self.max_norm:
            raise ValueError(
                f"WeightDecay({self.max_norm}) on {name!r}: a step of norm {update_norm:.4g} is longer than the cap: "
                "the decay would flip the weight's sign; lower the learning rate or use HardCap"
            )

    def _act(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        return slices * max(0.0, 1 - update_norm / cap - SLACK)


@dataclass(frozen=True)
class ColumnCap(Constraint):
    """Columns (or embedding vectors) of RMS above the cap are scaled back to it (LT section 4.4)."""

    def acts_on(self, norm: Norm) -> bool:
        return isinstance(norm, ColNorm)

    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:
        """The projection is exact for any step."""

    def apply(self, weights: Tensor, norm: Norm, update_norm: float) -> Tensor:
        return self.project(weights, norm)

    def project(self, weights: Tensor, norm: Norm) -> Tensor:
        assert isinstance(norm, ColNorm)
        cap = self.max_norm * TARGET
        return weights * (cap / rms(weights, norm.feature_dim, keepdim=True).clamp(min=cap))
