"""LT table 1: transformers with enforced norms beside the unconstrained ones of the GPT-2 speedruns, and LipsFormer.

LT's released code multiplies <q, k>/d_head by 24 with the soft cap and by sqrt(d_head)/cap^2 with spectral
normalization, where its text has 1; here it is as in the code. The final scale of the logits is 8 in the row with cap 1
and 1 in the others. Unlike LT, queries, keys and values have a cap for every head. As in LT, all of "ours" have one
learning rate: LT's, or, at the size for the CPU (`SMALL_RATES`), half of that of `token_preset`, which is too fast for
a cap of 16. There Modula has four times that of `token_preset`: the best of 1, 2, 4 and 8 times, at which seed 0 ends,
after 120 steps, at a loss of 2.350, 2.190, 2.117 and 2.154. Its largest entry there is 24.3 at a quarter of that rate.

The largest entry is that of the results of modules without parts, on 32 windows of the validation split (the batch of
a step). LT's code records the residual stream and the logits, on every batch of its last evaluation: the largest entry
with its sign, and the largest RMS. A row has these too, on the same windows, LT's formula with and without its equation
20, and the norms that any formula needs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure

from papers import _by_form
from papers._by_form import Matched
from papers._experiment import ANSWERS, Experiment, Preset, Verdict, between
from papers._figures import panels
from papers._table import Row
from papers._tokens import byte_corpus, corpus_of, results
from papers.training import PaperVariant, paper_preset
from wellnormed.models.config import GPTConfig
from wellnormed.proof.decimals import shown
from wellnormed.train.config import Caps, ConstraintName, TrainConfig
from wellnormed.train.presets import Size

STEEP = 0.8
"""A rate at which, in `stability-grid`, no model without a constraint trains that has 4 blocks or more."""


@dataclass(frozen=True)
class Published:
    """A row of the table: how its model is trained, and what LT found."""

    variant: PaperVariant
    tokens: int
    """Times those of the speedrun."""
    accuracy: float | None
    loss: float | None
    """None where the training diverges."""
    log10_lipschitz: float | None
    """LT's formula; None for what it calls infinity."""
    largest_entry: float | None
    largest_rms: float | None
    constraint: ConstraintName | None = None
    cap: float = math.inf
    logit_scale: float = 1.0
    rate: float | None = None
    """The rate of a row that only the size for the CPU has; None takes that of the preset or of `SMALL_RATES`."""


