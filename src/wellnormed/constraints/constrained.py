"""Constrained parameters: how batches of them are written and measured, rounded, and how a write is noticed."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from wellnormed.constraints.base import Constraint, State, held
from wellnormed.norms import Norm
from wellnormed.norms.base import widened
from wellnormed.parallel import Job, Placement
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
Action = Callable[[Constrained, Tensor, State], tuple[Tensor, State]]
"""What becomes of the weights of such a batch, and of what their constraint remembers."""


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
    assert c.constraint.bound is not None
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


@torch.no_grad()
def write(buckets: Iterable[list[Constrained]], action: Action, states: dict[str, State], placement: Placement) -> None:
    """The one way by which weights are constrained: buckets of equal constraint, norm, step, shape and layout."""
    buckets = list(buckets)

    def job(members: list[Constrained]) -> Job:
        first, remembered = members[0], [states[c.name] for c in members]
        keys = list(remembered[0])

        def function(weights: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            constrained, state = action(first, widened(weights), dict(zip(keys, values, strict=True)))
            if weights.dtype.itemsize < 4:
                constrained = rounded(first, constrained, state, weights.dtype)
            return constrained, *(state[key] for key in keys)

        inputs = [c.parameter for c in members], *([state[key] for state in remembered] for key in keys)
        return Job(inputs, function, cubic=first.norm.measures == "singular values")

    results = placement.run(map(job, buckets))
    for members, (weights, *after) in zip(buckets, results, strict=True):
        torch._foreach_copy_([local(c.parameter) for c in members], [local(w) for w in weights])
        for key, values in zip(states[members[0].name], after, strict=True):
            torch._foreach_copy_([states[c.name][key] for c in members], values)


@torch.no_grad()
def measure(buckets: Iterable[list[Constrained]], function: Measure, placement: Placement) -> dict[str, float]:
    """A number for every weight of buckets of equal norm, shape and layout."""
    buckets = list(buckets)

    def job(members: list[Constrained]) -> Job:
        first, weights = members[0], [c.parameter.detach() for c in members]
        numbers = [torch.empty((), dtype=torch.float64, device=weight.device) for weight in weights]
        cubic = first.norm.measures == "singular values"
        return Job((weights, numbers), lambda batch, _: (function(first, batch).double(),), read_only=1, cubic=cubic)

    return {
        c.name: number
        for members, (numbers,) in zip(buckets, placement.run(map(job, buckets)), strict=True)
        for c, number in zip(members, torch.stack(numbers).tolist(), strict=True)
    }
