"""nanoGPT and its training, from torch's layers: the unconstrained peer, with layer norms and AdamW.

Pre-norm blocks, learned positions, tied embedding, no biases; learning rate 1e-3 with 100 steps of warm-up and cosine
decay to 1e-4, betas 0.9 and 0.99, weight decay 0.1 on matrices, gradients clipped at 1.0.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from papers._resumed import fit_resumed
from papers._shakespeare import scores, shakespeare
from papers.characters import TextTask
from wellnormed.data.characters import CharacterText

WARM_UP = 100


class PlainGPT(nn.Module):
    """A decoder-only transformer with layer norms, as nanoGPT has it.

    Shape: integers `(B, T)` -> logits `(B, T, vocabulary_size)`.
    """

    def __init__(
        self, vocabulary_size: int, length: int, width: int, heads: int, blocks: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=dropout, activation="gelu", batch_first=True, norm_first=True, bias=False
        )
        layer.dropout = nn.Dropout(0.0)  # nanoGPT drops nothing between the two matrices
        self.blocks = nn.TransformerEncoder(layer, blocks, nn.LayerNorm(width, bias=False), enable_nested_tensor=False)
        self.apply(self._initialize)
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "linear2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * blocks))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.MultiheadAttention):
            nn.init.normal_(module.in_proj_weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        return F.linear(self.blocks(x, mask=mask, is_causal=True), self.tokens.weight)


class NanoGPTTask(TextTask[PlainGPT]):
    """Its training."""

    def __init__(self, model: PlainGPT, text: CharacterText, *, steps: int, length: int, batch: int, seed: int) -> None:
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=1e-3,
            betas=(0.9, 0.99),
        )
        optimizer.register_step_pre_hook(self._clip)
        generator = torch.Generator().manual_seed(seed)
        super().__init__(model, optimizer, None, steps, generator, text=text, length=length, batch=batch)

    def _clip(self, *_: Any) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def rate_factor(self, step: int) -> float:
        """Warm-up, then cosine decay."""
        if step < WARM_UP:
            return (step + 1) / (WARM_UP + 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, self.steps - WARM_UP)))


@dataclass(frozen=True)
class NanoGPTRun:
    """One training run; its published loss is the best of the evaluations during training."""

    steps: int
    batch: int
    length: int
    width: int
    heads: int
    blocks: int
    dropout: float
    evaluations: int
    seed: int


def best_scores(run: NanoGPTRun, device: torch.device, folder: Path) -> dict[str, float]:
    """Train, or go on from the folder, and return the scores of the evaluation with the lowest loss on the split."""
    torch.manual_seed(run.seed)
    text, every, found = shakespeare(), run.steps // run.evaluations, []
    model = PlainGPT(len(text.symbols), run.length, run.width, run.heads, run.blocks, run.dropout).to(device)
    task = NanoGPTTask(model, text, steps=run.steps, length=run.length, batch=run.batch, seed=run.seed)

    def watch(task: NanoGPTTask, _: float) -> None:
        if task.step % every == 0:
            found.append(scores(task.model, run.length))
            task.model.train()

    fit_resumed(task, folder, watch, found)
    return min(found, key=lambda result: result["loss"])
