"""Runs in memory on the characters of a text, and the loss over a split of it, of any model.

`_tokens.token_task` makes the runs that a config says.
"""

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed.constraints as constraints
from wellnormed.data.characters import CharacterText
from wellnormed.train.language import TOKENS_AT_ONCE
from wellnormed.train.task import M, Task

Precision = Literal["float32", "bfloat16"]


class TextTask(Task[M]):
    """Next characters of windows at random places of a text, for a model of integers `(B, T)` to logits `(B, T, V)`.

    Args:
        model, optimizer, constraints, steps, generator: As for every `Task`.
        text: The text that is learned.
        length: Characters of a window, T.
        batch: Windows of a step, B.
        precision: Of the model's products while it trains, by autocast. Weights keep their own.
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
        precision: Precision = "float32",
    ) -> None:
        super().__init__(model, optimizer, constraints, steps, generator)
        self.text, self.length, self.batch, self.precision = text, length, batch, precision

    def batch_loss(self) -> Tensor:
        """Cross entropy, in nats a character."""
        starts = torch.randint(len(self.text.train) - self.length, (self.batch,), generator=self.generator)
        return self.loss_of(self.text.train, starts)

    def loss_of(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """The same over the windows of a split that begin at these places."""
        windows = tokens[starts[:, None] + torch.arange(self.length + 1)]
        windows = windows.to(next(self.model.parameters()).device)
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor, length: int) -> float:
    """Mean cross entropy, in nats a token, over the non-overlapping windows of `length` tokens of a split (int64).

    Every token but the first is predicted once, the last window being shorter. The model maps integers `(B, T)` to
    logits `(B, T, symbols)`; call `eval` where modes differ.
    """
    if len(tokens) < 2:
        raise ValueError(f"the split has {len(tokens)} tokens, but one prediction needs 2; use a longer text")
    device = next(model.parameters()).device
    count = len(tokens) - 1
    whole = count // length * length
    at_once = length * max(1, TOKENS_AT_ONCE // length)
    total = 0.0
    # whole windows, so many at once, and what is left
    for start, stop in pairwise(sorted({*range(0, whole, at_once), whole, count})):
        logits = model(tokens[start:stop].reshape(-1, min(length, stop - start)).to(device))
        targets = tokens[start + 1 : stop + 1].to(device)
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"))
    return total / count
