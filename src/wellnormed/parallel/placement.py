"""Where functions of whole tensors run: here at once, or dealt to processes (`sharded`).

An oracle or a constraint needs its weight whole; everything else an optimizer does is elementwise. Both hand their
whole-tensor work over as jobs, so that one mechanism decides who does it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """A batched function, and the tensors of equal shape and layout that it takes.

    Args:
        inputs: One list per argument, all of the same length; `inputs[i][j]` is argument `i` of member `j`.
        function: From the arguments, each stacked along a new first dimension, to results of the same number, shapes,
            dtypes and order.
        returned: The arguments, by number and rising, in whose place the results stand; all of them if None.
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
    returned: tuple[int, ...] | None = None
    cubic: bool = True

    def run(self) -> tuple[list[Tensor], ...]:
        """The results, one list per returned argument."""
        stacked = (torch.stack(tensors) if len(tensors) > 1 else tensors[0][None] for tensors in self.inputs)
        return tuple(list(result.unbind()) for result in self.function(*stacked))

    @property
    def replaced(self) -> tuple[list[Tensor], ...]:
        """The inputs in whose place the results stand."""
        return self.inputs if self.returned is None else tuple(self.inputs[i] for i in self.returned)

    @property
    def cost(self) -> int:
        """Multiplications for one member, up to a factor: `m n min(m, n)`, or its entries if the job is not cubic."""
        shape = self.inputs[0][0].shape
        count = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        return count * min(rows, count // max(rows, 1)) if self.cubic else count


class Placement(ABC):
    """Who does the jobs."""

    sent_bytes: int = 0
    """What this process has sent for jobs since it started; what goes to several others counts for each of them."""

    @abstractmethod
    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[list[Tensor], ...]]:
        """The results of every job, in order; each laid out over processes as the input in its place.

        Every process passes the same jobs in the same order, and takes all results. A job's inputs are read before
        the next result is asked for.
        """

    @abstractmethod
    def agree(self, numbers: dict[str, float], among: list[str]) -> dict[str, float]:
        """The largest of every number over all processes.

        Args:
            numbers: Name -> a number that is not negative; the same names in every process.
            among: All names there may be, the same in every process.

        Raises:
            ValueError: In every process: a name is in some processes only.
        """


class Local(Placement):
    """One process with whole tensors: a job is done when its result is asked for."""

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[list[Tensor], ...]]:
        for job in jobs:
            yield job.run()

    def agree(self, numbers: dict[str, float], among: list[str]) -> dict[str, float]:
        return numbers
