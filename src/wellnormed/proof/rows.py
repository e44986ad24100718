"""What a proof is made of: rows for the operations of a program, and claims on stored tensors. Data only."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wellnormed.proof.decimals import Decimals


class Bounds(NamedTuple):
    """Bounds of every group, in arrays whose axes inside a group have size 1, as have axes along which all are equal.

    They hold for every input of the domain.
    """

    radius: Decimals
    """Largest Euclidean norm."""
    gain: Decimals
    """Largest Euclidean norm of a change, over the size of the input's change in the certificate's norm."""
    largest: Decimals
    """Largest absolute value of an entry."""


@dataclass(frozen=True)
class Claim:
    """A bound on what an operation uses of stored tensors."""

    measure: str
    """Name of what is bounded, such as `spectral`; see `proof.claims`."""
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
    """Names of earlier rows."""
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
    """What is stated of a row that is to be checked, and what was derived of one that a proof has added."""

    @property
    def group_size(self) -> int:
        """How many entries a group has."""
        return math.prod(self.shape[axis] for axis in self.axes)
