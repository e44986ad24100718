"""The core of constraints: `check` before a step, `apply` after it, and `bound`, which holds from one to the next.

`project` brings weights where training may start, and `restore` those that something else than a step has written.
`attached` says when each is called.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from wellnormed._finite import sizes
from wellnormed.constraints.base import Constraint, State, held, of_each
from wellnormed.constraints.step_lengths import Bounds
from wellnormed.constraints.weights import Constrained
from wellnormed.matrix._checks import known_to_hold
from wellnormed.norms.base import widened
from wellnormed.parallel import Job, Placement
from wellnormed.parallel.layout import local, local_parts
from wellnormed.parallel.placement import in_buckets

Action = Callable[[Sequence[Constrained], Tensor, State], tuple[Tensor, State]]
"""Maps weights `(batch, *shape)` under constraints that are alike, and the tensors that are remembered of them, to the
constrained weights and the new tensors."""


def bound(constrained: Sequence[Constrained]) -> dict[str, float]:
    """The bound that holds now for every weight whose constraint promises one; the others are left out."""
    return {c.name: promised for c in constrained if (promised := c.promised()) is not None}


def check(constrained: Sequence[Constrained], steps: Bounds) -> None:
    """Refuse steps of these bounds after which a constraint could not hold; nothing is changed."""
    for c in constrained:
        c.own.check(c.norm, steps[c.name], c.name)


def seen_steps(constrained: Sequence[Constrained], steps: Bounds) -> Bounds:
    """What constraints see of steps of these bounds."""
    return {c.name: c.own.seen_step(steps[c.name], c.parameter) for c in constrained}


def apply(moved: Sequence[Constrained], seen: Bounds, placement: Placement) -> None:
    """Have constraints act on weights that a step has moved, of which they see this, but for those that may wait."""
    due = []
    for c in moved:
        waits = False
        if c.reach is not None:
            waits, c.reach = c.own.wait(c.reach, seen[c.name])
        if not waits:
            due.append(c)

    def alike(c: Constrained) -> Hashable:  # equal, where a process may be given some of a batch
        return c.norm, (c.constraint, seen[c.name]) if placement.shared else c.own.alike(seen[c.name])

    def act(members: Sequence[Constrained], weights: Tensor, state: State) -> tuple[Tensor, State]:
        norm, constraints, steps = members[0].norm, [c.own for c in members], [seen[c.name] for c in members]
        if len({*zip(constraints, steps, strict=True)}) == 1:
            return constraints[0].apply(weights, norm, steps[0], state)
        return constraints[0].apply_each(constraints, weights, norm, steps, state)

    try:
        _write([members for _, members in in_buckets(due, lambda c: c.parameter, alike)], act, placement)
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
    _write([[c] for c in moved], lambda c, weights, state: c[0].own.before_step(weights, c[0].norm, state), placement)


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
    _write(moved, lambda c, weights, state: (act(c[0])(weights, c[0].norm), state), placement)


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
            c.reach = max(c.reach, proved.get(c.name, 0.0))
    project([c for c in constrained if proved.get(c.name, 0.0) > promised.get(c.name, math.inf)], placement)


@torch.no_grad()
def _write(buckets: Sequence[list[Constrained]], action: Action, placement: Placement) -> None:
    """The one way by which weights are constrained: buckets of like constraints, and equal norm, shape and layout."""

    def job(members: list[Constrained]) -> Job:
        first = members[0]

        def function(weights: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            short = weights.dtype.itemsize < 4
            # the proof of rounded weights finds what is not finite, by the only look at the device that it takes
            here = members[: len(weights)]  # of equal constraints, this process may be given fewer
            with known_to_hold() if short and first.constraint.bound is not None else nullcontext():
                constrained, state = action(here, widened(weights), dict(zip(first.state, values, strict=True)))
            if constrained.shape != weights.shape or state.keys() != first.state.keys():
                raise ValueError(
                    f"{first.constraint!r} returned weights of shape {tuple(constrained.shape)} for "
                    f"{tuple(weights.shape)}, batch first, and the state {sorted(state)} for {sorted(first.state)}; "
                    "return both as they were given"
                )
            if constrained.data_ptr() == weights.data_ptr() and constrained.stride() != weights.stride():
                constrained = constrained.clone()  # a view of the weights, which torch cannot copy onto them
            if short:
                constrained = _rounded(here, constrained, state, weights.dtype)
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


def _rounded(members: Sequence[Constrained], weights: Tensor, states: State, dtype: torch.dtype) -> Tensor:
    """A batch in 16 bits that still keeps what was promised, by one proof."""
    norm = members[0].norm
    states = states or members[0].constraint.initial_state(weights, norm)
    own = [{key: value[i] for key, value in states.items()} for i in range(len(weights))]
    promised = [c.constraint.promised(state) for c, state in zip(members, own, strict=True)]
    bounds = [math.inf if each is None else each for each in promised]
    if min(bounds) == math.inf:
        return weights.to(dtype)
    return held(weights, norm, of_each(bounds, weights.device), dtype)
