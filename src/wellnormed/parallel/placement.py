"""Whole-tensor work as jobs of several members, each of which one process of a group computes, or every process.

An oracle or a constraint needs its weight whole; everything else an optimizer does is elementwise. Both hand their
whole-tensor work over as jobs, so that one mechanism decides who does it.

A member whose tensors are copied in every process (DDP) needs no gathering; its results go from its owner to all. A
member that is cut (FSDP2, tensor parallelism, both; `layout`) is sent in parts to its owner, and its result back in
parts. All parts start to travel at once; results start as soon as they are computed, while the next ones are computed.

`docs/parallel.md` says what is sent, and how much memory it takes.
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from wellnormed._batching import batches
from wellnormed._devices import entries_at_once
from wellnormed._precision import all_digits
from wellnormed.parallel.exchange import DealtJob
from wellnormed.parallel.layout import Cut, cut_of, laid_out, layout, local_parts, refuse_other_part

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
SMALL = 2**20
"""A copied member below this cost (about a 100 x 100 matrix) is computed in every process: the oracle's few million
operations take less than a message."""


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
        """Do the job here, with all of every tensor. One list for each replaced argument, laid out as the argument."""
        parts = map(local_parts, self.inputs)
        results = self.compute(*(torch.stack(one) if len(one) > 1 else one[0][None] for one in parts))
        pairs = zip(results, self.inputs[self.read_only :], strict=True)
        return tuple(laid_out(result.unbind(), tensors) for result, tensors in pairs)

    def compute(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Call the function in its own precision, whatever autocast or lower precision of products is around it."""
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
    items: Iterable[T], parameter_of: Callable[[T], Tensor], settings_of: Callable[[T], K], share: int = 24
) -> Iterator[tuple[K, list[T]]]:
    """Items of equal settings whose parameters agree in shape, dtype, device and layout, in batches that pay.

    A large bucket comes in several pieces, so that not all its results are held at once; `entries_at_once` says what
    the `share` is.
    """
    buckets: dict[tuple[K, tuple], list[T]] = defaultdict(list)
    totals: dict[tuple, int] = defaultdict(int)  # by layout, since processes may hold other plain tensors
    for item in items:
        parameter = parameter_of(item)
        kind = parameter.shape, parameter.dtype, parameter.device, layout(parameter)
        buckets[settings_of(item), kind].append(item)
        totals[kind[2:]] += parameter.numel()
    for (settings, kind), members in buckets.items():
        entries = entries_at_once(kind[2], totals[kind[2:]], share)
        for piece in batches([parameter_of(item) for item in members], entries):
            yield settings, members[piece]


def deal(costs: list[int], ranks: int) -> list[int]:
    """The rank that does each piece of work: the longest first, each to the least loaded rank (Graham 1969).

    Every rank finds the same owners without communication, and no load exceeds 4/3 of the shortest possible.

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
    """Sends every job to the group that its tensors lie on; small jobs and those on no group are done by every process.

    Args:
        parameters: Name -> parameter, the same in every process.
        process_group: The group that holds copies of the plain parameters, as DDP does. None: each process computes
            all of them itself.
    """

    sent_bytes: int = 0
    """Bytes that this process has sent for jobs since it started; a message to several processes counts for each."""

    def __init__(self, parameters: Mapping[str, Tensor], process_group: ProcessGroup | None = None) -> None:
        self._process_group = process_group
        self._cuts: dict = {}
        self._devices: dict[ProcessGroup, torch.device] = {}
        for name, parameter in parameters.items():
            cut = self._cut(parameter, name)
            if cut is not None:
                refuse_other_part(cut, parameter, name)
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

    @property
    def shared(self) -> bool:
        """Whether some of the work is shared among processes."""
        return bool(self._devices)

    def agree(
        self, sizes: dict[str, float], known: dict[str, float], among: Iterable[str] = ()
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The largest of every number, none negative, over all processes, by one message for each group of them.

        Args:
            sizes: A number for each gradient. A name of `among`, all that there may be, which only some processes have
                is refused in all of them.
            known: Other numbers, with the same names in every process.
            among: The same in every process.
        """
        among = list(among)
        for group, device in self._devices.items():
            rows = [[sizes.get(name, 0.0), float(name in sizes), float(name not in sizes)] for name in among]
            rows += [[number, 0.0, 0.0] for number in known.values()]
            largest = torch.tensor(rows, dtype=torch.float64, device=device).reshape(-1, 3)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            agreed, others = largest[: len(among)].tolist(), largest[len(among) :, 0].tolist()
            here = dict(zip(among, agreed, strict=True))
            if partly := [name for name, (_, has, lacks) in here.items() if has and lacks]:
                raise ValueError(
                    f"{', '.join(sorted(partly))} have a gradient in some processes only; nothing was changed. Let "
                    "every process use every parameter, or use DDP with find_unused_parameters=True"
                )
            sizes, known = {name: here[name][0] for name in sizes}, dict(zip(known, others, strict=True))
        return sizes, known

    def _cut(self, tensor: Tensor, name: str) -> Cut | None:
        key = layout(tensor), tensor.ndim  # finding a mesh's group takes longer than looking it up
        if key not in self._cuts:
            self._cuts[key] = cut_of(tensor, name)
        return self._cuts[key]

    def _plan(self, jobs: list[Job]) -> list[DealtJob | Job]:
        cuts = [[self._cut(tensors[0], "a job's input") for tensors in job.inputs] for job in jobs]
        groups = [self._group(job, of_inputs) for job, of_inputs in zip(jobs, cuts, strict=True)]
        costs: dict[ProcessGroup, list[int]] = defaultdict(list)
        for job, group in zip(jobs, groups, strict=True):
            if group is not None:
                costs[group] += [job.cost] * len(job.inputs[0])
        owners = {group: iter(deal(of_members, group.size())) for group, of_members in costs.items()}
        return [
            job if group is None else DealtJob(job, group, [next(owners[group]) for _ in job.inputs[0]], of_inputs)
            for job, group, of_inputs in zip(jobs, groups, cuts, strict=True)
        ]

    def _group(self, job: Job, cuts: list[Cut | None]) -> ProcessGroup | None:
        groups = {cut.group for cut in cuts if cut is not None}
        assert len(groups) <= 1  # arguments are weights or their momentum, all cut alike, and plain state
        if groups:
            return groups.pop()
        return self._process_group if job.cubic and job.cost >= SMALL else None
