"""One constrained parameter: what is measured of it, how it is rounded, and how a write into it is noticed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from wellnormed.constraints.base import Constraint, Promise, State, held
from wellnormed.norms import Norm
from wellnormed.norms.base import widened
from wellnormed.parallel.layout import local


@dataclass(frozen=True)
class Constrained:
    """A parameter with its name, the norm it is measured in, and its constraint."""

    name: str
    parameter: Tensor
    norm: Norm
    constraint: Constraint


Measure = Callable[[Constrained, Tensor], Tensor]
"""A number for every weight of a batch, which are all constrained alike."""


def upper_bound(c: Constrained, weights: Tensor) -> Tensor:
    """A proved bound on the norm of each weight; infinity where an entry is not finite."""
    if not bool(weights.isfinite().all()):
        return weights.new_full(weights.shape[:1], math.inf)
    return c.norm.upper_bound(weights)


def distance(c: Constrained, weights: Tensor) -> Tensor:
    """How far the weights are from their projections, in the norm."""
    wide = widened(weights)
    return c.norm.upper_bound(c.constraint.project(wide, c.norm) - wide)


def allowed_distance(c: Constrained) -> float:
    """How far a weight that its constraint has moved may be from its projection; in 16 bits it is rounded as well."""
    assert isinstance(c.constraint, Promise)
    return c.constraint.bound * (c.constraint.tolerance + 8 * torch.finfo(c.parameter.dtype).eps)


def mark(parameter: Tensor) -> tuple[int, int, StorageWeakRef, int]:
    """How often a parameter was written in place, and the memory it lies in.

    Of one that is cut torch counts writes into the whole and into this process' part apart. The reference keeps no
    memory, and while it lives no other memory is equal to it.
    """
    part = local(parameter)
    return parameter._version, part._version, StorageWeakRef(part.untyped_storage()), int(part.storage_offset())


def rounded(c: Constrained, weights: Tensor, states: State, dtype: torch.dtype) -> Tensor:
    """A batch in 16 bits that still keeps what was promised; one by one, for the proof makes float64 copies."""
    states = states or c.constraint.initial_state(weights, c.norm)
    bounds = [c.constraint.promised({key: value[i] for key, value in states.items()}) for i in range(len(weights))]
    pairs = zip(weights, bounds, strict=True)
    return torch.stack([w.to(dtype) if bound is None else held(w, c.norm, bound, dtype) for w, bound in pairs])
