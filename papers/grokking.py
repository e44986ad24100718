"""SC 6.2: steps to grok sums and products modulo a prime, by what projects the weights after every step.

SC finds that networks without a projection do not grok in 1,000 steps, nor do those whose matrices are projected to
matrix signs; that capping the embeddings suffices, at a Lipschitz bound four to five orders of magnitude larger than
with the matrices capped too; and that all other projections grok.

SC searched a grid of learning rates and caps that it does not state; `SETTINGS` is from a small search here, on sums
with one seed. The caps are in RMS -> RMS units. For matrix signs they stay 1, as published: with 2 they grok like the
others. The seeds of a setting are one model of stacked weights.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

from papers._experiment import Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._modular_arithmetic import Cell, ModularArithmetic, Projection
from papers._table import Row
from wellnormed.train.task import fit

GROKKED = 0.95
"""Test accuracy from which a model has grokked. SC does not say which it takes."""
EVERY = 5
"""Steps between evaluations."""
SETTINGS: dict[Projection, tuple[float, float]] = {
    "none": (0.5, 0.0),
    "embedding": (0.5, 0.0),
    "stiefel": (1.0, 1.0),
    "spectral-normalize": (1.0, 2.0),
    "hard-cap": (1.0, 2.0),
    "clipped-decay-0.5": (1.0, 1.0),
    "clipped-decay-0.1": (0.2, 0.25),
}
"""Learning rate and cap. A decay ends above its cap, so that it gets a smaller one for the same bound."""


def run(cells: Sequence[Cell], device: torch.device) -> list[dict[str, Any]]:
    """Steps until each seed has grokked, None if it has not; all end when the last one has."""
    task = ModularArithmetic(cells, device)
    grokked: list[int | None] = [None] * len(cells)
    curve: list[list[float]] = []

    def watch(task: ModularArithmetic, _: float) -> bool:
        if task.step % EVERY:
            return False
        accuracies = task.accuracies().tolist()
        curve.append(accuracies)
        for index, accuracy in enumerate(accuracies):
            if grokked[index] is None and accuracy >= GROKKED:
                grokked[index] = task.step
        return None not in grokked

    fit(task, watch)
    return [
        {"grokked_at": step, "lipschitz": bound, "steps": task.step, "accuracy": [row[index] for row in curve]}
        for index, (step, bound) in enumerate(zip(grokked, task.lipschitz(), strict=True))
    ]


def cells(preset: Preset) -> list[Cell]:
    """Every projection on both operations, over seeds."""
    seeds, steps = (64, 1000) if preset == "paper" else (16, 400)
    return [
        Cell(operation, projection, 113, 200, cap, lr, steps, seed)
        for operation in ("sum", "product")
        for projection, (lr, cap) in SETTINGS.items()
        for seed in range(seeds)
    ]


def _settings(cell: dict[str, Any] | Cell) -> tuple[Any, ...]:
    values = cell if isinstance(cell, dict) else vars(cell)
    return tuple(value for name, value in values.items() if name != "seed")


def _of(rows: Sequence[Row], operation: str, projection: str) -> list[dict[str, Any]]:
    wanted = {"operation": operation, "projection": projection}
    return [row["results"] for row in rows if wanted.items() <= row["config"].items()]


def _shown(steps: float, results: Sequence[dict[str, Any]]) -> str:
    return f"{steps:g}" if steps < math.inf else f"over {max(result['steps'] for result in results)}"


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Median test accuracy against steps, and steps to grok against the Lipschitz bound."""
    figure, axes = panels(2, 2, (9, 6.5))
    for column, operation in enumerate(("sum", "product")):
        for number, projection in enumerate(SETTINGS):
            results = _of(rows, operation, projection)
            if not results:
                continue
            # a stack ends early when all of it has grokked
            curves = list(zip_longest(*(result["accuracy"] for result in results), fillvalue=GROKKED))
            steps = [EVERY * (index + 1) for index in range(len(curves))]
            colour = f"C{number}"
            axes[0, column].plot(steps, list(map(median, curves)), color=colour, label=projection)
            low, high = zip(*((min(curve), max(curve)) for curve in curves), strict=True)
            axes[0, column].fill_between(steps, low, high, color=colour, alpha=0.15)
            points = [(result["lipschitz"], result["grokked_at"]) for result in results if result["grokked_at"]]
            if points:
                axes[1, column].semilogx(*zip(*points, strict=True), ".", color=colour)
        axes[0, column].set(title=f"{operation} modulo p", xlabel="step")
        axes[1, column].set(xlabel="Lipschitz bound of the matrices")
    axes[0, 0].set_ylabel("test accuracy: median, least, largest")
    axes[1, 0].set_ylabel("steps to grok")
    legend_below(figure, "Grokking under projections of the weights (bfloat16)")
    return {"grokking": figure}


PUBLISHED = {
    ("sum", "none"): "never in 1,000 steps", ("product", "none"): "never in 1,000 steps",
    ("sum", "stiefel"): "never in 1,000 steps", ("product", "stiefel"): "never in 1,000 steps",
    ("sum", "embedding"): "median 227 steps", ("product", "embedding"): "median 233 steps",
}  # fmt: skip
"""What SC's text says; its later version has 345 and 334.5 for the embedding cap alone."""


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Medians and shares of seeds that grok, and what capping the matrices too does to the Lipschitz bound."""
    found, good, bad = [], "same shape", "another shape"
    if preset == "paper":
        good, bad = "reached", "not reached"
    for operation in ("sum", "product"):
        bounds = {}
        for projection in SETTINGS:
            results = _of(rows, operation, projection)
            if not results:
                continue
            steps = sorted(result["grokked_at"] or math.inf for result in results)
            share = sum(step < math.inf for step in steps) / len(steps)
            bounds[projection] = median(result["lipschitz"] for result in results)
            least, middle, most = (_shown(value, results) for value in (steps[0], median(steps), steps[-1]))
            ours = f"median {middle} steps, {share:.0%} of seeds, bound {bounds[projection]:.3g}"
            published, why = PUBLISHED.get((operation, projection), "always in 1,000 steps"), ""
            reached = share == (0 if published.startswith("never") else 1)
            if not reached and share < 1:
                accuracies = [result["accuracy"][-1] for result in results]
                why = f"test accuracy after {results[0]['steps']} steps: {min(accuracies):.2f} to {max(accuracies):.2f}"
            elif not reached:
                why = "Muon's steps of this size generalize without what the paper has found necessary"
            interval, verdict = f"{least} to {most}", good if reached else bad
            found.append(Verdict(f"{operation}, {projection}", published, ours, interval, len(steps), verdict, why))
        if bounds.keys() >= {"embedding", "hard-cap"}:
            ratio = bounds["embedding"] / bounds["hard-cap"]
            why = (
                "" if ratio >= 1e4 else "the bound is the product of two norms here; SC does not say how it has its own"
            )
            what = f"{operation}: bound with the embeddings alone capped over that with a hard cap too"
            verdict = good if ratio >= 1e4 else bad
            found.append(Verdict(what, "1e4 to 1e5", f"{ratio:.2g}", "-", len(rows), verdict, why))
    return found


EXPERIMENT = Experiment(
    name="grokking",
    source="SC 6.2",
    shows="which projections of the weights let a network grok, how fast, and at what Lipschitz bound",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    together=_settings,
    differs={
        "cpu": "16 seeds instead of 64, and at most 400 steps instead of 1,000; bfloat16 throughout as in the paper, "
        "which a processor without instructions for it computes about five times slower"
    },
)
