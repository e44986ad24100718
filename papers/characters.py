"""Runs in memory on the characters of a text: of any model, and of a character transformer from a config."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import wellnormed.constraints as constraints
from wellnormed.data.characters import CharacterText
from wellnormed.models.files import build
from wellnormed.train.config import TrainConfig
from wellnormed.train.optimizer import build_optimizer
from wellnormed.train.setup import named_generators
from wellnormed.train.task import M, Task


class TextTask(Task[M]):
    """Next characters of windows at random places of a text, for a model of integers `(B, T)` to logits `(B, T, V)`.

    Args:
        model, optimizer, constraints, steps, generator: As for every `Task`.
        text: What is learned.
        length: Characters of a window, T.
        batch: Windows of a step, B.
    """

    def __init__(
        self,
        model: M,
        optimizer: torch.optim.Optimizer,
        constraints: constraints.Constraints | None,
        steps: int,
        generator: torch.Generator,
        *,
        text: CharacterText,
        length: int,
        batch: int,
    ) -> None:
        super().__init__(model, optimizer, constraints, steps, generator)
        self.text, self.length, self.batch = text, length, batch

    def batch_loss(self) -> Tensor:
        """Cross entropy, in nats a character."""
        starts = torch.randint(len(self.text.train) - self.length, (self.batch,), generator=self.generator)
        windows = self.text.train[starts[:, None] + torch.arange(self.length + 1)]
        windows = windows.to(next(self.model.parameters()).device)
        return F.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


OptimizerOf = Callable[[Any, TrainConfig], tuple[torch.optim.Optimizer, constraints.Constraints | None]]


class CharacterTask(TextTask[Any]):
    """A character transformer, its optimizer and its constraints, as a config says.

    `optimizer_of` makes what moves and holds the weights. A text that is shorter than the model's length, or another
    setting that cannot be had, is a `ValueError`.
    """

    def __init__(
        self,
        config: TrainConfig,
        text: CharacterText,
        device: torch.device,
        optimizer_of: OptimizerOf = build_optimizer,
    ) -> None:
        self.config, self.device = config, device
        if min(len(text.train), len(text.validation)) <= config.model.length:
            raise ValueError(
                f"the text {text.source!r} has {len(text.train)} characters to train on and {len(text.validation)} for "
                f"validation, but model.length={config.model.length} needs more of each; use a longer text "
                "or a smaller length (on the command line: --model.length)"
            )
        self.generators = named_generators(config.seed)
        model = build(config.model, self.generators["initial weights"]).to(device)
        optimizer, held = optimizer_of(model, config)
        order, length = self.generators["order of the data"], config.model.length
        super().__init__(model, optimizer, held, config.steps, order, text=text, length=length, batch=config.batch)
