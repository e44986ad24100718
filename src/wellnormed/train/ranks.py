"""The processes of a training run, as `torchrun` starts them; a run that it did not start is a group of one."""

import gc
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
PACKAGES = ("wellnormed", "torch", "safetensors")
"""Whose versions all ranks must share."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run: its number, how many there are, and where it computes."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What every rank has, on every rank, in their order."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def sum(self, *values: float | Tensor) -> list[float]:
        """Sums over the ranks, in float64, the same on each."""
        total = torch.stack([torch.as_tensor(x, device=self.device).detach().double() for x in values])
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def together(self, work: Callable[[], T]) -> T:
        """Do the work on every rank.

        An error on any rank is raised on all, with the same sentence, so that none waits for another.
        """
        results: list[T] = []
        problem: Exception | None = None
        try:
            results.append(work())
        except (ValueError, OSError) as error:
            if self.world == 1:
                raise
            problem = error
        problems = self.gather(None if problem is None else (isinstance(problem, OSError), str(problem)))
        for rank, found in enumerate(problems):
            if found is not None:
                raise (OSError if found[0] else ValueError)(f"rank {rank}: {found[1]}") from problem
        return results[0]

    def by_first(self, work: Callable[[], T]) -> T | None:
        """Do the work on the first rank alone, and return None on the others; errors as in `together`."""
        return self.together(lambda: work() if self.first else None)

    def require_equal(self, what: str, value: Any) -> None:
        """Refuse ranks that differ in something, naming the first that does."""
        for rank, found in enumerate(values := self.gather(value)):
            if found != values[0]:
                raise ValueError(
                    f"rank {rank} has another {what} than rank 0: {found} instead of {values[0]}; start all ranks with "
                    "the same command and the same packages"
                )


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the processes that `torchrun` started, with NCCL on GPUs and gloo elsewhere; leave them at the end.

    A default group that exists already is taken, and stays. `device` is "cpu", "cuda" or "auto", a GPU if there is one.
    That there is none, and that ranks have other versions of packages, is a `ValueError`.
    """
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise ValueError("device='cuda', but torch finds no CUDA device; use --device cpu")
    kind = ("cuda" if cuda else "cpu") if device == "auto" else device
    local = int(os.environ.get("LOCAL_RANK", 0))
    place = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(place)
    own = not dist.is_initialized()
    if own:
        if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
            yield Ranks(0, 1, place)
            return
        # one rank alone certifies at the end, which takes a large model minutes
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(hours=1))
    try:
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), place)
        ranks.require_equal("version of a package", {name: _version(name) for name in PACKAGES})
        yield ranks
    finally:
        if own:
            gc.collect()  # what still holds the group would end its threads too late, and abort the process
            dist.destroy_process_group()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a source tree that is not installed
