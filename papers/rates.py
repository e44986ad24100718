"""LMO section 5: criticality of uSCG, SCG and ALMOND against the horizon, on a problem with known constants.

`f(W) = 1/2 sum log(1 + (W - T)^2)` over 16 x 8 matrices is not convex, and its gradient has the Lipschitz constant 8
from the spectral norm to its dual, since every second derivative is at most 1. The noise is Gaussian. Criticality is
the dual norm of the gradient for uSCG, and the Frank-Wolfe gap over the spectral ball for SCG; both are averaged over
the iterates, as the lemmas have it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import wellnormed as wn
from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import draw_band, legend_below, panels
from papers._table import Row, results_by
from wellnormed.optim import ConditionalGradient
from wellnormed.routing import assign_norms
from wellnormed.train.task import Task, fit

Algorithm = Literal["uSCG", "SCG", "ALMOND"]
Momentum = Literal["constant", "vanishing"]
NORM = wn.Spectral(method="svd", units="l2")
SHAPE = (16, 8)
NOISES = (0.0, 0.5, 1.0, 2.0)
ALPHA = 0.1
"""The constant momentum of the lemmas, which is the part of the new gradient."""
STEP_RULES: dict[Algorithm, Any] = {"uSCG": "unconstrained", "SCG": "constrained", "ALMOND": "averaged"}


@dataclass(frozen=True)
class Cell:
    """One run."""

    algorithm: Algorithm
    momentum: Momentum
    horizon: int
    noise: float
    """Square root of the expected squared Euclidean length of the noise."""
    seed: int


class Noisy(Task[nn.Linear]):
    """Steps of the size that the lemmas take for the horizon."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, generator = cell, torch.Generator().manual_seed(cell.seed)
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, device=device)
        nn.init.zeros_(model.weight)
        target = torch.randn(SHAPE, generator=generator)
        self.target = (2 * target / torch.linalg.matrix_norm(target, 2)).to(device)
        lr = cell.horizon**-0.5 if cell.momentum == "constant" else 0.75 * cell.horizon**-0.75
        norms = assign_norms(model, overrides={"weight": NORM})
        optimizer = ConditionalGradient(norms, lr=lr, momentum=0.0, step_rule=STEP_RULES[cell.algorithm])
        super().__init__(model, optimizer, None, cell.horizon, generator)

    def rate_factor(self, step: int) -> float:
        """The rate stays, and so the momentum can follow the lemmas: all of the first gradient, then what they say."""
        alpha = (step + 1) ** -0.5 if self.cell.momentum == "vanishing" else ALPHA
        for group in self.optimizer.param_groups:
            group["momentum"] = 1 - alpha if step else 0.0
        return 1.0

    def batch_loss(self) -> Tensor:
        """The loss with a linear term whose gradient is the noise."""
        weight = self.model.weight
        noise = torch.randn(SHAPE, generator=self.generator).to(weight) * self.cell.noise / math.sqrt(weight.numel())
        return 0.5 * (weight - self.target).square().log1p().sum() + (weight * noise).sum()

    @torch.no_grad()
    def criticality(self) -> float:
        """The criticality without the noise."""
        weight = self.model.weight
        gradient = (weight - self.target) / (1 + (weight - self.target).square())
        dual = float(NORM.dual_norm(gradient))
        return dual + float((gradient * weight).sum()) if self.cell.algorithm == "SCG" else dual


def cells(preset: Preset) -> list[Cell]:
    """Horizons by factors of 4."""
    longest, seeds = (14, 8) if preset == "paper" else (12, 3)
    return [
        Cell(algorithm, momentum, 2**power, noise, seed)
        for seed in range(seeds)
        for algorithm, momentum, noise in product(get_args(Algorithm), get_args(Momentum), NOISES)
        for power in range(4, longest + 1, 2)
    ]


def run(cell: Cell, device: torch.device) -> dict[str, Any]:
    """The criticality, averaged over the iterates."""
    task = Noisy(cell, device)
    values = [task.criticality()]
    fit(task, lambda task, _: values.append(task.criticality()))
    return {"criticality": fmean(values[:-1])}


def curve(rows: Sequence[Row], algorithm: str, momentum: str, noise: float) -> dict[int, list[float]]:
    """Horizon -> criticality of every seed."""
    return results_by(rows, "horizon", "criticality", algorithm=algorithm, momentum=momentum, noise=noise)


def slopes(values: dict[int, list[float]]) -> list[float]:
    """The slope of every seed: least squares of the logarithms over the upper half of the horizons."""
    found = []
    for seed in range(min(map(len, values.values()))):
        points = [(math.log(n), math.log(v[seed])) for n, v in values.items()][len(values) // 2 :]
        x, y = (fmean(column) for column in zip(*points, strict=True))
        found.append(sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points))
    return found


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Criticality against the horizon, by noise; one panel for each algorithm and momentum."""
    figure, axes = panels(2, 3, (11, 6.5), sharex=True)
    for (row, momentum), (column, algorithm) in product(enumerate(get_args(Momentum)), enumerate(get_args(Algorithm))):
        axis = axes[row, column]
        for number, noise in enumerate(NOISES):
            values = curve(rows, algorithm, momentum, noise)
            if values:
                draw_band(axis, values, "o-", color=f"C{number}", label=f"noise {noise:g}")
        axis.set(title=f"{algorithm}, {momentum} momentum", xscale="log", yscale="log")
    for axis in axes[1]:
        axis.set_xlabel("horizon n")
    for axis in axes[:, 0]:
        axis.set_ylabel("criticality, mean over the iterates")
    legend_below(figure, "Rates on a problem with known constants")
    return {"rates": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Slopes against the lemmas' exponents, and the plateau against the noise."""
    found: list[Verdict] = []

    def add(what: str, published: str, values: Sequence[float], most: float | None) -> None:
        verdict = "measured" if most is None else ANSWERS[preset][not fmean(values) <= most]
        found.append(Verdict.of(what, published, values, verdict, digits=".2f"))

    for algorithm, lemmas in (("uSCG", ("5.3", "5.4")), ("SCG", ("5.5", "5.6"))):
        for momentum, lemma, noise, exponent in zip(get_args(Momentum), lemmas, (0.0, 1.0), (-0.5, -0.25), strict=True):
            values = curve(rows, algorithm, momentum, noise)
            if len(values) > 2:
                what = f"{algorithm}, {momentum} momentum, noise {noise:g} (lemma {lemma}): exponent of n"
                within = 0.05  # slopes of finite horizons bend
                add(what, f"at most {exponent}; here within {within}", slopes(values), exponent + within)
        small, large = (curve(rows, algorithm, "constant", noise) for noise in NOISES[2:])
        if small and large:
            last = [list(values.values())[-1] for values in (small, large)]
            what = f"{algorithm}, constant momentum, longest horizon: criticality at noise 2 over that at noise 1"
            ratios = [b / a for a, b in zip(*last, strict=False)]
            add(what, "at most 2; here within 0.2", ratios, 2.2)  # a tenth for what the seeds differ by
    for momentum in get_args(Momentum):
        values = curve(rows, "ALMOND", momentum, 1.0)
        if len(values) > 2:
            add(f"ALMOND, {momentum} momentum, noise 1: exponent of n", "no lemma", slopes(values), None)
    return found


EXPERIMENT = Experiment(
    name="rates",
    source="LMO section 5",
    shows="that uSCG and SCG converge no slower than their lemmas say, to a plateau in proportion to the noise",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "horizons to 4,096 instead of 16,384, 3 seeds instead of 8",
        "paper": "LMO proves these rates and runs nothing: problem, sizes, horizons and noise are ours",
    },
)
