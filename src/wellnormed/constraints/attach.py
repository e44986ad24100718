"""Attach constraints to an optimizer through its step hooks, and measure whether they hold."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from wellnormed.constraints.base import Constraint, State
from wellnormed.norms import Assignment, MatrixNorm, Norm
from wellnormed.optim import ConditionalGradient
from wellnormed.parallel import Job, Placement, in_buckets, placement_for
from wellnormed.parallel.layout import copy_, whole


@dataclass(frozen=True)
class _Constrained:
    name: str
    parameter: Tensor
    norm: Norm
    rule: Constraint


class Constraints:
    """The rules attached to one optimizer. Before a step they check that they can hold; after it they hold.

    Rules run where the optimizer's oracles run (`ConditionalGradient.placement`). With parameters that lie over many
    processes, making this object, `norms`, `norm_ratios` and `proved_ratios` are collective calls: every process must
    make them. What the rules remember is the same in every process.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, constrained: tuple[_Constrained, ...]) -> None:
        self._optimizer = optimizer
        self._constrained = constrained
        self._placement = _placement(optimizer, constrained)
        self._known = _known_norms(optimizer)
        self._check()
        self._state: dict[str, State] = {}
        self._versions: dict[str, int] = {}
        self._begin(constrained)
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self._before()),
            optimizer.register_step_post_hook(lambda *_: self._apply()),
        )
        _ACTIVE.setdefault(optimizer, []).append(self)

    def __str__(self) -> str:
        width = max((len(c.name) for c in self._constrained), default=0)
        return "\n".join(f"{c.name:{width}}  {c.rule!r}" for c in self._constrained)

    def remove(self) -> None:
        """Detach from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        _ACTIVE[self._optimizer].remove(self)

    @property
    def names(self) -> list[str]:
        """The constrained parameters."""
        return [c.name for c in self._constrained]

    def norms(self) -> dict[str, float]:
        """Estimated norm of every constrained parameter, in its own units; cheap enough for every logged step."""
        buckets = in_buckets(self._constrained, _parameter, lambda c: c.norm)
        return self._measure((members for _, members in buckets), lambda norm, weights: norm.norm(weights))

    def promised(self) -> dict[str, float]:
        """The bound that holds now for every parameter whose rule promises one; the others are left out."""
        bounds = {c.name: c.rule.promised(self._state[c.name]) for c in self._constrained}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def norm_ratios(self) -> dict[str, float]:
        """Estimated norm over the promised bound, of every parameter whose rule promises one."""
        norms = self.norms()
        return {name: norms[name] / bound for name, bound in self.promised().items()}

    def proved_ratios(self) -> dict[str, float]:
        """Proved bound on the norm over the promised one: at most 1, or the promise is broken.

        Parameters whose rule promises nothing are left out.
        """
        promised = self.promised()
        one_by_one = ([c] for c in self._constrained if c.name in promised)  # float64 copies of a batch would be large
        bound = self._measure(one_by_one, lambda norm, weights: norm.upper_bound(weights))
        return {name: bound[name] / promised[name] for name in bound}

    def state_dict(self) -> dict[str, Tensor]:
        """What the rules remember from step to step, `PARAMETER.KEY` -> a copy; save it beside the optimizer's state.

        Empty if no rule remembers anything.
        """
        return {f"{name}.{key}": tensor.clone() for name, own in self._state.items() for key, tensor in own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of the same rules, after the weights of the same step were loaded.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape; nothing was changed.
        """
        own = {f"{name}.{key}": tensor for name, owned in self._state.items() for key, tensor in owned.items()}
        if own.keys() != state.keys():
            raise ValueError(
                f"the state lacks {sorted(own.keys() - state.keys())} and has unknown "
                f"{sorted(state.keys() - own.keys())}; load it into the rules that it was saved from"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"the state of {name!r} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}; "
                    "load it into a model of the same sizes"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._versions = {c.name: c.parameter._version for c in self._constrained}

    def _update_norm(self, c: _Constrained) -> float | None:
        """Bound on the coming step in the norm that the rule measures in; None if the optimizer measures in another."""
        name, norm = self._known.get(id(c.parameter), (c.name, None))
        if not isinstance(self._optimizer, ConditionalGradient) or norm != c.norm:
            return None
        return self._optimizer.update_norm(name)

    def _check(self) -> None:
        self._steps = {c.name: self._update_norm(c) for c in self._constrained}
        for c in self._constrained:
            c.rule.check(c.norm, self._steps[c.name], c.name)

    def _before(self) -> None:
        self._check()
        self._stepping = {c.name for c in self._constrained if c.parameter.grad is not None}
        self._begin([c for c in self._constrained if c.parameter._version != self._versions[c.name]])

    @torch.no_grad()
    def _begin(self, changed: Sequence[_Constrained]) -> None:
        """Bring weights below their caps that are new, or that someone else has changed since the last step."""
        jobs = [_projection(c) for c in changed]
        for c, (weights,) in zip(changed, self._placement.run(jobs), strict=True):
            copy_([c.parameter], weights)
        for c in changed:
            self._state[c.name] = self._start(c)
            self._versions[c.name] = c.parameter._version

    @torch.no_grad()
    def _start(self, c: _Constrained) -> State:
        state = c.rule.initial_state(whole(c.parameter)[None], c.norm)
        return {key: value[0].clone() for key, value in state.items()}

    @torch.no_grad()
    def _measure(
        self, buckets: Iterable[list[_Constrained]], function: Callable[[Norm, Tensor], Tensor]
    ) -> dict[str, float]:
        """A number for every weight of buckets of equal norm, shape and layout."""
        buckets = list(buckets)
        results = self._placement.run(_measurement(members, function) for members in buckets)
        return {
            c.name: number
            for members, (numbers,) in zip(buckets, results, strict=True)
            for c, number in zip(members, torch.stack(numbers).tolist(), strict=True)
        }

    @torch.no_grad()
    def _apply(self) -> None:
        def settings(c: _Constrained) -> tuple[Any, ...]:
            return c.rule, c.norm, self._steps[c.name] if c.rule.uses_update_norm else None

        buckets = list(in_buckets(self._moved(), _parameter, settings))
        jobs = (self._job(rule, norm, step, members) for (rule, norm, step), members in buckets)
        for (_, members), (weights, *states) in zip(buckets, self._placement.run(jobs), strict=True):
            copy_([c.parameter for c in members], weights)
            for key, values in zip(self._state[members[0].name], states, strict=True):
                torch._foreach_copy_([self._state[c.name][key] for c in members], values)
        self._versions = {c.name: c.parameter._version for c in self._constrained}

    def _moved(self) -> list[_Constrained]:
        """Those with a gradient, before the step or (from a closure) after it; the others the optimizer passed by."""
        return [c for c in self._constrained if c.name in self._stepping or c.parameter.grad is not None]

    def _job(self, rule: Constraint, norm: Norm, step: float | None, members: list[_Constrained]) -> Job:
        states = [self._state[c.name] for c in members]
        keys = list(states[0])

        def function(weights: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            constrained, state = rule.apply(weights, norm, step, dict(zip(keys, values, strict=True)))
            return constrained, *(state[key] for key in keys)

        inputs = [c.parameter for c in members], *([own[key] for own in states] for key in keys)
        return Job(inputs, function, cubic=isinstance(norm, MatrixNorm))


def _parameter(c: _Constrained) -> Tensor:
    return c.parameter


_ACTIVE: "WeakKeyDictionary[torch.optim.Optimizer, list[Constraints]]" = WeakKeyDictionary()
"""The rules attached to every optimizer, so that no parameter gets two."""


def _known_norms(optimizer: torch.optim.Optimizer) -> dict[int, tuple[str, Norm | None]]:
    if not isinstance(optimizer, ConditionalGradient):
        return {}
    return {id(a.parameter): (a.name, a.norm) for a in optimizer.assignment}


def _placement(optimizer: torch.optim.Optimizer, constrained: tuple[_Constrained, ...]) -> Placement:
    if isinstance(optimizer, ConditionalGradient):
        return optimizer.placement
    return placement_for({c.name: c.parameter for c in constrained})


def _projection(c: _Constrained) -> Job:
    cubic = isinstance(c.norm, MatrixNorm)
    return Job(([c.parameter],), lambda weights: (c.rule.project(weights, c.norm),), cubic=cubic)


def _measurement(members: list[_Constrained], function: Callable[[Norm, Tensor], Tensor]) -> Job:
    norm = members[0].norm
    weights = [c.parameter.detach() for c in members]
    numbers = [torch.empty((), dtype=torch.float64, device=weight.device) for weight in weights]
    cubic = isinstance(norm, MatrixNorm)
    return Job((weights, numbers), lambda batch, _: (function(norm, batch).double(),), returned=(1,), cubic=cubic)


def constrain(
    optimizer: torch.optim.Optimizer, rules: Mapping[str, Constraint], norms: Assignment | None = None
) -> Constraints:
    """Keep weights in bounds after every `optimizer.step()`.

    Weights above their cap are brought below it at once; from then on every step is checked before and corrected
    after. A parameter without a gradient took no step and is left alone. Weights that someone else changes between two
    steps, by loading a checkpoint for example, are brought below their caps before the next one, unless
    `Constraints.load_state_dict` says that they belong to the rules' own state. What a rule promises, or that it
    promises nothing, is said in its own text; 16-bit weights keep promises within their rounding. A copied or unpickled
    optimizer has no rules: call this again.

    Args:
        optimizer: Any optimizer. Those of `wellnormed.optim` know their parameters' names and norms and the norm of
            their steps; for any other pass `norms`.
        rules: Name pattern (`fnmatch`; a module's name stands for all below it) -> rule. Every rule must act on at
            least one parameter that its pattern matches (a spectral rule passes by biases; `print` shows what is
            constrained), and no parameter may have two.
        norms: What `assign_norms` returned for the model; needed for optimizers of other libraries.

    Returns:
        The attached rules, with `norm_ratios()` (estimates), `proved_ratios()`, `state_dict()` and `remove()`.

    Raises:
        ValueError: Naming parameter, value, rule and remedy.

    Example:
        >>> import torch, wellnormed as wn
        >>> model = torch.nn.Linear(8, 8, bias=False)
        >>> optimizer = wn.Scion(wn.assign_norms(model), lr=0.5)
        >>> rules = wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)})
        >>> for _ in range(20):
        ...     model(torch.randn(4, 8)).sum().backward()
        ...     optimizer.step()
        >>> rules.proved_ratios()["weight"] <= 1
        True
    """
    if norms is None:
        if not isinstance(optimizer, ConditionalGradient):
            raise ValueError(
                f"{type(optimizer).__name__} does not know its parameters' norms; pass norms=wn.assign_norms(model)"
            )
        norms = optimizer.assignment
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    ruled = {name for other in _ACTIVE.get(optimizer, []) for name in other.names}
    constrained: dict[str, _Constrained] = {}
    for pattern, rule in rules.items():
        meant = norms.match([pattern], "rules of constrain")
        named = [a for a in norms if a.name in meant]
        acting = [(a, a.norm) for a in named if a.norm is not None and rule.acts_on(a.norm)]
        if not acting:
            raise ValueError(
                f"{rule!r} acts on none of the parameters that {pattern!r} matches: "
                + ", ".join(f"{a.name} lives in {a.norm or 'no norm'}" for a in named)
                + "; use ColumnCap for ColNorm, and SoftCap, HardCap or another spectral rule for Spectral and PerHead"
            )
        for a, norm in acting:
            if a.name in ruled:
                raise ValueError(
                    f"parameter {a.name!r} has a rule of an earlier `constrain`; call remove() on what that returned"
                )
            if a.name in constrained:
                raise ValueError(
                    f"parameter {a.name!r} has two rules, {constrained[a.name].rule!r} and {rule!r}; "
                    "make the patterns disjoint"
                )
            if id(a.parameter) not in owned:
                raise ValueError(
                    f"parameter {a.name!r} is not in this optimizer, so its rule would never run; leave it out"
                )
            constrained[a.name] = _Constrained(a.name, a.parameter, norm, rule)
    return Constraints(optimizer, tuple(constrained.values()))
