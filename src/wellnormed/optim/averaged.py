"""Schedule-free training: an average of the iterates of any optimizer, which may be evaluated at any step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed._ranges import NOT_NEGATIVE, Range
from wellnormed.optim.around import Around
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.parts import Group
from wellnormed.optim.saved_state import by_name
from wellnormed.parallel.layout import Mark, local, mark

KEPT, POINT, STEPS, BETA = "averaged_kept", "averaged_point", "averaged_steps", "averaged_beta"
"""What a saved state has beside that of the optimizer within: three tensors of every weight, a number of every group.
Kept is z or, with a `beta` of 0, x; the point is y."""


class Averaged(Around):
    """Schedule-free training (Defazio et al., 2024, section 2) over an optimizer: a constant rate, and no end to plan.

    There are three points. The optimizer moves its iterate `z`; `x` is the average of all its iterates, with weights
    that grow as `t^power`; and gradients are taken between them:

        y = (1 - beta) z + beta x,   z <- step of the optimizer from z,   x <- x + (power + 1) / (t + power) (z - x).

    The weights of the model are `y` while it trains and `x` after `eval()`, until `train()` puts `y` back, bit for bit.
    With `beta=0` the optimizer trains as it would alone, beside an average of its tail. The factor before `z - x` is
    that of polynomial-decay averaging (Shamir and Zhang, 2013, section 3.2).

    **Constraints act on z.** A cap is a ball, which is convex, so `x` and `y` lie in it as well, but for the rounding
    of the average. `eval()` proves each constrained weight, and scales those down that rounding has lifted, so that
    `proved_ratios()` and `certify(within=...)` hold for what is evaluated. A constraint that holds a norm at a value,
    as `Orthogonal` and `Sphere` do, holds it from above alone: averages lie inside the ball, and `print` says so.

    It is used as an optimizer of torch is: by schedulers (of its rates, which need not fall), scalers, closures,
    `torch.distributed.checkpoint`. The state dict has all three points, so that a state that was saved in one mode is
    loaded in any. It keeps one more copy of every weight, and another one while it is in `eval()`. A batch norm gathers
    the statistics of `y`: after `eval()`, call `torch.optim.swa_utils.update_bn(loader, model)`.

    Args:
        optimizer: It moves z: any optimizer whose `step` needs no closure, with its constraints. An average does some
            of the work of a momentum, so that about 0.5 is enough for Scion's.
        beta: How far gradients are taken from z towards x, in [0, 1).
        power: How fast the weights of later iterates grow; 0 or more. Of 0 it is the mean of all iterates.

    Raises:
        ValueError: A number is out of range, or a weight has 16 bits, in which an average stands still. `step` was
            called after `eval()` without `train()`, or something else has written into a weight.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(8, 8, bias=False)
        >>> optimizer = wn.Averaged(wn.Scion(layer, lr=0.02, momentum=0.5))
        >>> constraints = wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)})
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     layer(torch.randn(4, 8)).sum().backward()
        ...     optimizer.step()
        >>> optimizer.eval()  # the weights are the average now
        >>> constraints.proved_ratios()["weight"] <= 1
        True
        >>> optimizer.train()
    """

    _kept = ("inner", "beta", "power", "_flags", "_stored", "_points")

    def __init__(self, optimizer: torch.optim.Optimizer, *, beta: float = 0.8, power: float = 2.0) -> None:
        self._require_optimizer(optimizer)
        require_numbers("Averaged: ", {"beta": beta}, Range(lambda x: 0 <= x < 1, "lie in [0, 1)"))
        require_numbers("Averaged: ", {"power": power}, NOT_NEGATIVE)
        self.inner, self.beta, self.power = optimizer, beta, power
        # changed in place alone, for Lightning's wrapper of an optimizer is a shallow copy of it
        self._flags = {"training": True, "loaded": False}
        self._stored: dict[Tensor, dict[str, Tensor]] = {}
        self._points: dict[Tensor, Tensor] = {}  # y, while the weights may be something else: x, or what is loaded
        self.__setstate__({})
        self._refuse_16_bits()

    def _refuse_16_bits(self) -> None:
        for name, parameter in self._named():
            if parameter.dtype.itemsize < 4 and parameter.requires_grad:
                raise ValueError(
                    f"Averaged: parameter {name!r} is of {parameter.dtype}, in which an average stands still; keep the "
                    "weights in float32, and compute in 16 bits by torch.autocast"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # makes the hooks
        self._marks: dict[Tensor, Mark] = {}  # of weights as they were written here; none yet of a copy

    @property
    def training(self) -> bool:
        """Whether the weights are y, at which gradients are taken, and not the average."""
        return self._flags["training"]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of the optimizer within and of the average, to be read."""
        within = super().state
        return {p: {**within.get(p, {}), **self._stored.get(p, {})} for p in {**within, **self._stored}}

    def __str__(self) -> str:
        weights = "y, at which gradients are taken" if self.training else "the average x"
        lines = [f"Averaged(beta={self.beta:g}, power={self.power:g}): the weights are {weights}", str(self.inner)]
        for follower in self.attached:
            lines += follower.said_of_averages()
        return "\n".join(lines)

    @property
    def attached(self) -> list[Any]:
        """The constraints of the optimizer within."""
        return getattr(self.inner, "attached", [])

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters to the optimizer within; their average begins with their first gradient."""
        super().add_param_group(param_group)
        self._refuse_16_bits()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer within from z, by gradients of y; returns the closure's value, or None."""
        self._require_own_writes()
        self._require_points()
        moving = any(float(group.get("lr", 1.0)) for group in self.param_groups)  # torch saves a state by a step of 0
        if moving and not self.training:
            raise ValueError(
                "Averaged: step() after eval(): the gradients are those of the average; call train() where the model's "
                "train() is called"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.training:
            self.inner.step()
            return loss
        self._to_iterates()
        done = False
        try:
            self.inner.step()
            done = True
        finally:
            self._to_points(done)
        return loss

    @torch._disable_dynamo
    def _to_iterates(self) -> None:
        """Put z in the weights, and x in the place of z."""
        begun = self._begun()
        for _, parameter in self._named():
            if parameter not in begun and parameter.grad is not None:
                steps = torch.zeros((), dtype=torch.float64, device="cpu")
                self._stored[parameter] = {KEPT: parameter.detach().clone(), STEPS: steps}
        for parameter, entry in begun.items() if self.beta else ():
            weight, kept = local(parameter), local(entry[KEPT])
            average = self._average(weight, kept)
            weight.copy_(kept)
            kept.copy_(average)
        for follower in self.attached:
            follower.accept(begun)

    def _begun(self) -> dict[Tensor, dict[str, Tensor]]:
        """What is kept of every weight that was moved; until then, also after a step of length 0, it may be loaded."""
        return {parameter: entry for parameter, entry in self._stored.items() if float(entry[STEPS])}

    @torch._disable_dynamo
    def _to_points(self, done: bool) -> None:
        """Move x towards z if a step was done, and put y in the weights and z in the place of x."""
        for group in self.param_groups:
            moved = done and float(group.get("lr", 1.0)) != 0
            for parameter in group["params"]:
                if parameter not in self._stored:
                    continue
                entry = self._stored[parameter]
                weight, kept = local(parameter), local(entry[KEPT])
                if moved:
                    entry[STEPS] += 1
                    kept.lerp_(weight, (self.power + 1) / (float(entry[STEPS]) + self.power))
                if self.beta:
                    point = torch.lerp(weight, kept, self.beta)
                    kept.copy_(weight)
                    weight.copy_(point)
        self._points.clear()  # which were loaded
        self._flags["loaded"] = False
        self._sign()

    def _average(self, weight: Tensor, kept: Tensor) -> Tensor:
        """The average x, from y and z; where y is z, x is kept itself."""
        return torch.lerp(kept, weight, 1 / self.beta) if self.beta else kept

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average in the weights, with every promise of the constraints kept; a second call does nothing."""
        self._require_own_writes()
        if not self.training and not self._flags["loaded"]:
            return
        self._flags.update(training=False, loaded=False)
        for parameter, entry in self._begun().items():
            point = self._points.get(parameter)
            self._points[parameter] = point = parameter.detach().clone() if point is None else point
            local(parameter).copy_(self._average(local(point), local(entry[KEPT])))
        for follower in self.attached:
            follower.bring_averages()
        self._sign()

    @torch.no_grad()
    def train(self) -> None:
        """Put the weights back as they were before `eval`, bit for bit; a second call does nothing."""
        self._require_own_writes()
        for parameter, point in self._points.items():
            parameter.copy_(point)
        self._points.clear()
        self._flags.update(training=True, loaded=False)
        self._sign()

    def _sign(self) -> None:
        self._marks.clear()
        self._marks.update((parameter, mark(parameter)) for parameter in self._begun())

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its name, or with its shape if it has none."""
        for group in self.param_groups:
            names = group.get("param_names") or [f"one of shape {tuple(p.shape)}" for p in group["params"]]
            yield from zip(names, group["params"], strict=True)

    @torch._disable_dynamo
    def _require_points(self) -> None:
        """Refuse weights that were loaded after this state and are not y, at which gradients are taken."""
        loaded = self._points if self._flags["loaded"] and self.training else {}
        if any(not torch.equal(local(parameter), local(point)) for parameter, point in loaded.items()):
            raise ValueError(
                "Averaged: the weights were loaded after the optimizer's state, and are not those at which it takes "
                "gradients (a model that was saved after eval()?); call train() once both are loaded"
            )

    @torch._disable_dynamo
    def _require_own_writes(self) -> None:
        """Refuse weights that something else has written: the next step would begin somewhere else, and say nothing."""
        marks = self._marks  # none of what is loaded
        if written := [name for name, p in self._named() if p in marks and mark(p) != marks[p]]:
            raise ValueError(
                f"Averaged: {', '.join(written[:3])}{', ...' if written[3:] else ''} were written since the last step; "
                "load the model's weights before the optimizer's state, or begin a new average at the weights as they "
                "are: Averaged(optimizer.inner)"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer within, with the points of the average, the same in both modes."""
        self._require_own_writes()
        state = super().state_dict()
        entries = dict(state["state"])
        for number, (_, parameter) in enumerate(self._named()):
            if parameter in self._stored:
                point = self._points.get(parameter, parameter).detach().clone()
                own = {key: value.clone() for key, value in self._stored[parameter].items()}
                entries[number] = {**entries.get(number, {}), **own, POINT: point}
        for group in state["param_groups"]:
            group[BETA] = self.beta
        return {**state, "state": entries}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`, and put its weights into the model: y, or x after `eval()`.

        The state of an optimizer without an average begins a new one at the weights as they are.

        Raises:
            ValueError: The state is of other weights or of another optimizer; nothing was changed.
        """
        if isinstance(self.inner, ConditionalGradient):
            state_dict = by_name(state_dict, self.param_groups)
        groups = [dict(group) for group in state_dict["param_groups"]]
        if others := {beta for group in groups if (beta := group.pop(BETA, self.beta)) != self.beta}:
            raise ValueError(
                f"load_state_dict: the average was made with beta={others.pop()}, not {self.beta}; pass that beta"
            )
        keys, places = (KEPT, POINT, STEPS), (key for group in groups for key in group["params"])
        named = dict(zip(places, self._named(), strict=False))  # torch refuses other counts
        saved = [(*named[key], entry) for key, entry in state_dict["state"].items() if key in named and KEPT in entry]
        for name, parameter, entry in saved:
            if any(entry[key].shape != parameter.shape for key in (KEPT, POINT)):
                raise ValueError(
                    f"load_state_dict: the average of {name!r} is of shape {tuple(entry[KEPT].shape)}, not "
                    f"{tuple(parameter.shape)}; load it into a model of the same sizes"
                )
        within = {place: {key: e[key] for key in e if key not in keys} for place, e in state_dict["state"].items()}
        state = {place: entry for place, entry in within.items() if entry}
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        for own in (self._stored, self._points, self._marks):
            own.clear()
        for _, parameter, entry in saved:
            kept = torch.empty_like(parameter).copy_(entry[KEPT])
            steps = entry[STEPS].to("cpu", torch.float64, copy=True)
            self._stored[parameter] = {KEPT: kept, STEPS: steps}
            self._points[parameter] = entry[POINT].to(parameter.dtype, copy=True)
            parameter.copy_(entry[POINT])
        self._flags["loaded"] = True
        if not self.training:
            self.eval()
