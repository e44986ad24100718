"""The transformer that Norm-Constrained LMOs (LMO) trains in section 6, as a task.

It is modded-nanogpt's: rotary positions, RMS norm without gains on the stream and on queries and keys, no biases,
output projections that start at zero. On FineWeb the head shares the embedding's weight and the hidden layer is squared
ReLU; in the released Shakespeare code it has its own, and the hidden layer is GELU. Activations are scaled by
sqrt(2) as there. There is no weight decay, gradients are not clipped, and Adam alone has a warm-up.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from papers._table import ADDED
from papers.characters import TextTask
from wellnormed.data import load_shakespeare
from wellnormed.data.characters import CharacterText
from wellnormed.nn import Rotary
from wellnormed.norms import Sign
from wellnormed.optim import AdamWSettings
from wellnormed.routing import assign_norms, initialize_
from wellnormed.train.task import DivergedError, fit

Method = Literal["Adam with warm-up", "Muon", "uSCG", "SCG", "Sign", "Signum"]
Text = Literal["shakespeare", "fineweb"]
BETAS = (0.9, 0.95)
WARM_UP = 0.05
"""Part of the steps in which Adam's rate rises. LMO's text says that of its optimizers only Adam needs a warm-up, not
how long it is, and its code has no Adam. In modded-nanogpt, on which it builds, Adam's takes about 250 steps of as many
tokens as each of LMO's 5,100."""
FINEWEB: dict[str, Any] = {"steps": 5100, "batch": 512, "length": 1024, "head_width": 128, "text": "fineweb"}
"""The settings of figure 1, from the released code."""
RADII = {"embedding": 1.0, "layers": 3.0, "head": 10.0}
"""The radii of the released Shakespeare code, where every layer has the norm Sign."""
_VALIDATION = 2**14  # characters


@dataclass(frozen=True)
class GPTRun:
    """One training run."""

    method: Method
    width: int
    blocks: int
    lr: float
    steps: int
    batch: int
    seed: int
    length: int = 64
    head_width: int = 16
    text: Text = "shakespeare"
    shared: bool = field(default=False, metadata=ADDED)
    """Whether the head's weight is the embedding on characters too; on FineWeb it always is."""
    warm_up: float | None = field(default=None, metadata=ADDED)
    """The part of the steps in which the rate rises; None is that of the method."""


@cache
def shakespeare() -> CharacterText:
    """The Shakespeare that this machine has; reading the plays takes seconds, and every cell asks for it."""
    return load_shakespeare()


def text_of(cell: GPTRun) -> str:
    """The name of what a run reads."""
    return f"characters of {shakespeare().source}" if cell.text == "shakespeare" else "tokens of FineWeb"


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to the stream."""

    def __init__(self, width: int, head_width: int, squared: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for layer in (self.output, self.down):
            nn.init.zeros_(layer.weight)
        self.rotary, self.head_width, self.squared = Rotary(head_width), head_width, squared

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.output(self.attend(rms_norm(x)))
        hidden = self.up(rms_norm(x))
        hidden = F.relu(hidden).square() * 2 if self.squared else F.gelu(hidden) * math.sqrt(2)
        return x + self.down(hidden)

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention of all heads, before the output projection."""
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in layers)
        query, key = (self.rotary(rms_norm(part)) for part in (query, key))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Integers `(B, T)` -> logits `(B, T, symbols)`; the head's weight may be the embedding too."""

    def __init__(self, symbols: int, run: GPTRun) -> None:
        super().__init__()
        fineweb = run.text == "fineweb"
        self.embedding = None if fineweb or run.shared else nn.Embedding(symbols, run.width)
        self.layers = nn.ModuleList(Block(run.width, run.head_width, fineweb) for _ in range(run.blocks))
        self.head = nn.Linear(run.width, symbols, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.head.weight) if self.embedding is None else self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(rms_norm(x))


def rms_norm(x: Tensor) -> Tensor:
    """Scale every vector to RMS 1."""
    return F.rms_norm(x, x.shape[-1:])


def optimizer_of(model: GPT, run: GPTRun, group: Any = None) -> torch.optim.Optimizer:
    """The optimizer of a run.

    As in the released code all start where torch puts them, except where every layer has the norm Sign. Muon is that of
    modded-nanogpt: steps of RMS 0.1 times the learning rate of AdamW, which moves embedding and head. `group` is the
    processes that hold copies of the weights.
    """
    match run.method:
        case "Adam with warm-up":
            return torch.optim.AdamW(model.parameters(), lr=run.lr, betas=BETAS, weight_decay=0.0)
        case "Muon":
            adamw = AdamWSettings(lr=run.lr, betas=BETAS)
            rate = 0.1 / 0.2 * run.lr  # the unit match_rms_adamw has RMS 0.2
            return wn.Muon(model, rate, recipe="muon", adjust_lr_fn="match_rms_adamw", adamw=adamw, process_group=group)
        case "uSCG" | "SCG":
            recipe = "scion-gpt" if model.embedding is None else "scion-shakespeare"
            radii = {name: RADII[name] for name in ("layers", "head")} if run.shared else {}
            own = {"unconstrained": run.method == "uSCG", "process_group": group}
            return wn.Scion(model, run.lr, recipe=recipe, radii=radii, **own)
        case "Sign":
            norms = assign_norms(model, "sign-only")
            initialize_(norms, radii=RADII, generator=torch.Generator().manual_seed(run.seed))
        case "Signum":
            norms = assign_norms(model, overrides={"*": Sign()})
    return wn.Scion(norms, run.lr, radii=RADII)


def rate_factor(run: GPTRun, step: int) -> float:
    """Adam's rate rises linearly at first, as others may; the last part, on FineWeb 28%, is a linear fall to 0."""
    falling = 1450 / 5100 if run.text == "fineweb" else 1.0
    own = WARM_UP if run.method == "Adam with warm-up" else 0.0
    rising = round((own if run.warm_up is None else run.warm_up) * run.steps)
    return min((step + 1) / max(1, rising), 1.0, (1 - step / run.steps) / falling)


class GPTTask(TextTask[GPT]):
    """The training of a run on characters."""

    def __init__(self, run: GPTRun, device: torch.device) -> None:
        self.run, text = run, shakespeare()
        torch.manual_seed(run.seed)
        model = GPT(len(text.symbols), run).to(device)
        super().__init__(
            model, optimizer_of(model, run), None, run.steps, torch.Generator().manual_seed(run.seed + 2**32),
            text=text, length=run.length, batch=run.batch,
        )  # fmt: skip

    def rate_factor(self, step: int) -> float:
        """The factor of the run."""
        return rate_factor(self.run, step)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Cross entropy over windows that are spread evenly from the first to the last character to validate on."""
        tokens = self.text.validation
        count = max(1, min(len(tokens), _VALIDATION) // self.length)
        starts = torch.linspace(0, len(tokens) - self.length - 1, count, dtype=torch.float64).long()
        return float(self.loss_of(tokens, starts))


def run(cell: GPTRun, device: torch.device) -> dict[str, Any]:
    """Validation loss of a run on characters at the end; None where the loss or a gradient was not a number."""
    task = GPTTask(cell, device)
    try:
        fit(task)
    except DivergedError:
        return {"loss": None}
    loss = task.validation_loss()
    return {"loss": loss if math.isfinite(loss) else None}
