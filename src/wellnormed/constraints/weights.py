"""Constrained parameters: what is remembered of each, how a write is noticed, and how they are measured.

`of_optimizer` writes them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wellnormed.constraints.base import Constraint, State
from wellnormed.norms import Norm
from wellnormed.norms.base import widened
from wellnormed.parallel import Job, Placement
from wellnormed.parallel.layout import Mark, marks, whole
from wellnormed.routing.patterns import bare_names

DOUBTED, WRITTEN = 1.0, 2.0
"""What may have happened to a weight: its values may have been loaded; it was written, or put into other memory."""


@dataclass(eq=False)
class Constrained:
    """A parameter with its name, the norm it is measured in, its constraint, and what is remembered of it.

    Args:
        state: What the constraint remembers.
        reach: A bound on the norm, where the constraint need not act after every step.
        doubt: DOUBTED or WRITTEN from then until the weight is proved again; else 0.
        seen: The mark of the weight when the constraints last saw it.
        placed: Whether the weight was projected, and an average has not yet been told.
        shape: The shape of the weight that is remembered.
    """

    name: str
    parameter: Tensor
    norm: Norm
    constraint: Constraint
    state: State = field(default_factory=dict)
    reach: float | None = None
    doubt: float = 0.0
    seen: Mark | None = None
    placed: bool = False
    shape: torch.Size | None = None

    @property
    def own(self) -> Constraint:
        """The constraint as it acts on a weight of this dtype."""
        return self.constraint.stored_as(self.parameter.dtype)

    def promised(self) -> float | None:
        """The bound that the constraint promises now; None if it promises nothing."""
        return self.constraint.promised(self.state)

    def begin(self) -> None:
        """Remember the projected weight; a collective call where it is cut, and the constraint remembers any."""
        self.reach, self.shape = self.own.first_reach(), self.parameter.shape
        if type(self.constraint).initial_state is not Constraint.initial_state:  # else no process needs it whole
            state = self.constraint.initial_state(widened(whole(self.parameter))[None], self.norm)
            self.state = {key: value[0].clone() for key, value in state.items()}

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, whose weight has another mark."""
        return vars(self) | {"doubt": changes([self])[self.name], "seen": None}


def changes(constrained: Sequence[Constrained]) -> dict[str, float]:
    """DOUBTED or WRITTEN for each weight, as far as torch counts what this process has written; else 0."""
    now = marks([c.parameter for c in constrained], [c.seen for c in constrained])
    return {c.name: c.doubt if c.seen == here else WRITTEN for c, here in zip(constrained, now, strict=True)}


def remember(constrained: Sequence[Constrained]) -> None:
    """Take weights as they are for those that the constraints know."""
    now = marks([c.parameter for c in constrained], [c.seen for c in constrained])
    for c, here in zip(constrained, now, strict=True):
        c.seen = here


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
    assert c.constraint.bound is not None
    return c.constraint.bound * (c.constraint.tolerance + 8 * torch.finfo(c.parameter.dtype).eps)


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


def matching_state(state: object, here: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state that was saved, by names without the prefixes of wrappers, if it has the tensors that are `here`."""
    pairs = state.items() if isinstance(state, Mapping) else [(None, None)]
    own = {name: value for name, value in pairs if isinstance(name, str) and isinstance(value, Tensor)}
    places = {name: name.rpartition(".") for name in own}
    bare = bare_names({parameter for parameter, _, _ in places.values()})
    saved = {f"{bare[parameter]}.{key}": own[name] for name, (parameter, _, key) in places.items()}
    if len(saved) < len(pairs):
        raise ValueError(
            "Constraints.load_state_dict: the state must be a dictionary of names and tensors; pass "
            "what state_dict() returned"
        )
    if here.keys() != saved.keys():
        raise ValueError(
            f"the state lacks {sorted(here.keys() - saved.keys())} and has unknown "
            f"{sorted(saved.keys() - here.keys())}; load it into the constraints that it was saved from"
        )
    for name, tensor in here.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"the state of {name!r} has shape {tuple(saved[name].shape)}, not {tuple(tensor.shape)}; "
                "load it into a model of the same sizes"
            )
    return saved
