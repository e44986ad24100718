"""LMO sections 3.2 and 6: a head that shares the embedding's weight, and rates that do not rise at first.

LMO is Training Deep Learning Models with Norm-Constrained LMOs. It says that weight sharing works with the norms Sign,
Spectral and Sign, and that of its optimizers Adam alone needs a warm-up. Here every method trains with one table and
with two, with a warm-up and without, at rates of which the best counts.
"""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import panels
from papers._gpt import GPTRun, Method, run, text_of
from papers._table import Row
from papers._transfer import agreed, best_losses

POWERS: dict[Method, range] = {
    "Adam with warm-up": range(-10, -5), "Muon": range(-7, -2), "uSCG": range(-7, -2), "SCG": range(-7, -2),
}  # fmt: skip
"""Base-2 logarithms of the rates."""
TITLES: dict[Method, str] = {"Adam with warm-up": "Adam", "Muon": "Muon", "uSCG": "uSCG", "SCG": "SCG"}
WARM_UPS = (0.0, 0.1)
"""Parts of the steps; LMO does not say how long its warm-up is."""


def cells(preset: Preset) -> list[GPTRun]:
    """Width 64 and two blocks for the CPU; LMO's Shakespeare model, 256 wide, with windows of 1,024 for a GPU."""
    steps, batch, width, length, head_width = (1000, 32, 256, 1024, 64) if preset == "paper" else (128, 16, 64, 64, 16)
    return [
        GPTRun(method, width, 2, 2.0**power, steps, batch, seed, length, head_width, shared=shared, warm_up=warm_up)
        for seed in range(3)
        for shared in (True, False)
        for warm_up in WARM_UPS
        for method, powers in POWERS.items()
        for power in powers
    ]


def losses(rows: Sequence[Row], method: Method, shared: bool, warm_up: float) -> list[float]:
    """The lowest loss over the rates, of every seed."""
    return best_losses(rows, method=method, shared=shared, warm_up=warm_up)


def gains(rows: Sequence[Row], method: Method, shared: bool) -> list[float]:
    """By how much a warm-up lowers the loss, of every seed."""
    without, with_it = (losses(rows, method, shared, warm_up) for warm_up in WARM_UPS)
    return [a - b for a, b in zip(without, with_it, strict=False)]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The lowest loss of every method, with one table and with two, with a warm-up and without; lines hold seeds."""
    figure, axes = panels(1, 2, (9, 4), sharey=True)
    for axis, shared in zip(axes[0], (True, False), strict=True):
        for number, warm_up in enumerate(WARM_UPS):
            for place, method in enumerate(POWERS):
                if found := losses(rows, method, shared, warm_up):
                    at, label = place + 0.35 * number, f"warm-up of {warm_up:.0%}" if place == 0 else None
                    axis.bar(at, fmean(found), 0.3, color=f"C{number}", alpha=0.7, label=label)
                    axis.plot([at, at], [min(found), max(found)], "k-")
        axis.set_title("one table" if shared else "embedding and head apart")
        axis.set_xticks([place + 0.175 for place in range(len(POWERS))], TITLES.values())
    bars = [bar.get_height() for axis in axes[0] for bar in axis.patches]
    axes[0, 0].set(ylabel="lowest validation loss", ylim=(min(bars, default=0.0) - 0.05, max(bars, default=1.0) + 0.05))
    axes[0, 0].legend()
    figure.suptitle("Weight sharing and warm-up (Shakespeare)")
    return {"warm-up": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Whether Scion is ahead with one table too, and whether a warm-up helps Adam more than the others."""
    found: list[Verdict] = []
    adam: Method = "Adam with warm-up"
    for shared, tables in ((True, "one table"), (False, "two tables")):
        by = {method: own for method in POWERS if (own := gains(rows, method, shared))}
        if by.keys() == POWERS.keys():
            more = [a - max(others) for a, *others in zip(by.pop(adam), *by.values(), strict=False)]
            verdict, why = agreed(more, *ANSWERS[preset])
            ours = ", ".join(f"{TITLES[method]} {fmean(gains(rows, method, shared)):.3f}" for method in POWERS)
            interval = f"Adam's is larger by {min(more):.3f} to {max(more):.3f}"
            what = f"{tables}: by how much a warm-up lowers the loss"
            found.append(Verdict(what, "Adam alone needs it", ours, interval, len(more), verdict, why))
    for method in ("uSCG", "SCG"):
        own = losses(rows, method, True, WARM_UPS[0])
        peers = [losses(rows, adam, True, WARM_UPS[1]), losses(rows, "Muon", True, WARM_UPS[0])]
        if lower := [min(others) - loss for loss, *others in zip(own, *peers, strict=False)]:
            verdict, why = agreed(lower, *ANSWERS[preset])
            ours = " against ".join(f"{fmean(each):.3f}" for each in (own, *peers))
            interval = f"lower by {min(lower):.3f} to {max(lower):.3f}"
            what = f"one table: {method} against Adam with a warm-up, and Muon"
            found.append(Verdict(what, "lower", ours, interval, len(lower), verdict, why))
    return found


EXPERIMENT = Experiment(
    name="warm-up",
    source="LMO 3.2 and 6",
    shows="that Scion trains a head that is the embedding too, and needs no warm-up where Adam does",
    cells=cells,
    run=run,
    data=text_of,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "width 64 and two blocks, 128 steps of 16 windows of 64 characters, 13 of them a warm-up; radii of "
        "LMO's code for Shakespeare",
        "paper": "LMO's own runs are on FineWeb; the warm-up has a tenth of the steps, which LMO does not say",
    },
)
