"""Training runs on the characters of a text: of any model, and of a character transformer from a config."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import wellnormed.constraints as constraints
from wellnormed.data.characters import CharacterText
from wellnormed.models.files import CharacterModel, build
from wellnormed.norms import assign_norms
from wellnormed.optim import Scion
from wellnormed.train.config import SEED, TrainConfig
from wellnormed.train.task import M, Task
from wellnormed.train.weights import rate_factors, weight_constraints


def named_generators(seed: int) -> dict[str, torch.Generator]:
    """One generator for each use, so that more draws for one never move another."""
    allowed, must = SEED
    if not allowed(seed):
        raise ValueError(f"seed={seed} must {must}; choose another (on the command line: --seed)")
    names = ("initial weights", "order of the data", "sample", "lower bound")
    return {name: torch.Generator().manual_seed(seed * len(names) + i) for i, name in enumerate(names)}


def build_optimizer(model: CharacterModel, config: TrainConfig) -> tuple[Scion, constraints.Constraints]:
    """The optimizer of a run, with the constraints that hold after each of its steps."""
    optimizer = Scion(
        assign_norms(model, recipe="modular"),
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=True,
        radius=1.0,  # these models start in their norms
        lr_factors=rate_factors(model, config),
    )
    return optimizer, constraints.constrain(optimizer, weight_constraints(model, config))


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


class CharacterTask(TextTask[CharacterModel]):
    """A character transformer, its optimizer and its constraints, as a config says.

    `optimizer_of` makes what moves and holds the weights. A text that is shorter than the model's length, or another
    setting that cannot be had, is a `ValueError`.
    """

    def __init__(
        self,
        config: TrainConfig,
        text: CharacterText,
        device: torch.device,
        optimizer_of: Callable[[CharacterModel, TrainConfig], tuple[Scion, constraints.Constraints]] = build_optimizer,
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
