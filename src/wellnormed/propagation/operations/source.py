"""Where values begin: the certified input, and the vectors that an embedding looks up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from wellnormed.propagation.decimals import decimals, float_up, rounding_up, sqrt_up
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.registry import Read, operation, primitive
from wellnormed.propagation.rows import Claim
from wellnormed.propagation.value import Bounds, Value


def default_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """Axes of a group: the last one, or all but the first of an image's: tokens apart, the pixels of a sample not."""
    return tuple(range(1, len(shape))) if len(shape) > 3 else (len(shape) - 1,)


def source(step: Ledger, shape: Sequence[int], name: str) -> Value:
    """The certified variable: every group has at most the domain's root mean square."""
    if not shape:
        raise step.refuse("the input is a single number; pass a batch of vectors")
    return step.derive("input", [], shape=shape, axes=default_axes(shape), constants={"radius": step.radius}, name=name)


@primitive("input")
def _input(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """RMS at most the radius in every group; the change of the input has size 1 by definition."""
    entries = math.prod(c["shape"][axis] for axis in c["axes"])
    root = decimals(sqrt_up(entries)).reshape([1] * len(c["shape"]))
    radius = root * decimals(c["radius"])
    return Bounds(radius, root, radius)


@primitive("output")
def _output(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """The model's result, in the groups that the certificate speaks of."""
    return reads[0].bounds


MOVES_OF_TOKENS = (
    "view", "reshape", "_unsafe_view", "flatten", "expand", "clone", "contiguous", "to", "_to_copy", "alias", "slice",
    "select", "narrow", "transpose", "permute", "t", "unsqueeze", "squeeze", "detach",
)  # fmt: skip
"""What may be done with integers before they are looked up."""


@dataclass(frozen=True)
class Tokens:
    """Integers of the input, which an embedding looks up."""

    name: str
    shape: tuple[int, ...]


@operation("aten.embedding.default")
def embedding(step: Ledger, weight: Any, tokens: Any, *settings: Any, **keywords: Any) -> Value:
    """The vectors looked up are the certified variable: any in the ball, the table's rows among them."""
    if not isinstance(tokens, Tokens) or not isinstance(weight, Stored):
        raise step.refuse("what it looks up is neither a stored table nor numbers of the input; look up tokens only")
    claim = step.prove("row_norm", weight)
    width = weight.tensor.shape[-1]
    with rounding_up():
        largest = Decimal(claim.values[0]) / Decimal(width).sqrt().next_minus()
    if largest > Decimal(step.radius):
        needed = float_up(largest)
        raise ValueError(
            f"radius={step.radius} is smaller than the largest row of {weight.name}, which has RMS {needed}: pass "
            f"radius={needed} or more, or cap the embedding's rows"
        )
    return step.derive(
        "input", [], shape=(*tokens.shape, width), axes=(-1,), constants={"radius": step.radius}, claims=[claim]
    )
