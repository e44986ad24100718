"""The processes of a training run, as `torchrun` starts them; a run that it did not start is a group of one."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from wellnormed.train.environment import device_of, versions
from wellnormed.train.stopping import Stopped

T = TypeVar("T")
PATIENCE = timedelta(minutes=10)
"""The time for which a rank waits for the others in a step, more than compiling or a checkpoint can delay one."""
SAME_START = "start all ranks with the same command, the same packages and the same files"


@dataclass(frozen=True)
class Ranks:
    """This process of a run: its number, the number of processes, and its device."""

    rank: int
    world: int
    device: torch.device
    patient: Any = None
    """A group of the same processes with a timeout of days; see `together`. None for a single process."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def gather(self, value: T, patiently: bool = False) -> list[T]:
        """Give every rank the values of all ranks, in their order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, self.patient if patiently else None)
        return values

    def sum(self, *values: float | Tensor) -> list[float]:
        """Sums over the ranks, in float64, the same on each."""
        total = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self.device).detach() for x in values])
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def together(self, work: Callable[[], T], patiently: bool = False) -> T:
        """Do the work on every rank.

        An error on any rank, or `Stopped`, is raised on all, with the same sentence, so that none waits for another.
        `patiently` is for work that may take a rank hours.
        """
        results: list[T] = []
        problem: BaseException | None = None
        try:
            results.append(work())
        except (ValueError, OSError, Stopped) as error:
            if self.world == 1:
                raise
            problem = error
        said: Any = None if problem is None else (isinstance(problem, OSError), str(problem))
        problems = self.gather(problem.number if isinstance(problem, Stopped) else said, patiently)
        for rank, said_there in enumerate(problems):
            if isinstance(said_there, int):
                raise Stopped(said_there) from problem
            if said_there is not None:
                raise (OSError if said_there[0] else ValueError)(f"rank {rank}: {said_there[1]}") from problem
        return results[0]

    def by_first(self, work: Callable[[], T], patiently: bool = False) -> T | None:
        """Do the work on the first rank alone, and return None on the others; errors as in `together`."""
        return self.together(lambda: work() if self.first else None, patiently)

    def require_equal(self, what: str, facts: Mapping[str, Any], remedy: str = SAME_START) -> None:
        """Refuse ranks that differ in a fact; the message names the first such rank and the fact."""
        for rank, there in enumerate(values := self.gather(dict(facts))):
            for name, expected in values[0].items():
                if there.get(name) != expected:
                    raise ValueError(
                        f"rank {rank} has another {what} than rank 0: {name} is {there.get(name)} instead of "
                        f"{expected}; {remedy}"
                    )


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the processes that `torchrun` started, with NCCL on GPUs and gloo elsewhere; leave them at the end.

    An existing default group is used and kept. `device` is "cpu", "cuda" or "auto", a GPU if there is one. A missing
    GPU and ranks with different versions of packages are each a `ValueError`.
    """
    place = device_of(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    began_here = not dist.is_initialized()
    if began_here:
        if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
            yield Ranks(0, 1, place)
            return
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=PATIENCE)
    # one rank alone certifies at the end, which takes a large model hours
    patient: Any = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    try:
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), place, patient)
        ranks.require_equal("version of a package", versions())
        yield ranks
    finally:
        gc.collect()  # objects that still hold a group would end its threads too late, and abort the process
        dist.destroy_process_group(None if began_here else patient)
