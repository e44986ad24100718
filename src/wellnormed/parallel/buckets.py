"""Which parameters are stacked and treated as one batch."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor

from wellnormed._batching import batches
from wellnormed.parallel.layout import layout

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def in_buckets(
    items: Iterable[T], parameter_of: Callable[[T], Tensor], settings_of: Callable[[T], K]
) -> Iterator[tuple[K, list[T]]]:
    """Items of equal settings whose parameters agree in shape, dtype, device and layout, in batches that pay.

    A large bucket comes in several pieces, so that not all its results are held at once.
    """
    buckets: dict[tuple[K, tuple], list[T]] = defaultdict(list)
    for item in items:
        parameter = parameter_of(item)
        kind = parameter.shape, parameter.dtype, parameter.device, layout(parameter)
        buckets[settings_of(item), kind].append(item)
    for (settings, _), members in buckets.items():
        for piece in batches([parameter_of(item) for item in members]):
            yield settings, members[piece]
