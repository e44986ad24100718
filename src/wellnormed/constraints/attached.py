"""Constraints that are attached to an optimizer by its step hooks, and measured. `attach` makes them."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from wellnormed.constraints.base import Constraint, Promise, State, held
from wellnormed.norms import MatrixNorm, Norm
from wellnormed.norms.base import widened
from wellnormed.norms.patterns import unwrapped
from wellnormed.optim import ConditionalGradient
from wellnormed.parallel import Job, Placement, in_buckets
from wellnormed.parallel.layout import is_distributed, local, whole

ROUNDING = 1e-6
"""By how much two lengths of the same weight may differ, relatively: some roundings of a float32 sum."""


@dataclass(frozen=True)
class Constrained:
    """A parameter with its name, the norm it is measured in, and its constraint."""

    name: str
    parameter: Tensor
    norm: Norm
    constraint: Constraint


class Constraints:
    """The constraints attached to one optimizer. Before a step they check that they can hold; after it they hold.

    They run where the optimizer's oracles run (`ConditionalGradient.placement`). With parameters that lie over many
    processes, making this object, `norms`, `norm_ratios` and `proved_ratios` are collective calls: every process must
    make them. What the constraints remember is the same in every process. A copied or unpickled optimizer keeps its
    constraints; a copy of this object alone belongs to no optimizer until it is copied with one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, constrained: tuple[Constrained, ...]) -> None:
        self._constrained = constrained
        self._state: dict[str, State] = {}
        self._reach: dict[str, Tensor] = {}  # on the CPU, so that no step waits for a device
        self._belong_to(optimizer)
        self._check()
        self._begin(constrained)
        self._hook()

    def __str__(self) -> str:
        width = max((len(c.name) for c in self._constrained), default=0)
        return "\n".join(f"{c.name:{width}}  {c.constraint!r}" for c in self._constrained)

    def remove(self) -> None:
        """Detach from the optimizer; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        attached = ACTIVE[self._optimizer]
        attached[:] = [other for other in attached if other is not self]

    @property
    def names(self) -> list[str]:
        """The constrained parameters."""
        return [c.name for c in self._constrained]

    def norms(self) -> dict[str, float]:
        """Estimated norm of every constrained parameter, in its own units; cheap enough for every logged step."""
        buckets = in_buckets(self._constrained, lambda c: c.parameter, lambda c: c.norm)
        return self._measure([members for _, members in buckets], lambda norm, weights: norm.norm(weights))

    def promised(self) -> dict[str, float]:
        """The bound that holds now for every parameter whose constraint promises one; the others are left out."""
        bounds = {c.name: c.constraint.promised(self._state[c.name]) for c in self._constrained}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def parameters(self) -> list[Tensor]:
        """Every parameter that has a constraint."""
        return [c.parameter for c in self._constrained]

    def balls(self) -> list[tuple[Tensor, Norm, float]]:
        """Every parameter whose constraint promises one bound for all steps; the norm it is measured in; the bound."""
        held = [(c, c.constraint) for c in self._constrained]
        return [(c.parameter, c.norm, promise.bound) for c, promise in held if isinstance(promise, Promise)]

    def norm_ratios(self) -> dict[str, float]:
        """Estimated norm over the promised bound, of every parameter whose constraint promises one."""
        norms = self.norms()
        return {name: norms[name] / bound for name, bound in self.promised().items()}

    def proved_ratios(self) -> dict[str, float]:
        """Proved bound on the norm over the promised one, where there is one: at most 1, or the promise is broken."""
        promised = self.promised()
        one_by_one = [[c] for c in self._constrained if c.name in promised]  # float64 copies of a batch would be large
        bound = self._measure(one_by_one, lambda norm, weights: norm.upper_bound(weights))
        return {name: bound[name] / promised[name] for name in bound}

    def state_dict(self) -> dict[str, Tensor]:
        """What constraints remember from step to step, `PARAMETER.KEY` -> a copy; save it with the optimizer's state.

        Empty if none remembers anything. The names are without the prefixes that wrappers add, as in the checkpoints of
        torch, so that they are the same whether or not a model is compiled or recomputes its activations.
        """
        return {unwrapped(key): tensor.clone() for key, tensor in self._flat_state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of the same constraints, after the weights of the same step were loaded.

        The prefixes that wrappers give names do not count.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape; nothing was changed.
        """
        own = {unwrapped(name): tensor for name, tensor in self._flat_state().items()}
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
        self._remember()

    def _flat_state(self) -> dict[str, Tensor]:
        flat = {f"{name}.{key}": tensor for name, own in self._state.items() for key, tensor in own.items()}
        return flat | {f"{name}.reach": tensor for name, tensor in self._reach.items()}

    def _belong_to(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own_placement = Placement({c.name: c.parameter for c in self._constrained})
        known = optimizer.assignment if isinstance(optimizer, ConditionalGradient) else ()
        self._names_there: dict[tuple[Tensor, Norm | None], str] = {(a.parameter, a.norm): a.name for a in known}
        self._steps: dict[str, float | None] = {}

    def _hook(self) -> None:
        self._hooks = (
            self._optimizer.register_step_pre_hook(lambda *_: self._before()),
            self._optimizer.register_step_post_hook(lambda *_: self._after()),
        )
        ACTIVE.setdefault(self._optimizer, []).append(self)
        self._optimizer.__reduce_ex__ = partial(_copied_with_constraints, self._optimizer)

    @property
    def _placement(self) -> Placement:
        own = self._optimizer
        return own.placement if isinstance(own, ConditionalGradient) else self._own_placement

    def _check(self) -> None:
        """Get the bounds on the coming step, None where the optimizer knows none in a constraint's norm; check them."""
        engine: Any = self._optimizer  # a ConditionalGradient, where it has a name for a parameter
        for c in self._constrained:
            name = self._names_there.get((c.parameter, c.norm))
            self._steps[c.name] = None if name is None else engine.update_norm(name)
            c.constraint.check(c.norm, self._steps[c.name], c.name)

    def _before(self) -> None:
        self._check()
        self._stepping = {c.name for c in self._constrained if c.parameter.grad is not None}
        self._begin(self._changed_by_others())

    def _changed_by_others(self) -> list[Constrained]:
        """What has another version, or another size: `parameter.data.mul_(2)` leaves the version as it was.

        A size is read after a step and before the next: only the difference tells that someone was here in between.
        """
        now = self._sizes()
        resized = ((now - self._seen_sizes.to(now)).abs() > ROUNDING * now).tolist()  # one transfer for all
        triples = zip(self._constrained, self._seen_versions, resized, strict=True)
        return [c for c, version, other in triples if other or c.parameter._version != version]

    def _sizes(self) -> Tensor:
        sizes = [_size(c.parameter) for c in self._constrained]
        return torch.stack([size.to(sizes[0]) for size in sizes]) if sizes else torch.zeros(0)

    @torch.no_grad()
    def _begin(self, changed: Sequence[Constrained]) -> None:
        """Bring weights below their caps that are new, or that someone else has changed since the last step."""
        self._state |= {c.name: {} for c in changed}
        self._write([[c] for c in changed], lambda c, weights, state: (c.constraint.project(weights, c.norm), state))
        for c in changed:
            state = c.constraint.initial_state(widened(whole(c.parameter))[None], c.norm)
            self._state[c.name] = {key: value[0].clone() for key, value in state.items()}
            if (reach := c.constraint.first_reach()) is not None:
                self._reach[c.name] = reach
        if changed:
            self._remember()

    def _after(self) -> None:
        """Constrain what has moved: with a gradient before the step or, from a closure, after it."""
        moved = [c for c in self._constrained if c.name in self._stepping or c.parameter.grad is not None]
        steps = {c.name: c.constraint.seen_step(self._steps[c.name], c.parameter) for c in moved}
        counted = self._reach
        due = [c for c in moved if not (c.name in counted and c.constraint.may_wait(counted[c.name], steps[c.name]))]
        buckets = in_buckets(due, lambda c: c.parameter, lambda c: (c.constraint, c.norm, steps[c.name]))
        self._write(
            [members for _, members in buckets],
            lambda c, weights, state: c.constraint.apply(weights, c.norm, steps[c.name], state),
        )
        self._remember()

    @torch.no_grad()
    def _write(
        self, buckets: list[list[Constrained]], action: Callable[[Constrained, Tensor, State], tuple[Tensor, State]]
    ) -> None:
        """The one way by which weights are constrained: buckets of equal constraint, norm, step, shape and layout."""
        results = self._placement.run(self._job(members, action) for members in buckets)
        for members, (weights, *states) in zip(buckets, results, strict=True):
            torch._foreach_copy_([local(c.parameter) for c in members], [local(w) for w in weights])
            for key, values in zip(self._state[members[0].name], states, strict=True):
                torch._foreach_copy_([self._state[c.name][key] for c in members], values)

    def _job(self, members: list[Constrained], action: Callable[..., tuple[Tensor, State]]) -> Job:
        states = [self._state[c.name] for c in members]
        keys, first = list(states[0]), members[0]

        def function(weights: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            constrained, state = action(first, widened(weights), dict(zip(keys, values, strict=True)))
            if weights.dtype.itemsize < 4:
                constrained = _rounded(first, constrained, state, weights.dtype)
            return constrained, *(state[key] for key in keys)

        inputs = [c.parameter for c in members], *([own[key] for own in states] for key in keys)
        return Job(inputs, function, cubic=isinstance(first.norm, MatrixNorm))

    def _remember(self) -> None:
        self._seen_versions, self._seen_sizes = [c.parameter._version for c in self._constrained], self._sizes()

    @torch.no_grad()
    def _measure(
        self, buckets: list[list[Constrained]], function: Callable[[Norm, Tensor], Tensor]
    ) -> dict[str, float]:
        """A number for every weight of buckets of equal norm, shape and layout."""

        def job(members: list[Constrained]) -> Job:
            norm, weights = members[0].norm, [c.parameter.detach() for c in members]
            numbers = [torch.empty((), dtype=torch.float64, device=weight.device) for weight in weights]
            cubic = isinstance(norm, MatrixNorm)
            return Job((weights, numbers), lambda batch, _: (function(norm, batch).double(),), read_only=1, cubic=cubic)

        results = self._placement.run(job(members) for members in buckets)
        return {
            c.name: number
            for members, (numbers,) in zip(buckets, results, strict=True)
            for c, number in zip(members, torch.stack(numbers).tolist(), strict=True)
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"_constrained": self._constrained, "_state": self._state, "_reach": self._reach}


def _rounded(c: Constrained, weights: Tensor, states: State, dtype: torch.dtype) -> Tensor:
    """A batch in 16 bits that still keeps what was promised; one by one, for the proof makes float64 copies."""
    states = states or c.constraint.initial_state(weights, c.norm)
    bounds = [c.constraint.promised({key: value[i] for key, value in states.items()}) for i in range(len(weights))]
    pairs = zip(weights, bounds, strict=True)
    return torch.stack([w.to(dtype) if bound is None else held(w, c.norm, bound, dtype) for w, bound in pairs])


def _copied_with_constraints(optimizer: torch.optim.Optimizer, protocol: Any) -> tuple[Any, ...]:
    """What `copy` and `pickle` ask an optimizer for: its own state, and its constraints, to be attached to the copy."""
    state = type(optimizer).__reduce_ex__(optimizer, protocol)[2]
    return _restored, (type(optimizer), state, tuple(ACTIVE.get(optimizer, ())))


def _restored(
    cls: type[torch.optim.Optimizer], state: dict[str, Any], attached: Iterable[Constraints]
) -> torch.optim.Optimizer:
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    for constraints in attached:
        own = copy.copy(constraints) if "_optimizer" in vars(constraints) else constraints
        own._belong_to(optimizer)
        own._remember()
        own._hook()
    return optimizer


def _size(parameter: Tensor) -> Tensor:
    """The Euclidean length of a parameter; 0 of one that is cut, of which every process would see another part."""
    if is_distributed(parameter):
        return torch.zeros(())
    return torch.linalg.vector_norm(parameter.detach(), dtype=torch.promote_types(parameter.dtype, torch.float32))


ACTIVE: "WeakKeyDictionary[torch.optim.Optimizer, list[Constraints]]" = WeakKeyDictionary()
"""The constraints attached to every optimizer, so that no parameter gets two."""
