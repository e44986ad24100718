"""A batch of parameters: its whole-tensor work, which is done at once, and how its weights move, part by part."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellnormed.norms import Norm
from wellnormed.optim.parts import MEMORIES, Direction, Group, Momentum, States, StepRule, outcome
from wellnormed.parallel import Job
from wellnormed.parallel.layout import local_parts


class Numbers(NamedTuple):
    """The numbers of a part that may change from step to step.

    They are tensors without dimensions where the step is compiled, since `torch.compile` takes a number for a constant.
    """

    step: float | Tensor
    """Learning rate times radius."""
    momentum: float | Tensor
    """The share of the momentum that stays."""
    kept: float | Tensor | None
    """1 minus the decay of this step; None for 1."""
    factor: float | Tensor | None
    """The weights lose `factor` times their directions: usually learning rate times radius. None for 0."""

    @classmethod
    def of(cls, one: "Moved") -> "Numbers":
        """The numbers of a parameter's coming step."""
        group, kept, factor = one.group, 1.0, float(one.group["lr"] > 0)
        if one.direction.returns == "direction":
            kept, factor = one.rule.shares(group, one.radius, one.largest)
        step = float(group["lr"]) * one.radius
        return cls(step, group["momentum"], None if kept == 1 else kept, None if factor == 0 else factor)

    def as_tensors(self) -> "Numbers":
        """These numbers as 0-d float64 CPU tensors, so that `torch.compile` does not specialise on their values."""
        return Numbers(*(number if number is None else _as_tensor(number) for number in self))  # pyrefly: ignore


class Moved(NamedTuple):
    """A parameter that moves along a direction, and what its step is made of."""

    name: str
    parameter: Tensor
    group: Group
    rule: StepRule
    norm: Norm
    direction: Direction
    radius: float
    largest: float | None
    """The bound on the norm of its direction; None without one."""

    @property
    def part(self) -> Hashable:
        """Equal for parameters that move by the same numbers."""
        return id(self.group), self.radius

    def alike(self) -> tuple[Norm, Direction, Hashable]:
        """Equal for parameters whose directions are computed at once."""
        apart = None if self.direction.same_at_any_rate else self.part
        return self.norm, self.direction, id(self.parameter) if self.group["memory"] == "gradient" else apart


class Part(NamedTuple):
    """Parameters of a batch that move by the same numbers: those of one group and one radius."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    group: Group
    rule: StepRule
    direction: Direction
    numbers: Numbers

    @property
    def memory(self) -> Momentum:
        """Where the momentum is kept."""
        return MEMORIES[self.group["memory"]]

    def seen(self, states: States) -> dict[str, list[Tensor]]:
        """What a direction may see of each parameter, by name, with the momentum brought up to date."""
        gradients = self.gradients
        if self.group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        momentum, ahead = gradients, self.group["nesterov"]
        if self.rule.averages == "gradients":
            momentum = self.memory.average(gradients, self.parameters, states, self.numbers.momentum, ahead)
        return {"gradient": gradients, "weight": self.parameters, "momentum": momentum}

    def move(self, states: States, directions: list[Tensor], *kept_tensors: list[Tensor]) -> None:
        """Move the weights by what the job has computed, and remember what their directions keep."""
        for key, tensors in zip(self.direction.keeps, kept_tensors, strict=True):
            self._write([states[parameter][key] for parameter in self.parameters], tensors)
        momentum, factor = self.numbers.momentum, self.numbers.factor
        if self.direction.returns == "weight":
            if factor is not None:
                self._write(self.parameters, directions)
        else:
            if self.rule.averages == "directions":
                directions = self.memory.average(directions, self.parameters, states, momentum)
            if self.numbers.kept is not None:
                torch._foreach_mul_(self.parameters, self.numbers.kept)
            if isinstance(factor, Tensor):
                torch._foreach_sub_(self.parameters, torch._foreach_mul(directions, factor))
            elif factor is not None:
                torch._foreach_add_(self.parameters, directions, alpha=-factor)
        self.memory.after_step(self.gradients, momentum)

    def _write(self, targets: list[Tensor], values: list[Tensor]) -> None:
        torch._foreach_copy_(local_parts(targets), local_parts(values))


class Batch(NamedTuple):
    """Parameters that share norm, direction, shape and layout, so that their directions are computed at once."""

    norm: Norm
    direction: Direction
    parts: list[Part]

    def make_state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Make the state of parameters that lack some."""
        for part in self.parts:
            kept = part.memory.state
            for parameter in part.parameters:
                for key in kept:
                    if key not in states[parameter]:
                        states[parameter][key] = torch.zeros_like(parameter)
                for key in self.direction.keeps:
                    if key not in states[parameter]:
                        states[parameter][key] = self.direction.start(key, parameter, self.norm)

    def job(self, states: States) -> Job:
        """The work on whole tensors: it computes the directions, and brings what they keep of each weight up to date.

        Of the gradients and the weights only those that the direction looks at become part of the job.
        """
        norm, direction, first = self.norm, self.direction, self.parts[0]
        names, keeps = (*direction.sees, "momentum"), direction.keeps
        length, steps = first.numbers.step, first.group["steps"]

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            told = dict(zip((*names, *keeps), tensors, strict=True))
            return outcome(direction, told, norm, length, steps)

        visible = [part.seen(states) for part in self.parts]
        inputs = [[tensor for seen in visible for tensor in seen[name]] for name in names]
        members = [parameter for part in self.parts for parameter in part.parameters]
        inputs += [[states[parameter][key] for parameter in members] for key in keeps]
        return Job(tuple(inputs), function, read_only=len(names) - 1, cubic=norm.measures == "singular values")

    def move(self, states: States, *results: list[Tensor]) -> None:
        """Move the weights by what the job has computed, and remember what their directions keep."""
        first = 0
        for part in self.parts:
            piece = slice(first, first := first + len(part.parameters))
            part.move(states, *(tensors[piece] for tensors in results))


def _as_tensor(number: float | Tensor) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device="cpu")
