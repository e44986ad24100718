"""Constraints that are attached to an optimizer by its step hooks, and measured. `attach` makes them.

What happens at a step: `before` checks that every constraint can hold after a step of that length, and brings back
what somebody else has written; `after` has each constraint act on the weights that have moved, through `_write`. An
optimizer of this library calls both from within its step, so that the bounds are those of the numbers it multiplies
with; any other calls them by its hooks.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wellnormed._devices import recording
from wellnormed.constraints.base import State, held
from wellnormed.constraints.constrained import (
    DOUBTED,
    WRITTEN,
    Constrained,
    Measure,
    allowed_distance,
    distance,
    mark,
    matching_state,
    measure,
    upper_bound,
)
from wellnormed.constraints.steps import Bounds, BoundsItsSteps, attached_to, step_bounds, still
from wellnormed.norms import Norm
from wellnormed.norms.base import widened
from wellnormed.parallel import Job, Placement
from wellnormed.parallel.layout import local
from wellnormed.parallel.placement import in_buckets
from wellnormed.routing.patterns import bare_names

Action = Callable[[Constrained, Tensor, State], tuple[Tensor, State]]
"""Maps weights `(batch, *shape)` under one constraint, and the tensors that are remembered of them, to the constrained
weights and the new tensors."""
ROUNDS = 4
"""How often `project_` projects at most: again only where 16 bits round a weight away from its projection."""


def _said(count: int) -> str:
    which, have = ("a parameter", "has") if count == 1 else (f"{count} parameters", "have")
    return (
        f"{which} joined the optimizer after `constrain`, and {have} no constraint. Call `constrain` again for what "
        "joined. `certify(within=...)` takes one object: for that, call `remove()` first, and then `constrain` with "
        "all patterns"
    )


class Constraints:
    """The constraints attached to one optimizer. Before a step they check that they can hold; after it they hold.

    They hold as long as only the optimizer moves the weights; whoever else writes calls `project_`.

    They run where the optimizer's oracles run. With parameters that lie over many processes, making this object, all
    that measures or projects, and `load_state_dict` are collective calls. What is remembered is the same everywhere.

    A copied or unpickled optimizer of this library keeps its constraints. One of another library does not, as torch
    copies no hooks: copy this object, which copies its optimizer, or both together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        constrained: tuple[Constrained, ...],
        left_out: Mapping[str, str] | None = None,
        prove: bool = True,
    ) -> None:
        self._optimizer, self._constrained = optimizer, constrained
        self._left_out = dict(left_out or {})  # other parameters, and why they have no constraint
        self._prove = prove
        self._known = self._moved()  # the number of parameters that the optimizer moved, constrained or not
        self._told = 0  # how many a warning said to have joined since
        self._bounds: Bounds = {}  # on the step that was checked last
        # weights whose last step had a bound of 0, so that another such step needs no proof; all, with `prove=False`
        self._resting: set[str] = set() if prove else {c.name for c in constrained}
        self._own_placement = Placement({c.name: c.parameter for c in constrained})
        self._check()
        self._begin(constrained, prove)
        self.attach()

    def __str__(self) -> str:
        lines = {c.name: repr(c.constraint) for c in self._constrained}
        lines |= {name: f"not constrained: {why}" for name, why in self._left_out.items()}
        width = max(map(len, lines), default=0)
        shown = [f"{name:{width}}  {text}" for name, text in lines.items()]
        if (joined := self._joined()) > 0:
            shown.append(_said(joined))
        return "\n".join(shown)

    def _moved(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)

    def _joined(self) -> int:
        """How many parameters joined the optimizer that no `constrain` has seen."""
        return self._moved() - max((each._known for each in attached_to(self._optimizer)), default=self._known)

    def project_(self) -> None:
        """Bring back what anything but the optimizer has written into constrained weights.

        Weights that are proved to keep what their constraint promises stay as they are, bit for bit; the others are
        brought where `constrain` would bring them. So a second call changes nothing. Constraints that hold a norm at a
        value also bring back weights that lie below it: by more than rounding for `Sphere` and `Clip`, and by more than
        half of it for `Orthogonal` and `Stiefel`, whose own steps end below. Constraints that promise nothing write
        nothing here, and remember the weights as they are now.

        A write through `weight.data` or a NumPy view is one that torch does not count, so that no step can see it:
        call this after it, and before the next step. A collective call where weights lie over many processes.

        Raises:
            ValueError: A weight holds NaN or infinity; nothing was changed.

        Example:
            >>> import torch, wellnormed as wn
            >>> layer = torch.nn.Linear(8, 8, bias=False)
            >>> constraints = wn.constrain(wn.Scion(layer, lr=0.02), {"weight": wn.SoftCap(1.0)})
            >>> _ = layer.weight.data.fill_(1.0)  # of norm 8
            >>> constraints.project_()
            >>> constraints.proved_ratios()["weight"] <= 1
            True
        """
        self._handle_written(self._constrained)
        valued = [c for c in self._constrained if c.constraint.tolerance]
        for _ in range(ROUNDS):
            astray = self._measure_own(valued, distance)
            if not (valued := [c for c in valued if astray[c.name] > allowed_distance(c)]):
                break
            self._begin(valued)
        self._remember()

    def remove(self) -> None:
        """Detach from the optimizer; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        attached = attached_to(self._optimizer)
        attached[:] = [other for other in attached if other is not self]

    @property
    def names(self) -> list[str]:
        """The constrained parameters."""
        return [c.name for c in self._constrained]

    def norms(self) -> dict[str, float]:
        """Estimated norm of every constrained parameter, in its own units; cheap enough for every logged step."""
        buckets = in_buckets(self._constrained, lambda c: c.parameter, lambda c: c.norm)
        return measure((members for _, members in buckets), lambda c, weights: c.norm.norm(weights), self._placement)

    def promised(self) -> dict[str, float]:
        """The bound that holds now for every parameter whose constraint promises one; the others are left out."""
        return {c.name: bound for c in self._constrained if (bound := c.promised()) is not None}

    def parameters(self) -> list[Tensor]:
        """Every parameter that has a constraint."""
        return [c.parameter for c in self._constrained]

    def balls(self) -> list[tuple[Tensor, Norm, float]]:
        """Every parameter whose constraint promises one bound for all steps; the norm it is measured in; the bound."""
        bounds = [(c, c.constraint.bound) for c in self._constrained]
        return [(c.parameter, c.norm, bound) for c, bound in bounds if bound is not None]

    def norm_ratios(self) -> dict[str, float]:
        """Estimated norm over the promised bound, of every parameter whose constraint promises one."""
        norms = self.norms()
        return {name: norms[name] / bound for name, bound in self.promised().items()}

    def proved_ratios(self) -> dict[str, float]:
        """Proved bound on the norm over the promised one, where there is one: at most 1, or the promise is broken."""
        promised = self.promised()
        one_by_one = [[c] for c in self._constrained if c.name in promised]  # float64 copies of a batch would be large
        proved = measure(one_by_one, upper_bound, self._placement)
        return {name: bound / promised[name] for name, bound in proved.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """What constraints remember from step to step, `PARAMETER.KEY` -> a copy; save it with the optimizer's state.

        Empty if none remembers anything. The names are without the prefixes that wrappers add, as in the checkpoints of
        torch, so that they are the same whether or not a model is compiled or recomputes its activations.
        """
        return {key: tensor.clone() for key, tensor in self._flat_state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of the same constraints, after the weights of the same step were loaded.

        Prefixes of wrappers do not count. Weights that are not proved to keep what the state promises, such as those of
        a run with a larger cap, are brought below their caps. After `constrain(..., prove=False)` nothing is proved.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape; nothing was changed.
        """
        here = self._flat_state()
        saved = matching_state(state, here)
        for name, tensor in here.items():
            tensor.copy_(saved[name])
        self._settle(self._constrained, self._prove)
        self._remember()

    def _flat_state(self) -> dict[str, Tensor]:
        bare = bare_names(c.name for c in self._constrained)
        flat = {f"{bare[c.name]}.{key}": tensor for c in self._constrained for key, tensor in c.state.items()}
        return flat | {f"{bare[c.name]}.reach": c.reach for c in self._constrained if c.reach is not None}

    def attach(self) -> None:
        """Attach to the optimizer; once, when these constraints or a copy of them are made."""
        own = isinstance(self._optimizer, BoundsItsSteps)  # which calls `before` and `after` in the midst of its step
        after = torch.compiler.disable(self._sweep if own else self.after)  # these look at memory
        before = torch.compiler.disable(self.before)
        self._hooks = (
            *(() if own else (self._optimizer.register_step_pre_hook(lambda *_: before()),)),
            self._optimizer.register_step_post_hook(lambda *_: after()),
            self._optimizer.register_load_state_dict_post_hook(lambda *_: self._doubt()),
        )
        attached_to(self._optimizer).append(self)
        self._remember()

    @property
    def _placement(self) -> Placement:
        optimizer = self._optimizer
        return optimizer.placement if isinstance(optimizer, BoundsItsSteps) else self._own_placement

    def _check(self) -> None:
        """Get the bounds on the coming step, and check that the constraints hold after it."""
        self._bounds = step_bounds(self._optimizer, self._constrained)
        for c in self._constrained:
            c.constraint.check(c.norm, self._bounds[c.name], c.name)

    def before(self) -> None:
        """Check that the constraints hold after the coming step, and bring back what somebody else has written.

        An optimizer of this library calls it when closures and hooks have run and it reads the numbers of its step.
        """
        for c in self._constrained:
            if recording(c.parameter.device) and (
                c.reach is not None or any(tensor.device.type == "cpu" for tensor in c.state.values())
            ):
                raise RuntimeError(
                    f"a CUDA graph cannot record {c.constraint!r} on {c.name!r}: what it remembers from step to step "
                    "lies on the CPU, and would stand still in a replay; take a cap with every=1"
                )
        if (joined := self._joined()) > self._told:
            self._told = joined
            warnings.warn(_said(joined), stacklevel=2)
        self._check()
        self._stepping = {c.name for c in self._constrained if c.parameter.grad is not None}
        self._still_before = still(self._optimizer, self._constrained, self._bounds)
        changes = self._changes(self._constrained)
        if any(changes.values()):
            self._handle_written([c for c in self._constrained if changes[c.name] == WRITTEN])
            self._settle([c for c in self._constrained if changes[c.name] == DOUBTED])
            self._remember()

    def _doubt(self) -> None:
        """Whoever loads an optimizer's state loads weights as well, which torch does not count where they are cut."""
        for c in self._constrained:
            c.doubt = max(c.doubt, DOUBTED)

    def _changes(self, among: Sequence[Constrained]) -> dict[str, float]:
        """What happened to each of these, in any process, since the constraints last saw it, as far as torch counts."""
        return self._placement.agree({c.name: c.change() for c in among}, [c.name for c in among])

    def _handle_written(self, changed: Sequence[Constrained]) -> None:
        """Handle externally modified weights: project those with a bound, reset the state of the others."""
        self._settle(changed)
        self._begin([c for c in changed if c.promised() is None])

    def _settle(self, among: Sequence[Constrained], prove: bool = True) -> None:
        """Bring back weights that are not proved to keep their promise; the others are not written."""
        promised, proved = self.promised(), self._measure_own(among if prove else [], upper_bound)
        if ruined := [name for name, bound in proved.items() if not bound < math.inf]:
            raise ValueError(
                f"the constrained weights {', '.join(ruined)} hold NaN or infinity, which nothing bounds; load other "
                "values"
            )
        for c in among:
            c.doubt = 0.0
            if c.reach is not None:
                c.reach.clamp_(min=proved.get(c.name, 0.0))
        self._begin([c for c in among if proved.get(c.name, 0.0) > promised.get(c.name, math.inf)])

    @torch.no_grad()
    def _begin(self, changed: Sequence[Constrained], prove: bool = True) -> None:
        """Bring weights where training may start, and remember them as they are then."""
        for c in changed:
            c.state = {}
        bring = lambda c: c.constraint.project if prove else c.constraint.begin  # noqa: E731
        _write([[c] for c in changed], lambda c, weights, state: (bring(c)(weights, c.norm), state), self._placement)
        for c in changed:
            c.begin()

    def after(self) -> None:
        """Constrain what has moved: with a gradient before the step or, from a closure, after it.

        The bounds are those of the step that was made: `before` read them when the step read its numbers. What moved
        without a gradient is brought below its cap from wherever it is. A step of length 0, such as torch makes to load
        an optimizer's state, writes no weight that keeps its promise.
        """
        unmoved, stepped = self._still_before, self._stepping
        if not isinstance(self._optimizer, BoundsItsSteps):  # a closure has run since
            unmoved = unmoved & still(self._optimizer, self._constrained, self._bounds)
            stepped = stepped | {c.name for c in self._constrained if c.parameter.grad is not None}
        others = [c for c in self._constrained if c.name not in stepped]
        moved = [c for c in self._constrained if c.name in stepped]
        moved = [c for c in moved if c.name not in unmoved or c.constraint.acts_at_rest]
        steps = {c.name: c.constraint.seen_step(self._bounds[c.name], c.parameter) for c in moved}
        due = [c for c in moved if c.reach is None or not c.constraint.may_wait(c.reach, steps[c.name])]
        buckets = in_buckets(due, lambda c: c.parameter, lambda c: (c.constraint, c.norm, steps[c.name]))
        apply = lambda c, weights, state: c.constraint.apply(weights, c.norm, steps[c.name], state)  # noqa: E731
        try:
            _write([members for _, members in buckets], apply, self._placement)
        except ValueError as error:
            if ruined := [c.name for c in due if not local(c.parameter).isfinite().all()]:
                raise ValueError(
                    f"after the step {', '.join(ruined)} hold NaN or infinity, which no constraint can bound; load the "
                    "last good weights, and lower the learning rate or skip steps whose gradients are not finite"
                ) from error
            raise
        changes = self._changes(others) if others else {}
        changed = [c for c in others if changes[c.name] == WRITTEN]
        self._begin([c for c in changed if c.name not in unmoved])
        at_rest = [c for c in self._constrained if c.name in unmoved]
        self._settle([c for c in at_rest if c.name not in self._resting or c in changed])
        self._resting = {name for name in unmoved if self._bounds[name] == 0}
        self._remember()

    def _sweep(self) -> None:
        """Bring back what an optimizer's own `step` has written around, or in place of, that of this library."""
        if written := [c for c in self._constrained if mark(c.parameter) != c.seen]:
            self._handle_written(written)
            self._remember()

    def _remember(self) -> None:
        for c in self._constrained:
            c.seen = mark(c.parameter)

    def _measure_own(self, among: Sequence[Constrained], function: Measure) -> dict[str, float]:
        """The largest number of any process for every weight, each by its own copy; infinity where it is not finite."""
        here = measure([[c] for c in among], function, self._own_placement)
        finite = {name: number if number < math.inf else math.inf for name, number in here.items()}
        return self._placement.agree(finite, list(finite)) if among else {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("_optimizer", "_constrained", "_left_out", "_prove", "_known")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "param_groups" in vars(self._optimizer):  # else it is being copied too, and calls `follow`
            self.follow(self._optimizer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a copied optimizer: these constraints if they were copied with it, else a copy of them."""
        if "_optimizer" not in vars(self):  # it is being copied too, and comes here when it is complete
            return
        followers = self
        if self._optimizer is not optimizer:
            followers = object.__new__(type(self))
            followers._optimizer, followers._left_out, followers._prove = optimizer, self._left_out, self._prove
            followers._constrained = tuple(map(copy.copy, self._constrained))
            followers._known = self._known
        if not any(set(other.names) & set(self.names) for other in attached_to(optimizer)):
            followers._bounds, followers._resting = {}, set()
            followers._told = 0
            followers._own_placement = Placement({c.name: c.parameter for c in self._constrained})
            followers.attach()


@torch.no_grad()
def _write(buckets: Sequence[list[Constrained]], action: Action, placement: Placement) -> None:
    """The one way by which weights are constrained: buckets of equal constraint, norm, step, shape and layout."""

    def job(members: list[Constrained]) -> Job:
        first = members[0]

        def function(weights: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            constrained, state = action(first, widened(weights), dict(zip(first.state, values, strict=True)))
            if constrained.shape != weights.shape or state.keys() != first.state.keys():
                raise ValueError(
                    f"{first.constraint!r} returned weights of shape {tuple(constrained.shape)} for "
                    f"{tuple(weights.shape)}, batch first, and the state {sorted(state)} for {sorted(first.state)}; "
                    "return both as they were given"
                )
            if weights.dtype.itemsize < 4:
                constrained = _rounded(first, constrained, state, weights.dtype)
            return constrained, *(state[key] for key in first.state)

        remembered = ([c.state[key] for c in members] for key in first.state)
        return Job(
            ([c.parameter for c in members], *remembered), function, cubic=first.norm.measures == "singular values"
        )

    results = placement.run(map(job, buckets))
    for members, (weights, *after) in zip(buckets, results, strict=True):
        # A look at another device waits for it: a step with a bound has a finite direction and needs none.
        if members[0].parameter.device.type == "cpu" and not all(bool(local(w).isfinite().all()) for w in weights):
            raise ValueError(f"{members[0].constraint!r} gave NaN or infinity")
        torch._foreach_copy_([local(c.parameter) for c in members], [local(w) for w in weights])
        for key, values in zip(members[0].state, after, strict=True):
            torch._foreach_copy_([c.state[key] for c in members], values)


def _rounded(c: Constrained, weights: Tensor, states: State, dtype: torch.dtype) -> Tensor:
    """A batch in 16 bits that still keeps what was promised; equal promises are proved at once."""
    states = states or c.constraint.initial_state(weights, c.norm)
    bounds = [c.constraint.promised({key: value[i] for key, value in states.items()}) for i in range(len(weights))]
    rounded = weights.to(dtype)
    for bound in {bound for bound in bounds if bound is not None}:
        equal = [i for i, each in enumerate(bounds) if each == bound]
        if len(equal) == len(weights):
            return held(weights, c.norm, bound, dtype)
        rounded[equal] = held(weights[equal], c.norm, bound, dtype)
    return rounded
