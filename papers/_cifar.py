"""The network of Training Transformers with Enforced Lipschitz Bounds (LT) on CIFAR-10, as a task.

3072-256-256-10, ReLU, no biases, pixels in [0, 1], no augmentation, rates that fall linearly to 0, the last matrix zero
at the start (appendix F) and the others orthogonal. As in the released code, each of the three layers of equal mass has
a third of the learning rate, and of the weight decay, and momentum is an average that keeps 0.9, without Nesterov's
step. There (`CifarRun.released`) it is the first matrix that starts at zero, and the slope of ReLU at zero is 1/2;
torch's is 0, with which such a network never moves.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from papers._caps_as_published import HardCapAsPublished, SoftCapAsPublished
from papers._lt_methods import Method, constraint_of
from papers._table import ADDED
from papers.cifar10 import load_cifar10
from wellnormed.constraints import Constraint, Constraints
from wellnormed.routing import assign_norms
from wellnormed.train.task import Task

OptimizerName = Literal["adamw", "muon"]
AsPublished = Literal["soft cap as published", "hard cap as published"]
"""Caps as the released code has them (`papers._caps_as_published`)."""
LAYERS = 3
BETAS = (0.9, 0.95)
EPOCH = 97
"""Steps of 512 images; the last ones of an epoch fill no batch and are left out."""
CLIPPED = 3.0
"""The norm, per unit of the rate, in which AdamW's steps are clipped for a soft cap, which needs their bound."""
WITHIN = 0.01
"""How far an accuracy may be from the published one."""


@dataclass(frozen=True)
class CifarRun:
    """One training run."""

    optimizer: OptimizerName
    method: Method | AsPublished
    strength: float
    """The cap in RMS -> RMS units, or the decay."""
    lr: float
    steps: int
    batch: int = 512
    width: int = 256
    seed: int = 0
    released: bool = field(default=False, metadata=ADDED)
    """Whether the start, the order of batches and AdamW are those of LT's code."""


