"""LT figures 2 (left), 4 and 6: twelve pairs of optimizer and constraint, Lipschitz bound against loss, on CIFAR-10."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any, get_args

import torch
from matplotlib.figure import Figure

from papers._cifar import EPOCH, WITHIN, AsPublished, CifarRun, CifarTask, Method, OptimizerName, lt_task
from papers._experiment import Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._table import Row
from wellnormed.proof.decimals import shown
from wellnormed.train.task import fit

PAIRS: list[tuple[OptimizerName, Method]] = [
    (optimizer, method)
    for optimizer, method in product(get_args(OptimizerName), get_args(Method))
    if optimizer == "muon" or method != "hard cap"
]
"""LT's twelve, and AdamW with a soft cap, which needs a bound on the step: there the step is clipped."""
MUON: dict[Method, tuple[float, ...]] = {
    "weight decay": (0.1, 1.585, 1.150, 0.596, 326.6),
    "spectral normalization": (6.0, 1.0, 1.147, 0.601, 216.6),
    "stiefel": (5.0, 1.0, 1.217, 0.577, 124.4),
    "soft cap": (6.0, 0.398, 1.185, 0.588, 115.3),
    "hard cap": (5.0, 0.631, 1.199, 0.588, 92.2),
    "hammer": (4.0, 0.398, 1.262, 0.569, 76.1),
    "spectral weight decay": (0.05, 0.157, 1.558, 0.549, 56.9),
}
"""Strength and learning rate of each method with Muon, which LT prints; loss, accuracy and bound of its logs."""
AS_PUBLISHED: dict[AsPublished, tuple[float, ...]] = {
    "soft cap as published": MUON["soft cap"],
    "hard cap as published": MUON["hard cap"],
}
"""The same of the two caps that LT's code has otherwise than its text."""
LINES = {name: row for name, row in (MUON | AS_PUBLISHED).items() if f"{name} as published" not in AS_PUBLISHED}
"""The trainings of LT's code, line by line."""
ADAMW_RATES = tuple(10 ** (-5 + 0.3 * step) for step in (6, 7, 8))
"""The rates of LT's sweep about 10^-3."""
ADAMW = (0.545, 851)
"""Accuracy and bound of LT's best run with AdamW in its logs, whose setting is not said."""
BOUND_WITHIN = 0.1
"""How far a bound may be from the published one, as a share of it."""
EVERY = 49
"""Steps from one measurement of the norms to the next."""
CAPPED: list[Method] = ["spectral normalization", "stiefel", "soft cap", "hard cap", "hammer"]
"""The methods whose strength is a cap."""


def cells(preset: Preset) -> list[CifarRun]:
    """`paper`: the rows of Muon that LT gives in full, and AdamW at three rates; `cpu`: a smaller sweep.

    Lines of `paper` that end otherwise than in LT's logs are trained again from the start and in the order of its code.
    """
    if preset == "paper":
        adamw = [CifarRun("adamw", "weight decay", 0.1, lr, 50 * EPOCH) for lr in ADAMW_RATES]
        muon = [CifarRun("muon", name, row[0], row[1], 50 * EPOCH) for name, row in (MUON | AS_PUBLISHED).items()]
        again = [run for run in muon if run.method in ("soft cap as published", "spectral weight decay")]
        again.append(replace(adamw[1], strength=0.08))
        seeds = [replace(run, released=True, seed=seed) for seed in range(3) for run in again]
        return muon + adamw + again[-1:] + seeds
    small: dict[str, Any] = {"steps": 300, "batch": 256, "width": 64}
    decays: dict[Method, tuple[float, ...]] = {
        "weight decay": (0.03, 0.3, 1.0),
        "spectral weight decay": (0.02, 0.1, 0.5),
    }
    rates: dict[OptimizerName, tuple[float, ...]] = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (0.1, 0.5)}
    clipped = (1e-2, 3e-2)
    return [
        CifarRun(optimizer, method, strength, lr, seed=seed, **small)
        for seed in range(3)
        for optimizer, method in PAIRS
        for strength in decays.get(method, (1.0, 2.0, 4.0))
        for lr in (clipped if (optimizer, method) == ("adamw", "soft cap") else rates[optimizer])
    ]


