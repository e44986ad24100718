"""What constraints know of an optimizer: which parameters it has and, if it says so, how long its steps are."""

import functools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from wellnormed._devices import recording
from wellnormed.constraints.weights import Constrained
from wellnormed.matrix.msign import frobenius
from wellnormed.norms import Norm
from wellnormed.parallel import Placement
from wellnormed.routing import Assignment
from wellnormed.routing.places import Places

if TYPE_CHECKING:
    from wellnormed.constraints.of_optimizer import Constraints

Bounds = dict[str, float | None]
"""A bound on the norm of a parameter's step, by the parameter's name; None where there is no bound."""


@runtime_checkable
class BoundsItsSteps(Protocol):
    """An optimizer that can bound its steps, as those of `wellnormed.optim`."""

    assignment: Assignment
    placement: Placement
    places: Places
    """The parts of the model, looked at in every step before `before` is called."""
    attached: list[Any]
    """The constraints attached to its steps, which are copied with it."""

    @property
    def settings(self) -> object:
        """Another object after any change on which bounds and decays depend."""
        ...

    def attach(self, constraints: Any) -> None:
        """Add to `attached`.

        Of each it calls `before` when it reads the numbers of its step, `after` when it has moved the weights, `sweep`
        when its `step` returns, and `doubt` when it has loaded a state.
        """
        ...

    def update_norms(self) -> Bounds:
        """The bound on the coming step of every parameter of the assignment, in its norm."""
        ...

    def decay(self, name: str) -> float:
        """The share of a parameter, one that has a bound, that the coming step removes."""
        ...


def attached_to(optimizer: torch.optim.Optimizer) -> "list[Constraints]":
    """The constraints attached to an optimizer. That of another library is given the attribute, which is not copied."""
    return vars(optimizer).setdefault("attached", [])


def count_of(optimizer: torch.optim.Optimizer) -> int:
    """The number of parameters that an optimizer has."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def step_bounds(optimizer: torch.optim.Optimizer, constrained: Sequence[Constrained]) -> Bounds:
    """The bound on each coming step; None where the optimizer knows no bound in the norm of the constraint.

    From a cap M, a step of norm `u` with a decay `d` leads to at most `(1 - d) M + u`: for a constraint that undoes
    just one step it counts as one of `u - d M`, but never as none. A constraint that waits is given `u`, since a decay
    takes less of a weight below M. An optimizer that no longer has a constrained parameter is refused.
    """
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if lost := [c.name for c in constrained if c.parameter not in owned]:
        raise ValueError(
            f"the optimizer no longer has the constrained parameter {', '.join(lost)}; if the model has another "
            "one in its place, call remove() on these constraints, make the optimizer again, and constrain it"
        )
    if not isinstance(optimizer, BoundsItsSteps):
        return dict.fromkeys((c.name for c in constrained), None)
    bounds = optimizer.update_norms()
    known = {a.parameter: a for a in optimizer.assignment}
    found: Bounds = {}
    for c in constrained:
        a = known.get(cast(nn.Parameter, c.parameter))
        found[c.name] = step = bounds[a.name] if a and a.norm == c.norm else None
        undone = c.constraint.uses_update_norm and c.own.first_reach() is None
        if a and step and undone and c.constraint.bound is not None:
            found[c.name] = max(step - optimizer.decay(a.name) * c.constraint.bound, sys.float_info.min)
    return found


@functools.lru_cache(maxsize=1024)
def least_unit(norm: Norm, shape: torch.Size) -> float:
    """The least Frobenius norm of a weight of norm 1, for norms that are the largest size of a part."""
    return min(unit for _, unit in norm.blocks(torch.empty(shape, device="meta")))


_LONG = 2**20
"""The most entries whose length torch adds up at once: it is then within .1%, where that of 4e7 equal entries of
float32 is 2% too small, and that of 1e8 5% too large."""


class Measured:
    """Weights before a step whose optimizer gives no bound, by which the step is measured once it was made.

    The Frobenius norm of the difference is a bound, in the least unit of any part.
    """

    def __init__(self, constrained: Sequence[Constrained]) -> None:
        self._starts = [(c, c.parameter.detach().clone()) for c in constrained]

    def seen(self) -> Bounds:
        """What constraints see of the steps, by the bounds that were measured; none while a CUDA graph is recorded."""
        found: Bounds = {}
        for device in {start.device for _, start in self._starts}:
            if recording(device):
                continue
            constrained, starts = zip(*(each for each in self._starts if each[1].device == device), strict=True)
            steps = torch._foreach_sub([c.parameter.detach() for c in constrained], list(starts))
            parts = [frobenius(x.reshape(len(x), -1)) if x.numel() > _LONG else x for x in steps]
            lengths = torch.stack(torch._foreach_norm(parts))
            for c, length in zip(constrained, lengths.tolist(), strict=True):
                most = length + c.parameter.numel() ** 0.5 * 2.0**-63  # of entries whose squares are 0 in float32
                bound = most / least_unit(c.norm, c.parameter.shape) if most < math.inf else None
                found[c.name] = c.own.seen_step(bound, c.parameter)
        return found


def rates_of(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """The rate and the parameters of each group; what `step_bounds` and `still` depend on where bounds are unknown."""
    return [(_rate(group), *map(id, group["params"])) for group in optimizer.param_groups]


def _rate(group: dict[str, Any]) -> float | None:
    """The rate of a group; None if it is on a device, or there is none."""
    lr = group.get("lr")
    return None if lr is None or (torch.is_tensor(lr) and lr.device.type != "cpu") else float(lr)


def still(optimizer: torch.optim.Optimizer, constrained: Sequence[Constrained], bounds: Bounds) -> set[str]:
    """The parameters whose step has length 0: by its bound or, without one, by a rate that is on the CPU."""
    rates = {p: _rate(group) for group in optimizer.param_groups for p in group["params"]}
    lengths = {c.name: rates.get(c.parameter) if bounds[c.name] is None else bounds[c.name] for c in constrained}
    return {name for name, length in lengths.items() if length == 0}
