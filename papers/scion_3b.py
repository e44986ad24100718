"""LMO table 5: a larger model with the learning rate that was best for a small one.

LMO trains 3 billion parameters, 3.3 times as wide and 3 times as deep as the model of 124 million whose rates it takes.
Here the rates of the preset `cpu` are the best of width 64 and 2 blocks in `lr-transfer-gpt`, for a model 4 times as
wide and 3 times as deep. Half and twice those rates, and for Adam smaller ones, whose best falls with the size, show
what the large model would have gained by a search.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import panels
from papers._gpt import FINEWEB, GPTRun, Method, Text, text_of
from papers._lmo_tokens import run
from papers._table import Row
from papers._transfer import Best, agreed, best
from papers.lr_transfer_gpt import METHODS, SMALL, TABLE_5, WITHIN

RATES: dict[Preset, dict[Method, float]] = {
    "cpu": {"Adam with warm-up": 2.0**-6, "Muon": 2.0**-4, "uSCG": 2.0**-4, "SCG": 2.0**-4},
    "paper": {"Adam with warm-up": 2.0**-9, "Muon": 0.0036, "uSCG": 2.0**-12, "SCG": 2.0**-12},
}
"""The best rates of the small model. Of the paper Scion's are LMO's, 2^-12, where the example in its released code has
0.00036; Muon's is that of modded-nanogpt, on which LMO builds, and Adam's the nearest power of two."""
PRESET_OF: dict[Text, Preset] = {"shakespeare": "cpu", "fineweb": "paper"}
FACTORS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)
"""Multiples of the small model's rate; the first three are Adam's alone."""
ORDERS: tuple[tuple[Method, Method], ...] = (
    ("uSCG", "Adam with warm-up"), ("uSCG", "Muon"), ("SCG", "Adam with warm-up"), ("SCG", "Muon"), ("uSCG", "SCG"),
)  # fmt: skip
"""Whose loss is below whose in table 5."""


def cells(preset: Preset) -> list[GPTRun]:
    """The large model at the rates of the small one; in `cpu` also at multiples of them."""
    rates = RATES[preset]
    if preset == "paper":
        return [GPTRun(method, 2560, 36, rates[method], seed=0, **FINEWEB) for method in METHODS]
    searched = {method: FACTORS if method == "Adam with warm-up" else FACTORS[3:] for method in METHODS}
    runs = [(method, factor, seed) for seed in range(3) for method in METHODS for factor in searched[method]]
    return [GPTRun(method, 256, 6, factor * rates[method], seed=seed, **SMALL) for method, factor, seed in runs]


def losses(rows: Sequence[Row], method: Method, factor: float = 1.0) -> list[float]:
    """The loss of every seed at a multiple of the small model's rate; infinity for a run that diverged."""
    rate = {text: factor * RATES[preset][method] for text, preset in PRESET_OF.items()}
    found = [row for row in rows if row["config"]["method"] == method]
    found = [row for row in found if row["config"]["lr"] == rate[row["config"]["text"]]]
    ends = [row["results"]["loss"] for row in sorted(found, key=lambda row: row["config"]["seed"])]
    return [math.inf if loss is None else loss for loss in ends]


def least(rows: Sequence[Row], method: Method) -> Best:
    """The lowest mean loss of a method over the multiples of the small model's rate."""
    return best({factor: fmean(found) for factor in FACTORS if (found := losses(rows, method, factor))})


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss of the large model at the small one's rate, and at multiples of it."""
    figure, ((axis,),) = panels(1, 1, (6, 4))
    for number, method in enumerate(METHODS):
        shown = {factor: found for factor in FACTORS if (found := losses(rows, method, factor))}
        axis.plot(list(shown), [fmean(found) for found in shown.values()], "-", color=f"C{number}", label=method)
        for factor, found in shown.items():
            axis.plot([factor] * len(found), found, "o", color=f"C{number}", ms=4)
    axis.set(xlabel="learning rate over that of the small model", ylabel="validation loss")
    axis.set_xscale("log", base=2)
    axis.legend()
    figure.suptitle("The large model at the small one's learning rate")
    return {"scion-3b": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """The losses at the small model's rates, their order, and what another rate would have gained."""
    yes, no = ANSWERS[preset]
    found = []
    for method in METHODS:
        if own := losses(rows, method):
            tried = sum(bool(losses(rows, method, factor)) for factor in FACTORS)
            lowest = least(rows, method)
            at_best = f"; {lowest.loss:.3f} at the best of {tried} rates" + " (edge)" * lowest.at_edge
            ours = f"{fmean(own):.3f}" + at_best * (tried > 1)
            near = abs(fmean(own) - TABLE_5[method]) <= WITHIN
            verdict = "measured" if preset == "cpu" else yes if near else no
            found.append(Verdict.of(f"{method}: loss", str(TABLE_5[method]), own, verdict, ours=ours))
    for own, other in ORDERS:
        gains = [b - a for a, b in zip(losses(rows, own), losses(rows, other), strict=False)]
        if gains:
            verdict, why = agreed(gains, yes, no)
            if preset == "cpu":
                lowest, others = least(rows, own), least(rows, other)
                at_best = f"at the best rate of each, lower by {others.loss - lowest.loss:.3f}"
                at_best += " (edge)" * (lowest.at_edge or others.at_edge)
                why = f"{why}; {at_best}" if why else at_best
            published, ours = (f"lower by {by:.3f}" for by in (TABLE_5[other] - TABLE_5[own], fmean(gains)))
            found.append(Verdict.of(f"{own} below {other}", published, gains, verdict, why, ours=ours))
    return found


EXPERIMENT = Experiment(
    name="scion-3b",
    source="LMO table 5",
    shows="the order of Adam, Muon, uSCG and SCG on a large model with the learning rates of a small one",
    cells=cells,
    run=run,
    keeps=True,
    data=text_of,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "characters of Shakespeare instead of tokens of FineWeb, width 256 and 6 blocks instead of 2560 and "
        "36, for 64 steps of 16 windows of 64",
        "paper": "the length of Adam's warm-up is modded-nanogpt's, for LMO's text does not say it; the hidden layers "
        "of Adam and Muon are scaled like Scion's, and their rates are modded-nanogpt's, or near them",
    },
)