def run(cell: CifarRun, device: torch.device) -> dict[str, Any]:
    """Loss, accuracy and bound at the end, and the norms on the way."""
    norms: list[list[float]] = []

    def watch(task: CifarTask, _: float) -> None:
        if task.step % EVERY == 0:
            norms.append(task.norms())

    task = lt_task(cell, device)
    fit(task, watch)
    return task.evaluate() | {"norms_on_the_way": norms}


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both the bound and the loss, by rising bound."""
    best: list[tuple[float, float]] = []
    for bound, loss in sorted(points):
        if not best or loss < best[-1][1]:
            best.append((bound, loss))
    return best


def of_pair(rows: Sequence[Row], optimizer: str, method: str) -> list[Row]:
    """Rows of an optimizer with a constraint."""
    return [row for row in rows if (row["config"]["optimizer"], row["config"]["method"]) == (optimizer, method)]


def at_edge(rows: Sequence[Row]) -> bool:
    """Whether the lowest loss has the smallest or the largest rate, so that another rate may be better."""
    rates = [row["config"]["lr"] for row in rows]
    return min(rows, key=lambda row: row["results"]["loss"])["config"]["lr"] in (min(rates), max(rates))


def points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Bound, and loss or the share of wrong images."""
    results = [row["results"] for row in rows]
    return [(found["lipschitz"], found["loss"] if key == "loss" else 1 - found["accuracy"]) for found in results]