ROWS = {
    "NanoGPT": Published("nanogpt", 1, 0.380, 3.410, None, 91648, 24092),
    "Modula": Published("modula", 1, 0.374, 3.491, None, 1872, 110.3),
    "ours, no constraint": Published("lipschitz", 1, None, None, None, None, None),
    "LipsFormer": Published("lipsformer", 1, 0.301, 4.130, 130, 61, None),
    "ours, normalized at 8": Published("lipschitz", 1, 0.362, 3.582, 134, 37.75, 6.1, "spectral-normalize", 8.0),
    "ours, soft cap 8": Published("lipschitz", 2, 0.374, 3.481, 122, 112, 28, "soft-cap", 8.0),
    "ours, normalized at 1": Published("lipschitz", 1, 0.212, 5.047, 1, 6.5, 1, "spectral-normalize", 1.0, 8.0),
    "speedrun": Published("speedrun", 1, 0.394, 3.280, None, 148480, 12480),
    "ours, normalized at 16": Published("lipschitz", 4, 0.395, 3.280, 264, 49.3, 7.1, "spectral-normalize", 16.0),
    "ours, no constraint, rate 0.8": Published("lipschitz", 1, None, None, None, None, None, rate=STEEP),
    "ours, normalized at 1, rate 0.8": Published(
        "lipschitz", 1, None, None, None, None, None, "spectral-normalize", 1.0, 8.0, rate=STEEP
    ),
}
SMALL_RATES: dict[PaperVariant, float] = {"lipschitz": 0.1, "modula": 0.2}
COLUMNS = {
    "validation_loss": "validation loss", "largest_entry": "largest activation entry",
    "log10_lipschitz": "log10 of the Lipschitz bound",
}  # fmt: skip
WORDS = {
    "validation_loss": "loss {:.3f}", "validation_accuracy": "accuracy {:.3f}", "largest_entry": "largest entry {:.3g}",
    "largest_of_stream": "{:.3g} where LT reads it", "largest_rms_of_stream": "RMS {:.3g}",
    "log10_lipschitz": "proved bound 10^{}", "log10_as_published": "10^{:.1f} by LT's formula",
    "log10_with_equation_20": "10^{:.1f} with equation 20",
}  # fmt: skip
ORDERED = {
    "validation_loss": ("loss", "validation loss"),
    "largest_entry": ("largest_entry", "largest activation entry"),
    "largest_of_stream": ("largest_entry", "largest entry as LT has it"),
    "largest_rms_of_stream": ("largest_rms", "largest RMS as LT has it"),
}
"""Results whose order is compared -> the field of `Published`, and a name."""
CAPPED = "ours, soft cap 8"
"""The row that LT's abstract sets beside Modula's."""
WITHIN = 0.02
"""How far a loss may be above the published one."""
GUESS: dict[Preset, float] = {"cpu": math.log(256), "paper": math.log(50257)}
"""The loss of a uniform guess. A model that ends above it does not train."""


@dataclass(frozen=True)
class Cell:
    """One training run."""

    row: str
    size: Size
    blocks: int
    length: int
    steps: int
    batch: int
    seed: int = 0


def cells(preset: Preset) -> list[Cell | Matched]:
    """Every row; LT's numbers are of single runs. For the CPU also models that are 1-Lipschitz by form, and peers."""
    small = 3, ("1m", 5, 128), 105, 32
    seeds, shape, steps, batch = (1, ("124m", 12, 1024), 1770, 384) if preset == "paper" else small
    rows = {name: row for name, row in ROWS.items() if row.rate is None or preset == "cpu"}
    runs = (Cell(name, *shape, steps * row.tokens, batch, seed) for seed in range(seeds) for name, row in rows.items())
    longest_first = sorted(runs, key=lambda cell: -cell.steps)  # so that none of the longest runs alone at the end
    return [*longest_first, *(() if preset == "paper" else _by_form.cells())]


def config_of(cell: Cell) -> TrainConfig:
    """The training run of a cell."""
    row = ROWS[cell.row]
    run = paper_preset(cell.size, row.variant)
    model = replace(run.model, blocks=cell.blocks, length=cell.length)
    settings: dict[str, Any] = {"steps": cell.steps, "batch": cell.batch, "seed": cell.seed, "attack_steps": 0}
    if cell.size == "1m":
        rate = row.rate or SMALL_RATES.get(row.variant, run.learning_rate)
        settings |= {"validation_tokens": 2**17, "learning_rate": rate}
    if isinstance(model, GPTConfig):
        entries = model.width // model.heads
        scale = math.sqrt(entries) / row.cap**2 if row.constraint == "spectral-normalize" else 24.0
        model = replace(model, logit_scale=row.logit_scale, attention_scale=scale, half_rotary=cell.size != "1m")
        caps = {} if row.constraint is None else {"caps": Caps(*[row.cap] * 7)}
        settings |= {"constraint": row.constraint or "none", **caps}
    return replace(run, model=model, **settings)


def run(cell: Cell | Matched, device: torch.device, folder: Path) -> dict[str, Any]:
    """Loss, accuracy, bounds and the largest activation of the trained model."""
    if isinstance(cell, Matched):
        return _by_form.run(cell, device, folder)
    return results(config_of(cell), corpus_of(cell.size), device, folder)


