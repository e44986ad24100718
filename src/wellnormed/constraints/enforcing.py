"""The core of constraints: `check` before a step, `apply` after it, and `bound`, which holds from one to the next.

`project` brings weights where training may start, and `restore` those that something else than a step has written.
`attached` says when each is called.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from wellnormed._finite import sizes
from wellnormed.constraints.base import Constraint, State, held
from wellnormed.constraints.step_lengths import Bounds
from wellnormed.constraints.weights import Constrained
from wellnormed.matrix._checks import known_to_hold
from wellnormed.norms.base import widened
from wellnormed.parallel import Job, Placement
from wellnormed.parallel.layout import local, local_parts
from wellnormed.parallel.placement import in_buckets

Action = Callable[[Constrained, Tensor, State], tuple[Tensor, State]]
"""Maps weights `(batch, *shape)` under one constraint, and the tensors that are remembered of them, to the constrained
weights and the new tensors."""


def bound(constrained: Sequence[Constrained]) -> dict[str, float]:
    """The bound that holds now for every weight whose constraint promises one; the others are left out."""
    return {c.name: promised for c in constrained if (promised := c.promised()) is not None}


def check(constrained: Sequence[Constrained], steps: Bounds) -> None:
    """Refuse steps of these bounds after which a constraint could not hold; nothing is changed."""
    for c in constrained:
        c.own.check(c.norm, steps[c.name], c.name)


def apply(moved: Sequence[Constrained], steps: Bounds, placement: Placement) -> None:
    """Have constraints act on weights that a step of these bounds has moved, but for those that may wait."""
    seen = {c.name: c.own.seen_step(steps[c.name], c.parameter) for c in moved}
    due = [c for c in moved if c.reach is None or not c.constraint.may_wait(c.reach, seen[c.name])]
    buckets = in_buckets(due, lambda c: c.parameter, lambda c: (c.constraint, c.norm, seen[c.name]))
    act = lambda c, weights, state: c.own.apply(weights, c.norm, seen[c.name], state)  # noqa: E731
    try:
        _write([members for _, members in buckets], act, placement)
    except (ValueError, torch.linalg.LinAlgError) as error:
        if ruined := [c.name for c in due if not local(c.parameter).isfinite().all()]:
            raise ValueError(
                f"after the step {', '.join(ruined)} hold NaN or infinity, which no constraint can bound; load the "
                "last good weights, and lower the learning rate or skip steps whose gradients are not finite"
            ) from error
        raise


@torch.no_grad()
def begin_step(moved: Sequence[Constrained], placement: Placement) -> None:
    """Have constraints act on weights that a step will move."""
    _write([[c] for c in moved], lambda c, weights, state: c.own.before_step(weights, c.norm, state), placement)


def project(constrained: Sequence[Constrained], placement: Placement, prove: bool = True) -> None:
    """Bring weights where training may start, and remember them as they are then."""
    for c in constrained:
        c.state = {}
    bring(constrained, placement, prove)
    for c in constrained:
        c.begin()
        c.placed = True


@torch.no_grad()
def bring(constrained: Sequence[Constrained], placement: Placement, prove: bool) -> None:
    """Bring weights where training may start, and leave what is remembered as it is.

    With `prove=False` it is the constraint's own function that brings them, and no proof follows.
    """
    act = lambda c: c.own.project if prove else c.own.begin  # noqa: E731
    moved = [[c] for c in constrained if not _leaves(type(c.constraint))]
    _write(moved, lambda c, weights, state: (act(c)(weights, c.norm), state), placement)


def _leaves(kind: type[Constraint]) -> bool:
    """Whether constraints of this class leave every weight as it is at the start."""
    return kind.project is Constraint.project and kind.begin is Constraint.begin


def restore(constrained: Sequence[Constrained], proved: Mapping[str, float], placement: Placement) -> None:
    """Project the weights that are not `proved` to keep their bound; the others are not written.

    A weight that `proved` does not name is taken for one that keeps it.
    """
    if ruined := [name for name, norm in proved.items() if not norm < math.inf]:
        raise ValueError(
            f"the constrained weights {', '.join(ruined)} hold NaN or infinity, which nothing bounds; load other values"
        )
    promised = bound(constrained)
    for c in constrained:
        c.doubt = 0.0
        if c.reach is not None:
            c.reach.clamp_(min=proved.get(c.name, 0.0))
    project([c for c in constrained if proved.get(c.name, 0.0) > promised.get(c.name, math.inf)], placement)


@torch.no_grad()
def _write(buckets: Sequence[list[Constrained]], action: Action, placement: Placement) -> None:
    """The one way by which weights are constrained: buckets of equal constraint, norm, step, shape and layout."""

    def job(members: list[Constrained]) -> Job:
        first = members[0]

        def function(weights: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            short = weights.dtype.itemsize < 4
            # the proof of rounded weights finds what is not finite, by the only look at the device that it takes
            with known_to_hold() if short and first.constraint.bound is not None else nullcontext():
                constrained, state = action(first, widened(weights), dict(zip(first.state, values, strict=True)))
            if constrained.shape != weights.shape or state.keys() != first.state.keys():
                raise ValueError(
                    f"{first.constraint!r} returned weights of shape {tuple(constrained.shape)} for "
                    f"{tuple(weights.shape)}, batch first, and the state {sorted(state)} for {sorted(first.state)}; "
                    "return both as they were given"
                )
            if short:
                constrained = _rounded(first, constrained, state, weights.dtype)
            return constrained, *(state[key] for key in first.state)

        remembered = ([c.state[key] for c in members] for key in first.state)
        inputs = ([c.parameter for c in members], *remembered)
        return Job(inputs, function, cubic=first.norm.measures == "singular values")

    for members, (weights, *after) in zip(buckets, placement.run(map(job, buckets)), strict=True):
        values = local_parts(weights)
        # A look at another device waits for it: a step with a bound has a finite direction and needs none.
        if values[0].device.type == "cpu" and max(sizes(values)) == math.inf:
            raise ValueError(f"{members[0].constraint!r} gave NaN or infinity")
        torch._foreach_copy_(local_parts([c.parameter for c in members]), values)
        for key, states in zip(members[0].state, after, strict=True):
            torch._foreach_copy_([c.state[key] for c in members], states)


def _rounded(c: Constrained, weights: Tensor, states: State, dtype: torch.dtype) -> Tensor:
    """A batch in 16 bits that still keeps what was promised, by one proof."""
    states = states or c.constraint.initial_state(weights, c.norm)
    promised = [c.constraint.promised({key: value[i] for key, value in states.items()}) for i in range(len(weights))]
    bounds = [math.inf if each is None else each for each in promised]
    if min(bounds) == math.inf:
        return weights.to(dtype)
    if len(set(bounds)) == 1:
        return held(weights, c.norm, bounds[0], dtype)
    filled = [torch.full((), each, dtype=torch.float64, device=weights.device) for each in bounds]  # waits for no copy
    return held(weights, c.norm, torch.stack(filled), dtype)
