"""Constraints that are attached to an optimizer by its step hooks, and measured. `attach` makes them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wellnormed.constraints.base import State
from wellnormed.constraints.constrained import (
    Constrained,
    Measure,
    allowed_distance,
    distance,
    mark,
    measure,
    upper_bound,
    write,
)
from wellnormed.constraints.steps import Bounds, BoundsItsSteps, attached_to, longer, step_bounds, still
from wellnormed.norms import Norm
from wellnormed.norms.base import widened
from wellnormed.norms.patterns import unwrapped
from wellnormed.parallel import Placement, in_buckets
from wellnormed.parallel.layout import local, whole

DOUBTED, WRITTEN = 1.0, 2.0
"""What may have happened to a weight: its values may have been loaded; it was written, or put into other memory."""
ROUNDS = 4
"""Of projections in one `project_`: more than one only where 16 bits round a weight away from its projection."""


class Constraints:
    """The constraints attached to one optimizer. Before a step they check that they can hold; after it they hold.

    They hold as long as only the optimizer moves the weights; whoever else writes calls `project_`.

    They run where the optimizer's oracles run. With parameters that lie over many
    processes, making this object, `project_`, `norms`, `norm_ratios`, `proved_ratios` and `load_state_dict` are
    collective calls: every process must make them. What the constraints remember is the same in every process.

    A copied or unpickled optimizer of this library keeps its constraints. One of another library does not, as torch
    copies no hooks: copy this object, which copies its optimizer, or both together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        constrained: tuple[Constrained, ...],
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self._constrained = constrained
        self._left_out = dict(left_out or {})  # other parameters, and why they have no constraint
        self._state: dict[str, State] = {}
        self._reach: dict[str, Tensor] = {}  # on the CPU, so that no step waits for a device
        self._unproved: dict[str, float] = {}  # as `_changes` counts them
        self._optimizer = optimizer
        self._bounds: Bounds = {}  # on the step that was checked last
        self._resting: set[str] = set()  # proved since they took a step that was not of length 0, by its bound
        self._own_placement = Placement({c.name: c.parameter for c in constrained})
        self._check()
        self._begin(constrained)
        self.attach()

    def __str__(self) -> str:
        lines = {c.name: repr(c.constraint) for c in self._constrained}
        lines |= {name: f"not constrained: {why}" for name, why in self._left_out.items()}
        width = max(map(len, lines), default=0)
        return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())

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
        self._meet(self._constrained)
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
        bounds = {c.name: c.constraint.promised(self._state[c.name]) for c in self._constrained}
        return {name: bound for name, bound in bounds.items() if bound is not None}

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
        return {unwrapped(key): tensor.clone() for key, tensor in self._flat_state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of the same constraints, after the weights of the same step were loaded.

        The prefixes that wrappers give names do not count. Weights that are not proved to keep what the state promises,
        such as those of a run with a larger cap, are brought below their caps.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape; nothing was changed.
        """
        own = {unwrapped(name): tensor for name, tensor in self._flat_state().items()}
        _require_state(state)
        state = {unwrapped(name): tensor for name, tensor in state.items()}
        if own.keys() != state.keys():
            raise ValueError(
                f"the state lacks {sorted(own.keys() - state.keys())} and has unknown "
                f"{sorted(state.keys() - own.keys())}; load it into the constraints that it was saved from"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"the state of {name!r} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}; "
                    "load it into a model of the same sizes"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._settle(self._constrained)
        self._remember()

    def _flat_state(self) -> dict[str, Tensor]:
        flat = {f"{name}.{key}": tensor for name, own in self._state.items() for key, tensor in own.items()}
        return flat | {f"{name}.reach": tensor for name, tensor in self._reach.items()}

    def attach(self) -> None:
        """Attach to the optimizer; once, when these constraints or a copy of them are made."""
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)  # they look at memory
        self._hooks = (
            self._optimizer.register_step_pre_hook(lambda *_: before()),
            self._optimizer.register_step_post_hook(lambda *_: after()),
            self._optimizer.register_load_state_dict_post_hook(lambda *_: self._doubt()),
        )
        attached_to(self._optimizer).append(self)
        self._remember()

    @property
    def _placement(self) -> Placement:
        own = self._optimizer
        return own.placement if isinstance(own, BoundsItsSteps) else self._own_placement

    def _check(self) -> None:
        """Get the bounds on the coming step, and check that the constraints hold after it."""
        self._bounds = step_bounds(self._optimizer, self._constrained)
        for c in self._constrained:
            c.constraint.check(c.norm, self._bounds[c.name], c.name)

    def _before(self) -> None:
        self._check()
        self._stepping = {c.name for c in self._constrained if c.parameter.grad is not None}
        self._still_before = still(self._optimizer, self._constrained, self._bounds)
        changes = self._changes(self._constrained)
        if any(changes.values()):
            self._meet([c for c in self._constrained if changes[c.name] == WRITTEN])
            self._settle([c for c in self._constrained if changes[c.name] == DOUBTED])
            self._remember()

    def _doubt(self) -> None:
        """Whoever loads an optimizer's state loads weights as well, which torch does not count where they are cut."""
        self._unproved = dict.fromkeys(self.names, DOUBTED) | self._unproved

    def _changes(self, among: Sequence[Constrained]) -> dict[str, float]:
        """What happened to each of these, in any process, since the constraints last saw it, as far as torch counts."""
        here = self._changes_here()
        return self._placement.agree({c.name: here[c.name] for c in among}, [c.name for c in among])

    def _changes_here(self) -> dict[str, float]:
        written = {c.name: WRITTEN for c in self._constrained if mark(c.parameter) != self._seen[c.name]}
        return dict.fromkeys(self.names, 0.0) | self._unproved | written

    def _meet(self, changed: Sequence[Constrained]) -> None:
        """Take over weights that someone else has written: promises are kept, and what promises nothing begins anew."""
        self._settle(changed)
        promised = self.promised()
        self._begin([c for c in changed if c.name not in promised])

    def _settle(self, among: Sequence[Constrained]) -> None:
        """Bring back weights that are not proved to keep their promise; the others are not written."""
        promised, proved = self.promised(), self._measure_own(among, upper_bound)
        if ruined := [name for name, bound in proved.items() if not bound < math.inf]:
            raise ValueError(
                f"the constrained weights {', '.join(ruined)} hold NaN or infinity, which nothing bounds; load other "
                "values"
            )
        for c in among:
            if c.name in self._reach:
                self._reach[c.name].clamp_(min=proved[c.name])
            self._unproved.pop(c.name, None)
        self._begin([c for c in among if proved[c.name] > promised.get(c.name, math.inf)])

    @torch.no_grad()
    def _begin(self, changed: Sequence[Constrained]) -> None:
        """Bring weights where training may start, and remember them as they are then."""
        self._state |= {c.name: {} for c in changed}
        project = lambda c, weights, state: (c.constraint.project(weights, c.norm), state)  # noqa: E731
        write([[c] for c in changed], project, self._state, self._placement)
        for c in changed:
            state = c.constraint.initial_state(widened(whole(c.parameter))[None], c.norm)
            self._state[c.name] = {key: value[0].clone() for key, value in state.items()}
            if (reach := c.constraint.first_reach()) is not None:
                self._reach[c.name] = reach

    def _after(self) -> None:
        """Constrain what has moved: with a gradient before the step or, from a closure, after it.

        What moved without a gradient, and what a closure or another hook let make a longer step than was checked, is
        brought below its cap from wherever it is. A step of length 0, such as torch makes to load an optimizer's state,
        writes no weight that keeps its promise.
        """
        bounds = step_bounds(self._optimizer, self._constrained)
        unmoved = self._still_before & still(self._optimizer, self._constrained, bounds)
        stepped = {c.name for c in self._constrained if c.name in self._stepping or c.parameter.grad is not None}
        beyond = stepped & longer(bounds, self._bounds)
        others = [c for c in self._constrained if c.name not in stepped]
        moved = [c for c in self._constrained if c.name in stepped - beyond]
        moved = [c for c in moved if c.name not in unmoved or c.constraint.acts_at_rest]
        steps = {c.name: c.constraint.seen_step(self._bounds[c.name], c.parameter) for c in moved}
        reach = self._reach
        due = [c for c in moved if not (c.name in reach and c.constraint.may_wait(reach[c.name], steps[c.name]))]
        buckets = in_buckets(due, lambda c: c.parameter, lambda c: (c.constraint, c.norm, steps[c.name]))
        apply = lambda c, weights, state: c.constraint.apply(weights, c.norm, steps[c.name], state)  # noqa: E731
        try:
            write((members for _, members in buckets), apply, self._state, self._placement)
        except ValueError as error:
            if ruined := [c.name for c in due if not local(c.parameter).isfinite().all()]:
                raise ValueError(
                    f"after the step {', '.join(ruined)} hold NaN or infinity, which no constraint can bound; load the "
                    "last good weights, and lower the learning rate or skip steps whose gradients are not finite"
                ) from error
            raise
        self._begin([c for c in self._constrained if c.name in beyond])
        changes = self._changes(others) if others else {}
        changed = [c for c in others if changes[c.name] == WRITTEN]
        self._begin([c for c in changed if c.name not in unmoved])
        at_rest = [c for c in self._constrained if c.name in unmoved]
        self._settle([c for c in at_rest if c.name not in self._resting or c in changed])
        self._resting = {name for name in unmoved if self._bounds[name] == 0}
        self._remember()

    def _remember(self) -> None:
        self._seen = {c.name: mark(c.parameter) for c in self._constrained}

    def _measure_own(self, among: Sequence[Constrained], function: Measure) -> dict[str, float]:
        """The largest number of any process for every weight, each by its own copy; infinity where it is not finite."""
        here = measure([[c] for c in among], function, self._own_placement)
        finite = {name: number if number < math.inf else math.inf for name, number in here.items()}
        return self._placement.agree(finite, list(finite)) if among else {}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_optimizer", "_constrained", "_left_out", "_state", "_reach")
        return {name: vars(self)[name] for name in kept} | {"_unproved": self._changes_here()}

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
            vars(followers).update(self.__getstate__() | {"_optimizer": optimizer})
        if not any(set(other.names) & set(self.names) for other in attached_to(optimizer)):
            followers._bounds, followers._resting = {}, set()
            followers._own_placement = Placement({c.name: c.parameter for c in self._constrained})
            followers.attach()


def _require_state(state: object) -> None:
    """Refuse what maps no names to tensors."""
    pairs = state.items() if isinstance(state, Mapping) else [(None, None)]
    if not all(isinstance(name, str) and torch.is_tensor(value) for name, value in pairs):
        raise ValueError(
            "Constraints.load_state_dict: the state is no dictionary of names and tensors; pass what state_dict() gave"
        )
