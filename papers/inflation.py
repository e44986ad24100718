"""LT appendix F: how much the gradients of rare symbols may be inflated does not matter to the Shakespeare transformer.

Muon divides the gradient of every symbol's vector by its size. LT feared that a rare symbol's old momentum would so
stay a full step for hundreds of steps, let no gradient grow by more than a factor, tried the factors 1, 4, 16, ...,
65,536 on 8 seeds, found no significant difference, and took 16. In its code the factor multiplies the gradient itself,
whose entries are far below 1/16, and the rate of the embedding is halved for all six residual connections. Here stand
both that and this library's way, where a gradient may grow to the size of the largest one, at unhalved rates.
"""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor

from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._lt_transformer import SMALL, Floor, TransformerRun, lt_transformer
from papers._table import Row, results_by
from papers.characters import validation_loss
from wellnormed.train.task import fit

SEEDS = 8
RATES: dict[Floor, float] = {"as published": 12.0, "largest symbol": 0.4}
"""Learning rates: the best of those that `block-mass` tries with halved rates and in the modular norm, at mass 32."""
SHUFFLES = 1999
LEVEL = 0.05
"""Differences that chance makes less often are significant."""


def cells(preset: Preset) -> list[TransformerRun]:
    """The factors of the paper on its 8 seeds; fewer factors on a CPU."""
    if preset == "paper":
        factors, sizes = dict.fromkeys(get_args(Floor), tuple(4**power for power in range(9))), {}
    else:
        factors, sizes = {"as published": (1, 16, 256, 65536), "largest symbol": (1, 16, 65536)}, SMALL
    return [
        TransformerRun(RATES[floor], inflation, floor, halved=floor == "as published", seed=seed, **sizes)
        for seed in range(SEEDS)
        for floor in get_args(Floor)
        for inflation in factors[floor]
    ]


def run(cell: TransformerRun, device: torch.device) -> dict[str, Any]:
    """Loss over the validation split, and how far the vectors of rare and of frequent symbols moved."""
    task = lt_transformer(cell, device)
    vectors = task.model.get_parameter("embedding.weight").detach()
    start = vectors.clone()
    fit(task)
    moved = (vectors - start).square().mean(1).sqrt()
    rare, frequent = by_frequency(task.text.train, len(moved))
    return {
        "loss": validation_loss(task.model, task.text.validation, cell.length),
        "moved_rare": float(moved[rare].mean()),
        "moved_frequent": float(moved[frequent].mean()),
    }


def by_frequency(tokens: Tensor, symbols: int) -> tuple[Tensor, Tensor]:
    """The rarer half of the symbols of a text, and the others."""
    order = tokens.bincount(minlength=symbols).argsort()
    return order[: symbols // 2], order[symbols // 2 :]


def by_factor(rows: Sequence[Row], floor: str, what: str = "loss") -> dict[int, list[float]]:
    """Factor -> the results of every seed."""
    return results_by(rows, "inflation", what, floor=floor)


def chance(groups: Sequence[Sequence[float]]) -> float:
    """How often means of the groups differ as much as these, by their variance, if runs are dealt to groups by chance.

    Example:
        >>> chance([[1.0, 1.1, 0.9], [2.0, 2.1, 1.9], [3.0, 3.1, 2.9]]) < 0.05
        True
        >>> chance([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
        1.0
    """
    values, sizes = torch.tensor([x for group in groups for x in group], dtype=torch.float64), list(map(len, groups))
    generator = torch.Generator().manual_seed(0)

    def spread(order: Tensor) -> float:
        weights = torch.tensor(sizes, dtype=torch.float64)
        means = torch.stack([part.mean() for part in values[order].split(sizes)])
        return float((weights * (means - values.mean()).square()).sum())

    ours = spread(torch.arange(len(values))) * (1 - 1e-9)  # a spread that is equal but for rounding counts
    as_large = sum(spread(torch.randperm(len(values), generator=generator)) >= ours for _ in range(SHUFFLES))
    return (1 + as_large) / (1 + SHUFFLES)


def _without_farthest(losses: dict[int, list[float]], moved: dict[int, list[float]]) -> str:
    """The difference without the factor whose mean is farthest from that of all, and how far vectors move."""
    mean = fmean(x for values in losses.values() for x in values)
    apart = max(losses, key=lambda factor: abs(fmean(losses[factor]) - mean))
    others = [factor for factor in losses if factor != apart]
    far = [fmean(moved[factor]) for factor in (apart, others[0], others[-1])]
    return (
        f"without the factor {apart}, p = {chance([losses[factor] for factor in others]):.3f}; with it vectors of "
        f"frequent symbols move by {far[0]:.2g}, with {others[0]} by {far[1]:.2g} and with {others[-1]} by {far[2]:.2g}"
    )


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss of every run and its mean against the factor; and the movement of the vectors."""
    figure, axes = panels(1, 2, (10, 4), sharey=False)
    for number, floor in enumerate(get_args(Floor)):
        losses = by_factor(rows, floor)
        for factor, values in losses.items():
            axes[0, 0].plot([factor] * len(values), values, ".", color=f"C{number}", alpha=0.4)
        axes[0, 0].plot(list(losses), list(map(fmean, losses.values())), "-", color=f"C{number}", label=floor)
        for what, style in (("moved_rare", "--"), ("moved_frequent", "-")):
            moved = by_factor(rows, floor, what)
            axes[0, 1].plot(list(moved), list(map(fmean, moved.values())), style, color=f"C{number}")
    for axis in axes[0]:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("largest inflation")
    axes[0, 0].set_ylabel("validation loss (nats a character)")
    title = "dashed: the rarer half of the symbols"
    axes[0, 1].set(yscale="log", ylabel="movement of a symbol's vector (RMS)", title=title)
    legend_below(figure, "Inflation of the embedding's gradients: every run, and means")
    return {"inflation": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Whether the losses differ by more than chance, and what the factor does to the vectors."""
    found, (yes, no) = list[Verdict](), ANSWERS[preset]
    for floor in get_args(Floor):
        losses = by_factor(rows, floor)
        if len(losses) < 2 or min(map(len, losses.values())) < 2:
            continue
        means = [fmean(values) for values in losses.values()]
        probability, runs = chance(list(losses.values())), sum(map(len, losses.values()))
        noise = fmean(stdev(values) for values in losses.values())
        ours = f"p = {probability:.3f}; standard deviation of the seeds {noise:.3f}"
        interval, verdict = f"means {min(means):.3f} to {max(means):.3f}", yes if probability >= LEVEL else no
        why = "" if verdict == yes else _without_farthest(losses, by_factor(rows, floor, "moved_frequent"))
        found.append(Verdict(f"loss, {floor}", "no significant difference", ours, interval, runs, verdict, why))
        for what in ("moved_rare", "moved_frequent"):
            moved = {factor: fmean(values) for factor, values in by_factor(rows, floor, what).items()}
            first, last = min(moved), max(moved)
            ours = f"{moved[first]:.2g} at {first}, {moved[last]:.2g} at {last}"
            name = f"movement of {what.removeprefix('moved_')} symbols' vectors, {floor}"
            found.append(Verdict(name, "-", ours, "-", runs, "measured"))
    return found


EXPERIMENT = Experiment(
    name="inflation",
    source="LT appendix F",
    shows="that the largest inflation of the embedding's gradients does not decide the loss",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "width and length 64 instead of 256, 600 steps of 12 windows instead of 2,000 of 64, fewer factors",
        "paper": "LT does not say cap, rates and form of its runs: the cap is 2, the rates are the best ones of "
        "`block-mass`, the form is that of the text",
    },
)
