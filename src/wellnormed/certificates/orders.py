"""The order in which this machine adds the products of a linear map, found by probing (FPRev, arXiv 2411.00442)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from wellnormed.proof import Row
from wellnormed.proof.arithmetic import Arithmetic

_HUGE = 2.0**60
"""It absorbs sums of ones, until its negative is added."""


def depth(inputs: int, outputs: int, batch: int, dtype: torch.dtype) -> int:
    """How often this machine adds something to an addend of a linear map, the most for five addends.

    Of n addends, two are a huge number and its negative, and the others ones. The result is the number of ones that are
    added after the two have met. So addend i, with every other one in turn as the partner, gives as many results as
    it meets additions.

    Args:
        inputs: The number of addends.
        outputs: The number of outputs of the map.
        batch: How many vectors the map is applied to at once.
        dtype: The dtype of map and vectors.

    Example:
        >>> 1 <= depth(2, 1, 1, torch.float64) <= 2
        True
    """
    weight, most = torch.ones(outputs, inputs, dtype=dtype), 0
    for first in sorted({0, inputs // 3, inputs // 2, inputs - 2, inputs - 1} & set(range(inputs))):
        probes = torch.ones(inputs, inputs, dtype=dtype)
        probes[:, first] = _HUGE
        probes.fill_diagonal_(-_HUGE)
        probes = probes[torch.arange(inputs) != first]
        met = torch.cat([F.linear(some, weight)[:, 0] for some in probes.split(batch)])
        most = max(most, len(met.unique()))
    return most


def require_lanes(rows: Sequence[Row], arithmetic: Arithmetic) -> None:
    """Refuse an order of sums that this machine does not keep in a linear map of a proof, of one vector or of 64.

    Raises:
        ValueError: Names the first such map.
    """
    sizes = {row.name: row.shape[-1] for row in rows}
    for row in (each for each in rows if each.operation == "linear" and each.executed is not None):
        assert row.executed is not None  # it was asked
        dtype = getattr(torch, row.executed.dtype)
        if row.constants["parts"] > 1 or dtype not in (torch.float32, torch.float64):
            continue
        for batch in (1, 64):
            found = depth(inputs := sizes[row.inputs[0]], row.shape[-1], batch, dtype)
            stated = arithmetic.depth(inputs + 1) - 2  # a product is rounded, too, and a bias is added
            if found > stated:
                raise ValueError(
                    f"certify: arithmetic says {arithmetic.lanes} lanes, and the {inputs} addends of {row.name} would "
                    f"meet {stated} additions; this machine adds to one of them {found} times, for {batch} vectors "
                    "at once. State fewer lanes, or none for any order"
                )
