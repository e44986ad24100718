"""The engine: momentum x norm x step rule.

Norm-Constrained LMOs (LMO), algorithms 1 and 2 and ALMOND. With the gradient `g`, the buffer `m` and the norm's linear
minimization oracle `-dualize`:

- `"unconstrained"` (uSCG): `w <- (1 - lr * weight_decay) w - lr * radius * dualize(m)`;
- `"constrained"` (SCG): `w <- (1 - lr) w - lr * radius * dualize(m)`, which never leaves the ball of that radius: the
  oracle's overshoot is divided out;
- `"averaged"` (ALMOND): `m` averages the oracle's outputs, not the gradients, and `w <- w - lr * radius * m`;
- `"sharp"` (stochastic spectral descent): `w <- w - lr * dual_norm(m) * dualize(m)`, steepest descent.

uSCG with weight decay `mu` is SCG with radius `radius / mu` and step `lr * mu` (LMO section 3); both are tested.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from wellnormed.norms import MatrixNorm, Norm
from wellnormed.optim.fallback import adamw_step
from wellnormed.optim.routing import Params, by_name, resolve, split
from wellnormed.optim.settings import GROUP_DEFAULTS, EngineSettings, Group, Memory, check_settings, refuse_unknown
from wellnormed.parallel import Job, in_buckets, placement_for
from wellnormed.parallel.layout import local, refuse_other_layout

_INSIDE = 1 - 1e-5
"""Share of the oracle's step that SCG takes, so that float32 rounding does not lead out of the ball."""


class NonFiniteGradientError(ValueError):
    """A gradient held NaN or infinity; nothing was changed."""


