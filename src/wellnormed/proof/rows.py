"""The records of a proof: rows for the operations of a program, and claims about stored tensors. Data only."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wellnormed.proof.decimals import Decimals


class Bounds(NamedTuple):
    """Bounds of every group of a tensor, for all inputs of the domain.

    Each array has as many axes as the tensor. An axis along which groups extend has size 1, and so has an axis along
    which all groups have equal bounds. Groups along the last axis of a tensor `(B, T, D)` have arrays `(B, T, 1)`, or
    `(1, 1, 1)`.
    """

    radius: Decimals
    """Largest Euclidean norm of the group."""
    gain: Decimals
    """Largest Euclidean norm of the group's change, over the size of the input's change in the certificate's norm."""
    largest: Decimals
    """Largest absolute value of an entry of the group."""


@dataclass(frozen=True)
class Claim:
    """A bound on stored tensors, on which a row rests."""

    measure: str
    """Name of the number that is bounded, such as `spectral`; `proof.claims.MEASURES` has all."""
    tensors: tuple[str, ...]
    """Names of the stored tensors."""
    values: tuple[float, ...]
    """The bounds: one, or one for each part, such as the heads of a projection."""
    constants: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the measure, such as a convolution's stride."""


@dataclass(frozen=True, eq=False)
class Row:
    """One operation of a program, with the bounds of its result."""

    name: str
    operation: str
    """A primitive, which has bounds, or a move, which only rearranges, scales and adds."""
    inputs: tuple[str, ...]
    """Names of earlier rows."""
    shape: tuple[int, ...]
    """Shape of the result for the example."""
    constants: dict[str, Any]
    """Numbers, lists of numbers, and names of stored tensors."""
    claims: tuple[Claim, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    """For each input of a primitive, the axes along which the groups extend whose bounds it uses."""
    axes: tuple[int, ...] = ()
    """The axes along which the groups of a primitive's result extend."""
    bounds: Bounds | None = None
    """The bounds that a row states before `Proof.add`, and the proved ones afterwards."""

    @property
    def group_size(self) -> int:
        """Number of entries of a group."""
        return math.prod(self.shape[axis] for axis in self.axes)
