"""The transformer of Training Transformers with Enforced Lipschitz Bounds (LT) on Tiny Shakespeare, as a task.

Sections 4.1 to 4.3 and appendix F: blocks of attention and a feed-forward layer in convex residual connections, no
norms of activations, no biases; queries and keys turned by position and no other positions, as in the released code,
since the paper does not say. Output projections and the head start at zero, all else is orthogonal. Masses are 1 for
the embedding, 32 for the blocks and 1 for the head; the rate of a layer is halved for every residual connection after
it (appendix F). AdamW has one rate for all weights. Caps hold whole matrices, the three projections of attention too,
and the embedding's vectors have RMS at most 1. Momentum is an average that keeps 0.9, without Nesterov's step.

LT's repository held another form from 7 to 9 May 2025, which its remark on "the sensitivity of Mul" describes: there
the stream is `x + block(x)`, and attention has no factor of 1/3. Which form made the published runs is not known.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from papers import as_published
from papers._lt_methods import constraint_of
from papers._table import ADDED
from papers.characters import Precision, TextTask, validation_loss
from wellnormed.certificates import certify
from wellnormed.constraints import Constraint
from wellnormed.data import load_shakespeare
from wellnormed.data.characters import CharacterText
from wellnormed.models import GPT, NanoGPT, PotentialGPT
from wellnormed.models.config import GPTConfig
from wellnormed.nn import constraints_of
from wellnormed.routing import Assignment, assign_norms
from wellnormed.train.language import TOKENS_AT_ONCE
from wellnormed.train.presets import PRESETS

OptimizerName = Literal["adamw", "muon"]
Method = Literal["weight decay", "spectral normalization", "hammer", "soft cap"]
Residual = Literal["convex", "plain"]
"""The form of LT's text, and that of its code from 7 to 9 May 2025."""
BLOCKS_MASS = 32
MATRICES = dict.fromkeys(("layers", "head"), wn.Spectral(coefficients="you-6"))
"""Norms of whole matrices, where this package's own models measure every head, and Modula's iteration for the step."""


@dataclass(frozen=True, kw_only=True)
class LTShape:
    """The model and how long it is trained. The defaults are LT's."""

    residual: Residual = field(default="convex", metadata=ADDED)
    precision: Precision = field(default="float32", metadata=ADDED)
    """The precision of products during training."""
    steps: int = 2000
    batch: int = 64
    length: int = 256
    width: int = 256
    blocks: int = 3
    seed: int = 0


@dataclass(frozen=True)
class LTRun(LTShape):
    """One training run."""

    optimizer: OptimizerName
    method: Method
    strength: float
    """The cap in RMS -> RMS units, or the decay."""
    lr: float


@cache
def shakespeare() -> CharacterText:
    """Tiny Shakespeare and no other text, since the published numbers were measured on it."""
    return load_shakespeare("tiny-shakespeare")


def lt_model(run: LTShape, generator: torch.Generator) -> GPT:
    """The transformer at its start."""
    paper = PRESETS["paper"].model
    assert isinstance(paper, GPTConfig)
    form: dict[str, Any] = {"residual": "plain", "output_factor": 1.0} if run.residual == "plain" else {}
    shape = {"length": run.length, "width": run.width, "blocks": run.blocks, "residual_strength": 0.5 / run.blocks}
    config = replace(paper, vocabulary_size=len(shakespeare().symbols), rotary=True, **shape, **form)
    return GPT(config, generator)


def rate_factors(blocks: int, mass: float = BLOCKS_MASS) -> dict[str, float]:
    """Part of the model -> its share of a step: its mass, halved for every residual connection after it."""
    layers, atoms, whole = 2 * blocks, 6 * blocks, mass + 2
    own = {f"layers.{i}": mass / atoms / whole * 0.5 ** (layers - 1 - i) for i in range(layers)}
    return {"embedding": 0.5**layers / whole, **own, "head": 1 / whole}


def lt_task(run: LTRun, device: torch.device) -> TextTask[GPT]:
    """A run of LT."""
    model = lt_model(run, torch.Generator().manual_seed(run.seed)).to(device)
    norms, factors = assign_norms(model, recipe="modular", overrides=MATRICES), rate_factors(run.blocks)
    decay = run.strength if run.method == "weight decay" else 0.0
    if run.optimizer == "muon":
        top = max(factors.values())  # the decay of a step is refused where it exceeds 1 in any layer, not before
        optimizer: torch.optim.Optimizer = wn.Scion(
            norms, lr=run.lr * top, momentum=0.9, nesterov=False, weight_decay=decay,
            lr_factors={part: factor / top for part, factor in factors.items()},
        )  # fmt: skip
    else:
        groups = [
            {"params": list(model.get_submodule(part).parameters()), "weight_decay": decay * factor}
            for part, factor in factors.items()
        ]
        optimizer = torch.optim.AdamW(groups, lr=run.lr, betas=(0.9, 0.95), eps=1e-12)
    return text_task(run, model, optimizer, norms, constraint_of(run.method, run.strength))


def text_task(
    run: LTShape, model: GPT, optimizer: torch.optim.Optimizer, norms: Assignment, constraint: Constraint | None
) -> TextTask[GPT]:
    """The training of a model whose matrices have this constraint, beside those that its layers ask for."""
    held = constraints_of(model) | ({} if constraint is None else {"*": constraint})
    return TextTask(
        model, optimizer, wn.constrain(optimizer, held, norms=norms), run.steps,
        torch.Generator().manual_seed(run.seed + 2**32), text=shakespeare(), length=run.length, batch=run.batch,
        precision=run.precision,
    )  # fmt: skip


@torch.no_grad()
def scores_as_published(model: nn.Module, tokens: Tensor, length: int, windows: int = 1280) -> tuple[float, float]:
    """Loss and accuracy as LT's released code computes them: over windows that start one token apart, from the first.

    The code's 1,280 windows of 256 see the first 1,536 characters of the validation split and no others, so this does
    not estimate the loss over the split. A shorter split has fewer windows.
    """
    device, loss, correct = next(model.parameters()).device, 0.0, 0
    every = tokens[: windows + length].unfold(0, length + 1, 1)
    for part in every.split(max(1, TOKENS_AT_ONCE // length)):
        logits, targets = model(part[:, :-1].to(device)).flatten(0, 1).float(), part[:, 1:].flatten().to(device)
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        correct += int((logits.argmax(-1) == targets).sum())
    predicted = len(every) * length
    return loss / predicted, correct / predicted


def scores(model: nn.Module, length: int) -> dict[str, float]:
    """Loss over the whole validation split; loss and accuracy as LT read them, over its first characters."""
    split = shakespeare().validation
    loss, accuracy = scores_as_published(model.eval(), split, length)
    whole = validation_loss(model, split, length)
    return {"loss": whole, "loss_as_published": loss, "accuracy_as_published": accuracy}


def bounds(model: GPT | NanoGPT | PotentialGPT) -> dict[str, Any]:
    """Logarithms to base 10 of the proved Lipschitz constant and, of LT's transformer, of LT's formula.

    Of LT's transformer also its `whole_norms`.
    """
    model = model.eval().cpu()
    proved = {"log10_proved": certify(model).rms_lipschitz.log10}
    if not isinstance(model, GPT):
        return proved
    norms = as_published.whole_norms(model)
    return proved | {"log10_as_published": as_published.transformer(model, norms=norms), "norms": norms}
