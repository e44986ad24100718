"""Constraints that move the largest singular value alone. They remember its vector, and promise nothing.

Several singular values may grow in one step, so the norm may exceed any value (LT section 3.1). Both suit steps of low
rank, as AdamW's, better than orthogonalised ones, which raise all values at once.
"""

from dataclasses import dataclass

from torch import Tensor

from wellnormed._inputs import require_flags, require_numbers
from wellnormed.constraints.base import TARGET, SpectralConstraint, State
from wellnormed.matrix import leading_singular_triplet, spectral_hammer, spectral_weight_decay


def _vector(slices: Tensor) -> State:
    """The leading right vector of every slice, so that finding it after a step costs a few products."""
    return {"vector": leading_singular_triplet(slices).v}


@dataclass(frozen=True)
class Hammer(SpectralConstraint):
    """The largest singular value of every slice, where above `max_norm`, becomes `max_norm` (LT section 3.1).

    No promise: other singular values may stay above. LT's published form also raises a smaller one to `max_norm`, after
    every step; `as_published` does so.

    Args:
        max_norm: In units of the weight's norm.
        as_published: Raise as well.
    """

    max_norm: float
    as_published: bool = False

    def __post_init__(self) -> None:
        self._require_positive(max_norm=self.max_norm)
        require_flags("Hammer: ", {"as_published": self.as_published})

    def _initial_state(self, slices: Tensor, bound: Tensor) -> State:
        return _vector(slices)

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        triplet, size = leading_singular_triplet(slices, state["vector"]), self.max_norm * TARGET * unit
        return spectral_hammer(slices, size, triplet, as_published=self.as_published), {"vector": triplet.v}


@dataclass(frozen=True)
class SpectralWeightDecay(SpectralConstraint):
    """The largest singular value of every slice loses the fraction `decay` (LT section 3.1; Yoshida and Miyato 2017).

    No promise. The published form is coupled to no learning rate, so a schedule does not weaken it.

    Args:
        decay: Fraction removed by every step, in (0, 1].
    """

    decay: float

    def __post_init__(self) -> None:
        require_numbers("SpectralWeightDecay: ", {"decay": self.decay})
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"SpectralWeightDecay: decay={self.decay} must lie in (0, 1]; leave the constraint out for no decay"
            )

    def _initial_state(self, slices: Tensor, bound: Tensor) -> State:
        return _vector(slices)

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        triplet = leading_singular_triplet(slices, state["vector"])
        return spectral_weight_decay(slices, self.decay, triplet), {"vector": triplet.v}
