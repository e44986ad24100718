"""A row at work: what the rule of its operation reads, and the checks that rules share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from wellnormed.proof.decimals import ZERO
from wellnormed.proof.reading import field, integers, number, require
from wellnormed.proof.rows import Bounds, Claim
from wellnormed.proof.value import Value


@dataclass(eq=False)
class Inference:
    """A row whose inputs are values; its claims are complete, and `shape_of` knows the shapes of tensors."""

    name: str
    operation: str
    inputs: list[Value]
    shape: tuple[int, ...]
    constants: dict[str, Any]
    claims: list[Claim]
    reads: list[tuple[int, ...]]
    axes: tuple[int, ...]
    shape_of: Callable[[str], tuple[int, ...]]
    bounds: list[Bounds]
    """Of the groups that it reads, for every input."""
    logits: np.ndarray | None = None
    """For every head of an attention, what no logit exceeds."""

    def number(self, key: str) -> float:
        """A finite constant."""
        return number(field(self.constants, key, "its constants"), key)

    def claim(self, place: int, measure: str, **settings: Any) -> Claim:
        """One of its claims, which must be of that measure and with these settings."""
        require(place < len(self.claims), f"it lacks a claim of {measure}")
        claim = self.claims[place]
        differs = [key for key, each in settings.items() if claim.constants.get(key) != each]
        require(claim.measure == measure and not differs, f"its claim {place} must be {measure} with {settings}")
        return claim

    def only(self, inputs: int, claims: tuple[int, ...] = (0,)) -> None:
        """Check how many inputs and claims it has."""
        require(len(self.inputs) == inputs, f"it has {len(self.inputs)} inputs instead of {inputs}")
        require(len(self.claims) in claims, f"it has {len(self.claims)} claims instead of {claims}")

    def groups(self, *axes: int) -> None:
        """Check that it reads and leaves the same groups, which extend along given axes."""
        for read in [*self.reads, self.axes]:
            require(read == self.axes and set(axes) <= set(read), f"it must read and leave groups along {axes}")

    def keeps_shape(self) -> None:
        """Check that the result has the shape of all inputs."""
        require(all(x.shape == self.shape for x in self.inputs), "its result has another shape than its inputs")

    def entries(self) -> int:
        """Entries of a group."""
        return math.prod(self.shape[axis] for axis in self.axes)

    def over(self) -> int:
        """Entries of the vectors that it works on, which must lie in a group."""
        over = integers(field(self.constants, "over", "its constants"), "over")
        require(len(set(over)) == len(over) > 0, f"over={over} must be axes, each once")
        self.groups(*over)
        return math.prod(self.shape[axis] for axis in over)


def weight_of(row: Inference) -> tuple[str, bool]:
    """The matrix of a linear row."""
    return row.claims[0].tensors[0], row.claims[0].constants["transposed"]


def bias_of(row: Inference, place: int, outputs: int, parts: int = 1) -> list[Decimal]:
    """Norms of the parts of a bias, whose claim has that place; zero where a row has none."""
    if len(row.claims) <= place:
        return [ZERO] * parts
    claim = row.claim(place, "group_norm", parts=parts)
    require(math.prod(row.shape_of(claim.tensors[0])) == outputs, f"its bias has not {outputs} entries")
    return [Decimal(value) for value in claim.values]
