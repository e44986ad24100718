"""LT appendix F: how layers share the learning rate of the Shakespeare transformer, and projections in bfloat16.

The mass of all blocks decides how much of a step they get beside the embedding and the head, of mass 1 each; LT swept
it and took 32, which is 95% of the step. It further halved the rate once for every residual connection that follows,
and could not reach its losses without, for a reason unknown to it. In its code this came from a sensitivity of 1 for
every factor of the model: then the shares of the mass are the rates, while in the modular norm the factors of the
residuals and of attention multiply the rates of the blocks by 6 and more. That code also took the factors out of the
forward pass: both forms of the model are trained, the convex one of the text and that plain one. On NanoGPT, weight
projections computed in bfloat16 were found slightly better; here they are tried on this model.
"""

from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from papers._experiment import ANSWERS, Experiment, Preset, Verdict, between
from papers._figures import legend_below, panels
from papers._lt_transformer import SMALL, TransformerRun, largest_norm, lt_transformer
from papers._table import Row
from papers.characters import TextTask, validation_loss
from wellnormed.models import GPT
from wellnormed.train.task import fit

MASS = 32
"""The value of LT."""
HALVED: dict[str, Any] = {"halved": True, "projection": "float32", "residual": "convex"}
MODULAR, BFLOAT16 = HALVED | {"halved": False}, HALVED | {"projection": "bfloat16"}
PLAIN = HALVED | {"residual": "plain"}
PLAIN_MODULAR = MODULAR | {"residual": "plain"}
VARIANTS = {
    "halved rates": HALVED, "modular norm": MODULAR, "halved rates, bfloat16": BFLOAT16,
    "plain residuals, halved rates": PLAIN, "plain residuals, modular norm": PLAIN_MODULAR,
}  # fmt: skip
RATES = {
    ("convex", True): (6.0, 12.0, 24.0, 48.0), ("convex", False): (0.2, 0.4, 0.8, 1.6),
    ("plain", True): (0.75, 1.5, 3.0, 6.0), ("plain", False): (0.4, 1.6, 6.4),
}  # fmt: skip
"""Form and whether rates are halved -> learning rates."""
SEEDS, EVERY = 3, 50
STEPS: dict[str, Any] = {"steps": 400}


def cells(preset: Preset) -> list[TransformerRun]:
    """Every mass with halved rates and, in the text's form, with those of the modular norm; LT's mass with the rest.

    A rate at which a step of the head is longer than the soft cap bears is left out.
    """
    sizes: dict[str, Any]
    masses, sizes = ((1, 2, 4, 8, 16, 32, 64, 128), {}) if preset == "paper" else ((2, 8, 32, 128), SMALL | STEPS)
    kinds = [*product(masses, (HALVED, MODULAR, PLAIN)), (MASS, BFLOAT16), (MASS, PLAIN_MODULAR)]
    return [
        TransformerRun(lr, blocks_mass=mass, **variant, **sizes, seed=seed)
        for seed in range(SEEDS)
        for mass, variant in kinds
        for lr in RATES[variant["residual"], variant["halved"]]
        if lr / (mass + 2) <= 1.6 * TransformerRun.cap
    ]


def run(cell: TransformerRun, device: torch.device) -> dict[str, Any]:
    """Loss over the validation split, and the largest norm of a matrix over its cap, seen every 50 steps."""
    task, norms = lt_transformer(cell, device), []

    def watch(task: TextTask[GPT], _: float) -> None:
        if task.step % EVERY == 0 or task.step == task.steps:
            norms.append(largest_norm(task))

    fit(task, watch)
    loss = validation_loss(task.model, task.text.validation, cell.length)
    return {"loss": loss, "norm_over_cap": max(norms) / cell.cap}


def select(rows: Sequence[Row], mass: float, variant: dict[str, Any]) -> dict[float, list[Row]]:
    """Learning rate -> the rows of a mass and a variant, in the order of their seeds."""
    found: dict[float, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["config"]["lr"], row["config"]["seed"])):
        if (variant | {"blocks_mass": mass}).items() <= row["config"].items():
            found.setdefault(row["config"]["lr"], []).append(row)
    return found


def losses(rows: Sequence[Row]) -> list[float]:
    """The loss of every row."""
    return [row["results"]["loss"] for row in rows]


def best(rows: Sequence[Row], mass: float, variant: dict[str, Any]) -> list[float]:
    """The losses of every seed at the learning rate of the lowest mean loss."""
    found = map(losses, select(rows, mass, variant).values())
    return min(found, key=fmean, default=[])


