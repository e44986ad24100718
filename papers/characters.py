"""Runs in memory on the characters of a text, of any model; `_tokens.token_task` makes those that a config says."""

import torch
import torch.nn.functional as F
from torch import Tensor

import wellnormed.constraints as constraints
from wellnormed.data.characters import CharacterText
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
        return self.loss_of(self.text.train, starts)

    def loss_of(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """The same over the windows of a split that begin at these places."""
        windows = tokens[starts[:, None] + torch.arange(self.length + 1)]
        windows = windows.to(next(self.model.parameters()).device)
        return F.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
