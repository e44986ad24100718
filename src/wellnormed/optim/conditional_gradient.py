"""The engine: momentum, then the norm's linear minimization oracle, then a step rule.

Norm-Constrained LMOs (LMO), algorithms 1 and 2. With `d = norm.dualize(momentum)`:

- `"unconstrained"` (uSCG): `w <- w - lr * radius * d`;
- `"constrained"` (SCG): `w <- (1 - lr) w - lr * radius * d`, which never leaves the ball of that radius.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from wellnormed.norms import Assignment, Norm
from wellnormed.norms.assignment import match_patterns

StepRule = Literal["unconstrained", "constrained"]


class NonFiniteGradientError(ValueError):
    """A gradient held NaN or infinity; nothing was changed."""


class ConditionalGradient(torch.optim.Optimizer):
    """Momentum x norm x step rule, over every parameter of an assignment.

    Parameters of equal norm and shape are stacked and treated in one pass. State is one momentum buffer per parameter.

    Args:
        assignment: What `assign_norms` returned; `print(optimizer)` shows it.
        lr: Step size in units of each parameter's norm.
        momentum: The fraction of the buffer that is kept, in [0, 1).
        nesterov: Look one step ahead: the oracle sees `momentum * buffer + (1 - momentum) * gradient`.
        step_rule: See the module's text.
        radius: Radius of the norm ball, in units of each parameter's norm.
        lr_scales: Name pattern -> factor on `lr`; each becomes its own group. Unmatched parameters keep factor 1.

    Raises:
        ValueError: A setting is out of its range, or a pattern matches nothing or overlaps another.

    Example:
        >>> import torch, wellnormed as wn
        >>> model = torch.nn.Linear(4, 4, bias=False)
        >>> before = model.weight.detach().clone()
        >>> optimizer = ConditionalGradient(wn.assign_norms(model), lr=0.1, momentum=0.0)
        >>> model(torch.eye(4)).square().sum().backward()
        >>> optimizer.step()
        >>> step = torch.linalg.matrix_norm(model.weight.detach() - before, 2)
        >>> bool(0.08 < step <= 0.1 * optimizer.overshoot("weight") * 1.001)
        True
    """

    def __init__(
        self,
        assignment: Assignment,
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        step_rule: StepRule = "unconstrained",
        radius: float = 1.0,
        lr_scales: Mapping[str, float] | None = None,
    ) -> None:
        if not 0 <= lr < float("inf"):
            raise ValueError(f"lr={lr} must be finite and not negative")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must lie in [0, 1): it is the fraction kept")
        if not 0 < radius < float("inf"):
            raise ValueError(f"radius={radius} must be positive and finite")
        if step_rule not in ("unconstrained", "constrained"):
            raise ValueError(f"step_rule={step_rule!r} must be 'unconstrained' or 'constrained'")
        if step_rule == "constrained" and lr > 1:
            raise ValueError(f"lr={lr} must be at most 1 with step_rule='constrained': it is a convex combination")
        if len(assignment) == 0:
            raise ValueError("the assignment holds no trainable parameter; there is nothing to optimize")
        scales = dict(lr_scales or {})
        if bad := {pattern: scale for pattern, scale in scales.items() if not 0 <= scale < float("inf")}:
            raise ValueError(f"lr_scales={bad} must be finite and not negative")
        self.assignment = assignment
        self._norms: dict[Tensor, Norm] = {a.parameter: a.norm for a in assignment}
        owner = match_patterns(scales, [a.name for a in assignment], "lr_scales")
        groups: dict[float, list[tuple[str, Tensor]]] = defaultdict(list)
        for a in assignment:
            groups[scales.get(owner.get(a.name, ""), 1.0)].append((a.name, a.parameter))
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "step_rule": step_rule,
            "radius": radius,
            "steps": 0,
        }
        super().__init__([{"params": named, "lr": lr * scale} for scale, named in groups.items()], defaults)

    def __str__(self) -> str:
        settings = ", ".join(
            f"{key}={self.defaults[key]}" for key in ("lr", "momentum", "nesterov", "step_rule", "radius")
        )
        return f"{type(self).__name__}({settings})\n{self.assignment}"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient.

        Returns:
            The closure's value, or None.

        Raises:
            NonFiniteGradientError: Names the parameter and the step; no parameter and no buffer was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_non_finite_gradients()
        for group in self.param_groups:
            buckets: dict[tuple, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    buckets[self._norms[parameter], parameter.shape, parameter.dtype, parameter.device].append(
                        parameter
                    )
            for (norm, *_), parameters in buckets.items():
                self._step_bucket(norm, parameters, group)
            group["steps"] += 1
        return loss

    def _step_bucket(self, norm: Norm, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(buffers, gradients, 1 - group["momentum"]) if group["nesterov"] else buffers
        direction = norm.dualize(torch.stack(list(ahead)))
        lr = float(group["lr"])
        if group["step_rule"] == "constrained":
            torch._foreach_mul_(parameters, 1 - lr)
        torch._foreach_add_(parameters, list(direction.unbind()), alpha=-lr * group["radius"])

    def _refuse_non_finite_gradients(self) -> None:
        named = [
            (name, p.grad) for g in self.param_groups for name, p in zip(g["param_names"], g["params"], strict=True)
            if p.grad is not None and p.grad.numel()
        ]  # fmt: skip
        if not named:
            return
        sizes = torch._foreach_norm([g for _, g in named])
        if bool(torch.stack([size.float() for size in sizes]).isfinite().all()):  # one transfer for all parameters
            return
        finite = torch.stack([g.isfinite().all() for _, g in named])  # squares of finite entries may overflow
        if not bool(finite.all()):
            bad = [name for (name, _), ok in zip(named, finite.tolist(), strict=True) if not ok]
            raise NonFiniteGradientError(
                f"the gradient of {', '.join(bad)} holds NaN or infinity at step {self.param_groups[0]['steps']}; "
                "nothing was changed. Lower the learning rate, or find the operation with "
                "torch.autograd.set_detect_anomaly(True)"
            )

    def overshoot(self, name: str) -> float:
        """The largest norm of one oracle output for the named parameter."""
        return self._norms[self._named(name)[1]].overshoot

    def update_norm(self, name: str) -> float:
        """Bound on the norm of the next step of the named parameter, in units of its norm: lr x radius x overshoot."""
        group, _ = self._named(name)
        return float(group["lr"]) * group["radius"] * self.overshoot(name)

    def _named(self, name: str) -> tuple[dict[str, Any], Tensor]:
        for group in self.param_groups:
            if name in group["param_names"]:
                return group, group["params"][group["param_names"].index(name)]
        raise ValueError(f"no parameter {name!r} in this optimizer; print it to see the names")
