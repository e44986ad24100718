"""Jobs on whole tensors, whose members are shared among the processes of a group, or computed by each.

An oracle or a constraint needs its whole weight; everything else in an optimizer is elementwise. Both describe their
work as jobs, so that one mechanism decides which process does it.

A member whose tensors are copied in every process (DDP) needs no gathering; its owner sends the results to all. A
member that is cut (FSDP2, tensor parallelism, both; `layout`) is sent in parts to its owner, and its result is sent
back in parts. All parts are sent at once; each result is sent as soon as it is computed, while the next one is
computed.

`docs/parallel.md` has the sizes of messages and memory.
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
from wellnormed.parallel.layout import Cut, cut_of, kind, laid_out, layout, local_parts, refuse_other_part

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
SMALL = 2**20
"""Copied members below this cost (about a 100 x 100 matrix) are computed in every process: the few million operations
of an oracle take less time than a message."""


@dataclass(frozen=True)
class Job:
    """A batched function, and the tensors of equal shape and layout that it takes.

    Args:
        inputs: One list per argument, all of the same length; `inputs[i][j]` is argument `i` of member `j`.
        function: From the arguments, each stacked along a new first dimension, to results of the same shapes, dtypes
            and order.
        read_only: The number of leading arguments that are only read; the results replace the others.
        cubic: Whether the work on a member grows as `m n min(m, n)`, as for singular values. False for elementwise or
            columnwise work, whose result costs more to send than to compute.

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
        """Do the whole job in this process; returns a list for each replaced argument, in the argument's layout."""
        parts = map(local_parts, self.inputs)
        results = self.compute(*(torch.stack(one) if len(one) > 1 else one[0][None] for one in parts))
        pairs = zip(results, self.inputs[self.read_only :], strict=True)
        return tuple(laid_out(result.unbind(), tensors) for result, tensors in pairs)

    def compute(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Call the function in its own precision, whatever autocast or lower precision of products is around it."""
        device = arguments[0].device.type
        casts = torch.amp.is_autocast_available(device)
        casts = casts and (torch.compiler.is_compiling() or torch.is_autocast_enabled(device))
        with torch.autocast(device, enabled=False) if casts else nullcontext(), all_digits():
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
    """Batches of items with equal settings whose parameters agree in shape, dtype, device and layout.

    A large bucket is split into pieces, so that not all its results are in memory at once. `share` is that of
    `entries_at_once`.
    """
    buckets: dict[tuple[K, tuple], list[T]] = defaultdict(list)
    totals: dict[tuple, int] = defaultdict(int)  # by layout, since processes may hold other plain tensors
    for item in items:
        parameter = parameter_of(item)
        buckets[settings_of(item), kind(parameter)].append(item)
        totals[kind(parameter)[2:]] += parameter.numel()
    for (settings, of_members), members in buckets.items():
        entries = entries_at_once(parameter_of(members[0]).device, totals[of_members[2:]], share)
        for piece in batches([parameter_of(item) for item in members], entries):
            yield settings, members[piece]


def deal(costs: list[int], ranks: int) -> list[int]:
    """Assign pieces of work to ranks: the longest first, each to the least loaded rank (Graham 1969).

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
    """Shares every job in the group of its tensors; every process computes small jobs, and jobs without a group.

    Args:
        parameters: Name -> parameter, the same in every process.
        process_group: The group that holds copies of the plain parameters, as in DDP. With None each process computes
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
        """Yield the results of every job, in order, each in the layout of the argument that it replaces.

        Every process must pass the same jobs in the same order, and take all results. A job's inputs are read before
        the next result is requested. Without a group, the next job is taken only then.
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
        """Whether processes share some of the work."""
        return bool(self._devices)

    def agree(
        self, sizes: dict[str, float], known: dict[str, float], among: Iterable[str] = ()
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The maximum over all processes of every number, with one message for each group; no number is negative.

        Args:
            sizes: Name -> number, for the gradients of this process. A gradient that only some processes have is
                refused in all of them.
            known: Other numbers, with the same names in every process.
            among: All names that `sizes` may have in any process.
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
