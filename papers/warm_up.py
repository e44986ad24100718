"""LMO sections 3.2 and 6: a head that shares the embedding's weight, and rates that do not rise at first.

LMO is Training Deep Learning Models with Norm-Constrained LMOs. It says that weight sharing works with the norms Sign,
Spectral and Sign, and that of its optimizers Adam alone needs a warm-up. Here every method trains with one table and
with two, with a warm-up and without. Whether a method needs a warm-up is asked at the rate that is best with one; with
two tables, which is not LMO's setting, nothing is judged.
"""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from papers._experiment import ANSWERS, Experiment, Preset, Verdict, between
from papers._figures import panels
from papers._gpt import GPTRun, Method, run, text_of
from papers._table import Row
from papers._transfer import agreed, best, best_losses, curves, mean_best

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
    """The lowest loss over the rates, for every seed."""
    return best_losses(rows, method=method, shared=shared, warm_up=warm_up)


def costs(rows: Sequence[Row], method: Method, shared: bool) -> list[float]:
    """How much the loss rises without the warm-up at the rate that is best with one, for every seed."""
    without, with_it = (curves(rows, "shared", method=method, shared=shared, warm_up=each) for each in WARM_UPS)
    pairs = [(without[seed][shared], sizes[shared]) for seed, sizes in with_it.items() if seed in without]
    found = [(best(curve), other) for other, curve in pairs]
    return [other[least.rate] - least.loss for least, other in found if least.rate in other]


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
    if axes[0, 0].get_legend_handles_labels()[0]:  # of a table that has only begun there may be none
        axes[0, 0].legend()
    figure.suptitle("Weight sharing and warm-up (Shakespeare)")
    return {"warm-up": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Whether Adam alone loses without a warm-up, and whether Scion without one is ahead of Adam with one."""
    found: list[Verdict] = []
    adam: Method = "Adam with warm-up"
    for shared, tables in ((True, "one table"), (False, "two tables")):
        by = {method: own for method in POWERS if (own := costs(rows, method, shared))}
        if by.keys() == POWERS.keys():
            more = [own - max(others) for own, *others in zip(*by.values(), strict=False)]
            verdict, why = agreed(more, *ANSWERS[preset]) if shared else ("measured", "")
            edge = mean_best(rows, method=adam, shared=shared, warm_up=WARM_UPS[1])
            why = "; ".join(filter(None, (why, f"Adam's loss with a warm-up: {edge}")))
            ours = ", ".join(f"{TITLES[method]} {between(own)}" for method, own in by.items())
            what = f"{tables}: what leaving out the warm-up costs at the rate that is best with one"
            interval = f"Adam's is larger by {between(more)}"
            published = "Adam alone needs it" if shared else "-"
            found.append(Verdict(what, published, ours, interval, len(more), verdict, why))
    for method in ("uSCG", "SCG"):
        own, theirs = losses(rows, method, True, WARM_UPS[0]), losses(rows, adam, True, WARM_UPS[1])
        if lower := [b - a for a, b in zip(own, theirs, strict=False)]:
            verdict, why = agreed(lower, *ANSWERS[preset])
            muon = mean_best(rows, method="Muon", shared=True, warm_up=WARM_UPS[0])
            means = (mean_best(rows, method=m, shared=True, warm_up=w) for m, w in ((method, 0.0), (adam, WARM_UPS[1])))
            ours = f"{' against '.join(means)}; Muon without one {muon}"
            interval = f"lower by {between(lower)}"
            what = f"one table: {method} without a warm-up against Adam with one"
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
