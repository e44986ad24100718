"""Constraints that move only the largest singular value. They remember its vector, and promise nothing.

Several singular values may grow in one step, so the norm may exceed any value (LT section 3.1). Both suit steps of low
rank, as AdamW's, better than orthogonalised ones, which raise all values at once.
"""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed._ranges import PART
from wellnormed.constraints.base import TARGET, SpectralConstraint, State
from wellnormed.matrix import leading_singular_triplet, spectral_hammer, spectral_weight_decay
from wellnormed.matrix.leading import Triplet


class _OfTheLargest(SpectralConstraint):
    """Remembers the leading right vector of every slice, so that finding it after a step costs a few products."""

    def _initial_state(self, slices: Tensor, bound: Tensor) -> State:
        return {"vector": leading_singular_triplet(slices).v}

    def _act(self, slices: Tensor, unit: float, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        triplet = leading_singular_triplet(slices, state["vector"])
        return self._moved(slices, unit, triplet), {"vector": triplet.v}

    @abstractmethod
    def _moved(self, slices: Tensor, unit: float, triplet: Triplet) -> Tensor:
        """The slices with their largest singular values moved."""


@dataclass(frozen=True)
class Hammer(_OfTheLargest):
    """The largest singular value of every slice, where above `cap`, becomes `cap` (LT section 3.1).

    No promise: other singular values may stay above. LT's published form also raises a smaller one to `cap`, after
    every step (`papers._caps_as_published`).

    Args:
        cap: In units of the weight's norm.
    """

    cap: float

    def __post_init__(self) -> None:
        self._require_positive(cap=self.cap)

    def _moved(self, slices: Tensor, unit: float, triplet: Triplet) -> Tensor:
        return spectral_hammer(slices, self.cap * TARGET * unit, triplet)


@dataclass(frozen=True)
class SpectralWeightDecay(_OfTheLargest):
    """The largest singular value of every slice loses the fraction `decay` (LT section 3.1; Yoshida and Miyato 2017).

    No promise. The published form is coupled to no learning rate, so a schedule does not weaken it.

    Args:
        decay: Fraction removed by every step, in (0, 1].
    """

    decay: float

    def __post_init__(self) -> None:
        remedy = "leave the constraint out for no decay"
        require_numbers("SpectralWeightDecay: ", {"decay": self.decay}, PART, remedy)

    def _moved(self, slices: Tensor, unit: float, triplet: Triplet) -> Tensor:
        return spectral_weight_decay(slices, self.decay, triplet)
