"""The convex-potential layer, whose bound does not follow from those of its operations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wellnormed.propagation.decimals import ONE, decimals
from wellnormed.propagation.ledger import Ledger, Stored
from wellnormed.propagation.operations.linear import tokens_of
from wellnormed.propagation.registry import Read, primitive
from wellnormed.propagation.rows import Claim
from wellnormed.propagation.value import Bounds, Value


def convex_potential(step: Ledger, x: Value, weight: Stored, bias: Stored | None, factor: float) -> Value:
    """`x - factor W^T relu(W x + b)`."""
    if not isinstance(weight, Stored) or weight.tensor.ndim != 2 or isinstance(bias, Value):
        raise step.refuse("its weights are no stored matrix and vector; store them")
    claims = [step.prove("spectral", weight)]
    claims += [] if bias is None else [step.prove("positive_norm", bias)]
    axes = {*x.inner_axes(), len(x.shape) - 1}
    return step.derive("convex_potential", [(x, axes)], shape=x.shape, constants={"factor": factor}, claims=claims)


@primitive("convex_potential")
def _convex_potential(reads: Sequence[Read], c: Mapping[str, Any], claims: Sequence[Claim]) -> Bounds:
    """`I - f W^T D W` has eigenvalues between 1 and `1 - f w^2`; zero goes to `-f W^T relu(b)`."""
    (x,), factor = reads, decimals(c["factor"]).item()
    norm = decimals(claims[0].values).item()
    squared = abs(factor) * norm * norm
    slope = max(ONE, squared - 1) if factor >= 0 else ONE + squared
    shift = decimals(claims[1].values).item() if len(claims) > 1 else decimals(0).item()
    radius = slope * x.bounds.radius + abs(factor) * norm * shift * tokens_of(x, x.shape[-1])
    return Bounds(radius, slope * x.bounds.gain, np.asarray(radius))
