"""LMO section 3.1, "Exclusively Sign": the best learning rate against the width where every layer has the norm Sign.

LMO is Training Deep Learning Models with Norm-Constrained LMOs. With steps of `sign / d_in` in all layers but the
embedding, whose input is 1-hot, the best rate transfers across widths. Beside it the released code has Signum, the same
signs without `1 / d_in`, from torch's start instead of the sphere's. Settings are those of the released code for
Shakespeare, where radii are 1, 3 and 10 for embedding, blocks and head. Its rates hardly fall, since their schedule is
made for 600,000 steps; here they fall to 0, as the paper says.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._gpt import GPTRun, Method, run, text_of
from papers._table import Row
from papers._transfer import transfer_figure, transfer_verdict

TITLES: dict[Method, str] = {"Sign": "Sign in every layer (uSCG)", "Signum": "Signum, without 1 / d_in"}
POWERS: dict[Preset, dict[Method, range]] = {
    "cpu": {"Sign": range(-7, -1), "Signum": range(-13, -6)},
    "paper": {"Sign": range(-12, 0), "Signum": range(-18, -7)},
}
"""Base-2 logarithms of the rates; those of the paper are in the released code."""

SETTINGS: dict[Preset, dict[str, Any]] = {
    "cpu": {"batch": 16},
    "paper": {"batch": 32, "length": 1024, "head_width": 64},
}


def cells(preset: Preset) -> list[GPTRun]:
    """Four widths, two blocks, and three seeds."""
    widths = (256, 512, 1024, 2048) if preset == "paper" else (32, 64, 128, 256)
    return [
        GPTRun(method, width, 2, 2.0**power, steps=122, seed=seed, **SETTINGS[preset])
        for seed in range(3)
        for width in widths
        for method, powers in POWERS[preset].items()
        for power in powers
    ]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss against rate by width."""
    titles = {title: {"method": method} for method, title in TITLES.items()}
    title = "The best learning rate against width where steps are signs (Shakespeare)"
    return {"transfer": transfer_figure(rows, "width", titles, title, above=0.9)}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Whether the best rate stays, and what it does without `1 / d_in`."""
    names = ANSWERS[preset]
    asked: dict[Method, tuple[str, bool | None]] = {
        "Sign": ("transfers across width", True),
        "Signum": ("not stated in the text", None),
    }
    found: list[Verdict] = []
    for method, (published, stays) in asked.items():
        what = f"best rate, {TITLES[method]}"
        found += transfer_verdict(rows, "width", what, published, stays, names, method=method)
    return found


EXPERIMENT = Experiment(
    name="sign-only",
    source='LMO section 3.1, "Exclusively Sign"',
    shows="that the best learning rate does not move with the width where every layer has the norm Sign",
    cells=cells,
    run=run,
    data=text_of,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "widths 32 to 256 with heads of 16 instead of 256 to 2,048 with heads of 64, and batches of 16 windows "
        "of 64 characters instead of 32 of 1,024",
        "paper": "rates fall to 0, as LMO's text says, where the schedule of its code hardly falls in 122 steps",
    },
)
