"""Learning rate against depth: where a transformer without normalisation layers trains, with caps and without.

LT (section 4.4, table 1) finds that its transformer diverges without weight constraints and trains with them. Here both
are trained at every learning rate and depth. A run counts as trained if its validation loss ends below that of a
uniform guess, with which all of them begin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import panels
from papers._table import Row
from papers._tokens import byte_corpus, byte_text, token_task
from wellnormed.certificates.observing import summary
from wellnormed.models.config import GPTConfig
from wellnormed.train.config import Caps
from wellnormed.train.presets import token_preset
from wellnormed.train.task import DivergedError, fit

Kept = Literal["none", "spectral-normalize"]
UNIFORM = math.log(256)


@dataclass(frozen=True)
class Cell:
    """One training run."""

    constraint: Kept
    blocks: int
    lr: float
    steps: int
    width: int
    batch: int
    cap: float
    seed: int


def cells(preset: Preset) -> list[Cell]:
    """Every depth and learning rate, with caps and without, over seeds."""
    depths, rates = (2, 4, 8, 16), tuple(0.05 * 4.0**power for power in range(5))
    sizes = (1000, 256, 32, 4.0) if preset == "paper" else (60, 64, 8, 4.0)
    return [
        Cell(constraint, blocks, lr, *sizes, seed)
        for seed in range(3)
        for constraint in get_args(Kept)
        for blocks in depths
        for lr in rates
    ]


def run(cell: Cell, device: torch.device) -> dict[str, Any]:
    """The validation loss, None where it is not a number, and the largest activation entry."""
    start = token_preset("1m")
    assert isinstance(start.model, GPTConfig)
    shape = {"width": cell.width, "blocks": cell.blocks, "length": 64, "residual_strength": 0.5 / cell.blocks}
    config = replace(
        start, model=replace(start.model, **shape), constraint=cell.constraint, caps=Caps(*[cell.cap] * 7),
        learning_rate=cell.lr, steps=cell.steps, batch=cell.batch, seed=cell.seed, validation_tokens=2**14,
    )  # fmt: skip
    task = token_task(config, byte_corpus(), device)
    try:
        fit(task)
    except DivergedError:
        return {"loss": None, "stopped_at": task.step}
    loss, entry = task.evaluate()["validation_loss"], summary(task.observe())["largest_entry"]
    finite = math.isfinite(loss) and math.isfinite(entry)
    return {"loss": loss, "largest_entry": entry} if finite else {"loss": None, "stopped_at": task.step}


def losses(rows: Sequence[Row], constraint: str) -> dict[tuple[int, float], list[float]]:
    """Depth and learning rate -> the losses of the seeds, infinity where there is none."""
    found: dict[tuple[int, float], list[float]] = {}
    for row in rows:
        config, loss = row["config"], row["results"]["loss"]
        if config["constraint"] == constraint:
            found.setdefault((config["blocks"], config["lr"]), []).append(math.inf if loss is None else loss)
    return dict(sorted(found.items()))


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The mean loss at every depth and learning rate; black where a seed does not train."""
    figure, axes = panels(1, 2, (10.5, 3.8))
    colours = colormaps["viridis_r"].with_extremes(bad="black")
    for axis, constraint in zip(axes[0], get_args(Kept), strict=True):
        if not (grid := losses(rows, constraint)):  # of a table that has only begun
            continue
        depths, rates = sorted({depth for depth, _ in grid}), sorted({lr for _, lr in grid})
        values = [[_colour(grid.get((depth, lr), [math.inf])) for lr in rates] for depth in depths]
        axis.grid(visible=False)
        image = axis.imshow(values, origin="lower", aspect="auto", vmin=2, vmax=UNIFORM, cmap=colours)
        axis.set_xticks(range(len(rates)), [f"{lr:g}" for lr in rates])
        axis.set_yticks(range(len(depths)), [str(depth) for depth in depths])
        axis.set(title="no constraint" if constraint == "none" else constraint, xlabel="learning rate")
        figure.colorbar(image, ax=axis)
    axes[0, 0].set_ylabel("blocks")
    figure.suptitle("Validation loss (nats a byte), mean of the seeds; black: a seed ends above a uniform guess")
    return {"stability": figure}


def _colour(found: Sequence[float]) -> float:
    return fmean(found) if max(found) < UNIFORM else math.nan


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Where each trains, and whether there are places where only the constrained one does."""
    yes, no = ANSWERS[preset]
    grids = {constraint: losses(rows, constraint) for constraint in get_args(Kept)}
    trained = {
        constraint: {key for key, found in grid.items() if max(found) < UNIFORM} for constraint, grid in grids.items()
    }
    failed = {key for key, found in grids["none"].items() if min(found) >= UNIFORM}
    lines = []
    for constraint, grid in grids.items():
        if grid:
            ours, count = f"{len(trained[constraint])} of {len(grid)}", sum(map(len, grid.values()))
            lines.append(Verdict(f"trains in every seed, {constraint}", "-", ours, "-", count, "measured"))
            least = min(grid, key=lambda key: (fmean(grid[key]), key))
            what = f"least loss, {constraint}, at {least[0]} blocks and rate {least[1]:g}"
            lines.append(Verdict.of(what, "-", grid[least]))
    only = sorted(failed & trained["spectral-normalize"])
    words = ", ".join(f"{blocks} blocks at {lr:g}" for blocks, lr in only) or "nowhere"
    what, count = "diverges in every seed without a constraint and trains in every seed with one", len(rows)
    lines.append(Verdict(what, "yes", words, "-", count, yes if only else no))
    return lines


EXPERIMENT = Experiment(
    name="stability-grid",
    source="LT 4.4",
    shows="at which learning rates and depths only the transformer with enforced norms trains",
    cells=cells,
    run=run,
    data=byte_text,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "60 steps of 8 windows of 64 bytes, width 64",
        "paper": "LT has one depth and rate; this grid is of this package, at width 256",
    },
)