def text_of(cell: Cell | Matched) -> str:
    """The name of what a cell reads."""
    return (byte_corpus() if isinstance(cell, Matched) else corpus_of(cell.size)).name


def _parts(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of LT's table, and those of models that are 1-Lipschitz by form with their peers."""
    table = [row for row in rows if "row" in row["config"]]
    return table, [row for row in rows if "row" not in row["config"]]


def values(rows: Sequence[Row], name: str, key: str) -> list[float]:
    """A result of a row of the table, for every seed that has it."""
    return [row["results"][key] for row in rows if row["config"]["row"] == name and key in row["results"]]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss, the largest activation, and the bounds of every row, beside the published ones; means and extremes."""
    rows, matched = _parts(rows)
    figure, axes = panels(1, 3, (13, 4.5), sharey=True)
    names = [name for name in ROWS if any(row["config"]["row"] == name for row in rows)]
    for axis, key, title in zip(axes[0], COLUMNS, COLUMNS.values(), strict=True):
        for place, name in enumerate(names):
            if found := values(rows, name, key):
                axis.barh(place, fmean(found), color="C0", alpha=0.7)
                axis.plot([min(found), max(found)], [place, place], "k-")
        axis.set(title=title, xscale="log" if key == "largest_entry" else "linear")
    for place, name in enumerate(names):
        formula, row = values(rows, name, "log10_as_published"), ROWS[name]
        axes[0, 2].plot(formula, [place] * len(formula), "D", color="C1")
        for axis, published in ((axes[0, 1], row.largest_entry), (axes[0, 2], row.log10_lipschitz)):
            axis.plot([] if published is None else [published], [] if published is None else [place], "k*")
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].invert_yaxis()
    figure.suptitle("Bars: here, with extremes of the seeds. Diamonds: here, by LT's formulas. Stars: published")
    return {"table1": figure, **(_by_form.figures(matched) if matched else {})}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Every row beside LT's, and the order of the losses and of the activations that its table shows."""
    yes, no = ANSWERS[preset]
    rows, matched = _parts(rows)
    lines: list[Verdict] = []
    for name, row in ROWS.items():
        losses, stopped = values(rows, name, "validation_loss"), values(rows, name, "diverged_at")
        if not (count := len(losses) + len(stopped)):
            continue
        words = [f"{len(stopped)} of {count} diverge"] if stopped else []
        for key, what in WORDS.items():
            if found := values(rows, name, key):
                mean = fmean(found)
                words.append(what.format(shown(mean, ".1f") if key == "log10_lipschitz" else mean))
        interval = f"loss {between(losses)}" if losses else "-"
        if row.loss is None:
            published = "diverges" if row.constraint is None else "trains"
            trains = not stopped and max(losses) < GUESS[preset]
            verdict = yes if trains == (published == "trains") else no
            why = f"at rate {STEEP:g} it does not train" if trains and row.rate is None and preset == "cpu" else ""
            lines.append(Verdict(name, published, ", ".join(words[:2]), interval, count, verdict, why))
            continue
        published = f"loss {row.loss}, accuracy {row.accuracy}, largest entry {row.largest_entry:g}"
        published += "" if row.largest_rms is None else f", RMS {row.largest_rms:g}"
        published += "" if row.log10_lipschitz is None else f", 10^{row.log10_lipschitz:g} by LT's formula"
        norms: list[Any] = values(rows, name, "norms")
        if row.cap == 1 and norms:
            most = max(norm for each in norms for part, norm in each.items() if part.startswith("layers"))
            if most <= 1:  # what blocks add is then no longer than what they read, in convex residuals
                words.append(f"RMS is of logits times {row.logit_scale:g}, and of the stream at most 1 by proof")
        reached = bool(losses) and fmean(losses) <= row.loss + WITHIN
        verdict = "measured" if preset == "cpu" else yes if reached else no
        why = "a million parameters and other text cannot decide it" if preset == "cpu" else ""
        lines.append(Verdict(name, published, ", ".join(words), interval, count, verdict, why))
    for key in ORDERED:
        lines += _orders(rows, matched, preset, key)
    most = [values(rows, name, "largest_of_stream") for name in ("Modula", CAPPED)]
    if all(most):
        gap, published = fmean(most[0]) / fmean(most[1]), 1872 / 112
        what = f"largest entry as LT has it: Modula's over that of {CAPPED}"
        interval = f"{min(most[0]) / max(most[1]):.2g} to {max(most[0]) / min(most[1]):.2g}"
        verdict = yes if min(most[0]) > max(most[1]) else no
        why = "" if gap > published / 2 else f"the order, with a gap of {gap:.2g} instead of {published:.3g}"
        lines.append(Verdict(what, f"{published:.3g}", f"{gap:.2g}", interval, len(most[0]), verdict, why))
    return lines + _by_form.verdicts(matched)


def _orders(rows: Sequence[Row], matched: Sequence[Row], preset: Preset, column: str) -> list[Verdict]:
    """How many pairs of rows stand in LT's order: every seed of one below every seed of the other.

    A peer has the loss of the better of its trainings, by Muon or by Scion.
    """
    published, title = ORDERED[column]
    numbers = {name: number for name, row in ROWS.items() if (number := getattr(row, published)) is not None}
    found = {name: own for name in numbers if (own := values(rows, name, column))}
    if column == "validation_loss":
        for name in found:
            others = _by_form.at_best(matched, f"{name}, Scion")
            found[name] = min(found[name], others or found[name], key=fmean)
        title += ", peers by the better of Muon and Scion" * bool(matched)
    pairs = [(less, more) for less in found for more in found if numbers[less] < numbers[more]]
    if not pairs:
        return []
    reached = [(less, more) for less, more in pairs if max(found[less]) < min(found[more])]
    turned = [(less, more) for less, more in pairs if min(found[less]) > max(found[more])]
    ours = f"{len(reached)} as published, {len(turned)} the other way, others overlap"
    verdict: Any = ANSWERS[preset][bool(turned)]
    below = {more: " and ".join(less for less, other in turned if other == more) for _, more in turned}
    why = "; ".join(f"here {more} is below {others}" for more, others in below.items())
    if column == "largest_entry":
        verdict, why = "measured", f"LT's entries are those of the residual stream and the logits alone; {why}"
    what, runs = f"{title}: which of two rows is lower", sum(map(len, found.values()))
    return [Verdict(what, f"{len(pairs)} pairs", ours, "-", runs, verdict, why)]


EXPERIMENT = Experiment(
    name="nanogpt-table1",
    source="LT table 1",
    shows="loss, accuracy, bound and largest activation of transformers with enforced norms and of their peers",
    cells=cells,
    run=run,
    data=text_of,
    figures=figures,
    verdicts=verdicts,
    keeps=True,
    differs={
        "cpu": "a million parameters in the blocks, 105 (210, 420) steps of 32 windows of 128 bytes of books; rates of "
        "presets or `SMALL_RATES`, by form and of peers the best of three or more; all entries of queries and keys "
        "turn by position, in LT half",
        "paper": "attention sees past the ends of documents, where LT has masks; products are in bfloat16, in LT in "
        "8-bit floats; caps are met exactly and, for queries, keys and values, by each head, where LT's matrices end "
        "about a tenth above them; LT's final scale of 8 may be a cap of the head; embeddings move by their norm "
        "at 0.05, in LT by Adam at 0.1; the peers have one training; the largest entry is that of all modules, "
        "in LT of the residual stream and the logits, which stands beside it; LipsFormer's loss is 4.130 in the table, "
        "and 3.61 in appendix E; windows are of 1,024 tokens, in LT of 48 times as many; norms are exact, in LT of "
        "two power iterations in bfloat16",
    },
)
