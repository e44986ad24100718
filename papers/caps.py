"""LT figures 1 and 5, SC figures 1 to 3: what every cap and clip does to a singular value, and to a trained network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor

from papers._cifar import CifarRun, lt_task
from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import draw_band, legend_below, panels
from papers._table import Row
from papers.published_matrix import clip
from wellnormed.matrix import soft_cap, spectral_clip, spectral_clipped_weight_decay, spectral_hardcap, spectral_relu
from wellnormed.train.task import fit

GRID = torch.linspace(0, 2.5, 126, dtype=torch.float64)
ALPHAS = (0.2, 0.1, 0.05, 0.0)
"""Strengths of the soft cap in LT's figure 5."""
NESTED = "hard cap, nested signs"
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    **{
        f"soft cap, strength {a:g}": (partial(soft_cap, strength=a), lambda s, a=a: (p := s - a * s**3) + a * p**3)
        for a in ALPHAS
    },
    "hard cap": (partial(spectral_hardcap, upper=1.0), lambda s: min(s, 1.0)),
    NESTED: (partial(clip, lower=None, upper=1.0, method="nested"), lambda s: min(s, 1.0)),
    "clip to [0.5, 1]": (partial(spectral_clip, lower=0.5, upper=1.0), lambda s: min(max(s, 0.5), 1.0) if s else 0.0),
    "spectral relu at 0.5": (partial(spectral_relu, lower=0.5), lambda s: max(s, 0.5) if s else 0.0),
    "clipped weight decay 0.5": (
        partial(spectral_clipped_weight_decay, upper=1.0, decay=0.5),
        lambda s: min(s, 1.0) + 0.5 * max(s - 1.0, 0.0),
    ),
}
"""Name -> the matrix function, and what it does to a singular value."""


@dataclass(frozen=True)
class Curve:
    """A function on a diagonal matrix of singular values from 0 to 2.5."""

    function: str
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """The CIFAR-10 network, trained by Muon with a constraint of cap 2, or with none."""

    method: Literal["none", "soft cap", "hard cap"]
    steps: int
    width: int
    batch: int
    seed: int


def cells(preset: Preset) -> list[Curve | Trained]:
    """Every function once, and three trainings."""
    steps, width, batch, seeds = (4850, 256, 512, 1) if preset == "paper" else (300, 64, 256, 3)
    methods: tuple[Literal["none", "soft cap", "hard cap"], ...] = ("none", "soft cap", "hard cap")
    trained = [Trained(method, steps, width, batch, seed) for seed in range(seeds) for method in methods]
    return [*(Curve(name) for name in FUNCTIONS), *trained]


def run(cell: Curve | Trained, device: torch.device) -> dict[str, Any]:
    """Values of a curve, and of the scalar function; or singular values and activations of a trained network."""
    if isinstance(cell, Trained):
        return _trained(cell, device)
    function, scalar = FUNCTIONS[cell.function]
    values = function(GRID.diag().to(device)).diagonal().tolist()
    return {"values": values, "exact": [scalar(s) for s in GRID.tolist()]}


@torch.no_grad()
def _observed(model: torch.nn.Sequential, pixels: Tensor) -> dict[str, Any]:
    hidden = list(model.parameters())[1]
    activations = model[:4](pixels)
    quantiles = torch.linspace(0, 1, 51, dtype=torch.float64)
    return {
        "singular_values": torch.linalg.svdvals(hidden.double()).tolist(),
        "activations": activations.double().flatten().cpu().quantile(quantiles).tolist(),
    }


def _trained(cell: Trained, device: torch.device) -> dict[str, Any]:
    method = "weight decay" if cell.method == "none" else cell.method
    strength = 0.0 if cell.method == "none" else 2.0
    task = lt_task(CifarRun("muon", method, strength, 0.3, cell.steps, cell.batch, cell.width, cell.seed), device)
    fit(task)
    scores = task.evaluate()
    return {**_observed(task.model, task.test[0][:500]), "accuracy": scores["accuracy"], "norms": scores["norms"]}


