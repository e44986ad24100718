"""What a ledger is made of: rows for the operations of a model, and claims on stored tensors. Data only."""

import math
from dataclasses import dataclass, field
from typing import Any

from wellnormed.propagation.value import Bounds


@dataclass(frozen=True)
class Claim:
    """A proved bound on what an operation uses of stored tensors."""

    measure: str
    """Name of the proof, such as `spectral`; see `propagation.claims`."""
    tensors: tuple[str, ...]
    """Names among the stored tensors."""
    values: tuple[float, ...]
    """The bounds: one, or one for each part, such as the heads of a projection."""
    constants: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the measure, such as a convolution's stride."""


@dataclass(frozen=True, eq=False)
class Row:
    """One operation: what it reads, and what follows."""

    name: str
    operation: str
    """A primitive, which has bounds, or a move, which has none of its own."""
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    """Of the result, on the example."""
    constants: dict[str, Any]
    """Numbers, lists of numbers, and names of stored tensors."""
    claims: tuple[Claim, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    """For each input, the axes of the groups whose bounds a primitive uses."""
    axes: tuple[int, ...] = ()
    """Axes of the groups that a primitive bounds."""
    bounds: Bounds | None = None

    @property
    def group_size(self) -> int:
        """How many entries a group has."""
        return math.prod(self.shape[axis] for axis in self.axes)
