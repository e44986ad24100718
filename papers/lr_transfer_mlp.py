"""MD figure 1, sections 6.4 and 6.5: the best learning rate against width, for Adam, Adam with muP, and dualized.

MD is Modular Duality in Deep Learning; the settings are those of its appendix A.1, where rates stay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import wellnormed as wn
from papers._cifar import CifarTask, ConstantRate, mlp
from papers._experiment import ANSWERS, Experiment, Preset, Verdict, between
from papers._figures import legend_below, panels
from papers._table import Row
from papers._transfer import agreed, best, best_losses, curves, mean_best, transfer_figure, transfer_verdict
from wellnormed.routing import assign_norms
from wellnormed.train.task import DivergedError, fit

Method = Literal["Adam (SP)", "Adam (muP)", "dualized"]
SHOWN = {
    "moved_frobenius": "movement, Frobenius norm",
    "moved_spectral": "movement, spectral norm",
    "stable_rank": "stable rank of the last update",
}
"""Results of the hidden matrix."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: Method
    width: int
    lr: float
    steps: int
    batch: int
    seed: int


def task_of(cell: Cell, device: torch.device) -> CifarTask:
    """The network at its start, and what moves it."""
    torch.manual_seed(cell.seed)
    model = mlp(cell.width).to(device)
    generator = torch.Generator().manual_seed(cell.seed)
    weights = list(model.parameters())
    if cell.method == "dualized":
        for weight in weights:
            wn.Spectral(coefficients="cubic").initialize_(weight.data, generator)
        optimizer: torch.optim.Optimizer = wn.Scion(
            assign_norms(model, overrides={"*": wn.Spectral(coefficients="modula-5", method="newton-schulz")}),
            lr=cell.lr / len(weights), momentum=0.0, nesterov=False,
        )  # fmt: skip
    elif cell.method == "Adam (SP)":
        optimizer = torch.optim.Adam(weights, lr=cell.lr)
    else:
        for weight in weights:
            d_out, d_in = weight.shape
            nn.init.normal_(weight, std=math.sqrt(min(d_in, d_out)) / d_in, generator=generator)
        optimizer = torch.optim.Adam([{"params": [weight], "lr": cell.lr / weight.shape[1]} for weight in weights])
    return ConstantRate(model, optimizer, steps=cell.steps, batch=cell.batch, seed=cell.seed, device=device)


def cells(preset: Preset) -> list[Cell]:
    """Rates by factors of two about the best ones."""
    if preset == "paper":
        widths, steps, batch, seeds, half = (32, 64, 128, 256, 512, 1024, 2048, 4096), 20 * 390, 128, 1, 7
    else:
        widths, steps, batch, seeds, half = (32, 128, 512), 100, 128, 3, 3
    middle = {"Adam (SP)": -10, "Adam (muP)": 0, "dualized": -1}
    return [
        Cell(method, width, 2.0 ** (middle[method] + power), steps, batch, seed)
        for seed in range(seeds)
        for method, width in product(get_args(Method), widths)
        for power in range(-half, half + 1)
    ]


def stable_rank(matrix: Tensor) -> float:
    """`|M|_F^2 / |M|_2^2`, 0 for a zero matrix."""
    largest = float(torch.linalg.matrix_norm(matrix, 2))
    return float(matrix.square().sum()) / largest**2 if largest else 0.0


