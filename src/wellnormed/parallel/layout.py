"""The layout of one tensor over processes: plain, copied to all, or cut into parts.

A plain tensor is whole in every process. A `DTensor` may be cut over several dimensions of its mesh, as by
`fully_shard` after tensor or expert parallelism, and be copied over the others, as by hybrid sharding.
"""

import functools
import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from wellnormed._inputs import is_quantized

T = TypeVar("T")
_PLAIN = Tensor, nn.Parameter
Steps = tuple[tuple[int, int], ...]
"""The cuts in order: for each its dimension, counted from the last one as -1, and its number of parts."""


@dataclass(frozen=True)
class Cut:
    """A tensor is cut into consecutive parts, and each of them again by the next step. Every rank holds one.

    Args:
        group: The ranks.
        steps: The cuts, the first one first.
        holders: The rank in the group that holds each part; the parts of the first part come first.
    """

    group: ProcessGroup
    steps: Steps
    holders: tuple[int, ...]

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        """The shape of every rank's part of a tensor."""
        return self._by_rank(_part_shapes(shape, self.steps))

    def parts(self, tensors: Tensor) -> list[Tensor]:
        """Every rank's part of a batch `(*batch, *shape)`, as views."""
        parts = [tensors]
        for dim, count in self.steps:
            parts = [part for x in parts for part in x.split(part_lengths(x.shape[dim], count), dim)]
        return self._by_rank(parts)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """The batch that these parts make up, one for every rank."""
        parts = [parts[rank] for rank in self.holders]
        for dim, count in reversed(self.steps):
            parts = [torch.cat(parts[first : first + count], dim) for first in range(0, len(parts), count)]
        return parts[0]

    def _by_rank(self, ordered: list[T]) -> list[T]:
        held = dict(zip(self.holders, ordered, strict=True))
        return [held[rank] for rank in range(len(held))]


@functools.lru_cache(maxsize=1024)  # a step asks for the parts of a thousand ranks
def _part_shapes(shape: torch.Size, steps: Steps) -> list[torch.Size]:
    shapes = [list(shape)]
    for dim, count in steps:
        shapes = [[*s[:dim], length, *s[len(s) + dim + 1 :]] for s in shapes for length in part_lengths(s[dim], count)]
    return [torch.Size(s) for s in shapes]


