"""LMO figure 1: the best learning rate of a transformer against its width and depth.

LMO is Training Deep Learning Models with Norm-Constrained LMOs. It trains NanoGPT of 64 million to a billion parameters
on FineWeb with Adam, Muon, unconstrained Scion (uSCG) and Scion (SCG), and finds that the best rate of the last two
does not depend on the width; `scion-3b` has the model of table 5, which takes the rate of a smaller one. Batch, steps,
schedule, radii and the share of Adam beside Muon are those of the released code. The paper does not name the widths and
rates: 512 (64 million parameters), 768 (124), 1280 and 2560 (a billion) are chosen, and rates about the code's.
"""

from collections.abc import Sequence
from statistics import fmean, mode
from typing import Any

from matplotlib.figure import Figure

from papers._experiment import ANSWERS, Experiment, Preset, Verdict, between
from papers._gpt import FINEWEB, GPTRun, Method, text_of
from papers._lmo_tokens import run
from papers._table import Row
from papers._transfer import agreed, best_losses, mean_best, transfer_figure, transfer_verdict

METHODS: tuple[Method, ...] = ("Adam with warm-up", "Muon", "uSCG", "SCG")
POWERS: dict[Preset, dict[Method, tuple[int, ...]]] = {
    "cpu": {"Adam with warm-up": (-10, -9, -8, -7, -6, -5, -4), "Muon": (-7, -6, -5, -4, -3, -2),
            "uSCG": (-6, -5, -4, -3, -2), "SCG": (-6, -5, -4, -3, -2)},
    "paper": {"Adam with warm-up": (-12, -11, -10, -9, -8, -7), "Muon": (-11, -10, -9, -8, -7, -6),
              "uSCG": (-14, -13, -12, -11, -10), "SCG": (-14, -13, -12, -11, -10)},
}  # fmt: skip
"""Base-2 logarithms of the rates."""
TABLE_5: dict[Method, float] = {"Adam with warm-up": 3.024, "Muon": 2.909, "uSCG": 2.882, "SCG": 2.890}
BILLION: dict[Method, float] = {"Muon": 2.988, "uSCG": 2.984}
WITHIN = 0.02
"""How far a loss may be from the published one."""
SMALL: dict[str, Any] = {"steps": 64, "batch": 16}
WIDTHS, DEPTHS = (32, 64, 128, 256), (1, 2, 4)


def cells(preset: Preset) -> list[GPTRun]:
    """Widths at one depth, and depths at one width."""
    powers = POWERS[preset]
    if preset == "paper":
        widths = [(width, 12) for width in (512, 768, 1280, 2560)]
        return [GPTRun(m, *size, 2.0**p, seed=0, **FINEWEB) for m in METHODS for size in widths for p in powers[m]]
    sizes = dict.fromkeys([(width, 2) for width in WIDTHS] + [(64, depth) for depth in DEPTHS])
    return [
        GPTRun(method, *size, 2.0**power, seed=seed, **SMALL)
        for seed in range(3)
        for size in sizes
        for method in METHODS
        for power in powers[method]
    ]


def base(rows: Sequence[Row]) -> tuple[int, int]:
    """The depth at which widths are compared, and the width at which depths are."""
    blocks = mode(row["config"]["blocks"] for row in rows)
    others = [row["config"]["width"] for row in rows if row["config"]["blocks"] != blocks]
    return blocks, mode(others) if others else 0


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss against rate by width, and by depth."""
    blocks, width = base(rows)
    found = {}
    for by, other, value in (("width", "blocks", blocks), ("blocks", "width", width)):
        title = f"The best learning rate against {by} ({other}: {value})"
        panels: dict[str, dict[str, Any]] = {method: {"method": method, other: value} for method in METHODS}
        found[by] = transfer_figure(rows, by, panels, title, above=0.7)
    return found


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """How far the best rate moves with width and depth, and the order of the optimizers at the largest width."""
    (blocks, width), found = base(rows), []
    names = ANSWERS[preset]
    for method in METHODS:
        stays = method in ("uSCG", "SCG")
        published = "does not move with the width" if stays else "moves with the width"
        what = f"best rate against width, {method}"
        found += transfer_verdict(rows, "width", what, published, stays, names, method=method, blocks=blocks)
    if preset == "cpu":
        for method in METHODS:
            stays = True if method in ("uSCG", "SCG") else None
            published = "the rate of 12 blocks serves 36" if stays else "not stated"
            what = f"best rate against depth, {method}"
            found += transfer_verdict(rows, "blocks", what, published, stays, names, method=method, width=width)
        return found + _order(rows, blocks)
    for method, published in BILLION.items():
        ours = best_losses(rows, method=method, width=2560, blocks=blocks)
        if ours:
            close = abs(fmean(ours) - published) <= WITHIN
            what = f"a billion parameters, {method}: validation loss"
            mean = mean_best(rows, method=method, width=2560, blocks=blocks)
            found.append(Verdict.of(what, str(published), ours, names[not close], ours=mean))
    return found


def _order(rows: Sequence[Row], blocks: int) -> list[Verdict]:
    widest = max(row["config"]["width"] for row in rows if row["config"]["blocks"] == blocks)
    losses = {m: best_losses(rows, method=m, width=widest, blocks=blocks) for m in METHODS}
    if not all(losses.values()):
        return []
    found = []
    for scion in ("uSCG", "SCG"):
        for other in ("Adam with warm-up", "Muon"):
            gains = [b - a for a, b in zip(losses[scion], losses[other], strict=False)]
            ours = " against ".join(mean_best(rows, method=m, width=widest, blocks=blocks) for m in (scion, other))
            interval = f"lower by {between(gains)}"
            what = f"lowest loss at the largest width, {scion} against {other}"
            published = f"{TABLE_5[scion]} against {TABLE_5[other]} (table 5)"
            verdict, why = agreed(gains, "same shape", "another shape")
            found.append(Verdict(what, published, ours, interval, len(gains), verdict, why))
    return found


EXPERIMENT = Experiment(
    name="lr-transfer-gpt",
    source="LMO figure 1",
    shows="that the best learning rate of Scion does not move with the width and the depth, where Adam's and Muon's do",
    cells=cells,
    run=run,
    keeps=True,
    data=text_of,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "characters of Shakespeare instead of tokens of FineWeb, widths 32 to 256 with 1 to 4 blocks, heads of "
        "16, for 64 steps of 16 windows of 64; head and embedding are two weights, with the norms and radii of the "
        "released Shakespeare code, and rates fall from the first step on",
        "paper": "the length of Adam's warm-up is modded-nanogpt's, for LMO's text does not say it; the hidden layers "
        "of Adam and Muon are scaled like Scion's; widths, rates and one seed are chosen, for the paper does not name "
        "them",
    },
)
