"""A training run in memory, of any model: its batches, optimizer and constraints, and the loop over steps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from wellnormed.constraints import Constraints
from wellnormed.optim import Averaged, NonFiniteGradientError
from wellnormed.train.stopping import Requests

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound="Task[Any]")
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


class DivergedError(ValueError):
    """A loss or a gradient is not finite; the weights are as they were before the step."""


class Task(ABC, Generic[M]):
    """Everything that one step changes. A subclass builds it from a config, and defines the loss of a batch.

    Args:
        model: The module that is trained.
        optimizer: The optimizer of its weights, whose learning rates are the initial ones times `rate_factor`.
        constraints: The constraints on weights after every step; None for no constraint.
        steps: The number of steps of the whole run.
        generator: The source of all draws during training, on the CPU, so that they are the same on every device.
        schedule: Makes a scheduler of torch, which sets the learning rates after every step; by default it multiplies
            those of the optimizer by `rate_factor`.
    """

    def __init__(
        self,
        model: M,
        optimizer: torch.optim.Optimizer,
        constraints: Constraints | None,
        steps: int,
        generator: torch.Generator,
        schedule: Schedule | None = None,
    ) -> None:
        self.model, self.optimizer, self.constraints = model, optimizer, constraints
        self.steps, self.generator, self.step = steps, generator, 0
        self.scheduler = schedule(optimizer) if schedule else LambdaLR(optimizer, self.rate_factor)
        if not isinstance(self.scheduler, LRScheduler) or isinstance(self.scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"schedule returned a {type(self.scheduler).__name__}; return a scheduler of torch.optim.lr_scheduler "
                "that counts steps. ReduceLROnPlateau waits for a metric, which this trainer does not give"
            )
        self.requests = Requests()
        """The requests to the run from outside."""

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
        """The factor on the learning rates in a step, counted from 0: a linear fall to 0."""
        return 1 - step / self.steps

    def learning_rate(self) -> float:
        """The next step's learning rate in the first group that began at the optimizer's `lr`, else in the first."""
        groups = self.optimizer.param_groups
        own = self.optimizer.defaults.get("lr")
        return float(next((g for g in groups if g["initial_lr"] == own), groups[0])["lr"])

    def advance(self) -> float:
        """Take one step, and return the loss before it. A loss or gradient that is not finite is a `DivergedError`."""
        value = self.backward()
        if not math.isfinite(value):
            raise DivergedError(
                f"step {self.step + 1}: the loss is {value}; {_first_not_finite(self.model)}. No weight was changed; "
                "lower the learning rate (on the command line: --learning-rate)"
            )
        try:
            self.optimizer.step()
        except NonFiniteGradientError as error:
            raise DivergedError(f"step {self.step + 1}: {error}") from error
        self.scheduler.step()
        self.step += 1
        return value

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context with the weights to evaluate and publish: their average, if the optimizer keeps one."""
        averages = self.optimizer if isinstance(self.optimizer, Averaged) else None
        if averages:
            averages.eval()
        yield
        if averages:
            averages.train()

    def require_caps(self) -> float:
        """Prove every norm, and return the largest ratio of norm to cap; one above 1 is a `ValueError`."""
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


def fit(task: T, watch: Callable[[T, float], bool | None] | None = None) -> None:
    """Train to the end. `watch`, called after every step with the loss before it, ends the run by returning True."""
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