def run(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Training loss at the end; of the hidden matrix, how far it moved and the stable rank of its last update."""
    task = task_of(cell, device)
    hidden = list(task.model.parameters())[1].detach()
    start, before, update = hidden.clone(), hidden.clone(), torch.zeros_like(hidden)
    losses: list[float] = []

    def watch(task: CifarTask, loss: float) -> None:
        losses.append(loss)
        torch.sub(hidden, before, out=update)
        before.copy_(hidden)

    try:
        fit(task, watch)
    except DivergedError:
        return {"loss": None}
    moved = hidden - start
    return {
        "loss": fmean(losses[-20:]),
        "moved_frobenius": float(moved.norm() / start.norm()),
        "moved_spectral": float(torch.linalg.matrix_norm(moved, 2) / torch.linalg.matrix_norm(start, 2)),
        "stable_rank": stable_rank(update),
    }


def at_best(rows: Sequence[Row], method: str, key: str) -> dict[int, list[float]]:
    """Width -> a result of the hidden matrix at the best rate of every seed."""
    found: dict[int, list[float]] = {}
    for seed, sizes in curves(rows, "width", method=method).items():
        for width, curve in sizes.items():
            where = {"method": method, "width": width, "lr": best(curve).rate, "seed": seed}
            results = [row["results"] for row in rows if where.items() <= row["config"].items()]
            found.setdefault(width, []).extend(result[key] for result in results if result["loss"] is not None)
    return {width: values for width, values in sorted(found.items()) if values}


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss against rate by width, the best marked; movement and stable rank of the hidden matrix at the best rate."""
    titles = {method: {"method": method} for method in get_args(Method)}
    title = "CIFAR-10: the best learning rate against width"
    transfer = transfer_figure(rows, "width", titles, title, ylabel="training loss", above=1.0)
    movement, axes = panels(1, 3, (11, 4), sharey=False)
    for axis, (key, name) in zip(axes[0], SHOWN.items(), strict=True):
        for method in titles:
            if found := at_best(rows, method, key):
                axis.loglog(list(found), list(map(fmean, found.values())), "o-", label=method)
        widths = sorted({row["config"]["width"] for row in rows})
        axis.set_xticks(widths, map(str, widths), minor=False)
        axis.set_xticks([], minor=True)
        axis.set(title=name, xlabel="width")
    legend_below(movement, "The hidden matrix at the best rate, mean of the seeds; movement over the size of the start")
    return {"transfer": transfer, "movement": movement}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """How far the best rate moves, which method ends lowest, and whether dualized weights move."""
    found: list[Verdict] = []
    names = ANSWERS[preset]
    claims = {"Adam (SP)": "drifts to the left", "Adam (muP)": "mostly corrected", "dualized": "fairly stable"}
    for method, published in claims.items():
        stays = method != "Adam (SP)"
        found += transfer_verdict(rows, "width", f"best rate, {method}", published, stays, names, method=method)
    lowest = {method: losses for method in claims if (losses := best_losses(rows, method=method))}
    if lowest.keys() == claims.keys():
        ours = ", ".join(f"{mean_best(rows, method=method)} {method}" for method in lowest)
        gains = [min(others) - own for *others, own in zip(*lowest.values(), strict=True)]
        interval = f"lower by {between(gains)}"
        verdict, why = agreed(gains, *names)
        found.append(Verdict("lowest training loss", "dualized, much lower", ours, interval, len(gains), verdict, why))
    for key, name in SHOWN.items():
        widest = {m: list(sizes.values())[-1] for m in claims if (sizes := at_best(rows, m, key))}
        if widest.keys() == claims.keys():
            ours = ", ".join(f"{fmean(values):.2g} {method}" for method, values in widest.items())
            published, verdict, why = "-", "measured", ""
            if key != "moved_spectral":  # MD 6.5 has the Frobenius norm, and the stable rank
                gains = [own - max(others) for *others, own in zip(*widest.values(), strict=True)]
                published, (verdict, why) = "dualized the largest", agreed(gains, *names)
            own = widest["dualized"]
            interval = f"{between(own, '.2g')} dualized"
            found.append(Verdict(f"{name}, widest network", published, ours, interval, len(own), verdict, why))
    return found


EXPERIMENT = Experiment(
    name="lr-transfer-mlp",
    source="MD figure 1, sections 6.4 and 6.5",
    shows="that the best learning rate of dualized training does not move with the width, and that its weights move",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "widths 32, 128 and 512 for 100 steps instead of 32 to 4096 for 20 epochs",
        "paper": "MD does not name its 10 to 20 rates: 15 by factors of two are chosen; the dualized start is an "
        "exact matrix sign, not 30 steps of Newton-Schulz",
    },
)
