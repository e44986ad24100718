"""The messages of one job in a group: owners get parts, compute, and send results back, each as early as possible."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from wellnormed.parallel.layout import Cut, laid_out, local

if TYPE_CHECKING:
    from wellnormed.parallel.placement import Job


class DealtJob:
    """A job whose members have owners. Call `collect`, `compute` and `run` in this order, on every rank.

    `owners` holds the rank in the group that computes each member, `cuts` how each argument is cut (None if every rank
    has it whole).
    """

    def __init__(self, job: "Job", group: ProcessGroup, owners: list[int], cuts: list[Cut | None]) -> None:
        self._job = job
        self._arguments = [
            _Copied(tensors, group, owners) if cut is None else _Parts(tensors, group, owners, cut)
            for tensors, cut in zip(job.inputs, cuts, strict=True)
        ]
        self._replaced = self._arguments[job.read_only :]
        self._works = group.rank() in owners

    def collect(self) -> None:
        """Start to send parts to their owners."""
        for argument in self._arguments:
            argument.collect()

    def compute(self) -> int:
        """Compute the members that this rank owns, start to send the results, and return the bytes sent for the job."""
        stacked = [argument.stacked() for argument in self._arguments]
        results = self._job.compute(*stacked) if self._works else (None,) * len(self._replaced)
        for argument, result in zip(self._replaced, results, strict=True):
            argument.spread(result)
        return sum(argument.sent for argument in self._arguments)

    def run(self) -> tuple[list[Tensor], ...]:
        """Wait for the results, and return them as `Job.run` does."""
        return tuple(argument.results() for argument in self._replaced)


class _Argument(ABC):
    """One argument of all members: how its values reach the owners, and how results leave them.

    `collect` starts to fetch the members that this rank owns; `stacked` waits for them and stacks them. `spread` starts
    to send their results (None from a rank that owns no member); `results` waits for the results of all members, and
    lays each out like its input. `sent` counts the bytes.
    """

    def __init__(self, tensors: list[Tensor], group: ProcessGroup, owners: list[int]) -> None:
        self._tensors, self._group, self.sent = tensors, group, 0
        self._rank = group.rank()
        self._owned = [[j for j, owner in enumerate(owners) if owner == rank] for rank in range(group.size())]
        self._mine = self._owned[self._rank]
        self._shape = tensors[0].shape

    def collect(self) -> None:  # noqa: B027
        """Do nothing: every rank has the whole argument."""

    @abstractmethod
    def stacked(self) -> Tensor: ...

    @abstractmethod
    def spread(self, result: Tensor | None) -> None: ...

    @abstractmethod
    def _arrived(self) -> Mapping[int, Tensor]: ...

    def results(self) -> list[Tensor]:
        parts = self._arrived()
        return laid_out([parts[j] for j in range(len(self._tensors))], self._tensors)

    def _buffer(self, entries: int) -> Tensor:
        first = self._tensors[0]
        return torch.empty(entries, dtype=first.dtype, device=first.device)


class _Copied(_Argument):
    """An argument that is whole on every rank. Its owners broadcast the results of all their members in one message."""

    def stacked(self) -> Tensor:
        return torch.stack([local(self._tensors[j]) for j in self._mine]) if self._mine else self._buffer(0)

    def spread(self, result: Tensor | None) -> None:
        self._arriving = []
        for rank, members in enumerate(self._owned):
            if not members:
                continue
            if rank == self._rank:
                assert result is not None  # this rank owns members
                buffer = result.to(self._tensors[0]).reshape(-1).contiguous()
                self.sent += buffer.nbytes * (self._group.size() - 1)
            else:
                buffer = self._buffer(len(members) * self._shape.numel())
            work = dist.broadcast(buffer, group=self._group, group_src=rank, async_op=True)
            assert work is not None  # this rank is in the group
            self._arriving.append((members, buffer, work))

    def _arrived(self) -> Mapping[int, Tensor]:
        results: dict[int, Tensor] = {}
        for members, buffer, work in self._arriving:
            work.wait()
            results |= zip(members, buffer.view(-1, *self._shape).unbind(), strict=True)
        return results


class _Parts(_Argument):
    """An argument that is cut over the ranks. Each rank sends its parts to every owner, and gets results back."""

    def __init__(self, tensors: list[Tensor], group: ProcessGroup, owners: list[int], cut: Cut) -> None:
        super().__init__(tensors, group, owners)
        self._cut, self._part_shapes = cut, cut.shapes(self._shape)
        # entries of this rank's parts of what each rank owns, and of each rank's parts of what this one owns
        self._here = [len(members) * self._part_shapes[self._rank].numel() for members in self._owned]
        self._there = [len(self._mine) * shape.numel() for shape in self._part_shapes]

    def collect(self) -> None:
        parts = [local(self._tensors[j]).reshape(-1) for members in self._owned for j in members]
        self._arriving = self._exchange(torch.cat(parts), self._here, self._there)

    def stacked(self) -> Tensor:
        _, buffer, work = self._arriving
        work.wait()
        pairs = zip(buffer.split(self._there), self._part_shapes, strict=True)
        return self._cut.joined([part.view(len(self._mine), *shape) for part, shape in pairs])

    def spread(self, result: Tensor | None) -> None:
        parts = [] if result is None else self._cut.parts(result.to(self._tensors[0].dtype))
        sent = torch.cat([part.reshape(-1) for part in parts]) if parts else self._buffer(0)
        self._arriving = self._exchange(sent, self._there, self._here)

    def _arrived(self) -> Mapping[int, Tensor]:
        _, buffer, work = self._arriving
        work.wait()
        parts = buffer.view(len(self._tensors), *self._part_shapes[self._rank]).unbind()
        return dict(zip((j for members in self._owned for j in members), parts, strict=True))

    def _exchange(self, sent: Tensor, outgoing: list[int], incoming: list[int]) -> tuple[Tensor, Tensor, dist.Work]:
        """Exchange between all pairs at once; the sent tensor is kept until it has arrived."""
        self.sent += (sum(outgoing) - outgoing[self._rank]) * sent.element_size()
        received = self._buffer(sum(incoming))
        work = dist.all_to_all_single(received, sent, incoming, outgoing, self._group, async_op=True)
        assert work is not None  # this rank is in the group
        return sent, received, work