class CifarTask(Task[nn.Sequential]):
    """Batches without replacement, epoch after epoch; the last images of an epoch that fill no batch are left out."""

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        constraints: Constraints | None = None,
        *,
        steps: int,
        batch: int,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(model, optimizer, constraints, steps, torch.Generator().manual_seed(seed + 2**32))
        self.train, self.test = (pixels_and_labels(split, device) for split in ("train", "test"))
        self.batch, self.order, self.epoch = batch, torch.empty(0, dtype=torch.long), 0

    def batch_loss(self) -> Tensor:
        """Cross entropy."""
        pixels, labels = self.next_batch()
        return F.cross_entropy(self.model(pixels), labels)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Images and classes."""
        drawn = self.next_numbers()
        pixels, labels = (part[drawn.to(part.device)] for part in self.train)
        return pixels, labels

    def next_numbers(self) -> Tensor:
        """The numbers of the next batch's images; `epoch` counts, from 1, the orders that were drawn."""
        if len(self.order) < self.batch:
            self.order = torch.randperm(len(self.train[1]), generator=self.generator)
            self.epoch += 1
        drawn, self.order = self.order[: self.batch], self.order[self.batch :]
        return drawn

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy over all test images, and the product of the proved RMS -> RMS norms."""
        norms = self.norms()
        return {**self.score(*self.test), "lipschitz": math.prod(norms), "norms": norms}

    @torch.no_grad()
    def score(self, pixels: Tensor, labels: Tensor) -> dict[str, float]:
        """Loss and accuracy on these images."""
        logits = torch.cat([self.model(part) for part in pixels.split(2000)])
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(accuracy)}

    @torch.no_grad()
    def norms(self) -> list[float]:
        """The proved norms of the three matrices."""
        return [float(wn.Spectral().upper_bound(weight.detach())) for weight in self.model.parameters()]


class ConstantRate(CifarTask):
    """The same with a learning rate that stays."""

    def rate_factor(self, step: int) -> float:
        """The rate of the first step."""
        return 1.0


class AsReleased(CifarTask):
    """The same on batches that come in one order in every epoch, with AdamW without bias correction.

    torch's AdamW divides its averages in step t by `1 - beta^t`; a learning rate times `(1 - beta_1^t) / sqrt(1 -
    beta_2^t)` takes that back, up to Adam's eps. It changes the weight decay as well, which LT's code leaves
    alone: by -55, -39, -28 and -14% in steps 1, 2, 3 and 5, by up to a tenth more from step 9 to 100, and the weights
    by less than 0.1% in all.
    """

    order_of_all: Tensor | None = None

    def rate_factor(self, step: int) -> float:
        """A linear fall to 0, of AdamW without what torch corrects."""
        first, second = (1 - beta ** (step + 1) for beta in BETAS)
        adam = isinstance(self.optimizer, torch.optim.AdamW)
        return super().rate_factor(step) * (first / second**0.5 if adam else 1.0)

    def next_numbers(self) -> Tensor:
        """The numbers of the next batch's images."""
        if self.order_of_all is None:
            self.order_of_all = torch.randperm(len(self.train[1]), generator=self.generator)
        if len(self.order) < self.batch:
            self.order = self.order_of_all
        return super().next_numbers()


class HalfSlope(nn.Module):
    """ReLU with the slope 1/2 at zero."""

    def forward(self, x: Tensor) -> Tensor:
        """The larger of x and 0; torch shares the gradient between two that are equal."""
        return torch.maximum(x, torch.zeros_like(x))


def mlp(width: int) -> nn.Sequential:
    """3072-width-width-10, ReLU, no biases, at torch's start."""
    first, second, last = (nn.Linear(a, b, bias=False) for a, b in pairwise((3072, width, width, 10)))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last)


def lt_start(run: CifarRun) -> nn.Sequential:
    """The network at its start: one matrix zero, the others orthogonal."""
    model, generator = mlp(run.width), torch.Generator().manual_seed(run.seed)
    if run.released:
        model[2] = model[4] = HalfSlope()
    others = list(model.parameters())
    nn.init.zeros_(others.pop(0 if run.released else -1))
    for weight in others:
        wn.Spectral().initialize_(weight.data, generator)
    return model


def lt_adamw(model: nn.Module, run: CifarRun) -> torch.optim.Optimizer:
    """AdamW as torch has it, with LT's share of the weight decay for each layer."""
    decay = run.strength / LAYERS if run.method == "weight decay" else 0.0
    return torch.optim.AdamW(model.parameters(), lr=run.lr, betas=BETAS, eps=1e-12, weight_decay=decay)


def lt_task(run: CifarRun, device: torch.device) -> CifarTask:
    """A run of LT, its matrices held by the constraint of its method."""
    model = lt_start(run).to(device)
    norms = assign_norms(model, recipe="modular")
    if run.optimizer == "muon":
        rate, decay = run.lr / LAYERS, run.strength if run.method == "weight decay" else 0.0
        optimizer = wn.Scion(norms, lr=rate, momentum=BETAS[0], nesterov=False, weight_decay=decay)
    else:
        optimizer = lt_adamw(model, run)
        if run.method == "soft cap":
            optimizer = wn.optim.Clipped(optimizer, CLIPPED, norms=norms)
    constraint = _constraint(run)
    held = None if constraint is None else wn.constrain(optimizer, {"*": constraint}, norms=norms)
    kind = AsReleased if run.released else CifarTask
    return kind(model, optimizer, held, steps=run.steps, batch=run.batch, seed=run.seed, device=device)


def _constraint(run: CifarRun) -> Constraint | None:
    match run.method:
        case "soft cap as published":
            return SoftCapAsPublished(run.strength)
        case "hard cap as published":
            return HardCapAsPublished(run.strength)
        case method:
            return constraint_of(method, run.strength)


@cache
def pixels_and_labels(split: Literal["train", "test"], device: torch.device) -> tuple[Tensor, Tensor]:
    """All images of a split in [0, 1], and their classes."""
    images = load_cifar10(split)
    return (images.pixels.to(device) / 255).float(), images.labels.to(device)
