"""A job: a function of whole tensors, which a `Placement` does here at once or deals to processes; and what shares one.

An oracle or a constraint needs its weight whole; everything else an optimizer does is elementwise. Both hand their
whole-tensor work over as jobs, so that one mechanism decides who does it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from wellnormed._batching import batches
from wellnormed._precision import all_digits
from wellnormed.parallel.layout import layout, like, local

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Job:
    """A batched function, and the tensors of equal shape and layout that it takes.

    Args:
        inputs: One list per argument, all of the same length; `inputs[i][j]` is argument `i` of member `j`.
        function: From the arguments, each stacked along a new first dimension, to results of the same shapes, dtypes
            and order.
        read_only: How many of the arguments, the first ones, are only read; the results replace the others.
        cubic: Whether the work on a member grows as `m n min(m, n)`, as singular values do. False for work entry by
            entry or column by column, whose result costs more to send than to compute.

    Example:
        >>> import torch
        >>> Job(([torch.eye(2), torch.ones(2, 2)],), lambda batch: (2 * batch,)).run()[0][1]
        tensor([[2., 2.],
                [2., 2.]])
    """

    inputs: tuple[list[Tensor], ...]
    function: Callable[..., tuple[Tensor, ...]]
    read_only: int = 0
    cubic: bool = True

    def run(self) -> tuple[list[Tensor], ...]:
        """Done here, with all of every tensor: one list per replaced argument, laid out as the argument."""
        parts = ([local(t) for t in tensors] for tensors in self.inputs)
        results = self.compute(*(torch.stack(own) if len(own) > 1 else own[0][None] for own in parts))
        pairs = zip(results, self.inputs[self.read_only :], strict=True)
        return tuple([like(part, t) for part, t in zip(result, tensors, strict=True)] for result, tensors in pairs)

    def compute(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """The function, in its own precision, whatever `torch.autocast` or lower precision of products is around it."""
        kind = arguments[0].device.type
        available = torch.amp.is_autocast_available(kind)
        with torch.autocast(kind, enabled=False) if available else nullcontext(), all_digits():
            return self.function(*arguments)

    @property
    def cost(self) -> int:
        """Multiplications for one member, up to a factor: `m n min(m, n)`, or its entries if the job is not cubic."""
        shape = self.inputs[0][0].shape
        count = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        return count * min(rows, count // rows) if self.cubic else count


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
