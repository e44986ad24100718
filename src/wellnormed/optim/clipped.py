"""Any optimizer with a proved step: what it moves is brought into a ball of the weight's norm."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellnormed._inputs import require_numbers
from wellnormed._ranges import NOT_NEGATIVE, POSITIVE
from wellnormed.optim.around import Around, stepping
from wellnormed.optim.parts import Group, evaluated
from wellnormed.optim.validation import gradient_sizes, others, refuse_gradient, refuse_not_finite, warn_of_unmoved
from wellnormed.parallel import Job, Placement
from wellnormed.parallel.layout import local, local_parts
from wellnormed.parallel.placement import in_buckets
from wellnormed.routing import AssignedParameter, Assignment, assign_norms
from wellnormed.routing.places import Places

_INSIDE = 1 - 2e-5
"""The share of the bound that a projection aims at: it ends at most 1e-5 above in float32."""


class Clipped(Around):
    """An optimizer whose step has at most the norm `lr * gain`, by singular value, column or entry (SPECTRA).

    `w <- (1 - weight_decay lr) w + project(s, lr gain)`, where `s` is the step that the optimizer within makes, and
    `project` brings it into the ball of the weight's norm: singular values of matrices are capped, columns of tables
    and vectors shortened, entries clamped. Jiang, Semenov and Stich (2026), algorithm 1, caps matrices alone; their
    released code replaces the cap by a softer function, which has the same bound. So every constraint holds for AdamW
    as well, also those that need a bound on the step, as `SoftCap`, and certificates of `within` hold.

    Args:
        optimizer: It makes the steps: any optimizer of torch whose groups have an `lr`, without a decay of its own
            (what it decays is a part of its step, and is clipped with it).
        gain: The largest norm of a step of rate 1, in units of each weight's norm. Steps of Scion have 1. Entries of
            AdamW's steps are about 1, so that of `(d_out, d_in)` weights the norm is up to `d_in`.
        norms: The model, or what `assign_norms` returned. Parameters without a norm are moved as they are.
        weight_decay: The fraction of every weight that is clipped, per unit of rate, removed in a step.

    Raises:
        ValueError: A number is out of range, or the optimizer has constraints of its own. A gradient held NaN or
            infinity, and nothing was changed.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(8, 8, bias=False)
        >>> optimizer = wn.optim.Clipped(torch.optim.AdamW(layer.parameters(), lr=0.01), gain=2.0, norms=layer)
        >>> constraints = wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)})
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     layer(torch.randn(4, 8)).sum().backward()
        ...     optimizer.step()
        >>> constraints.proved_ratios()["weight"] <= 1
        True
    """

    _kept = ("inner", "gain", "weight_decay", "assignment", "attached", "_left_out")
    gain: float
    weight_decay: float
    assignment: Assignment
    attached: list[Any]
    _left_out: set[str]

    def __init__(
        self, optimizer: torch.optim.Optimizer, gain: float, *, norms: nn.Module | Assignment, weight_decay: float = 0.0
    ) -> None:
        require_numbers("Clipped: ", {"gain": gain}, POSITIVE)
        require_numbers("Clipped: ", {"weight_decay": weight_decay}, NOT_NEGATIVE)
        self._require_optimizer(optimizer)
        if isinstance(optimizer, Around):
            kind = type(optimizer).__name__
            raise ValueError(f"Clipped: {kind} moves weights beside its steps; pass {kind}(Clipped(...)) instead")
        assignment = assign_norms(norms) if isinstance(norms, nn.Module) else norms
        if not isinstance(assignment, Assignment):
            raise ValueError(f"Clipped: norms must be the model or its Assignment, got {norms!r}; pass norms=model")
        known = {a.parameter for a in assignment}
        members = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if unknown := [p for p in members if p not in known]:
            raise ValueError(
                f"Clipped: a parameter of shape {tuple(unknown[0].shape)} of the optimizer is not in norms=; assign "
                "norms to the same model, after it was moved, wrapped or unfrozen"
            )
        left_out = set(others(assignment.model(), set(members)))  # which other optimizers move
        values = (optimizer, float(gain), float(weight_decay), assignment, [], left_out)
        self.__setstate__(dict(zip(self._kept, values, strict=True)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.placement = Placement({a.name: a.parameter for a in self.assignment})
        self.places = Places(self.assignment.model)
        self._read: list[Any] = []
        self._settings = object()
        self.register_step_post_hook(lambda own, *_: own._tell("sweep"))  # of what a subclass's step has written

    def __str__(self) -> str:
        return f"Clipped(gain={self.gain:g}, weight_decay={self.weight_decay:g}): steps of\n{self.inner}"

    def _tell(self, what: str, *arguments: Any) -> None:
        for follower in self.attached:
            getattr(follower, what)(*arguments)

    def add_param_group(self, param_group: Group) -> None:
        """Refuse parameters that come later, whose norms nothing says."""
        raise ValueError("Clipped: parameters come with the optimizer; make both again with all of them")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`; constraints prove every weight at the next step."""
        super().load_state_dict(state_dict)
        self._tell("doubt")

    @property
    def settings(self) -> object:
        """Another object after any change of the rates and of what they belong to."""
        read = [self.gain, self.weight_decay]
        read += [(float(group["lr"]), *map(id, group["params"])) for group in self.param_groups]
        if read != self._read:
            self._read, self._settings = read, object()
        return self._settings

    def _clipped(self) -> list[tuple[AssignedParameter, float]]:
        """The parameters whose steps are brought into a ball, and their rates now."""
        rates = {p: float(group["lr"]) for group in self.param_groups for p in group["params"]}
        members = [a for a in self.assignment if a.parameter in rates]
        return [(a, rates[a.parameter]) for a in members if a.norm is not None and a.norm.measures is not None]

    def update_norms(self) -> dict[str, float | None]:
        """The bound on the norm of the coming step of every parameter, by name; None where it has no norm."""
        return {**{a.name: None for a in self.assignment}, **{a.name: rate * self.gain for a, rate in self._clipped()}}

    def decay(self, name: str) -> float:
        """The share of the named parameter that the next step removes."""
        return next(rate * self.weight_decay for a, rate in self._clipped() if a.name == name)

    def attach(self, constraints: Any) -> None:
        """Have constraints called in every step. `constrain` calls this."""
        self.attached.append(constraints)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer within, brought into the balls; returns the closure's value, or None."""
        loss = evaluated(closure)
        self._step()
        return loss

    @torch._disable_dynamo
    def _step(self) -> None:
        if getattr(stepping(self.inner), "attached", ()):
            raise ValueError(
                "Clipped: the optimizer within has constraints, which would act before its step is clipped and not "
                "hold after it; call remove() on them, and constrain this optimizer"
            )
        clipped = self._clipped()
        given = [(a, rate) for a, rate in clipped if a.parameter.grad is not None]
        if shares := [rate * self.weight_decay for _, rate in clipped if rate * self.weight_decay > 1]:
            raise ValueError(f"Clipped: weight_decay times lr is {shares[0]:g} and must be at most 1: it is a fraction")
        gradients = {a.name: cast(Tensor, a.parameter.grad) for a, _ in given}
        for a, _ in given:
            refuse_gradient(a.name, a.parameter, gradients[a.name], self.state.get(a.parameter, {}))
        refuse_not_finite(gradient_sizes(gradients), 0)
        self.places.look()
        held = {p for group in self.param_groups for p in group["params"]}
        warn_of_unmoved(others(self.assignment.model(), held), self._left_out)
        for follower in self.attached:
            follower.before(self, follower.changes())
        starts: dict[Tensor, Tensor] = {a.parameter: a.parameter.detach().clone() for a, _ in clipped}
        known = {a.name for a, _ in given}
        self.inner.step()
        moved = self._moved([a for a, _ in clipped if a.name not in known], starts)
        clipped = [(a, rate) for a, rate in clipped if a.name in known or moved[a.name]]
        self._refuse_ruined({a.name: a.parameter for a, _ in clipped}, starts)
        buckets = list(in_buckets(clipped, lambda one: one[0].parameter, lambda one: (one[0].norm, one[1])))
        jobs = (self._job(norm, rate, [a.parameter for a, _ in members], starts) for (norm, rate), members in buckets)
        for (_, members), (weights,) in zip(buckets, self.placement.run(jobs), strict=True):
            torch._foreach_copy_(local_parts([a.parameter for a, _ in members]), local_parts(weights))
        self._tell("after", self)

    def _refuse_ruined(self, weights: dict[str, Tensor], starts: dict[Tensor, Tensor]) -> None:
        """Put the weights back and refuse a step to NaN or infinity, which no projection brings into a ball."""
        if ruined := [name for name, size in gradient_sizes(weights).items() if not size < math.inf]:
            for parameter, start in starts.items():
                local(parameter).copy_(local(start))
            raise ValueError(
                f"Clipped: {type(self.inner).__name__} moved {', '.join(ruined[:5])} to NaN or infinity, by finite "
                "gradients; its weights were put back. Lower the learning rate, or pass it a larger eps"
            )

    def _moved(self, others: list[AssignedParameter], starts: dict[Tensor, Tensor]) -> dict[str, float]:
        """Which parameters without a gradient the optimizer within has moved in any process: 1 for those, 0 else."""
        same = {a.name: torch.equal(local(a.parameter), local(starts[a.parameter])) for a in others}
        return self.placement.agree({}, {name: float(not unmoved) for name, unmoved in same.items()})[1] if same else {}

    def _job(self, norm: Any, rate: float, parameters: list[Tensor], starts: dict[Tensor, Tensor]) -> Job:
        def moved(before: Tensor, after: Tensor) -> tuple[Tensor]:
            wide = torch.promote_types(before.dtype, torch.float32)
            start = before.to(wide)
            kept = start * (1 - rate * self.weight_decay)
            radius = rate * self.gain * _INSIDE
            step = norm.project(after.to(wide) - start, radius) if radius else 0.0
            return ((kept + step).to(after.dtype),)

        cubic = norm.measures == "singular values"
        return Job(([starts[p] for p in parameters], parameters), moved, read_only=1, cubic=cubic)
