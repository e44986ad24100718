"""airbench94 (Jordan, 2024): 94% on CIFAR-10 in seconds, with this package's optimizer and caps.

The network, its images and eight epochs in batches of 2,000 are airbench's (`_airbench`), as LMO trains it. "SGD" is
torch's, with the rates, momentum and weight decay of airbench94, but without its averages of the weights. "Scion" is
LMO's constrained form, and "Scion, caps" the unconstrained one, whose kernels and head are brought below the same
radii after every step. Seconds are those of training, without evaluation, after a few steps that warm the machine up;
they mean something only of runs with one job.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import wellnormed as wn
from papers._airbench import AirbenchRun, AirbenchTask
from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._table import Row
from wellnormed.constraints import Constraints, EntryCap
from wellnormed.routing import Assignment
from wellnormed.train.task import DivergedError, fit

Method = Literal["SGD", "Scion", "Scion, caps"]
CAPPED: Method = "Scion, caps"
PUBLISHED: dict[str, str] = {
    "SGD": "0.9401 in 3.83 s on an A100, with averages and 9.9 epochs",
    "Scion": "0.9395 (LMO)",
    "Scion, caps": "-",
}
TARGET = 0.94
WARM = 3
"""Steps that are not timed."""
MOMENTUM = 0.85
KILOSTEP = 1024 * (1 + 1 / (1 - MOMENTUM))
"""Images per unit of airbench94's rates, which are for sums over a batch and for what momentum makes of a step."""


@dataclass(frozen=True)
class Cell:
    """One training run."""

    method: Method
    lr: float
    """Of SGD, over airbench94's."""
    width: float
    """Channels over those of airbench."""
    steps: int
    batch: int
    seed: int
    tested: int = 10_000
    """Test images."""
    half: bool = False
    """Whether the network computes in bfloat16 (autocast)."""


