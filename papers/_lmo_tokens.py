"""The transformer of Norm-Constrained LMOs (LMO) on FineWeb, by the trainer of `wellnormed train nanogpt`.

A step's gradients add up over parts of its batch, blocks keep only their inputs for the backward pass, and a run
leaves checkpoints in a folder, from which it goes on after it was stopped. Tokens are read in the order of the files,
as in the released code, and products are in bfloat16.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.console import Console
from torch import nn

from papers import _gpt
from papers._gpt import GPT, GPTRun, optimizer_of, rate_factor
from wellnormed._files import read_json
from wellnormed.data.corpus import Corpus
from wellnormed.models.config import ModelConfig
from wellnormed.models.files import BUILDERS
from wellnormed.train.config import TrainConfig
from wellnormed.train.language import LanguageTask
from wellnormed.train.loop import resume, train
from wellnormed.train.ranks import Ranks
from wellnormed.train.run_folder import RunFolder
from wellnormed.train.task import DivergedError, Schedule

DATA = "fineweb10B"
MICRO_BATCH = 8
"""Windows whose activations are held at a time: with 1,024 tokens each, 1.6 GB of logits in float32."""
VALIDATION = 10 * 2**20  # tokens, as in the released code


@dataclass(frozen=True)
class LMOConfig:
    """Shapes of the transformer of LMO on tokens."""

    architecture: Literal["lmo"] = "lmo"
    """The kind of model that this configures."""
    vocabulary_size: int = 50304
    """Symbols; as in the released code, those of GPT-2, rounded up."""
    length: int = 1024
    """Tokens of context."""
    width: int = 768
    """Entries of a token's vector."""
    head_width: int = 128
    """Entries of an attention head."""
    blocks: int = 12
    """Pairs of attention and feed-forward layers."""


@dataclass(frozen=True)
class LMOTrainConfig(TrainConfig):
    """A run of that transformer."""

    model: ModelConfig | LMOConfig = field(default_factory=LMOConfig)  # pyrefly: ignore[bad-override]
    """Shapes of the model."""
    cell: GPTRun = field(default_factory=lambda: GPTRun("SCG", 768, 12, 2.0**-12, seed=0, **_gpt.FINEWEB))
    """The cell of the experiment."""


class LMOTask(LanguageTask):
    """Its training, by the optimizer and the rates of its cell."""

    config_type: ClassVar[type[TrainConfig]] = LMOTrainConfig
    command: ClassVar[str] = "papers"

    def __init__(
        self, config: LMOTrainConfig, corpus: Corpus, ranks: Ranks, schedule: Schedule | None = None
    ) -> None:  # fmt: skip
        def optimizer(model: Any, _: TrainConfig, group: Any) -> tuple[torch.optim.Optimizer, None]:
            return optimizer_of(model, config.cell, group), None

        self.cell = config.cell
        super().__init__(config, corpus, ranks, optimizer, schedule)

    def rate_factor(self, step: int) -> float:
        """The factor of the cell, with Adam's warm-up."""
        return rate_factor(self.cell, step)


def config_of(cell: GPTRun, device: torch.device) -> LMOTrainConfig:
    """The training run of a cell."""
    if device.index:
        raise ValueError(f"--device {device} must be cuda or cpu; choose a GPU by CUDA_VISIBLE_DEVICES={device.index}")
    model = LMOConfig(length=cell.length, width=cell.width, head_width=cell.head_width, blocks=cell.blocks)
    return LMOTrainConfig(
        cell=cell, model=model,
        data=DATA, shuffle=False, steps=cell.steps, batch=cell.batch, micro_batch=min(MICRO_BATCH, cell.batch),
        recompute=True, parallel="fsdp", precision="bfloat16", learning_rate=cell.lr, seed=cell.seed,
        constraint="none", validation_tokens=VALIDATION, checkpoint_every=500, certify="no", attack_steps=0,
        sample_tokens=0, device="cuda" if device.type == "cuda" else "cpu",
    )  # fmt: skip


def run(cell: GPTRun, device: torch.device, folder: Path) -> dict[str, Any]:
    """Validation loss at the end, as `_gpt.run`; a run on tokens goes on from what it left in the folder."""
    if cell.text != "fineweb":
        return _gpt.run(cell, device)
    files, quiet = RunFolder(folder), Console(quiet=True)
    try:
        if files.config_file.exists():
            resume(folder, quiet, task_of=LMOTask)
        else:
            train(config_of(cell, device), folder, quiet, task_of=LMOTask)
    except ValueError as error:
        if isinstance(error.__cause__, DivergedError):
            return {"loss": None}
        raise
    loss = read_json(files.results_file, "remove the folder, and the cell is run again", sealed=True)["validation_loss"]
    return {"loss": loss if math.isfinite(loss) else None}


def _build(config: LMOConfig, generator: torch.Generator | None) -> nn.Module:
    """The model with torch's own start, which draws from the global generator."""
    cell = GPTRun("SCG", config.width, config.blocks, 1.0, 1, 1, 0, config.length, config.head_width, "fineweb")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0 if generator is None else generator.initial_seed())
        model = GPT(config.vocabulary_size, cell)
    model.config = config  # pyrefly: ignore[bad-argument-type]
    return model


BUILDERS[LMOConfig] = _build