def _at_the_edge(rows: Sequence[Row], masses: Sequence[float], mass: float, variant: dict[str, Any]) -> str:
    """Says so if the best mass, or the best learning rate at it, is the largest or the least that was tried."""
    means = {lr: fmean(losses(own)) for lr, own in select(rows, mass, variant).items()}
    top = min(means, key=lambda lr: means[lr])
    rate_end, mass_end = ({max(all): "largest", min(all): "least"} for all in (means, masses))
    edges = [f"the {rate_end[top]} rate that was tried, {top:g}, is the best at {mass:g}"] if top in rate_end else []
    edges += [f"{mass:g} is the {mass_end[mass]} mass that was tried"] if mass in mass_end else []
    return "; ".join(edges)


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss against the mass at every learning rate, by variant."""
    figure, axes = panels(1, len(VARIANTS), (16, 4.2))
    masses = sorted({row["config"]["blocks_mass"] for row in rows})
    every = sorted({lr for rates in RATES.values() for lr in rates})
    colours = {lr: colormaps["viridis"](number / (len(every) - 1)) for number, lr in enumerate(every)}
    for axis, (name, variant) in zip(axes[0], VARIANTS.items(), strict=True):
        for lr in RATES[variant["residual"], variant["halved"]]:
            points = {mass: losses(own) for mass in masses if (own := select(rows, mass, variant).get(lr))}
            means, low, high = (list(map(what, points.values())) for what in (fmean, min, max))
            colour = colours[lr]
            axis.plot(list(points), means, "o-", color=colour, label=f"rate {lr:g}")
            axis.vlines(list(points), low, high, color=colour, linewidth=3, alpha=0.4)
        axis.set_xscale("log", base=2)
        axis.set(title=name, xlabel="mass of all blocks", xlim=(masses[0] / 2, masses[-1] * 2))
    axes[0, 0].set_ylabel("validation loss (nats a character)")
    legend_below(figure, "LT's transformer on Shakespeare: mean and range of the seeds")
    return {"block-mass": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """The best mass of each variant, and the variants against one another, each at its best learning rate.

    One seed judges nothing.
    """
    yes, no = ANSWERS[preset]
    found: list[Verdict] = []
    masses, tops = sorted({row["config"]["blocks_mass"] for row in rows}), {}
    published_at = {"halved rates": f"{MASS}", "plain residuals, halved rates": f"{MASS}", "modular norm": "-"}
    for name, published in published_at.items():
        variant = VARIANTS[name]
        means = {mass: fmean(own) for mass in masses if (own := best(rows, mass, variant))}
        if MASS in means:
            top, own = min(means, key=lambda mass: means[mass]), best(rows, MASS, variant)
            tops[name] = best(rows, top, variant)
            ours = f"{top:g}, with loss {means[top]:.3f}; {MASS} has {means[MASS]:.3f}"
            # as good if the mean at no other mass lies below the best seed at mass 32
            verdict = "measured" if published == "-" or len(own) < 2 else yes if means[top] >= min(own) else no
            interval, runs = f"{between(own)} at {MASS}", len(own) * len(means)
            edge = _at_the_edge(rows, list(means), top, variant)
            found.append(Verdict(f"best mass of the blocks, {name}", published, ours, interval, runs, verdict, edge))
    halved, modular, rounded = (best(rows, MASS, variant) for variant in (HALVED, MODULAR, BFLOAT16))
    plain, plain_modular = (best(rows, MASS, variant) for variant in (PLAIN, PLAIN_MODULAR))
    top, other = (tops.get(name, []) for name in list(VARIANTS)[:2])
    forward = "here the factors of residuals and attention stand in the forward pass, as the modular norm assumes"
    against = f"halved rates against the modular norm, mass {MASS}"
    lines = (
        (against, "needed for its losses", halved, modular, forward),
        (f"plain residuals, {against}", "needed for its losses", plain, plain_modular, ""),
        ("halved rates against the modular norm, each at its best mass", "-", top, other, ""),
        (f"bfloat16 against float32, halved rates, mass {MASS}", "slightly better (NanoGPT)", rounded, halved, ""),
    )
    for what, published, own, other, why in lines:
        if len(own) == len(other) > 0:
            differences = [a - b for a, b in zip(own, other, strict=True)]
            interval = f"differences {between(differences, '+.3f')}"
            verdict = "measured" if published == "-" or len(own) < 2 else yes if max(differences) < 0 else no
            ours = f"loss {fmean(own):.3f} against {fmean(other):.3f}"
            if verdict == no and min(differences) < 0:
                why = "the seeds differ in its sign"
            found.append(Verdict(what, published, ours, interval, 2 * len(own), verdict, why if verdict == no else ""))
    for name, variant in (("float32", HALVED), ("bfloat16", BFLOAT16)):
        ratios = [row["results"]["norm_over_cap"] for own in select(rows, MASS, variant).values() for row in own]
        if ratios:
            what, ours = f"largest norm over the cap, {name}", f"{max(ratios):.4f}"
            found.append(Verdict.of(what, "-", ratios, digits=".4f", ours=ours))
    return found


EXPERIMENT = Experiment(
    name="block-mass",
    source="LT appendix F",
    shows="how the mass of the blocks, halved rates and projections in bfloat16 change the loss of the transformer",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "width and length 64 instead of 256, 400 steps of 12 windows instead of 2,000 of 64",
        "paper": "LT does not say cap, rates and form of its runs: the cap is 2, rates are of a small search, and both "
        "forms are trained",
    },
)
