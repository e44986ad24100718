"""Schedule-free training: an average of the iterates of any optimizer, which may be evaluated at any step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wellnormed._inputs import require_numbers
from wellnormed._ranges import Range
from wellnormed.optim.around import Around, stepping
from wellnormed.optim.conditional_gradient import ConditionalGradient
from wellnormed.optim.parts import Group, evaluated
from wellnormed.optim.saved_state import by_name
from wellnormed.parallel.layout import Mark, local, mark

Z, X, STEPS = "averaged_z", "averaged_x", "averaged_steps"
"""State per weight beside that of the optimizer within: the iterate, the average, and the steps that it is of."""
_POWER = 2.0
"""The weights of later iterates grow as `t` to this power."""


class Averaged(Around):
    """Schedule-free training (Defazio et al., 2024, section 2) over an optimizer: a constant rate, and no end to plan.

    There are three points. The optimizer moves its iterate `z`; `x` is the average of all its iterates, with weights
    that grow as `t^2`; and gradients are taken between them:

        y = (1 - beta) z + beta x,   z <- step of the optimizer from z,   x <- x + 3 / (t + 2) (z - x).

    The weights of the model are `y` while it trains and `x` after `eval()`, until `train()` puts `y` back, bit for bit.
    With `beta=0` the optimizer trains as it would alone, beside an average of its tail. The factor before `z - x` is
    that of polynomial-decay averaging (Shamir and Zhang, 2013, section 3.2).

    **Constraints act on z.** A cap is a ball, which is convex, so `x` and `y` lie in it as well, but for the rounding
    of the average. `eval()` proves each constrained weight, and scales those down that rounding has lifted, so that
    `proved_ratios()` and `certify(within=...)` hold for the weights that are evaluated. A constraint that holds a norm
    at a value, as `Orthogonal` and `Sphere` do, holds it from above alone: averages lie inside the ball, and `print`
    says so. The average of a weight that `constrain` or `project_` has projected begins anew there.

    It is used as an optimizer of torch is: by schedulers (of its rates, which need not fall), scalers, closures,
    `torch.distributed.checkpoint`. The state dict has z and x, whatever the mode, and loading it puts y in the weights;
    so load the weights of the model before it. It keeps two more copies of every weight. A batch norm gathers the
    statistics of `y`: after `eval()`, call `torch.optim.swa_utils.update_bn(loader, model)`.

    Args:
        optimizer: It moves z: any optimizer whose `step` needs no closure, with its constraints. An average does some
            of the work of a momentum, so that about 0.5 is enough for Scion's.
        beta: How far gradients are taken from z towards x, in [0, 1).

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

    _kept = ("inner", "beta", "_mode", "_points")

    def __init__(self, optimizer: torch.optim.Optimizer, *, beta: float = 0.8) -> None:
        self._require_optimizer(optimizer)
        require_numbers("Averaged: ", {"beta": beta}, Range(lambda x: 0 <= x < 1, "lie in [0, 1)"))
        self.inner, self.beta = optimizer, beta
        # changed in place alone, for Lightning's wrapper of an optimizer is a shallow copy of it
        self._mode, self._points = {"training": True}, {}
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
        return self._mode["training"]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of the optimizer within and of the average, to be read."""
        within = super().state
        return {p: {**within.get(p, {}), **self._points.get(p, {})} for p in {**within, **self._points}}

    def __str__(self) -> str:
        weights = "y, at which gradients are taken" if self.training else "the average x"
        lines = [f"Averaged(beta={self.beta:g}): the weights are {weights}", str(self.inner)]
        for follower in self.attached:
            lines += follower.said_of_averages()
        return "\n".join(lines)

    @property
    def attached(self) -> list[Any]:
        """The constraints of the optimizer within."""
        return getattr(stepping(self.inner), "attached", [])

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters to the optimizer within; their average begins with their first gradient."""
        super().add_param_group(param_group)
        self._refuse_16_bits()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer within from z, by gradients of y; returns the closure's value, or None."""
        self._require_own_writes()
        moving = any(float(group.get("lr", 1.0)) for group in self.param_groups)  # torch saves a state by a step of 0
        if moving and not self.training:
            raise ValueError(
                "Averaged: step() after eval(): the gradients are those of the average; call train() where the model's "
                "train() is called"
            )
        loss = evaluated(closure)
        if self._mode.pop("loaded", False):
            self._begin_broken_averages_anew()
        self._put_iterates()
        try:
            self.inner.step()
            self._average()
        finally:
            self._put(self.training)
        return loss

    @torch._disable_dynamo
    def _begin_broken_averages_anew(self) -> None:
        """Of averages that were loaded, begin those anew that constraints do not allow, as under a smaller cap."""
        begun = self._begun()
        for parameter, entry in begun.items():
            local(parameter).copy_(local(entry[X]))
        broken = {parameter for follower in self.attached for parameter in follower.broken()}
        for parameter in broken & begun.keys():
            local(parameter).copy_(local(begun[parameter][Z]))
            begun[parameter][STEPS].zero_()

    @torch._disable_dynamo
    def _put_iterates(self) -> None:
        begun = self._begun()
        for parameter, entry in begun.items():
            local(parameter).copy_(local(entry[Z]))
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self._points and p.grad is not None:
                    steps = torch.zeros((), dtype=torch.float64, device="cpu")
                    self._points[p] = {Z: p.detach().clone(), X: p.detach().clone(), STEPS: steps}
        for follower in self.attached:
            follower.accept(begun)

    @torch._disable_dynamo
    def _average(self) -> None:
        """Take the weights for the next z, and move x towards it."""
        for group in self.param_groups:
            for parameter in group["params"] if float(group.get("lr", 1.0)) else ():
                if entry := self._points.get(parameter):
                    entry[STEPS] += 1
                    local(entry[Z]).copy_(local(parameter))
                    local(entry[X]).lerp_(local(parameter), (_POWER + 1) / (float(entry[STEPS]) + _POWER))

    @torch._disable_dynamo
    def _put(self, training: bool) -> None:
        """Put y in the weights, or x with every promise of the constraints kept."""
        for parameter, entry in self._begun().items():
            local(parameter).copy_(self._between(entry) if training else local(entry[X]))
        for follower in self.attached:
            if not training:
                follower.bring_averages()
            follower.placed()  # in a step, or just now
        self._mode["training"] = training
        self._marks.clear()
        self._marks.update((parameter, mark(parameter)) for parameter in self._begun())

    def _begun(self) -> dict[Tensor, dict[str, Tensor]]:
        """The points of every weight that was moved; until then, also after a step of length 0, it may be loaded."""
        return {parameter: entry for parameter, entry in self._points.items() if float(entry[STEPS])}

    def _between(self, entry: dict[str, Tensor]) -> Tensor:
        """The part of y that this process has."""
        return torch.lerp(local(entry[Z]), local(entry[X]), self.beta)

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average in the weights, with every promise of the constraints kept; a second call does nothing."""
        self._require_own_writes()
        if self.training:
            self._put(training=False)

    @torch.no_grad()
    def train(self) -> None:
        """Put the weights back as they were before `eval`, bit for bit; a second call does nothing."""
        self._require_own_writes()
        if not self.training:
            self._put(training=True)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its name, or with its shape if it has none."""
        for group in self.param_groups:
            names = group.get("param_names") or [f"one of shape {tuple(p.shape)}" for p in group["params"]]
            yield from zip(names, group["params"], strict=True)

    @torch._disable_dynamo
    def _require_own_writes(self) -> None:
        """Refuse weights that something else has written: the next step would begin somewhere else, and say nothing.

        The average of a weight that constraints have placed begins anew. Weights that are loaded may be y.
        """
        placed = {parameter: bounds for follower in self.attached for parameter, bounds in follower.placed()}
        begun, written = self._begun(), []
        for name, parameter in self._named():
            if parameter not in begun:
                continue
            known = self._marks.get(parameter)
            as_left = known == mark(parameter) or (known is None and not self.training)
            as_left = as_left or (self.training and torch.equal(local(parameter), self._between(begun[parameter])))
            if parameter in placed and (placed[parameter] or not as_left):
                begun[parameter][STEPS].zero_()
            elif not as_left:
                written.append(name)
        if written:
            raise ValueError(
                f"Averaged: {', '.join(written[:3])}{', ...' if written[3:] else ''} were written since the last step; "
                "load the model's weights before the optimizer's state, or begin a new average at the weights as they "
                "are: Averaged(optimizer.inner)"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer within, with z and x, the same in both modes."""
        self._require_own_writes()
        state = super().state_dict()
        points = {number: self._points.get(parameter, {}) for number, (_, parameter) in enumerate(self._named())}
        joined = {number: {**state["state"].get(number, {}), **own} for number, own in points.items()}
        return {**state, "state": {number: entry for number, entry in joined.items() if entry}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`: train, with y in the weights.

        The state of an optimizer without an average begins a new one at the weights as they are.

        Raises:
            ValueError: The state is of other weights or of another optimizer; nothing was changed.
        """
        if isinstance(self.inner, ConditionalGradient):
            state_dict = by_name(state_dict, self.param_groups)
        places = (key for group in state_dict["param_groups"] for key in group["params"])
        named, within, points = dict(zip(places, self._named(), strict=False)), {}, {}  # torch refuses other counts
        for place, entry in state_dict["state"].items():
            within[place] = {key: value for key, value in entry.items() if key not in (Z, X, STEPS)}
            if Z in entry and place in named:
                name, parameter = named[place]
                if not parameter.shape == entry[Z].shape == entry[X].shape:
                    raise ValueError(
                        f"load_state_dict: the average of {name!r} is of shape {tuple(entry[Z].shape)}, not "
                        f"{tuple(parameter.shape)}; load it into a model of the same sizes"
                    )
                points[parameter] = {key: torch.empty_like(parameter).copy_(entry[key]) for key in (Z, X)}
                points[parameter][STEPS] = entry[STEPS].to("cpu", torch.float64, copy=True)
        super().load_state_dict({**state_dict, "state": {place: entry for place, entry in within.items() if entry}})
        self._points.clear()
        self._points.update(points)
        self._put(training=True)
        self._mode["loaded"] = True  # constraints may get their own state before the next step
