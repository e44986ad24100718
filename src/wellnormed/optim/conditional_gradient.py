"""The engine: momentum x norm x step rule.

Norm-Constrained LMOs (LMO), algorithms 1 and 2 and ALMOND. With the gradient `g`, the buffer `m` and the norm's linear
minimization oracle `-dualize`:

- `"unconstrained"` (uSCG): `w <- (1 - lr * weight_decay) w - lr * radius * dualize(m)`;
- `"constrained"` (SCG): `w <- (1 - lr) w - lr * radius * dualize(m)`, which never leaves the ball of that radius: the
  oracle's overshoot is divided out. In 16 bits a small `lr` is lost in the rounding of `(1 - lr) w`: it is warned of;
- `"averaged"` (ALMOND): `m` averages the oracle's outputs, not the gradients, and `w <- w - lr * radius * m`;
- `"sharp"` (stochastic spectral descent): `w <- w - lr * dual_norm(m) * dualize(m)`, steepest descent.

uSCG with weight decay `mu` is SCG with radius `radius / mu` and step `lr * mu` (LMO section 3). What other papers do to
the oracle's output is in `directions`; what is only rounding error does not move a parameter: `rounding`.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn

from wellnormed.norms import Assignment, MatrixNorm, Norm
from wellnormed.optim.admission import (
    assign_later,
    refuse_cast,
    refuse_gradient,
    refuse_parameter,
    refuse_state,
    refuse_zero_redundancy,
)
from wellnormed.optim.directions import normalize_neurons, oracle, second_moment_like
from wellnormed.optim.fallback import adamw_step
from wellnormed.optim.rounding import Rounding, by_entries
from wellnormed.optim.routing import Params, by_name, named, resolve, split
from wellnormed.optim.settings import GROUP_DEFAULTS, EngineSettings, Group, Memory, check_settings, refuse_unknown
from wellnormed.parallel import Job, Placement, in_buckets
from wellnormed.parallel.layout import local

_INSIDE = 1 - 1e-5
"""Share of the oracle's step that SCG takes, so that float32 rounding does not lead out of the ball."""


class NonFiniteGradientError(ValueError):
    """A gradient held NaN or infinity; nothing was changed."""


