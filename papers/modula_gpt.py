"""Modula's own GPT on Tiny Shakespeare: its loss at its setting, in both its parameterisations.

Four blocks of width 128, 4 heads, 64 characters, 2,001 steps of 12 windows, rates that fall linearly to 0, masses 1
for the ends and 5 for the blocks, convex residual connections, attention with scale 1/d.

"Modula" is the example of the library as it is now: queries and keys turned by position, no norms of activations,
every weight orthogonal at the start, momentum 0.95 dualized, rate 0.1. Its loss is read on 240 windows that start one
character apart: the first 303 characters of the validation split. "first Modula" (Large et al., Scalable Optimization
in the Modular Norm) has learned positions, layer norms without gains, GELU times the root of 2 and queries, keys and
values over 3; Adam's direction (betas 0.9 and 0.99) gets the norm that is each weight's share of the step, the largest
singular value being tracked by one power iteration a step; rate 0.5, decay 0.01, vectors of embeddings kept at RMS 1.
Its loss is that of random windows of the split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from matplotlib.figure import Figure
from torch import nn

from papers._experiment import Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._first_modula import NormalizedAdam
from papers._shakespeare import MATRICES, scores_as_published, shakespeare
from papers._table import Row
from papers.characters import TextTask, validation_loss
from wellnormed.models import GPT
from wellnormed.models.config import GPTConfig
from wellnormed.models.gpt import FeedForward
from wellnormed.modular import modular_tree
from wellnormed.nn import Scale
from wellnormed.norms import ColNorm
from wellnormed.optim import Scion
from wellnormed.routing import Assignment, assign_norms
from wellnormed.train.task import fit

Library = Literal["Modula", "first Modula"]
PUBLISHED: dict[Library, tuple[str, float]] = {"Modula": ("loss_as_published", 1.897), "first Modula": ("loss", 1.80)}
"""Which measure was published, and the loss."""
WITHIN = 0.03
WINDOWS = 240
EVERY = 100


@dataclass(frozen=True)
class Cell:
    """One training run."""

    library: Library
    seed: int
    steps: int = 2001
    batch: int = 12
    length: int = 64
    width: int = 128
    blocks: int = 4


def cells(preset: Preset) -> list[Cell]:
    """The setting is small enough for a CPU: `cpu` is the published one, and `paper` has more seeds."""
    return [Cell(library, seed) for seed in range(8 if preset == "paper" else 3) for library in get_args(Library)]


def config_of(cell: Cell) -> GPTConfig:
    """The transformer that both have in common."""
    return GPTConfig(
        vocabulary_size=len(shakespeare().symbols), length=cell.length, width=cell.width, blocks=cell.blocks,
        residual_strength=0.5 / cell.blocks, output_factor=1 / 3, logit_scale=1.0,
        attention_scale=1.0 if cell.library == "Modula" else 1 / 9,  # of queries and keys over 3
        rotary=cell.library == "Modula", relative_bias=False, biases=False, stream_radius=None,
    )  # fmt: skip


def norms_of(model: GPT) -> Assignment:
    """Of whole matrices, and of columns without a limit for rare characters."""
    tables = [name for name, _ in model.named_parameters() if not name.startswith(tuple(MATRICES))]
    return assign_norms(model, overrides=MATRICES | dict.fromkeys(tables, ColNorm(0)))


def shares(config: GPTConfig) -> dict[str, float]:
    """Weight -> the norm of its part in a step of modular norm 1.

    The tree is that of attention at scale 1, and lacks what `task_of` adds, which has sensitivity 1. Modula divides by
    3 before the output projection of attention, and this package's model after it.
    """
    model = GPT(replace(config, attention_scale=1.0), torch.Generator())
    tree = modular_tree(model, norms_of(model))
    if not config.rotary:
        tree = tree.with_masses({"embedding": 0.5, "position": 0.5})
    outputs = {f"layers.{i}.block.output.weight" for i in range(0, 2 * config.blocks, 2)}
    factors = tree.tare(5.0, "layers").lr_factors()
    return {name: factor * (config.output_factor if name in outputs else 1.0) for name, factor in factors.items()}


def task_of(cell: Cell, device: torch.device) -> TextTask[GPT]:
    """A run of either library."""
    config, generator = config_of(cell), torch.Generator().manual_seed(cell.seed)
    model = GPT(config, generator)
    norms, factors = norms_of(model), shares(config)
    for assigned in norms:
        assert assigned.norm is not None
        assigned.norm.initialize_(assigned.parameter.data, generator)
    if cell.library == "Modula":
        optimizer: torch.optim.Optimizer = Scion(norms, lr=0.1, momentum=0.95, nesterov=False, lr_factors=factors)
    else:
        for residual in model.layers:
            if isinstance(residual.block, FeedForward):
                residual.block[1] = nn.Sequential(nn.GELU(), Scale(math.sqrt(2)))
            residual.block = nn.Sequential(_layer_norm(cell.width), residual.block)
        model.layers.append(_layer_norm(cell.width))
        optimizer = NormalizedAdam(norms, factors, lr=0.5, decay=0.01)
    order = torch.Generator().manual_seed(cell.seed + 2**32)
    model, text = model.to(device), shakespeare()
    return TextTask(model, optimizer, None, cell.steps, order, text=text, length=cell.length, batch=cell.batch)


def _layer_norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, elementwise_affine=False)


def run(cells: Sequence[Cell], device: torch.device) -> list[dict[str, Any]]:
    """Loss over the whole split and over its first 303 characters, and the mean training loss of every 100 steps."""
    return [_result(cell, task_of(cell, device)) for cell in cells]


def _result(cell: Cell, task: TextTask[GPT]) -> dict[str, Any]:
    losses: list[float] = []
    fit(task, lambda _, loss: losses.append(loss))
    model, split = task.model.eval(), shakespeare().validation
    return {
        "loss": validation_loss(model, split, cell.length),
        "loss_as_published": scores_as_published(model, split, cell.length, WINDOWS)[0],
        "training": [fmean(losses[start : start + EVERY]) for start in range(0, len(losses), EVERY)],
    }


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Training loss by library, one line a seed, and the losses at the end beside the published ones."""
    figure, axes = panels(1, 2, (10, 4.2))
    curves, ends = axes[0]
    for number, library in enumerate(get_args(Library)):
        found = [row for row in rows if row["config"]["library"] == library]
        own: dict[str, Any] = {"color": f"C{number}"}
        for row in found:
            result, whole = row["results"], max(1, row["config"]["steps"] // EVERY)  # the last mean may be of few steps
            steps = [EVERY * (i + 0.5) for i in range(whole)]
            curves.plot(steps, result["training"][:whole], alpha=0.7, label=f"{library}: training", **own)
            ends.plot(
                [number - 0.15], [result["loss"]], "o", label="whole validation split" if not number else "_", **own
            )
            ends.plot([number + 0.15], [result["loss_as_published"]], "s", fillstyle="none", **own)
        measure, published = PUBLISHED[library]
        ends.plot([number - 0.15 if measure == "loss" else number + 0.15], [published], "k*", markersize=11)
    curves.set(xlabel="step", ylabel="loss (nats a character)", title="training, means of 100 steps")
    ends.set(title="at the end")
    ends.set_xticks([0, 1], get_args(Library))
    labels = {"o": "whole validation split", "s": "its first 303 characters", "*": "published"}
    for marker, label in labels.items():
        ends.plot([], [], marker, color="k", fillstyle="none" if marker == "s" else "full", label=label)
    legend_below(figure, "Modula's GPT on Tiny Shakespeare, in both its parameterisations")
    return {"losses": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """The published losses in the measures in which they were read, and the other measure beside each."""
    found = []
    names = {"loss": "whole split", "loss_as_published": "first 303 characters"}
    for library, (measure, published) in PUBLISHED.items():
        results = [row["results"] for row in rows if row["config"]["library"] == library]
        for own, name in names.items() if results else ():
            values = [result[own] for result in results]
            shown, verdict = ("-", "measured")
            if own == measure:
                shown = f"{published:g}"
                verdict = "reached" if fmean(values) <= published + WITHIN else "not reached"
            interval = f"{min(values):.3f} to {max(values):.3f}"
            what = f"{library}: validation loss, {name}"
            found.append(Verdict(what, shown, f"{fmean(values):.3f}", interval, len(values), verdict))
    return found


EXPERIMENT = Experiment(
    name="modula-gpt",
    source="Modula's own examples",
    shows="the loss of Modula's GPT at its setting, in both its parameterisations",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={"paper": "eight seeds of the published setting, which `cpu` has too"},
)