class Airbench94Task(AirbenchTask):
    """The same network and images, moved and held by the method of a cell."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, whole = cell, cell.tested == 10_000
        super().__init__(
            AirbenchRun(cell.width, cell.lr, cell.steps, cell.batch, cell.seed, whole, cell.tested), device
        )

    def moved(self, model: nn.Module, norms: Assignment) -> tuple[torch.optim.Optimizer, Constraints | None]:
        """The optimizer, and what holds the weights."""
        match self.cell.method:
            case "SGD":
                images = self.cell.batch / KILOSTEP
                rate, shrinks = 11.5 * images * self.cell.lr, 0.0153 * images  # of the mean over a batch
                groups = [
                    {"params": [a.parameter], "lr": lr, "weight_decay": shrinks / lr}
                    for a in norms
                    for lr in [rate * (64 if a.parameter.ndim == 1 else 1)]
                ]
                return torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True), None
            case "Scion":
                return super().moved(model, norms)
            case _:
                optimizer = wn.Scion(norms, self.cell.lr, momentum=0.4)
                held = {a.name: wn.HardCap(a.radius) for a in norms if a.parameter.ndim == 4}
                held |= {a.name: EntryCap(a.radius) for a in norms if a.parameter.ndim == 2}
                return optimizer, wn.constrain(optimizer, held, norms=norms)

    def batch_loss(self) -> Tensor:
        with torch.autocast(self.train[0].device.type, torch.bfloat16, enabled=self.cell.half):
            return super().batch_loss()


def cells(preset: Preset) -> list[Cell]:
    """`paper`: every method at its published rate; `cpu`: a quarter of the width, less than an epoch, a few rates."""
    paper = preset == "paper"
    width, batch, tested, seeds = (1.0, 2000, 10_000, 5) if paper else (0.25, 200, 2000, 3)
    multiples = (1.0,) if paper else (0.5, 1.0, 2.0)
    rates: dict[Method, float] = {"SGD": 1.0 if paper else 4.0, "Scion": 0.05, CAPPED: 0.05}
    return [
        Cell(method, rate * multiple, width, 200, batch, seed, tested, half=paper)
        for seed in range(seeds)
        for method, rate in rates.items()
        for multiple in multiples
    ]


def run(cells: Sequence[Cell], device: torch.device) -> list[dict[str, Any]]:
    """Accuracy, the largest norm over its radius, and the seconds of training; zeros where it diverged."""
    return [_result(cell, device) for cell in cells]


def _result(cell: Cell, device: torch.device) -> dict[str, Any]:
    try:
        fit(Airbench94Task(cell, device), lambda task, _: task.step == WARM)
        task = Airbench94Task(cell, device)
        begin = _now(device)
        fit(task)
        seconds = _now(device) - begin
    except DivergedError:
        return {"loss": None, "accuracy": 0.0, "norm": 0.0, "seconds": 0.0}
    return task.evaluate() | {"seconds": seconds}


def _now(device: torch.device) -> float:
    """Seconds, when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def values(rows: Sequence[Row], key: str, **where: Any) -> list[float]:
    """A result of the rows whose config has these values."""
    return [row["results"][key] for row in rows if where.items() <= row["config"].items()]


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Method -> the rate of its highest mean accuracy."""
    tried: dict[str, set[float]] = {}
    for row in rows:
        tried.setdefault(row["config"]["method"], set()).add(row["config"]["lr"])
    return {
        method: max(rates, key=lambda lr, method=method: fmean(values(rows, "accuracy", method=method, lr=lr)))
        for method, rates in tried.items()
    }


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Accuracy against seconds of training: every run, those of the best rates in full colour."""
    figure, ((axis,),) = panels(1, 1, (7, 4.5))
    for number, (method, lr) in enumerate(best_rates(rows).items()):
        for where, alpha, label in (({}, 0.25, None), ({"lr": lr}, 1.0, f"{method}, rate {lr:g}")):
            points = [values(rows, key, method=method, **where) for key in ("seconds", "accuracy")]
            axis.plot(*points, "o", color=f"C{number}", alpha=alpha, label=label)
    axis.set(xlabel="seconds of training", ylabel="accuracy on test images")
    legend_below(figure, "airbench on CIFAR-10: every run; pale are other rates than the best")
    return {"airbench94": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Every method at its best rate, whether the caps held, and what they cost."""
    names, means, lines = ANSWERS[preset], {}, []
    for method, lr in best_rates(rows).items():
        each, seconds = (values(rows, key, method=method, lr=lr) for key in ("accuracy", "seconds"))
        means[method] = fmean(each)
        ours = f"{means[method]:.4f} in {fmean(seconds):.2f} s at rate {lr:g}"
        interval = f"{min(each):.4f} to {max(each):.4f}"
        verdict = "measured" if preset == "cpu" else names[means[method] < TARGET]
        what = f"{method}: accuracy and seconds"
        lines.append(Verdict(what, PUBLISHED[method], ours, interval, len(each), verdict))
    if norms := values(rows, "norm", method=CAPPED):
        largest = max(norms)
        what = "largest norm over its radius, with caps"
        lines.append(Verdict(what, "at most 1", f"{largest:.5f}", "-", len(norms), names[largest > 1]))
    for other in sorted(means.keys() - {CAPPED}) if CAPPED in means else ():
        what = f"accuracy of Scion with caps less that of {other}"
        count = sum(line.runs for line in lines if line.what.startswith((f"{CAPPED}:", f"{other}:")))
        lines.append(Verdict(what, "-", f"{means[CAPPED] - means[other]:+.4f}", "-", count, "measured"))
    return lines


EXPERIMENT = Experiment(
    name="airbench94",
    source="Jordan (2024); LMO figure 3",
    shows="accuracy of airbench's network on CIFAR-10, and the seconds of its training, with and without caps",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "a quarter of airbench's channels, 200 steps of 200 images, the first 2,000 test images, each seen once",
        "paper": "bfloat16 by autocast instead of half precision; nothing is compiled",
    },
)