def _trainings(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "method" in row["config"]:
            found.setdefault(row["config"]["method"], []).append(row["results"])
    return found


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The curves; and singular values and activations with and without a constraint, shaded over the seeds."""
    curves, axes = panels(1, 2, (10, 4.2))
    styles = ("-", "--", "-.", ":", "-")
    for row in rows:
        if "function" in row["config"]:
            name = row["config"]["function"]
            axis = axes[0, 0] if name.startswith("soft") else axes[0, 1]
            style = styles[len(axis.get_lines()) % len(styles)]  # curves lie upon each other
            axis.plot(GRID.tolist(), row["results"]["values"], style, linewidth=2, label=name)
    for axis, title in zip(axes[0], ("soft cap", "hard cap, clips and decay"), strict=True):
        axis.plot(GRID.tolist(), GRID.tolist(), ":", color="#999999", label="unchanged")
        axis.set(xlabel="singular value", ylim=(0, 1.6), title=title)
        axis.legend(fontsize=8)
    axes[0, 0].set_ylabel("afterwards")
    if not (trainings := _trainings(rows)):  # they come last
        return {"curves": curves}
    trained, axes = panels(1, 2, (10, 4), sharey=False)
    for number, (method, results) in enumerate(trainings.items()):
        for axis, what in zip(axes[0], ("singular_values", "activations"), strict=True):
            seeds = [sorted(result[what], reverse=what == "singular_values") for result in results]
            places = [100 * n / (len(seeds[0]) - 1) if what == "activations" else n for n in range(len(seeds[0]))]
            values = dict(zip(places, zip(*seeds, strict=True), strict=True))
            draw_band(axis, values, color=f"C{number}", label=method)
    axes[0, 0].set(xlabel="number", ylabel="singular value of the hidden matrix", yscale="log")
    axes[0, 1].set(xlabel="quantile (per cent)", ylabel="entry before the second ReLU")
    legend_below(trained, "CIFAR-10, Muon: with and without a constraint; shaded from the least to the largest seed")
    return {"curves": curves, "trained": trained}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Errors of the curves against the scalar functions; norms and activations of the trained networks."""
    errors = {
        row["config"]["function"]: max(
            abs(a - b) for a, b in zip(row["results"]["values"], row["results"]["exact"], strict=True)
        )
        for row in rows
        if "function" in row["config"]
    }
    published, why = errors.pop(NESTED, None), "by matrix signs that have not converged beside the cap"
    found = []
    if errors:
        largest = max(errors.values())
        what, verdict = "every cap and clip: largest error", "reached" if largest < 1e-9 else "not reached"
        found.append(Verdict(what, "the scalar function", f"{largest:.1e}", "-", len(errors), verdict))
    if published is not None:
        found.append(Verdict(f"{NESTED}: largest error", "-", f"{published:.1e}", "-", 1, "measured", why))
    trainings = _trainings(rows)
    for method in ("soft cap", "hard cap"):
        if method in trainings and "none" in trainings:
            held, free = trainings[method], trainings["none"]
            largest = [max(result["norms"]) for result in held]
            ours = f"norm {max(largest):.3f}, without {max(max(result['norms']) for result in free):.3f}"
            verdict = ANSWERS[preset][max(largest) > 2]
            found.append(Verdict.of(f"trained with a {method} of 2", "norm at most 2", largest, verdict, ours=ours))
    return found


EXPERIMENT = Experiment(
    name="caps",
    source="LT figures 1 and 5, SC figures",
    shows="what every cap and clip does to a singular value, and to the weights and activations of a trained network",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "the network has width 64 and is trained for 300 steps",
        "paper": "the papers' figures are sketches of the functions; the trained network, its rate of 0.3 and its "
        "caps of 2 are ours, at the size of LT's CIFAR-10 runs",
    },
)