def ratios(rows: Sequence[Row], method: str) -> list[list[float]]:
    """For every run with Muon, the norm of the second matrix over the cap, on the way and at the end."""
    return [
        [norms[1] / row["config"]["strength"] for norms in (*found["norms_on_the_way"], found["norms"])]
        for row in of_pair(rows, "muon", method)
        for found in [row["results"]]
    ]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Loss and errors against the bound, by pair and by method; norms over the cap during training."""
    colours = {method: f"C{number}" for number, method in enumerate(get_args(Method))}
    drawn = {}
    for key, name in (("loss", "test loss"), ("error", "share of test images wrong")):
        figure, axes = panels(1, 2, (11, 4.5), sharex=True)
        for axis, optimizer in zip(axes[0], get_args(OptimizerName), strict=True):
            for method, colour in colours.items():
                if found := points(of_pair(rows, optimizer, method), key):
                    axis.plot(*zip(*found, strict=True), ".", color=colour, alpha=0.4)
                    axis.plot(*zip(*frontier(found), strict=True), "-", color=colour, label=method)
            axis.set(xscale="log", title=optimizer, xlabel="Lipschitz bound (RMS to RMS)", ylabel=name)
        legend_below(figure, "CIFAR-10: what a bound costs")
        drawn["tradeoff" if key == "loss" else "errors"] = figure
    figure, axes = panels(2, 4, (12, 6), sharex=True, sharey=True)
    for axis, (method, colour) in zip(axes.flat, colours.items(), strict=False):
        axis.plot(*zip(*frontier(points(rows, "loss")), strict=True), "k-", lw=0.7)
        if found := points(of_pair(rows, "muon", method), "loss"):
            axis.plot(*zip(*found, strict=True), ".", color=colour)
        axis.set(xscale="log", title=method)
    axes.flat[-1].remove()
    figure.supxlabel("Lipschitz bound (RMS to RMS)")
    figure.supylabel("test loss")
    figure.suptitle("Muon, by method; the line is the best of all pairs")
    drawn["methods"] = figure
    figure, ((axis,),) = panels(1, 1, (7, 4.5))
    for method in CAPPED:
        for number, run in enumerate(ratios(rows, method)):
            steps = [EVERY * (1 + place) for place in range(len(run) - 1)]
            axis.plot(steps, run[:-1], color=colours[method], lw=0.7, label=None if number else method)
    axis.set(xlabel="step", ylabel="norm of the second matrix over the cap")
    legend_below(figure, "Muon: norms during training, every run")
    return drawn | {"norms": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """`paper`: the rows that LT gives in full; `cpu`: whether Muon's frontier lies below AdamW's."""
    if preset == "paper":
        return [*_as_released(rows), *_near_the_baseline(rows)]
    found = []
    for method in get_args(Method)[:6]:
        losses = {
            optimizer: [row["results"]["loss"] for row in of_pair(rows, optimizer, method)]
            for optimizer in get_args(OptimizerName)
        }
        if not all(losses.values()):
            continue
        best = {optimizer: min(values) for optimizer, values in losses.items()}
        in_lt = method != "soft cap"
        edge = {name: " (edge)" * at_edge(of_pair(rows, name, method)) for name in losses}
        ours = f"best loss {best['muon']:.3f}{edge['muon']} with Muon, {best['adamw']:.3f}{edge['adamw']} with AdamW"
        runs = sum(map(len, losses.values()))
        verdict = "same shape" if best["muon"] < best["adamw"] else "another shape"
        interval = f"mean {fmean(losses['muon']):.3f} and {fmean(losses['adamw']):.3f}"
        if in_lt:
            found.append(Verdict(method, "Muon's loss is lower", ours, interval, runs, verdict))
        else:
            found.append(Verdict(f"{method}, AdamW's steps clipped", "-", ours, interval, runs, "measured"))
        adamw, muon = ([row["results"] for row in of_pair(rows, name, method)] for name in ("adamw", "muon"))
        lowest = min(adamw, key=lambda results: results["loss"])
        loss, bound = lowest["loss"], lowest["lipschitz"]
        least = min((results["lipschitz"] for results in muon if results["loss"] <= loss), default=float("inf"))
        ours = f"{shown(least, '.3g')} with Muon, {shown(bound, '.3g')}{edge['adamw']} with AdamW"
        what = f"{method}: bound at AdamW's best loss, {loss:.3f}"
        verdict = "same shape" if least < 0.99 * bound else "another shape"  # equal caps give equal bounds
        published, verdict = ("lower with Muon", verdict) if in_lt else ("-", "measured")
        found.append(Verdict(what, published, ours, "-", runs, verdict))
    for method in CAPPED:
        if runs := ratios(rows, method):
            largest = max(map(max, runs))
            holds = method != "hammer"
            verdict = "same shape" if (largest <= 1) == holds else "another shape"
            what, published = f"norm over the cap during training, {method}", "at most 1" if holds else "above 1"
            found.append(Verdict(what, published, f"at most {largest:.4f}", "-", len(runs), verdict))
    return found


def _lines(rows: Sequence[Row], optimizer: OptimizerName) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Method, strength and rate -> the results of its seeds: with LT's start and order, if there are any."""
    found: dict[tuple[Any, ...], dict[bool, list[dict[str, Any]]]] = {}
    for config, results in ((row["config"], row["results"]) for row in rows):
        if config["optimizer"] == optimizer:
            setting = (config["method"], config["strength"], config["lr"])
            found.setdefault(setting, {}).setdefault(config.get("released", False), []).append(results)
    return {setting: kinds.get(True) or kinds[False] for setting, kinds in found.items()}


