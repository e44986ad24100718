"""How one tensor lies over processes: plain, copied to all, or cut along one dimension.

A plain tensor is whole in every process. A `DTensor` may be cut along one dimension over one dimension of its mesh, as
by `fully_shard`, by hybrid sharding (copies of shards) or by one-dimensional tensor parallelism; no other is served.
"""

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor
from torch.distributed import ProcessGroup

from wellnormed._inputs import is_quantized


@dataclass(frozen=True)
class Cut:
    """A dimension that is cut into consecutive parts, one for each rank of a group."""

    group: ProcessGroup
    dim: int


def part_lengths(length: int, world: int) -> list[int]:
    """Length of every rank's part of a cut dimension, as `torch.chunk` cuts: the last parts may be shorter or empty.

    Example:
        >>> part_lengths(5, 4)
        [2, 2, 1, 0]
    """
    chunk = -(-length // world)
    return [max(0, min(chunk, length - rank * chunk)) for rank in range(world)]


def is_distributed(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # a second to import; without it there is no DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def layout(tensor: Tensor) -> Hashable:
    """A value that is equal for two tensors if they lie over the same processes in the same way."""
    return (tensor.device_mesh, tensor.placements) if is_distributed(tensor) else None


def cut_of(tensor: Tensor, name: str) -> Cut | None:
    """How the tensor is cut; None if it is whole in every process.

    Cuts along several dimensions, cuts that interleave unevenly, and sums that are not yet summed are refused.
    """
    if not is_distributed(tensor):
        return None
    from torch.distributed.tensor import Replicate, Shard

    cuts = [(axis, placement) for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if not cuts:
        return None
    (axis, placement), *others = cuts
    if others or type(placement) is not Shard:
        raise ValueError(
            f"parameter {name!r} lies as {tuple(tensor.placements)} over a mesh of {tensor.device_mesh.ndim} "
            "dimensions, but its norm needs it whole, and only shards along one dimension of the mesh can be "
            "assembled: those of fully_shard, also with copies (HSDP), or of tensor parallelism alone. Use "
            "fully_shard without tensor parallelism for this parameter, or redistribute it"
        )
    return Cut(tensor.device_mesh.get_group(axis), placement.dim % tensor.ndim)


def local(tensor: Tensor) -> Tensor:
    """This process' part, which shares its memory; all of a plain tensor."""
    return tensor.to_local().detach() if is_distributed(tensor) else tensor


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """From this process' part, a tensor laid out as another of the same shape."""
    if not is_distributed(tensor):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """The assembled tensor, in every process; a collective call for a DTensor."""
    return tensor.full_tensor().detach() if is_distributed(tensor) else tensor.detach()


def refuse_untrainable(name: str, parameter: Tensor) -> None:
    """Refuse a parameter that no step can move: a piece of what FSDP1 flattens, or quantised codes."""
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
