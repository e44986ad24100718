"""The order in which this machine adds the products of a linear map, found by probing (FPRev, arXiv 2411.00442)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from wellnormed.proof import Row
from wellnormed.proof.arithmetic import Arithmetic

LANES = (64, 32, 16, 8, 4, 2)
"""Numbers of lanes that `most_lanes` tries."""
_HUGE = 2.0**60
"""It absorbs sums of ones, until its negative is added."""


@lru_cache(maxsize=64)
def depth(inputs: int, outputs: int, batch: int, dtype: torch.dtype, transposed: bool = False) -> int:
    """How often this machine adds something to an addend of a linear map, the most for five addends.

    Of n addends, two are a huge number and its negative, and the others ones. The result is the number of ones that are
    added after the two have met. So addend i, with every other one in turn as the partner, gives as many results as
    it meets additions.

    Args:
        inputs: The number of addends.
        outputs: The number of outputs of the map.
        batch: How many vectors the map is applied to at once.
        dtype: The dtype of map and vectors.
        transposed: Whether the map applies the transpose of a stored matrix.

    Example:
        >>> 1 <= depth(2, 1, 1, torch.float64) <= 2
        True
    """
    weight, most = torch.ones(*((inputs, outputs) if transposed else (outputs, inputs)), dtype=dtype), 0
    weight = weight.T if transposed else weight
    for first in sorted({0, inputs // 3, inputs // 2, inputs - 2, inputs - 1} & set(range(inputs))):
        probes = torch.ones(inputs, inputs, dtype=dtype)
        probes[:, first] = _HUGE
        probes.fill_diagonal_(-_HUGE)
        probes = probes[torch.arange(inputs) != first]
        met = torch.cat([F.linear(some, weight)[:, 0] for some in probes.split(batch)])
        most = max(most, len(met.unique()))
    return most


class Probe(NamedTuple):
    """The order in which this machine adds up a linear map."""

    row: str
    inputs: int
    batch: int
    depth: int

    def keeps(self, arithmetic: Arithmetic) -> bool:
        """Whether no addend meets more additions than the arithmetic says."""
        return self.depth <= self.stated(arithmetic)

    def stated(self, arithmetic: Arithmetic) -> int:
        """How many additions an addend meets by the arithmetic; a product is rounded, too, and a bias is added."""
        return arithmetic.depth(self.inputs + 1) - 2


def probes(rows: Iterable[Row], shape_of: Callable[[str], Sequence[int]]) -> Iterator[Probe]:
    """The orders of the linear maps of a proof, of one vector and of 64; `shape_of` gives the shape of a tensor."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.name] = row.shape[-1]
        dtype = None if row.executed is None else getattr(torch, row.executed.dtype)
        if dtype not in (torch.float32, torch.float64) or row.constants.get("parts", 1) != 1:
            continue
        maps: list[tuple[int, int, bool]] = []
        if row.operation == "linear":
            maps = [(sizes[row.inputs[0]], row.shape[-1], bool(row.claims[0].constants.get("transposed")))]
        elif row.operation == "convex_potential":
            hidden, width = shape_of(row.claims[0].tensors[0])
            maps = [(width, hidden, False), (hidden, width, True)]
        for inputs, outputs, transposed in maps:
            for batch in (1, 64):
                yield Probe(row.name, inputs, batch, depth(inputs, outputs, batch, dtype, transposed))


def most_lanes(rows: Iterable[Row], shape_of: Callable[[str], Sequence[int]]) -> tuple[int, Probe | None]:
    """The largest number of lanes, of `LANES`, that this machine keeps in the linear maps of a proof, or 1.

    Beside it is the probe of the first map that does not keep twice as many.
    """
    kept, limit = list(LANES), None
    for probe in probes(rows, shape_of):
        while kept and not probe.keeps(Arithmetic(lanes=kept[0])):
            kept, limit = kept[1:], probe
        if not kept:
            break
    return (kept[0] if kept else 1), limit


def require_lanes(rows: Iterable[Row], arithmetic: Arithmetic, shape_of: Callable[[str], Sequence[int]]) -> None:
    """Refuse an order of sums that this machine does not keep in a linear map of a proof, of one vector or of 64.

    Raises:
        ValueError: Names the first such map.
    """
    for probe in probes(rows, shape_of):
        if not probe.keeps(arithmetic):
            raise ValueError(
                f"certify: arithmetic says {arithmetic.lanes} lanes, and the {probe.inputs} addends of {probe.row} "
                f"would meet {probe.stated(arithmetic)} additions; this machine adds to one of them {probe.depth} "
                f"times, for {probe.batch} vectors at once. State fewer lanes, or none for any order"
            )