def part_lengths(length: int, world: int) -> list[int]:
    """The length of every rank's part of a dimension, cut as by `torch.chunk`: the last may be shorter or empty.

    Example:
        >>> part_lengths(5, 4)
        [2, 2, 1, 0]
    """
    chunk = -(-length // world)
    return [max(0, min(chunk, length - rank * chunk)) for rank in range(world)]


def is_distributed(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a `DTensor`."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # a second to import; without it there is no DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def layout(tensor: Tensor) -> Hashable:
    """A value that is equal for two tensors if they have the same layout over the same processes."""
    return (tensor.device_mesh, tensor.placements) if is_distributed(tensor) else None


def kind(tensor: Tensor) -> tuple[Hashable, ...]:
    """Shape, dtype, device and layouts: what a step on a tensor is planned by."""
    laid_out = None if type(tensor) in _PLAIN else layout(tensor)  # a step asks for every weight and gradient
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, laid_out


def cut_of(tensor: Tensor, name: str) -> Cut | None:
    """The cuts of a tensor; None if it is whole in every process.

    If it is cut over several dimensions of the mesh, the first call makes a group of its ranks, so all of them must
    call it together.

    Raises:
        ValueError: It is a sum that is not reduced yet, or has an unknown kind of cut.
    """
    if not is_distributed(tensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    if (axes := _cutting_axes(mesh, placements)) is None:
        raise ValueError(
            f"parameter {name!r} lies as {tuple(placements)} over a mesh of {mesh.ndim} dimensions, but its norm needs "
            "it whole, and only the layouts of fully_shard, tensor and expert parallelism can be assembled: copies, "
            "shards, and shards of shards. Redistribute it to Shard and Replicate before the optimizer is made"
        )
    if not axes:
        return None
    here = mesh.get_coordinate()
    across = mesh.mesh[tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))]
    ranks = across.permute([sorted(axes).index(axis) for axis in axes]).flatten().tolist()
    group = mesh.get_group(axes[0]) if len(axes) == 1 else _group_of(dist.group.WORLD, tuple(sorted(ranks)))
    steps = tuple((placements[axis].dim % tensor.ndim - tensor.ndim, mesh.size(axis)) for axis in axes)
    return Cut(group, steps, tuple(dist.get_group_rank(group, rank) for rank in ranks))


def _cutting_axes(mesh: Any, placements: Any) -> list[int] | None:
    """The dimensions of a mesh that cut a tensor, in the order of the cuts; None if a placement is unknown.

    `Shard` cuts before the dimensions of the mesh on its right. `_StridedShard` cuts after those that cut the same
    dimension of the tensor: `fully_shard` makes one where tensor parallelism has cut before. (Torch's own functions
    read it from the left, which is another cut where sizes do not divide: 9 rows on 4 x 2 processes.)
    """
    from torch.distributed.tensor import Replicate, Shard

    axes: list[int] = []
    for axis, placement in reversed(list(enumerate(placements))):
        if type(placement) is Shard:
            axes.insert(0, axis)
        elif type(placement).__name__ == "_StridedShard":  # torch does not export it
            before = math.prod(mesh.size(other) for other in axes if placements[other].dim == placement.dim)
            if placement.split_factor != before:
                return None
            axes.append(axis)
        elif type(placement) is not Replicate:
            return None
    return [axis for axis in axes if mesh.size(axis) > 1]


@functools.cache
def _group_of(world: Any, ranks: tuple[int, ...]) -> Any:
    """The group of these ranks, made without the others and once for every default group `world`."""
    return world if len(ranks) == world.size() else dist.new_group(list(ranks), use_local_synchronization=True)


def refuse_other_part(cut: Cut, tensor: Tensor, name: str) -> None:
    """Refuse a `DTensor` whose part in this process has another shape than its placements state."""
    expected, found = cut.shapes(tensor.shape)[cut.group.rank()], local(tensor).shape
    if is_distributed(tensor) and found != expected:
        raise ValueError(
            f"parameter {name!r} of shape {tuple(tensor.shape)} lies as {tuple(tensor.placements)}, by which this "
            f"process should hold a part of shape {tuple(expected)}, and holds one of {tuple(found)}; shard it by "
            "fully_shard or distribute_tensor with Shard, which give the first processes the larger parts"
        )


def local(tensor: Tensor) -> Tensor:
    """This process' part, which shares the tensor's memory; a plain tensor itself."""
    return tensor.to_local().detach() if is_distributed(tensor) else tensor


Mark = tuple[int, int, StorageWeakRef, int]
"""How often a tensor was written in place, and the memory it lies in, with the offset there.

For a tensor that is cut, torch counts writes to the whole and to this process' part separately. The weak reference
does not keep the memory alive, and while it exists no other memory compares equal to it.
"""


def marks(tensors: Sequence[Tensor], before: Sequence[Mark | None]) -> list[Mark]:
    """The mark of each tensor; with the reference of the one `before`, which takes time to make, where it holds."""
    found = []
    for tensor, known in zip(tensors, before, strict=True):  # a step asks three times
        part = tensor if type(tensor) in _PLAIN else local(tensor)
        memory = part.untyped_storage()
        same = known is not None and known[2].cdata == memory._cdata
        reference = known[2] if same else StorageWeakRef(memory)  # pyrefly: ignore
        found.append((tensor._version, part._version, reference, int(part.storage_offset())))
    return found


def mark(tensor: Tensor) -> Mark:
    """The mark of one tensor."""
    return marks([tensor], [None])[0]


def local_parts(tensors: list[Tensor]) -> list[Tensor]:
    """This process' parts of tensors of one layout."""
    return [local(tensor) for tensor in tensors] if tensors and is_distributed(tensors[0]) else tensors


def laid_out(parts: Sequence[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Tensors of the layout of others, which have one shape and layout, from this process' parts."""
    if not is_distributed(first := tensors[0]):
        return list(parts)
    from torch.distributed.tensor import DTensor

    of = functools.partial(DTensor.from_local, run_check=False, shape=first.shape)
    mesh, placements = first.device_mesh, first.placements
    return [of(part, mesh, placements, stride=tensor.stride()) for part, tensor in zip(parts, tensors, strict=True)]


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, or a number that torch has reduced in parts, in every process; a collective call."""
    if is_distributed(tensor) and not tensor.ndim:
        return tensor.full_tensor().detach()
    cut, part = cut_of(tensor, "to be assembled"), local(tensor.detach())
    if cut is None:
        return part
    shapes = cut.shapes(tensor.shape)
    sent = part.new_zeros(max(shape.numel() for shape in shapes))  # parts of equal size can be gathered
    sent[: part.numel()] = part.flatten()
    received = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(received, sent, cut.group)
    return cut.joined([row[: shape.numel()].view(shape) for row, shape in zip(received, shapes, strict=True)])


def refuse_untrainable(name: str, parameter: Tensor) -> None:
    """Refuse a parameter that no step can move: a flat parameter of FSDP1, or quantised codes."""
    if is_quantized(parameter):
        raise ValueError(
            f"parameter {name!r} holds quantised codes ({type(parameter).__name__}), which no step moves; freeze it by "
            "requires_grad_(False), and train an adapter beside it"
        )
    marks = (getattr(parameter, mark, False) for mark in ("_is_flat_param", "_fsdp_flattened"))
    if "_fsdp_wrapped_module" in name or any(marks):
        raise ValueError(
            f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens weights so that none has "
            "its shape; shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