class ConditionalGradient(torch.optim.Optimizer):
    """Momentum x norm x step rule, over every parameter of an assignment.

    Parameters of equal norm and shape are stacked and treated in one pass. State is one momentum buffer per parameter.
    Parameters without a norm are left to AdamW.

    Args:
        params: The model, whose parameters get their norms by `recipe` and `overrides`; or what `assign_norms`
            returned; or parameters, named parameters or groups as any torch optimizer takes them, together with
            `norms`. Groups may override `lr`, `momentum`, `nesterov`, `radius`, `weight_decay`.
        lr: Step size in units of each parameter's norm; without it, the rate recommended with the recipe.
        settings: The keywords of `EngineSettings`.

    Raises:
        ValueError: A setting is out of its range, a pattern matches nothing or overlaps another, or a parameter is in
            no group or in two.

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
    """Where a named optimizer's defaults differ from those of `EngineSettings`."""

    def __init__(self, params: Params, lr: float | None = None, **settings: Unpack[EngineSettings]) -> None:
        refuse_unknown(type(self), settings)
        settings = {**self.preset, **settings}
        self.memory: Memory = settings.get("memory", "buffer")
        groups, self.assignment = resolve(params, settings)
        if lr is None:
            if settings.get("step_rule") == "sharp":
                raise ValueError("step_rule='sharp' takes an inverse sharpness, which depends on the loss; pass lr=")
            lr = self.assignment.lr
        self.placement = placement_for({a.name: a.parameter for a in self.assignment}, settings.get("process_group"))
        self._norms: dict[Tensor, Norm | None] = {a.parameter: a.norm for a in self.assignment}
        own = {key: value for key, value in settings.items() if key in GROUP_DEFAULTS}
        defaults = {"lr": lr, **GROUP_DEFAULTS, **own, "steps": 0}
        check_settings(defaults, self.memory)
        super().__init__(split(groups, self.assignment, lr, settings), defaults)

    def __str__(self) -> str:
        """What the next step will use: for every parameter its norm, radius, learning rate, and why."""
        common = ("momentum", "nesterov", "step_rule", "weight_decay")
        settings = ", ".join(f"{key}={self.defaults[key]}" for key in common)
        columns: dict[str, dict[str, str]] = {"radius": {}, "lr": {}, "differs": {}}
        for name, (group, parameter) in self._owner.items():
            own = {} if self._norms[parameter] is None else {key: group[key] for key in common}
            columns["lr"][name] = f"{float(group['lr']):.4g}"
            columns["radius"][name] = f"{group['radius']:g}" if own else ""
            differing = [f"{key}={value}" for key, value in own.items() if value != self.defaults[key]]
            columns["differs"][name] = ", ".join(differing)
        if not any(columns["differs"].values()):
            del columns["differs"]
        return f"{type(self).__name__}({settings})\n{self.assignment.table(columns)}"

    def add_param_group(self, param_group: Group) -> None:
        """What torch calls for every group while the optimizer is made; later, all parameters have their group.

        Raises:
            ValueError: A parameter has no entry in the assignment, or a setting is out of its range.
        """
        members = param_group["params"]
        for member in [members] if isinstance(members, Tensor) else members:
            if (member[1] if isinstance(member, tuple) else member) not in self._norms:
                raise ValueError(
                    "add_param_group: a parameter is not in the assignment; make a new optimizer with "
                    "assign_norms(model) for the whole model"
                )
        check_settings({**self.defaults, **param_group}, self.memory)
        super().add_param_group(param_group)
        self._index()

    def _index(self) -> None:
        self._owner = {
            name: (group, parameter)
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        for group, parameter in self._owner.values():
            if group["step_rule"] == "adamw":
                self._norms[parameter] = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient.

        Returns:
            The closure's value, or None.

        Raises:
            NonFiniteGradientError: Names the parameter and the step; no parameter and no buffer was changed.
        """
        for group in self.param_groups:  # a scheduler may have moved them
            check_settings(group, self.memory)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_non_finite_gradients()
        for group in self.param_groups:
            if group["step_rule"] == "adamw":
                adamw_step([p for p in group["params"] if p.grad is not None], self.state.__getitem__, group)
            group["steps"] += 1
        buckets = list(self._buckets())
        results = self.placement.run(self._job(*bucket) for bucket in buckets)
        for (group, _, parameters), (directions,) in zip(buckets, results, strict=True):
            self._move(group, parameters, directions)
        return loss

    def _buckets(self) -> Iterator[tuple[Group, Norm, list[Tensor]]]:
        """Parameters that move by an oracle, in batches of equal norm; singly to save memory."""
        alone = self.memory == "gradient"
        for group in self.param_groups:
            moving = [
                (parameter, norm)
                for parameter in group["params"]
                if parameter.grad is not None and (norm := self._norms[parameter]) is not None
            ]
            for (norm, _), members in in_buckets(
                moving, lambda pair: pair[0], lambda pair: (pair[1], id(pair[0]) if alone else None)
            ):
                yield group, norm, [parameter for parameter, _ in members]

    def _job(self, group: Group, norm: Norm, parameters: list[Tensor]) -> Job:
        """The oracle's work on what it sees: the gradient, or its average, one step ahead with Nesterov."""
        gradients = [_gradient(p) for p in parameters]
        if self.memory == "gradient" or group["step_rule"] == "averaged":
            seen = gradients
        else:
            seen = self._average(parameters, gradients, group)
            if group["nesterov"]:
                seen = list(torch._foreach_lerp(seen, gradients, 1 - group["momentum"]))
        cubic = isinstance(norm, MatrixNorm)
        if group["step_rule"] != "sharp":
            return Job((seen,), lambda batch: (norm.dualize(batch),), cubic=cubic)
        sizes = (..., *(None,) * norm.ndim)
        return Job((seen,), lambda batch: (norm.dualize(batch) * norm.dual_norm(batch)[sizes],), cubic=cubic)

    def _move(self, group: Group, parameters: list[Tensor], directions: list[Tensor]) -> None:
        rule, lr = group["step_rule"], float(group["lr"])
        length, shrink = group["radius"], 1 - lr * group["weight_decay"]
        if rule == "averaged":
            directions = self._average(parameters, directions, group)
        elif rule == "constrained":
            norm = self._norms[parameters[0]]
            assert norm is not None  # it made the direction
            length, shrink = length * _INSIDE / norm.overshoot, 1 - lr
        if shrink != 1:
            torch._foreach_mul_(parameters, shrink)
        torch._foreach_add_(parameters, directions, alpha=-lr * length)
        if self.memory == "gradient":
            torch._foreach_mul_([_gradient(p) for p in parameters], group["momentum"])

    def _average(self, parameters: list[Tensor], values: list[Tensor], group: Group) -> list[Tensor]:
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, values, 1 - group["momentum"])
        return buffers

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; with `memory="gradient"` those that hold the momentum stay."""
        if self.memory == "gradient":
            groups = [group for group in self.param_groups if group["step_rule"] == "adamw"]
            for parameter in (parameter for group in groups for parameter in group["params"]):
                parameter.grad = None
        else:
            super().zero_grad(set_to_none)

    def _refuse_non_finite_gradients(self) -> None:
        if torch.compiler.is_compiling():
            return
        named: dict[str, Tensor] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    refuse_other_layout(name, parameter, parameter.grad)
                    named[name] = parameter.grad
        if bad := self.placement.agree(_non_finite(named), list(named)):
            raise NonFiniteGradientError(
                f"the gradient of {', '.join(bad)} holds NaN or infinity at step {self.param_groups[0]['steps']}; "
                "nothing was changed. Lower the learning rate, or find the operation with "
                "torch.autograd.set_detect_anomaly(True)"
            )

    def overshoot(self, name: str) -> float | None:
        """The largest norm of one oracle output for the named parameter; None if it has no norm."""
        norm = self._norms[self._named(name)[1]]
        return None if norm is None else norm.overshoot

    def update_norm(self, name: str) -> float | None:
        """Bound on the growth of the named parameter's norm in the next step: lr x radius x overshoot.

        None where there is no bound: a parameter without a norm, or the rule "sharp".
        """
        group, parameter = self._named(name)
        norm = self._norms[parameter]
        if norm is None or group["step_rule"] == "sharp":
            return None
        return float(group["lr"]) * group["radius"] * (1.0 if group["step_rule"] == "constrained" else norm.overshoot)

    def _named(self, name: str) -> tuple[Group, Tensor]:
        if name not in self._owner:
            raise ValueError(f"no parameter {name!r} in this optimizer; print it to see the names")
        return self._owner[name]

    def state_dict(self) -> dict[str, Any]:
        """As every torch optimizer; with `memory="gradient"` the gradients that hold the momentum are part of it."""
        state = super().state_dict()
        if self.memory == "gradient":
            numbered = enumerate(parameter for group in self.param_groups for parameter in group["params"])
            kept = {i: {"momentum_buffer": p.grad} for i, p in numbered if p.grad is not None and self._norms[p]}
            state["state"] = {**state["state"], **kept}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`, also one whose groups or names are in another order.

        Raises:
            ValueError: A parameter is missing or unknown, or one group here is in two there.
        """
        super().load_state_dict(by_name(state_dict, self.param_groups))
        if self.memory == "gradient":
            for parameter, state in list(self.state.items()):
                if self._norms[parameter] is not None:
                    parameter.grad = state.pop("momentum_buffer").clone()
                    del self.state[parameter]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "assignment": self.assignment, "memory": self.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "placement" not in vars(self):  # a copy: without the process group, which cannot be copied
            self.placement = placement_for({a.name: a.parameter for a in self.assignment})
        self._norms = {a.parameter: a.norm for a in self.assignment}
        self._index()


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # the caller's selection
    return parameter.grad


def _non_finite(gradients: dict[str, Tensor]) -> list[str]:
    """The names whose gradient, as far as this process holds it, has a NaN or an infinity."""
    held = {name: part for name, gradient in gradients.items() if (part := local(gradient)).numel()}
    if not held:
        return []
    sizes = torch._foreach_norm(list(held.values()))
    if bool(torch.stack([size.float() for size in sizes]).isfinite().all()):  # one transfer for all parameters
        return []
    finite = torch.stack([part.isfinite().all() for part in held.values()])  # squares of finite entries may overflow
    return [name for name, ok in zip(held, finite.tolist(), strict=True) if not ok]
