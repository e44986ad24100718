"""LMO figure 2: the loss against the batch size at a fixed number of tokens, each at its own best learning rate.

LMO is Training Deep Learning Models with Norm-Constrained LMOs. It trains the 124M model of its figure 1 on as many
tokens with larger batches, hence fewer steps, and finds that the loss of Scion suffers less than that of Adam and Muon.
The paper does not name the batches and rates: 512 to 4,096 by factors of two are chosen.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from papers._experiment import ANSWERS, Experiment, Preset, Verdict, between
from papers._figures import draw_band, legend_below, panels
from papers._gpt import FINEWEB, GPTRun, Method, text_of
from papers._lmo_tokens import run
from papers._table import Row
from papers._transfer import Best, agreed, best, curves, edges

METHODS: tuple[Method, ...] = ("Adam with warm-up", "Muon", "uSCG", "SCG")
TOKENS = 2**18
BATCHES = (8, 32, 64, 128)
POWERS: dict[Preset, dict[Method, tuple[int, ...]]] = {
    "cpu": {"Adam with warm-up": (-8, -7, -6, -5, -4), "Muon": (-7, -6, -5, -4, -3),
            "uSCG": (-7, -6, -5, -4, -3), "SCG": (-7, -6, -5, -4, -3)},
    "paper": {"Adam with warm-up": (-11, -10, -9, -8, -7), "Muon": (-10, -9, -8, -7, -6),
              "uSCG": (-13, -12, -11, -10, -9), "SCG": (-13, -12, -11, -10, -9)},
}  # fmt: skip
"""Base-2 logarithms of the rates."""


def cells(preset: Preset) -> list[GPTRun]:
    """Every method, batch, rate and seed, with as many steps as the tokens suffice for."""
    sizes: list[dict[str, Any]]
    if preset == "paper":
        sizes = [FINEWEB | {"width": 768, "blocks": 12, "batch": 512 * k, "steps": 5100 // k} for k in (1, 2, 4, 8)]
    else:
        sizes = [{"width": 64, "blocks": 2, "batch": batch, "steps": TOKENS // 64 // batch} for batch in BATCHES]
    return [
        GPTRun(method, lr=2.0**power, seed=seed, **size)
        for seed in range(1 if preset == "paper" else 3)
        for size in sizes
        for method in METHODS
        for power in POWERS[preset][method]
    ]


def rises(rows: Sequence[Row], method: str) -> list[float]:
    """By how much the lowest loss rises from the smallest to the largest batch, for every seed."""
    found = []
    for sizes in curves(rows, "batch", method=method).values():
        losses = [best(curve).loss for curve in sizes.values()]
        if len(losses) > 1:
            found.append(losses[-1] - losses[0])
    return found


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The lowest loss and its learning rate against the batch; bands hold the seeds."""
    figure, axes = panels(2, 1, (6, 7), sharex=True)
    for number, method in enumerate(METHODS):
        of_batch: dict[int, list[Best]] = {}
        for sizes in curves(rows, "batch", method=method).values():
            for batch, curve in sizes.items():
                of_batch.setdefault(batch, []).append(best(curve))
        for axis, name in zip(axes[:, 0], ("loss", "fitted"), strict=True):
            values = {batch: [getattr(found, name) for found in of_batch[batch]] for batch in sorted(of_batch)}
            draw_band(axis, values, "o-", color=f"C{number}", edge=0, label=method)
    axes[0, 0].set_ylabel("lowest validation loss")
    axes[1, 0].set(xlabel="windows in a batch", ylabel="best learning rate", yscale="log")
    axes[1, 0].set_xscale("log", base=2)
    legend_below(figure, "Batch size at a fixed number of tokens")
    return {"batch": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Whether the loss of Scion rises less than that of Adam and of Muon, and where rates are missing."""
    found: list[Verdict] = []
    yes, no = ANSWERS[preset]
    batches = sorted({row["config"]["batch"] for row in rows})
    for scion in ("uSCG", "SCG"):
        for other in ("Adam with warm-up", "Muon"):
            ours, theirs = rises(rows, scion), rises(rows, other)
            gains = [b - a for a, b in zip(ours, theirs, strict=False)]
            if not gains:
                continue
            what = f"rise of the lowest loss from batch {batches[0]} to {batches[-1]}, {scion} against {other}"
            numbers = f"{fmean(ours):.3f} against {fmean(theirs):.3f}"
            interval = f"smaller by {between(gains)}"
            verdict, why = agreed(gains, yes, no)
            at_edge = [f"{method}: {count} of the minima at the edge of the rates"
                       for method in (scion, other) if (count := edges(rows, "batch", method=method))]  # fmt: skip
            why = "; ".join([*at_edge, *filter(None, [why])])
            found.append(Verdict(what, "Scion's is smaller", numbers, interval, len(gains), verdict, why))
    return found


EXPERIMENT = Experiment(
    name="batch-size",
    source="LMO figure 2",
    shows="that the loss of Scion suffers less from large batches, at a fixed number of tokens, than Adam's and Muon's",
    cells=cells,
    run=run,
    keeps=True,
    data=text_of,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "262,144 characters of Shakespeare instead of 2.7 billion tokens of FineWeb, in batches of 8 to 128 "
        "windows of 64; width 64, two blocks, heads of 16; head and embedding are two weights, with the norms and "
        "radii of the released Shakespeare code, and rates fall from the first step on",
        "paper": "the length of Adam's warm-up is modded-nanogpt's, for LMO's text does not say it; the hidden layers "
        "of Adam and Muon are scaled like Scion's; batches, rates and one seed are chosen, for the paper does not "
        "name them",
    },
)