def _as_released(rows: Sequence[Row]) -> list[Verdict]:
    """Every line of LT's logs by accuracy and bound, AdamW's best, and what the two say together."""
    found, means = [], {}
    muon = _lines(rows, "muon")
    adamw = sorted(_lines(rows, "adamw").items(), key=lambda each: -_mean(each[1], "accuracy"))
    for (method, strength, rate), own in [*muon.items(), *adamw[:1]]:
        judged, why, published = True, "", ""
        if (method, strength, rate) in muon:
            loss, accuracy, bound = (MUON | AS_PUBLISHED)[method][2:]
            what, published, judged = f"Muon, {method}", f"{loss}, ", method in LINES
        else:
            accuracy, bound = ADAMW
            what = f"AdamW's best, {method} {strength:g}, rate {rate:.2g}"
            others = [
                f"{shown(_mean(o, 'lipschitz'), '.0f')} at {r:.2g} with decay {s:g}" for (_, s, r), o in adamw[1:]
            ]
            why = f"LT does not say its setting; the bound is {', '.join(others)}" if others else ""
        means[what.split(",")[0], method] = got = {key: _mean(own, key) for key in ("loss", "accuracy", "lipschitz")}
        ours = f"{got['loss']:.3f}, {got['accuracy']:.3f}, {shown(got['lipschitz'], '.1f')}"
        bounds = [each["lipschitz"] for each in own]
        interval = f"bound {min(bounds):.1f} to {max(bounds):.1f}" if len(own) > 1 else "-"
        off = got["lipschitz"] / bound - 1
        near = abs(got["accuracy"] - accuracy) <= WITHIN and abs(off) <= BOUND_WITHIN
        why = "; ".join(filter(None, (f"the bound is off by {off:+.0%}" if abs(off) > BOUND_WITHIN else "", why)))
        published = f"{published or '-, '}{accuracy}, {bound} (log)"
        verdict, whole = "reached" if near else "not reached", f"{what}: loss, accuracy, bound"
        line = Verdict(whole, published, ours, interval, len(own), verdict, why)
        found.append(line if judged else line.measured())
    ours, theirs = (means.get((who, "weight decay")) for who in ("Muon", "AdamW's best"))
    if ours and theirs:
        numbers = [f"{each['accuracy']:.3f} at {shown(each['lipschitz'], '.0f')}" for each in (ours, theirs)]
        holds = ours["accuracy"] >= theirs["accuracy"] and ours["lipschitz"] < theirs["lipschitz"]
        what, published = "weight decay, Muon against AdamW: accuracy at a bound", "equal, at a lower bound (abstract)"
        verdict = "reached" if holds else "not reached"
        found.insert(0, Verdict(what, published, " against ".join(numbers), "-", 2, verdict))
    return found


def _mean(results: Sequence[dict[str, Any]], key: str) -> float:
    return fmean(each[key] for each in results)


def _near_the_baseline(rows: Sequence[Row]) -> list[Verdict]:
    """LT section 3.4: which methods end within 1% of the accuracy of Muon with weight decay, and which within 4%."""
    accuracy = {setting[0]: _mean(own, "accuracy") for setting, own in _lines(rows, "muon").items()}
    if not accuracy.keys() >= LINES.keys():
        return []
    own, logs = (
        {name.removesuffix(" as published"): each[name] for name in LINES}
        for each in (accuracy, {name: row[3] for name, row in LINES.items()})
    )
    lines = []
    for within, claimed in (
        (0.01, {"spectral normalization", "soft cap", "hard cap"}),
        (0.04, {*own} - {"weight decay"}),
    ):
        below = {name: logs["weight decay"] - logs[name] for name in claimed}
        false = [f"{name} is {gap:.3f} below" for name, gap in below.items() if gap > within]
        near = [name for name in own if own[name] >= own["weight decay"] - within and name != "weight decay"]
        verdict = "corrected" if false else "reached" if {*near} == claimed else "not reached"
        what, published = f"accuracy within {within:.0%} of weight decay", ", ".join(n for n in own if n in claimed)
        why = f"in LT's own logs {', '.join(false)}" if false else ""
        ours = ", ".join(f"{name} {own[name]:.3f}" for name in ["weight decay", *near])
        lines.append(Verdict(what, published, ours, "-", len(LINES), verdict, why))
    return lines


EXPERIMENT = Experiment(
    name="cifar-tradeoff",
    source="LT figures 2 (left), 4 and 6",
    shows="which pairs of optimizer and constraint reach a low loss at a low Lipschitz bound",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "width 64, batch 256 and 300 steps instead of 256, 512 and 4,850; few rates and strengths. "
        "AdamW with a soft cap, which LT has not, has steps clipped to three times the rate, and rates of its own",
        "paper": "the runs of Muon that LT gives in full, and AdamW at three rates; where a row has not LT's code's "
        "start and order, the last matrix starts at zero, as LT's text says, batches come in a new order every epoch, "
        "where LT keeps one, and AdamW corrects its bias",
    },
)
