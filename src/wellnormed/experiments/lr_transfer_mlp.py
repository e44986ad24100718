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
from wellnormed.experiments._cifar import CifarTask, ConstantRate, mlp
from wellnormed.experiments._experiment import ANSWERS, Experiment, Preset, Verdict
from wellnormed.experiments._figures import legend_below, panels
from wellnormed.experiments._table import Row
from wellnormed.norms import assign_norms
from wellnormed.train.task import DivergedError, fit

Method = Literal["Adam (SP)", "Adam (muP)", "dualized"]


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


def run(cells: Sequence[Cell], device: torch.device) -> list[dict[str, Any]]:
    """Training loss at the end; of the hidden matrix, how far it moved and the stable rank of its last update."""
    return [_result(task_of(cell, device)) for cell in cells]


def _result(task: CifarTask) -> dict[str, Any]:
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


def best(rows: Sequence[Row], method: str, seed: int | None = None) -> dict[int, tuple[float, float, Row]]:
    """Width -> the best learning rate, its loss and its row, of one seed or of all of them together."""
    found: dict[int, tuple[float, float, Row]] = {}
    for row in rows:
        config, loss = row["config"], row["results"]["loss"]
        counts = config["method"] == method and loss is not None and seed in (None, config["seed"])
        if counts and (config["width"] not in found or loss < found[config["width"]][1]):
            found[config["width"]] = (config["lr"], loss, row)
    return dict(sorted(found.items()))


def drift(rows: Sequence[Row], method: str) -> list[float]:
    """By how many factors of two the best rate falls from the narrowest to the widest network, for every seed."""
    seeds = sorted({row["config"]["seed"] for row in rows})
    rates = ([lr for lr, _, _ in best(rows, method, seed).values()] for seed in seeds)
    return [math.log2(own[0] / own[-1]) for own in rates if len(own) > 1]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss against rate by width, the best marked; movement and stable rank of the hidden matrix at the best rate."""
    transfer, axes = panels(1, 3, (11, 4))
    widths = sorted({row["config"]["width"] for row in rows})
    for axis, method in zip(axes[0], get_args(Method), strict=True):
        for number, width in enumerate(widths):
            losses: dict[float, list[float]] = {}
            for config, loss in ((row["config"], row["results"]["loss"]) for row in rows):
                if (config["method"], config["width"]) == (method, width) and loss is not None:
                    losses.setdefault(config["lr"], []).append(loss)
            if losses:
                points = [(lr, fmean(values)) for lr, values in sorted(losses.items())]
                axis.semilogx(*zip(*points, strict=True), "-", base=2, color=f"C{number}", label=f"width {width}")
                axis.plot(*min(points, key=lambda point: point[1]), "o", color=f"C{number}")
        axis.set(title=method, xlabel="learning rate")
    axes[0, 0].set_ylabel("training loss")
    legend_below(transfer, "The best learning rate against width (CIFAR-10)")
    movement, axes = panels(1, 3, (11, 4), sharex=True)
    names = {"moved_frobenius": "movement, Frobenius", "moved_spectral": "movement, spectral",
             "stable_rank": "stable rank of the last update"}  # fmt: skip
    for axis, (name, title) in zip(axes[0], names.items(), strict=True):
        for method in get_args(Method):
            points = [(width, row["results"][name]) for width, (_, _, row) in best(rows, method).items()]
            if points:
                axis.loglog(*zip(*points, strict=True), "o-", label=method)
        axis.set(title=title, xlabel="width")
    legend_below(movement, "The hidden matrix at the best learning rate; movement over the size of the start")
    return {"transfer": transfer, "movement": movement}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """How far the best rate moves, which method ends lowest, and whether dualized weights move."""
    found: list[Verdict] = []
    same, other = ANSWERS[preset]
    claims = {
        "Adam (SP)": ("drifts to the left", lambda drift: drift >= 1),
        "Adam (muP)": ("mostly corrected", lambda drift: abs(drift) <= 1),
        "dualized": ("fairly stable", lambda drift: abs(drift) <= 1),
    }
    for method, (published, holds) in claims.items():
        drifts = drift(rows, method)
        if drifts:
            ours = f"falls by a factor of 2^{fmean(drifts):.1f} from the narrowest to the widest"
            interval = f"2^{min(drifts):.0f} to 2^{max(drifts):.0f}"
            verdict = same if holds(fmean(drifts)) else other
            found.append(Verdict(f"best rate, {method}", published, ours, interval, len(drifts), verdict))
    lowest = {method: min((loss for _, loss, _ in best(rows, method).values()), default=math.inf) for method in claims}
    if len(set(lowest.values())) > 1:
        ours = ", ".join(f"{loss:.3f} {method}" for method, loss in lowest.items())
        verdict = same if min(lowest, key=lambda method: lowest[method]) == "dualized" else other
        found.append(Verdict("lowest training loss", "dualized, much lower", ours, "-", len(rows), verdict))
    wide = {method: list(best(rows, method).values())[-1][2]["results"] for method in claims if best(rows, method)}
    if wide.keys() == claims.keys():
        ours = ", ".join(f"{result['stable_rank']:.0f} {method}" for method, result in wide.items())
        verdict = same if max(wide, key=lambda method: wide[method]["stable_rank"]) == "dualized" else other
        found.append(Verdict("stable rank of an update, widest", "dualized the largest", ours, "-", 1, verdict))
    return found


EXPERIMENT = Experiment(
    name="lr-transfer-mlp",
    source="MD figure 1, sections 6.4 and 6.5",
    shows="that the best learning rate of dualized training does not move with the width, and that its weights move",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={"cpu": "widths 32, 128 and 512 for 100 steps instead of 32 to 4096 for 20 epochs"},
)
