"""Where functions of whole tensors run: here at once, or dealt to processes (`sharded`).

An oracle or a constraint needs its weight whole; everything else an optimizer does is elementwise. Both hand their
whole-tensor work over as jobs, so that one mechanism decides who does it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """A batched function, and the tensors of equal shape that it takes.

    Args:
        inputs: One list per argument, all of the same length; `inputs[i][j]` is argument `i` of member `j`.
        function: From the arguments, each stacked along a new first dimension, to results of the same number, shapes
            and order.
    """

    inputs: tuple[list[Tensor], ...]
    function: Callable[..., tuple[Tensor, ...]]

    def run(self) -> tuple[list[Tensor], ...]:
        """The results, one list per argument."""
        stacked = (torch.stack(tensors) if len(tensors) > 1 else tensors[0][None] for tensors in self.inputs)
        return tuple(list(result.unbind()) for result in self.function(*stacked))


class Placement(ABC):
    """Who does the jobs."""

    @abstractmethod
    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[list[Tensor], ...]]:
        """The results of every job, in order; each laid out over processes as the input in its place.

        Every process passes the same jobs in the same order. A job's inputs are read before the next result is asked
        for.
        """

    @abstractmethod
    def agree(self, fine: bool) -> bool:
        """Whether it is fine in every process."""


class Local(Placement):
    """One process with whole tensors: a job is done when its result is asked for."""

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[list[Tensor], ...]]:
        for job in jobs:
            yield job.run()

    def agree(self, fine: bool) -> bool:
        return fine