class ConditionalGradient(torch.optim.Optimizer):
    """Momentum x norm x step rule, over every parameter of an assignment.

    Parameters of equal norm and shape are treated in one pass. State is one momentum buffer per parameter, and a number
    that tells whether its gradients agree with it (see `rounding`). Parameters without a norm are left to AdamW.

    Args:
        params: The model, whose parameters get their norms by `recipe` and `overrides`; or what `assign_norms`
            returned; or parameters, named parameters or groups as any torch optimizer takes them, together with
            `norms`. Groups may override `lr` and every keyword of `GROUP_DEFAULTS`.
        lr: Step size in units of each parameter's norm; without it, the rate recommended with the recipe.
        settings: The keywords of `EngineSettings`.

    Example:
        >>> import torch, wellnormed as wn
        >>> model = torch.nn.Linear(4, 4, bias=False)
        >>> before = model.weight.detach().clone()
        >>> optimizer = ConditionalGradient(model, lr=0.1, momentum=0.0)
        >>> model(torch.eye(4)).square().sum().backward()
        >>> optimizer.step()
        >>> (entry,) = optimizer.assignment
        >>> bool(entry.norm.norm(model.weight.detach() - before) <= optimizer.update_norm("weight") * 1.001)
        True
    """

    preset: ClassVar[EngineSettings] = {}
    """Where an optimizer's defaults differ from those of `EngineSettings`."""

    def __init__(self, params: Params, lr: float | None = None, **settings: Unpack[EngineSettings]) -> None:
        refuse_unknown(type(self), settings)
        refuse_zero_redundancy()
        settings = {**self.preset, **settings}
        self.memory: Memory = settings.get("memory", "buffer")
        groups, assignment = self._resolve(params, settings)
        self._model = next((given for given in (params, settings.get("norms")) if isinstance(given, nn.Module)), None)
        kept = ("recipe", "overrides", "per_head", "adamw", "radius", "radii", "lr_factors", "step_rule")  # for later
        self._chosen = cast(EngineSettings, {key: value for key, value in settings.items() if key in kept})
        self._process_group = settings.get("process_group")
        self._warned_without_gradients = self._warned_of_lost_decay = False
        if lr is None:
            if settings.get("step_rule") == "sharp":
                raise ValueError("step_rule='sharp' takes an inverse sharpness, which depends on the loss; pass lr=")
            lr = assignment.lr
        self._adopt(assignment)
        defaults = {"lr": lr, "steps": 0} | {key: settings.get(key, value) for key, value in GROUP_DEFAULTS.items()}
        check_settings(defaults, self.memory)
        super().__init__(split(groups, assignment, lr, settings), defaults)

    def _resolve(self, params: Params, settings: EngineSettings) -> tuple[list[Group], Assignment]:
        """Groups of named parameters, and their norms as this optimizer takes them."""
        return resolve(params, settings)

    def _adopt(self, assignment: Assignment) -> None:
        if meta := [a.name for a in assignment if a.parameter.is_meta]:
            raise ValueError(
                f"{', '.join(meta[:3])}{', ...' if meta[3:] else ''} are on the meta device: an optimizer would keep "
                "what to_empty() replaces; make it afterwards"
            )
        for a in assignment:
            refuse_parameter(a.name, a.parameter)
        self.assignment = replace(assignment, weights=())  # which are read once, and are not to be copied
        self.placement = Placement({a.name: a.parameter for a in assignment}, self._process_group)
        self._norms: dict[Tensor, Norm | None] = {a.parameter: a.norm for a in assignment}

    def __str__(self) -> str:
        """What the next step will use: for every parameter its norm, radius, learning rate, and why."""
        common = ("momentum", "nesterov", "step_rule", "weight_decay")
        settings = ", ".join(f"{key}={self.defaults[key]}" for key in common)
        columns: dict[str, dict[str, str]] = {"radius": {}, "lr": {}, "differs": {}}
        self._index()
        for name, (group, parameter) in self._owner.items():
            own = [] if self._norms[parameter] is None else common
            columns["lr"][name] = f"{float(group['lr']):.4g}"
            columns["radius"][name] = f"{self._radii[parameter]:g}" if own else ""
            columns["differs"][name] = ", ".join(f"{k}={group[k]}" for k in own if group[k] != self.defaults[k])
        if not any(columns["differs"].values()):
            del columns["differs"]
        return f"{type(self).__name__}({settings})\n{self.assignment.table(columns)}"

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, also in the middle of training, such as a layer that was frozen until now.

        Their norms come from the group's key `norm` (one for all of them, None for AdamW), else from the model that the
        optimizer was made with, by the same recipe and overrides. AdamW's settings are those of the optimizer.

        Example:
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
            >>> _ = model[0].requires_grad_(False)
            >>> optimizer = ConditionalGradient(model, lr=0.1)
            >>> _ = model[0].requires_grad_(True)
            >>> optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
            >>> optimizer.update_norm("0.weight") < optimizer.update_norm("1.weight")
            True
        """
        members = named([param_group])[0]["params"]
        groups, assignment = [{**param_group, "params": members}], self.assignment
        if any(parameter not in self._norms for _, parameter in members):
            known = self._known_later(members)
            entries = assign_later(members, param_group, {a.parameter: a for a in known}, self._owner)
            own = {key: value for key, value in param_group.items() if key != "norm"}
            own["params"] = [(a.name, a.parameter) for a in entries]
            assignment = replace(assignment, assigned=assignment.assigned + entries, weights=known.weights)
            groups = split([own], assignment, self.defaults["lr"], self._chosen)
        elif "norm" in param_group:
            raise ValueError(
                f"norm={param_group['norm']!r} in a group is for parameters that come later; give the norms of the "
                "first ones by overrides= or assign_norms"
            )
        for group in groups:
            check_settings({**self.defaults, **group}, self.memory)
        if assignment is not self.assignment:
            self._adopt(assignment)
        for group in groups:
            super().add_param_group(group)
        self._index()

    def _known_later(self, members: list[tuple[str, nn.Parameter]]) -> Assignment:
        """What is known of parameters that come later: all that the model holds now."""
        return Assignment(()) if self._model is None else self._resolve(self._model, self._chosen)[1]

    def _index(self) -> None:
        """Find whose group is whose; a user may have replaced groups, or moved a parameter to another one."""
        self._owner = {
            name: (group, parameter)
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        self._radii: dict[Tensor, float] = {}
        for name, (group, parameter) in self._owner.items():
            if group["step_rule"] != "adamw":
                self._radii[parameter] = group["radius"] * group.get("vector_radii", {}).get(name, 1.0)
            if parameter not in self._norms:
                raise ValueError(
                    f"parameter {name!r} is not the one that this optimizer was made with, and has no norm; add new "
                    "parameters by add_param_group, or make the optimizer again"
                )
            if group["step_rule"] == "adamw":
                self._norms[parameter] = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient; returns the closure's value, or None.

        Raises:
            NonFiniteGradientError: Names the parameter and the step; no parameter and no buffer was changed.
        """
        self._index()
        for group in self.param_groups:  # a scheduler may have moved them
            check_settings(group, self.memory)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sizes = self._gradient_sizes()
        self._rounding = Rounding(sizes, {name: parameter for name, (_, parameter) in self._owner.items()})
        for group in self.param_groups:
            if group["step_rule"] == "adamw":
                adamw_step([p for p in group["params"] if p.grad is not None], self.state.__getitem__, group)
            group["steps"] += 1
        buckets = list(self._buckets())
        for *_, parameters in buckets if self.memory == "buffer" else ():
            for parameter in parameters:
                self._state_of(parameter)  # all before the first direction, whose memory the next ones take then
        results = self.placement.run(self._job(*bucket) for bucket in buckets)
        for group, norm, parameters in buckets:
            directions, *averages = next(results)
            for average in averages:
                torch._foreach_copy_([self.state[p]["second_moment"] for p in parameters], average)
            self._move(group, norm, parameters, directions)
            del directions  # before the next ones are computed; `zip` would keep them
        return loss

    def _buckets(self) -> Iterator[tuple[Group, Norm, list[Tensor]]]:
        """Parameters that move by an oracle, in batches of equal norm; singly to save memory."""
        alone = self.memory == "gradient"
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None and self._norms[p] is not None]
            key = lambda p: (self._norms[p], self._radii[p], alone and id(p))  # noqa: E731
            for (norm, *_), members in in_buckets(moving, lambda p: p, key):
                assert norm is not None  # selected so
                yield group, norm, members

    def _job(self, group: Group, norm: Norm, parameters: list[Tensor]) -> Job:
        """The oracle's work on what it sees: the gradient, or its average, one step ahead with Nesterov."""
        gradients = [cast(Tensor, p.grad) for p in parameters]  # these parameters have one
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        states = [] if self.memory == "gradient" else [self._state_of(p) for p in parameters]
        averaged = group["step_rule"] == "averaged"
        if group["step_rule"] != "sharp":
            self._rounding.judge(parameters, gradients, states, norm, sized=not averaged)
        seen = gradients
        if states and not averaged:
            seen = self._average(parameters, gradients, group)
            if group["nesterov"]:
                seen = list(torch._foreach_lerp(seen, gradients, 1 - group["momentum"]))
        direction = oracle(norm, group)
        if not (isinstance(norm, MatrixNorm) and group["normuon"] is not None):
            return Job((seen,), lambda batch: (direction(batch),), cubic=isinstance(norm, MatrixNorm))
        for parameter, state in zip(parameters, states, strict=True):
            if "second_moment" not in state:
                state["second_moment"] = second_moment_like(parameter, norm)
        averages, keep = [state["second_moment"] for state in states], group["normuon"]
        return Job((seen, averages), lambda batch, own: normalize_neurons(direction(batch), own, norm, keep))

    def _move(self, group: Group, norm: Norm, parameters: list[Tensor], directions: list[Tensor]) -> None:
        rule, lr = group["step_rule"], float(group["lr"])
        length, shrink = self._radii[parameters[0]], 1 - lr * group["weight_decay"]
        if rule == "averaged":
            directions = self._average(parameters, directions, group)
        elif rule == "constrained":
            length, shrink = length * _INSIDE / norm.overshoot, 1 - lr
        directions = self._rounding.held_back(parameters, directions)
        if group["cautious_decay"]:
            pairs = zip(parameters, directions, strict=True)
            torch._foreach_mul_(parameters, [1 - (1 - shrink) * (d * p).ge(0).to(p) for p, d in pairs])
        elif shrink != 1:
            self._warn_of_lost_decay(parameters[0].dtype, 1 - shrink)
            torch._foreach_mul_(parameters, shrink)
        torch._foreach_add_(parameters, directions, alpha=-lr * length)
        if self.memory == "gradient":
            torch._foreach_mul_([cast(Tensor, p.grad) for p in parameters], group["momentum"])

    def _warn_of_lost_decay(self, dtype: torch.dtype, decay: float) -> None:
        lost = dtype.itemsize < 4 and decay < torch.finfo(dtype).eps / 2
        if lost and not self._warned_of_lost_decay and not torch.compiler.is_compiling():
            self._warned_of_lost_decay = True
            warnings.warn(
                f"a decay of {decay:.2g} a step is lost where weights round to {str(dtype).removeprefix('torch.')}"
                ", so it bounds no norm there; keep the weights in float32, raise the learning rate, or cap them by "
                "wellnormed.constrain",
                stacklevel=6,
            )

    def _average(self, parameters: list[Tensor], values: list[Tensor], group: Group) -> list[Tensor]:
        buffers = [self._state_of(p)["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(buffers, values, 1 - group["momentum"])
        return buffers

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if "agreement" not in state:
            state.setdefault("momentum_buffer", torch.zeros_like(parameter))
            entries = by_entries(parameter, self._norms[parameter])
            state["agreement"] = torch.zeros_like(parameter) if entries else parameter.new_zeros(())
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; with `memory="gradient"` those that hold the momentum stay."""
        if self.memory == "gradient":
            for parameter in (p for p, norm in self._norms.items() if norm is None):
                parameter.grad = None
        else:
            super().zero_grad(set_to_none)

    def _gradient_sizes(self) -> dict[str, float]:
        """The largest entry of every gradient, in any process; not found in a compiled step."""
        if torch.compiler.is_compiling():
            return {}
        held = {name: p.grad for name, (_, p) in self._owner.items() if p.grad is not None}
        for name, gradient in held.items():
            parameter = self._owner[name][1]
            refuse_gradient(name, parameter, gradient)
            refuse_cast(name, parameter, self.state.get(parameter, {}))
        if not held and not self._warned_without_gradients:
            self._warned_without_gradients = True
            warnings.warn(
                "step() found no gradient in any parameter and changed nothing: backward() was not called since "
                "zero_grad(), or the loss does not depend on these parameters (another copy of the model?)",
                stacklevel=5,
            )
        sizes = self.placement.agree(_largest_entries(held), list(self._owner))
        if bad := [name for name, size in sizes.items() if not size < float("inf")]:
            others = f" and {len(bad) - 5} others" if len(bad) > 5 else ""
            raise NonFiniteGradientError(
                f"the gradient of {', '.join(bad[:5])}{others} holds NaN or infinity at step "
                f"{self.param_groups[0]['steps']}; nothing was changed. Lower the learning rate, or find the operation "
                "with torch.autograd.set_detect_anomaly(True)"
            )
        return sizes

    def update_norm(self, name: str) -> float | None:
        """Bound on the growth of the named parameter's norm in the next step: lr x radius x overshoot.

        None where there is no bound: a parameter without a norm, the step rule "sharp", and, for singular values,
        `normuon`, and `cautious_decay` with a weight decay: shrinking some entries of a matrix may raise them.
        """
        bounds = self.update_norms()
        if name not in bounds:
            raise ValueError(f"no parameter {name!r} in this optimizer; print it to see the names")
        return bounds[name]

    def update_norms(self) -> dict[str, float | None]:
        """The `update_norm` of every parameter, by name."""
        self._index()
        for group in self.param_groups:
            check_settings(group, self.memory)
        return {name: self._update_norm(group, parameter) for name, (group, parameter) in self._owner.items()}

    def _update_norm(self, group: Group, parameter: Tensor) -> float | None:
        norm, step_rule = self._norms[parameter], group["step_rule"]
        cautious = group["cautious_decay"] and group["weight_decay"] > 0
        without_bound = isinstance(norm, MatrixNorm) and (cautious or group["normuon"] is not None)
        if norm is None or without_bound or step_rule == "sharp":
            return None
        return float(group["lr"]) * self._radii[parameter] * (1.0 if step_rule == "constrained" else norm.overshoot)

    def state_dict(self) -> dict[str, Any]:
        """As every torch optimizer; with `memory="gradient"` the gradients that hold the momentum are part of it."""
        state = super().state_dict()
        if self.memory == "gradient":
            numbered = enumerate(parameter for group in self.param_groups for parameter in group["params"])
            kept = {i: {"momentum_buffer": p.grad} for i, p in numbered if p.grad is not None and self._norms[p]}
            state["state"] = {**state["state"], **kept}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`, also one whose groups or names are in another order; see `by_name`.

        Settings of the groups, such as the learning rate, are those of the state.

        Raises:
            ValueError: The state is of another optimizer, step rule, norm, `memory` or size; nothing was changed.
        """
        ordered = by_name(state_dict, self.param_groups)
        refuse_state(ordered, self.param_groups, self._norms, self.memory)
        super().load_state_dict(ordered)
        if self.memory == "gradient":
            for parameter in list(self.state):
                if self._norms[parameter] is not None:
                    parameter.grad = self.state.pop(parameter)["momentum_buffer"].clone()

    def __getstate__(self) -> dict[str, Any]:
        own = {"assignment": self.assignment, "memory": self.memory, "_chosen": self._chosen}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_norms" not in vars(self):  # a copy: without its model, and without the process group, which has no copy
            self._model, self._process_group = None, None
            self._warned_without_gradients = self._warned_of_lost_decay = False
            self._adopt(self.assignment)
        self._index()


def _largest_entries(gradients: dict[str, Tensor]) -> dict[str, float]:
    """The largest entry of each gradient, as far as this process holds it; infinity if one is not finite."""
    held = {name: part for name, gradient in gradients.items() if (part := local(gradient)).numel()}
    found = dict.fromkeys(gradients, 0.0)
    if held:
        sizes = [torch.maximum(*map(torch.abs, torch.aminmax(part))) for part in held.values()]
        numbers = torch.stack([size.double().nan_to_num(float("inf"), float("inf")) for size in sizes])
        found |= zip(held, numbers.tolist(), strict=True)  # one transfer for all parameters
    return found
