"""LT appendix F: how layers share the learning rate of the Shakespeare transformer, and projections in bfloat16.

The mass of all blocks decides how much of a step they get beside the embedding and the head, of mass 1 each; LT swept
it and took 32, which is 95% of the step. It further halved the rate once for every residual connection that follows,
and could not reach its losses without. In its code this came from a sensitivity of 1 for every factor, which also took
the factors out of the forward pass; here they stay, and the halving stands alone. On NanoGPT, weight projections
computed in bfloat16 were found slightly better; here they are tried on this model.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure

from wellnormed.experiments._experiment import Experiment, Preset, Verdict
from wellnormed.experiments._figures import legend_below, panels
from wellnormed.experiments._lt_transformer import SMALL, TransformerRun, largest_norm, lt_transformer
from wellnormed.experiments._table import Row
from wellnormed.train.characters import CharacterTask
from wellnormed.train.evaluate import validation_loss
from wellnormed.train.task import fit

MASS = 32
"""What LT took."""
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {}, "halved rates": {"halved": True}, "bfloat16": {"projection": "bfloat16"},
}  # fmt: skip
RATES = {False: (0.5, 1.0, 2.0), True: (1.0, 2.0, 3.0)}
"""Learning rates without and with halving; 3.5 is about the largest at which the soft cap can hold the cap."""
SEEDS = 3
EVERY = 50


def cells(preset: Preset) -> list[TransformerRun]:
    """Every mass, and the variants at LT's mass, at three learning rates each."""
    sizes: dict[str, Any]
    masses, sizes = ((1, 2, 4, 8, 16, 32, 64, 128, 512), {}) if preset == "paper" else ((2, 8, 32, 128), SMALL)
    kinds: list[dict[str, Any]] = [{"blocks_mass": mass} for mass in masses] + [
        {"blocks_mass": MASS} | own for own in VARIANTS.values()
    ]
    runs = [
        TransformerRun(lr, **kind, **sizes, seed=seed)
        for seed in range(SEEDS)
        for kind in kinds
        for lr in RATES[kind.get("halved", False)]
    ]
    return list(dict.fromkeys(runs))


def run(cells: Sequence[TransformerRun], device: torch.device) -> list[dict[str, Any]]:
    """Loss over the validation split, and the largest norm of a matrix over its cap, seen every 50 steps."""
    return [_result(cell, device) for cell in cells]


def _result(cell: TransformerRun, device: torch.device) -> dict[str, Any]:
    task, norms = lt_transformer(cell, device), []

    def watch(task: CharacterTask, _: float) -> None:
        if task.step % EVERY == 0 or task.step == task.steps:
            norms.append(largest_norm(task))

    fit(task, watch)
    loss = validation_loss(task.model, task.text.validation, cell.length)
    return {"loss": loss, "norm_over_cap": max(norms) / cell.cap}


def select(rows: Sequence[Row], mass: float = MASS, **variant: Any) -> dict[float, list[Row]]:
    """Learning rate -> the rows of a mass and a variant, in the order of their seeds."""
    wanted = {"halved": False, "projection": "float32", "blocks_mass": mass} | variant
    found: dict[float, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["config"]["lr"], row["config"]["seed"])):
        if wanted.items() <= row["config"].items():
            found.setdefault(row["config"]["lr"], []).append(row)
    return found


def losses(rows: Sequence[Row]) -> list[float]:
    """Of every row."""
    return [row["results"]["loss"] for row in rows]


def best(rows: Sequence[Row], mass: float = MASS, **variant: Any) -> list[Row]:
    """The rows at the learning rate of the lowest mean loss."""
    return min(select(rows, mass, **variant).values(), key=lambda own: fmean(losses(own)), default=[])


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss against the mass at every learning rate; and of the variants at mass 32, at every seed."""
    figure, axes = panels(1, 2, (11, 4.2))
    masses = sorted({row["config"]["blocks_mass"] for row in rows})
    for number, lr in enumerate(RATES[False]):
        points = {mass: losses(own) for mass in masses if (own := select(rows, mass).get(lr))}
        axes[0, 0].plot(list(points), list(map(fmean, points.values())), "o-", color=f"C{number}", label=f"rate {lr:g}")
        low, high = (list(map(end, points.values())) for end in (min, max))
        axes[0, 0].fill_between(list(points), low, high, color=f"C{number}", alpha=0.2)
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set(xlabel="mass of all blocks", ylabel="validation loss (nats a character)")
    for number, variant in enumerate(VARIANTS.values()):
        for colour, (lr, own) in enumerate(select(rows, **variant).items()):
            values, place = losses(own), [number + 0.2 * (colour - 1)] * len(own)
            axes[0, 1].plot(place, values, "o", alpha=0.7, color="k", markersize=4)
            axes[0, 1].annotate(
                f"{lr:g}", (place[0], max(values)), xytext=(0, 5), textcoords="offset points", ha="center"
            )
    axes[0, 1].set_xticks(range(len(VARIANTS)), list(VARIANTS))
    axes[0, 1].set(xlabel=f"variant at mass {MASS}; the numbers are learning rates")
    legend_below(figure, "LT's transformer on Shakespeare: mean and range of the seeds, and every run")
    return {"block-mass": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """The best mass, and each variant against the runs as they are; all at their best learning rates."""
    yes, no = ("reached", "not reached") if preset == "paper" else ("same shape", "another shape")
    found: list[Verdict] = []
    means = {
        mass: fmean(losses(own)) for mass in {row["config"]["blocks_mass"] for row in rows} if (own := best(rows, mass))
    }
    if MASS in means and len(means) > 1:
        mass, own = min(means, key=lambda mass: means[mass]), losses(best(rows))
        ours = f"{mass:g} with {means[mass]:.3f}; {MASS} has {means[MASS]:.3f}"
        verdict = yes if means[mass] >= min(own) else no  # no better than mass 32 with its best seed
        interval, runs = f"{min(own):.3f} to {max(own):.3f} at {MASS}", len(rows)
        found.append(Verdict("best mass of the blocks", f"{MASS}", ours, interval, runs, verdict))
    published = {"halved rates": "needed for the losses reported", "bfloat16": "slightly better (on NanoGPT)"}
    plain = losses(best(rows))
    for name, expected in published.items():
        own = best(rows, **VARIANTS[name])
        if len(own) == len(plain) > 0:
            differences = [a - b for a, b in zip(losses(own), plain, strict=True)]
            ours = f"loss {fmean(losses(own)):.3f} against {fmean(plain):.3f} without"
            interval = f"differences {min(differences):+.3f} to {max(differences):+.3f}"
            verdict = yes if max(differences) < 0 else no
            found.append(Verdict(name, expected, ours, interval, 2 * len(own), verdict))
    for name in ("as it is", "bfloat16"):
        ratios = [row["results"]["norm_over_cap"] for own in select(rows, **VARIANTS[name]).values() for row in own]
        if ratios:
            what = f"largest norm over the cap, {'float32' if name == 'as it is' else name} projections"
            interval = f"{min(ratios):.4f} to {max(ratios):.4f}"
            found.append(Verdict(what, "-", f"{max(ratios):.4f}", interval, len(ratios), "measured"))
    return found


EXPERIMENT = Experiment(
    name="block-mass",
    source="LT appendix F",
    shows="how the mass of the blocks, halved rates and projections in bfloat16 change the loss of the transformer",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={"cpu": "width and length 64 instead of 256, 1,000 steps of 12 windows instead of 2,000 of 64"},
)
