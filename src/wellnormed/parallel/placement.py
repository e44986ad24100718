"""Who does the jobs: one process, or the processes of a group, of which one computes each member.

A member whose tensors are copied in every process (DDP) needs no gathering; its results go from its owner to all. A
member that is cut (FSDP2, `layout`) is sent in parts to its owner, and its result back in parts. All parts start to
travel at once; results start as soon as they are computed, while the next members are computed.

What is sent, and how much memory it takes, stands in `docs/parallel.md`.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from wellnormed.parallel.exchange import DealtJob
from wellnormed.parallel.job import Job
from wellnormed.parallel.layout import Cut, cut_of, layout

SMALL = 2**20
"""A copied member below this cost (about a 100 x 100 matrix) is computed in every process: the oracle's few million
operations take less than a message."""


def deal(costs: list[int], ranks: int) -> list[int]:
    """The rank that does each piece of work: the longest first, each to the least loaded rank (Graham 1969).

    The same on every rank without a word between them, and at most 4/3 of the shortest possible time.

    Example:
        >>> deal([1, 1, 3, 1], 2)
        [1, 1, 0, 1]
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[index] = heapq.heappop(loads)
        heapq.heappush(loads, (load + costs[index], owners[index]))
    return owners


class Placement:
    """Every job goes to the group that its tensors lie on. What is small, or lies on none, every process does itself.

    Args:
        parameters: Name -> parameter, the same in every process.
        process_group: The group that holds copies of the plain parameters, as DDP does. None: each process computes
            all of them itself.
    """

    sent_bytes: int = 0
    """What this process has sent for jobs since it started; what goes to several others counts for each of them."""

    def __init__(self, parameters: Mapping[str, Tensor], process_group: ProcessGroup | None = None) -> None:
        self._process_group = process_group
        self._cuts: dict = {}
        self._devices: dict[ProcessGroup, torch.device] = {}
        for name, parameter in parameters.items():
            cut = self._cut(parameter, name)
            group = process_group if cut is None else cut.group
            if group is not None:
                self._devices.setdefault(group, parameter.device)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[list[Tensor], ...]]:
        """The results of every job, in order; each laid out over processes as the argument in its place.

        Every process passes the same jobs in the same order, and takes all results. A job's inputs are read before
        the next result is asked for; without a group it is only then that the next job is taken.
        """
        if not self._devices:
            yield from (job.run() for job in jobs)
            return
        works = deque(self._plan(list(jobs)))
        for work in works:
            if isinstance(work, DealtJob):
                work.collect()
        for work in works:
            if isinstance(work, DealtJob):
                self.sent_bytes += work.compute()
        while works:
            yield works.popleft().run()

    def agree(self, numbers: dict[str, float], among: list[str]) -> dict[str, float]:
        """The largest of every number, none negative, over all processes.

        A name that only some processes have is refused in all of them; `among` are all names there may be, the same in
        every process.
        """
        for group, device in self._devices.items():
            own = [[numbers.get(name, 0.0), float(name in numbers), float(name not in numbers)] for name in among]
            most = torch.tensor(own, dtype=torch.float64, device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
            found = dict(zip(among, most.tolist(), strict=True))
            if partly := [name for name, (_, held, lacking) in found.items() if held and lacking]:
                raise ValueError(
                    f"{', '.join(sorted(partly))} have a gradient in some processes only; nothing was changed. Let "
                    "every process use every parameter, or use DDP with find_unused_parameters=True"
                )
            numbers = {name: found[name][0] for name in numbers}
        return numbers

    def _cut(self, tensor: Tensor, name: str) -> Cut | None:
        key = layout(tensor), tensor.ndim  # finding a mesh's group takes longer than looking it up
        if key not in self._cuts:
            self._cuts[key] = cut_of(tensor, name)
        return self._cuts[key]

    def _plan(self, jobs: list[Job]) -> list[DealtJob | Job]:
        cuts = [[self._cut(tensors[0], "a job's input") for tensors in job.inputs] for job in jobs]
        groups = [self._group(job, own) for job, own in zip(jobs, cuts, strict=True)]
        costs: dict[ProcessGroup, list[int]] = defaultdict(list)
        for job, group in zip(jobs, groups, strict=True):
            if group is not None:
                costs[group] += [job.cost] * len(job.inputs[0])
        owners = {group: iter(deal(own, group.size())) for group, own in costs.items()}
        return [
            job if group is None else DealtJob(job, group, [next(owners[group]) for _ in job.inputs[0]], own)
            for job, group, own in zip(jobs, groups, cuts, strict=True)
        ]

    def _group(self, job: Job, cuts: list[Cut | None]) -> ProcessGroup | None:
        groups = {cut.group for cut in cuts if cut is not None}
        assert len(groups) <= 1  # arguments are weights or their momentum, all cut alike, and plain state
        if groups:
            return groups.pop()
        return self._process_group if job.cubic and job.cost >= SMALL else None
