"""LMO figure 3: the best learning rate of Scion (SCG) against the width of a convolutional network on CIFAR-10.

LMO is Training Deep Learning Models with Norm-Constrained LMOs. The network is airbench's, trained for eight epochs in
batches of 2,000, at half, once, twice and four times its width; norms, radii, momentum and rates are those of the
released code, which reports 93.95% for the rate 0.05 at width 1. The paper finds that the best rate transfers, and that
no weight need be normalised, since the steps keep every norm within its radius.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure

from papers._airbench import AirbenchRun, AirbenchTask
from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._table import Row
from papers._transfer import transfer_figure, transfer_verdict
from wellnormed.train.task import DivergedError, fit

PUBLISHED = 0.9395
WITHIN = 0.003
"""How far the mean accuracy may be from the published one."""
RATE = 0.05


def cells(preset: Preset) -> list[AirbenchRun]:
    """Four widths and rates by factors of two; for `paper` also the rate of the published accuracy."""
    if preset == "paper":
        settings: dict[str, Any] = {"steps": 200, "batch": 2000, "averaged": True}
        widths, powers = (0.5, 1.0, 2.0, 4.0), range(-9, 1)
    else:
        settings = {"steps": 128, "batch": 128, "tested": 2000}
        widths, powers = (0.0625, 0.125, 0.25, 0.5), range(-7, -1)
    sizes = [(width, 2.0**power) for width in widths for power in powers]
    if preset == "paper":
        sizes.append((1.0, RATE))
    return [AirbenchRun(*size, seed=seed, **settings) for seed in range(3) for size in sizes]


def run(cell: AirbenchRun, device: torch.device) -> dict[str, Any]:
    """Loss and accuracy on test images, and the largest norm over its radius; None where the run diverged."""
    task = AirbenchTask(cell, device)
    try:
        fit(task)
    except DivergedError:
        return {"loss": None, "accuracy": None, "norm": None}
    return task.evaluate()


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss and accuracy against rate by width."""
    title = "airbench on CIFAR-10, Scion: the best learning rate against width"
    errors = [
        row | {"results": {"loss": None if row["results"]["loss"] is None else 1 - row["results"]["accuracy"]}}
        for row in rows
    ]
    return {
        "loss": transfer_figure(rows, "width", {"Scion (SCG)": {}}, title, ylabel="test loss"),
        "error": transfer_figure(errors, "width", {"Scion (SCG)": {}}, title, ylabel="share of test images wrong"),
    }


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """How far the best rate moves, whether norms stay within their radii, and the accuracy at the published rate."""
    names = ANSWERS[preset]
    found = transfer_verdict(rows, "width", "best rate, Scion", "transfers across width", True, names)
    at = [(row["config"], row["results"]) for row in rows if row["results"]["loss"] is not None]
    norms = [result["norm"] for config, result in at if config["lr"] >= RATE]
    if norms:
        what = f"largest norm of a kernel or the head over its radius, rates from {RATE} on"
        verdict = names[max(norms) > 1.01]  # for what is left of the start
        why = "kernels start outside, as released, and smaller rates keep more of that"
        found.append(Verdict.of(what, "at most 1", norms, verdict, why, ours=f"{max(norms):.3f}"))
    accuracies = [result["accuracy"] for config, result in at if (config["lr"], config["width"]) == (RATE, 1.0)]
    if accuracies:
        verdict = names[abs(fmean(accuracies) - PUBLISHED) > WITHIN]
        found.append(Verdict.of("accuracy", str(PUBLISHED), accuracies, verdict, digits=".4f"))
    return found


EXPERIMENT = Experiment(
    name="lr-transfer-cnn",
    source="LMO figure 3",
    shows="that the best learning rate of Scion does not move with the width of a convolutional network",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "widths of 1/16 to 1/2 of airbench's, 128 steps of 128 images instead of 200 of 2,000, and loss and "
        "accuracy on the first 2,000 test images, each seen once",
        "paper": "float32 instead of half precision",
    },
)
