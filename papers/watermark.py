"""MD figure 2: a letter of zeros in the hidden matrix, and whether training erases it, over ten learning rates.

Settings of MD's appendix A.2: width 1024, 1,000 steps of 1,024 images, no momentum; the dualized gradient against the
gradient divided by its spectral norm, both by a third for the mass of each of the three layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, Literal, get_args

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

import wellnormed as wn
from papers._cifar import CifarTask, ConstantRate, mlp
from papers._experiment import ANSWERS, Experiment, Preset, Verdict, between
from papers._figures import legend_below, panels
from papers._table import Row, results_by
from wellnormed.routing import assign_norms
from wellnormed.train.task import DivergedError, fit

Method = Literal["dualized", "normalized"]
_PIXELS = 32
"""Side of the picture of a matrix: the mean size of the entries in each of so many blocks squared."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: Method
    lr: float
    width: int
    steps: int
    batch: int
    seed: int


class Normalized(torch.optim.Optimizer):
    """`W - lr G / |G|_2`."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                size = torch.linalg.matrix_norm(parameter.grad, 2).clamp_min(torch.finfo(parameter.dtype).tiny)
                parameter.sub_(group["lr"] * parameter.grad / size)


def letter(side: int) -> Tensor:
    """Where an "a" covers a square of that side, as matplotlib draws it."""
    figure = Figure(figsize=(1, 1), dpi=side)
    figure.text(0.5, 0.5, "a", fontsize=80, ha="center", va="center")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., 0] < 128)


def task_of(cell: Cell, device: torch.device) -> tuple[CifarTask, Tensor]:
    """The network with its letter, what moves it, and where the letter is."""
    model, generator = mlp(cell.width), torch.Generator().manual_seed(cell.seed)
    for weight in model.parameters():
        wn.Spectral(coefficients="cubic").initialize_(weight.data, generator)
    mask = letter(cell.width).to(device)
    model = model.to(device)
    weights = list(model.parameters())
    weights[1].data[mask] = 0.0
    if cell.method == "dualized":
        norm = wn.Spectral(coefficients="watermark-10", method="newton-schulz")
        optimizer: torch.optim.Optimizer = wn.Scion(
            assign_norms(model, overrides={"*": norm}), lr=cell.lr / len(weights), momentum=0.0, nesterov=False
        )
    else:
        optimizer = Normalized(weights, cell.lr / len(weights))
    task = ConstantRate(model, optimizer, steps=cell.steps, batch=cell.batch, seed=cell.seed, device=device)
    return task, mask


def cells(preset: Preset) -> list[Cell]:
    """Ten rates by factors of two."""
    width, steps, batch, seeds = (1024, 1000, 1024, 1) if preset == "paper" else (256, 100, 256, 3)
    return [
        Cell(method, 2.0**power, width, steps, batch, seed)
        for seed in range(seeds)
        for method, power in product(get_args(Method), range(-6, 4))
    ]


def run(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Training accuracy; size of the entries under the letter over that of the others; a picture of the matrix."""
    task, mask = task_of(cell, device)
    try:
        fit(task)
    except DivergedError:
        return {"accuracy": None, "contrast": None, "picture": None}
    hidden = list(task.model.parameters())[1].detach().square()
    blocks = hidden.unfold(0, len(hidden) // _PIXELS, len(hidden) // _PIXELS)
    blocks = blocks.unfold(1, len(hidden) // _PIXELS, len(hidden) // _PIXELS).mean((-2, -1)).sqrt()
    return {
        "accuracy": task.score(*(part[:10_000] for part in task.train))["accuracy"],
        "contrast": float((hidden[mask].mean() / hidden[~mask].mean()).sqrt()),
        "picture": [[round(float(x), 5) for x in line] for line in blocks],
    }


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The learned matrix at every rate, and accuracy and contrast against the rate."""
    rates = sorted({row["config"]["lr"] for row in rows})
    pictures, axes = panels(2, len(rates), (1.3 * len(rates), 3.4))
    for axis in axes.flat:
        axis.axis("off")
    for row in rows:
        config, results = row["config"], row["results"]
        if config["seed"] == 0 and results["picture"] is not None:
            axis = axes[get_args(Method).index(config["method"]), rates.index(config["lr"])]
            axis.imshow(results["picture"], cmap="gray", vmin=0)
            axis.set_title(f"{config['lr']:g}: {results['accuracy']:.0%}", fontsize=8)
    pictures.suptitle("Sizes of the hidden matrix's entries after training, by rate; above: dualized", fontsize=10)
    curves, axes = panels(1, 2, (9.5, 4), sharey=False)
    names = {"accuracy": "training accuracy", "contrast": "size under the letter / beside it"}
    for axis, (name, title) in zip(axes[0], names.items(), strict=True):
        for method in get_args(Method):
            values = _by_rate(rows, method, name)
            means, low, high = ([by(found) for found in values.values()] for by in (fmean, min, max))
            axis.semilogx(list(values), means, "o-", base=2, label=method)
            axis.fill_between(list(values), low, high, alpha=0.2)
        axis.set(xlabel="learning rate", ylabel=title)
    legend_below(curves, "Erasing a watermark (CIFAR-10)")
    return {"pictures": pictures, "watermark": curves}


def _by_rate(rows: Sequence[Row], method: str, name: str) -> dict[float, list[float]]:
    return results_by([row for row in rows if row["results"][name] is not None], "lr", name, method=method)


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Which method ends higher, and which erases the letter where it still learns."""
    same, other = ANSWERS[preset]
    top: dict[str, list[float]] = {}
    kept: dict[str, list[float]] = {}
    for method in get_args(Method):
        accuracies, contrasts = (_by_rate(rows, method, name) for name in ("accuracy", "contrast"))
        top[method] = max(accuracies.values(), key=fmean, default=[0.0])
        stable = [lr for lr, values in accuracies.items() if fmean(values) > 0.8 * fmean(top[method])]
        kept[method] = contrasts[max(stable)] if stable else [0.0]
    runs = len({row["config"]["seed"] for row in rows})
    higher = same if fmean(top["dualized"]) > fmean(top["normalized"]) else other
    erased = same if fmean(kept["dualized"]) > 0.8 > fmean(kept["normalized"]) else other
    what = "size under the letter over that beside it, at the highest stable rate"
    return [
        Verdict("highest training accuracy", "dualized higher", *_shown(top), runs, higher),
        Verdict(what, "dualized erases it", *_shown(kept), runs, erased),
    ]


def _shown(found: dict[str, list[float]]) -> tuple[str, str]:
    """Means and extremes of both methods."""
    means = ", ".join(f"{fmean(values):.3f} {method}" for method, values in found.items())
    return means, ", ".join(map(between, found.values()))


EXPERIMENT = Experiment(
    name="watermark",
    source="MD figure 2",
    shows="that dualized training moves every entry of a wide matrix, and so erases a letter written into it",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "width 256 for 100 steps of 256 images instead of 1024 for 1,000 steps of 1,024",
        "paper": 'the letter is an "a" as matplotlib draws it; MD does not state the start, which is orthogonal here',
    },
)
