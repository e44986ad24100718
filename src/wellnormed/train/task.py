"""A training run in memory, of any model: its batches, what moves and holds its weights, and the loop over it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from wellnormed.constraints import Constraints
from wellnormed.models.files import load_weights
from wellnormed.optim import NonFiniteGradientError
from wellnormed.train.run_folder import Checkpoint
from wellnormed.train.stopping import Requests

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound="Task[Any]")


class DivergedError(ValueError):
    """A loss or a gradient is not finite; the weights are as they were before the step."""


class Task(ABC, Generic[M]):
    """Everything that one step changes. A subclass builds it from a config, and says what the loss of a batch is.

    Args:
        model: What is trained.
        optimizer: What moves its weights. The learning rate of every group is where it begins, times `rate_factor`.
        constraints: What holds its weights after every step; None for nothing.
        steps: Steps of the whole run.
        generator: Source of all draws during training, on the CPU, so that they are the same on every device.
    """

    def __init__(
        self,
        model: M,
        optimizer: torch.optim.Optimizer,
        constraints: Constraints | None,
        steps: int,
        generator: torch.Generator,
    ) -> None:
        self.model, self.optimizer, self.constraints = model, optimizer, constraints
        self.steps, self.generator, self.step = steps, generator, 0
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.requests = Requests()
        """What a run is asked for from outside."""

    @abstractmethod
    def batch_loss(self) -> Tensor:
        """The loss of the next batch, with its graph."""

    def backward(self) -> float:
        """Leave the gradient of the next batch's loss in the parameters, and return the loss."""
        loss = self.batch_loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.requests.agreed = self.requests.own()
        return float(loss.detach())

    def rate_factor(self, step: int) -> float:
        """What the learning rates are multiplied by in a step, counted from 0: a linear fall to 0."""
        return 1 - step / self.steps

    def advance(self) -> float:
        """Take one step, and return the loss before it. A loss or gradient that is not finite is a `DivergedError`."""
        value = self.backward()
        if not math.isfinite(value):
            raise DivergedError(
                f"step {self.step + 1}: the loss is {value}; {_first_not_finite(self.model)}. No weight was changed; "
                "lower the learning rate (on the command line: --learning-rate)"
            )
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.rate_factor(self.step)
        try:
            self.optimizer.step()
        except NonFiniteGradientError as error:
            raise DivergedError(f"step {self.step + 1}: {error}") from error
        self.step += 1
        return value

    def require_caps(self) -> float:
        """Prove every norm, and return the largest over its cap; one above its cap is a `ValueError`."""
        ratios = {} if self.constraints is None else self.constraints.proved_ratios()
        if not ratios:
            return 0.0
        worst = max(ratios, key=lambda name: ratios[name])
        if not ratios[worst] <= 1:
            raise ValueError(
                f"step {self.step}: the norm of {worst!r} may be {ratios[worst]:.9f} times its cap, so "
                "its constraint broke its promise; please report this run"
            )
        return ratios[worst]

    def checkpoint(self) -> Checkpoint:
        """Everything that the next step depends on."""
        content = self.optimizer.state_dict()
        state = {f"optimizer.{i}.{key}": t for i, entries in content["state"].items() for key, t in entries.items()}
        assert all(isinstance(value, Tensor) for value in state.values()), "optimizer state is made of tensors"
        state["optimizer.steps"] = torch.tensor([group.get("steps", 0) for group in content["param_groups"]])
        remembered = {} if self.constraints is None else self.constraints.state_dict()
        state |= {f"constraints.{name}": tensor for name, tensor in remembered.items()}
        state["generator.order"] = self.generator.get_state()
        return Checkpoint(self.step, dict(self.model.state_dict()), state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same config; tensors that do not fit are a `ValueError`."""
        load_weights(self.model, checkpoint.weights, f"the checkpoint of step {checkpoint.step}")
        state, content = dict(checkpoint.state), self.optimizer.state_dict()
        self.generator.set_state(state.pop("generator.order"))
        for group, steps in zip(content["param_groups"], state.pop("optimizer.steps").tolist(), strict=True):
            group["steps"] = steps
        entries: dict[int, dict[str, Tensor]] = {}
        remembered: dict[str, Tensor] = {}
        for name, tensor in state.items():
            match name.split("."):
                case "optimizer", index, key:
                    entries.setdefault(int(index), {})[key] = tensor
                case _:
                    remembered[name.removeprefix("constraints.")] = tensor
        self.optimizer.load_state_dict({"state": entries, "param_groups": content["param_groups"]})
        if self.constraints is not None:
            self.constraints.load_state_dict(remembered)
        self.step = checkpoint.step


def fit(task: T, watch: Callable[[T, float], bool | None] | None = None) -> None:
    """Train to the end. `watch` is called after every step, with the loss before it, and ends the run by True."""
    while task.step < task.steps:
        loss = task.advance()
        if watch is not None and watch(task, loss):
            return


def _first_not_finite(model: nn.Module) -> str:
    named = list(model.named_parameters())
    for what, tensors in (("parameter", named), ("gradient of", [(name, p.grad) for name, p in named])):
        for name, tensor in tensors:
            if tensor is not None and not bool(tensor.isfinite().all()):
                return f"the {what} {name!r} holds NaN or infinity"
    return "all gradients are finite"
