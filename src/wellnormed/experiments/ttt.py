"""SC 1.1: a layer that learns at test time, by steps through `msign` or a clip, and what a clip of its state does.

The layer reads key-value pairs in chunks and holds a matrix S. A chunk moves S by an inner step against the gradient of
the squared error `sum |S k - v|^2 / 2` of its pairs, or of their inner products `-sum v . S k`, which is linear
attention. The gradient is taken as it is, through a clip of its singular values at 1, or through `msign`. S itself may
be clipped after every step, as SC suggests "to control the growth of the attention state and prevent it from blowing
up". A query is answered by `S q`. Keys, queries, values, readout and inner step size are trained through all of this.

The task is associative recall: keys come again with other values, none twice in a chunk, and the last value counts. It
is trained at one length, and tested at that and longer ones. SC publishes no measurement; sizes are ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from wellnormed.experiments._experiment import Experiment, Preset, Verdict
from wellnormed.experiments._figures import legend_below, panels
from wellnormed.experiments._table import Row
from wellnormed.matrix import msign, spectral_hardcap, spectral_norm
from wellnormed.train.task import Task, fit

Inner = Literal["inner product", "squared error"]
Step = Literal["gradient", "clip", "msign"]
LENGTHS = (64, 256, 1024, 4096)
"""Pairs of a context: that of training, and longer ones."""
CHUNK, CAP, QUERIES = 16, 2.0, 16
STEPS: dict[Step, Callable[[Tensor], Tensor]] = {
    "gradient": lambda gradient: gradient,
    "clip": lambda gradient: spectral_hardcap(gradient, 1.0),
    "msign": msign,
}


@dataclass(frozen=True)
class Cell:
    """One layer."""

    inner: Inner
    step: Step
    clipped: bool
    """Whether the state is clipped at `CAP`."""
    width: int
    keys: int
    values: int
    steps: int
    batch: int
    seed: int


class Layer(nn.Module):
    """Keys and values `(B, N, C)` in chunks, and queries `(B, Q)` -> logits `(B, Q, V)`, and the state `(B, D, D)`."""

    def __init__(self, cell: Cell, generator: torch.Generator) -> None:
        super().__init__()
        self.cell = cell
        entries = {"keys": cell.keys, "queries": cell.keys, "values": cell.values, "readout": cell.values}
        for name, count in entries.items():
            rows = torch.randn(count, cell.width, generator=generator) / cell.width**0.5
            self.register_parameter(name, nn.Parameter(rows))
        self.log_step = nn.Parameter(torch.tensor(0.5).log())

    def forward(self, keys: Tensor, values: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        k_BNCD, v_BNCD = F.normalize(self.keys, dim=-1)[keys], self.values[values]
        state_BDD = k_BNCD.new_zeros(len(keys), self.cell.width, self.cell.width)
        for k_BCD, v_BCD in zip(k_BNCD.unbind(1), v_BNCD.unbind(1), strict=True):
            error = k_BCD @ state_BDD.mT - v_BCD if self.cell.inner == "squared error" else -v_BCD
            state_BDD = state_BDD - self.log_step.exp() * STEPS[self.cell.step](error.mT @ k_BCD)
            if self.cell.clipped:
                state_BDD = spectral_hardcap(state_BDD, CAP)
        q_BQD = F.normalize(self.queries, dim=-1)[queries]
        return q_BQD @ state_BDD.mT @ self.readout.mT, state_BDD


class Recall(Task[Layer]):
    """Batches of sequences of the first of `LENGTHS`."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(cell.seed)
        model = Layer(cell, generator).to(device)
        super().__init__(model, torch.optim.Adam(model.parameters(), lr=0.01), None, cell.steps, generator)

    def batch(self, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, queries and answers; a query is one of the last `2 K` keys."""
        cell, chunks = self.model.cell, length // CHUNK
        keys = torch.rand(cell.batch, chunks, cell.keys, generator=self.generator).argsort(-1)[..., :CHUNK]
        values = torch.randint(cell.values, keys.shape, generator=self.generator)
        recent = torch.randint(min(length, 2 * cell.keys), (cell.batch, QUERIES), generator=self.generator)
        queries = keys.flatten(1).gather(1, length - 1 - recent)
        matches_BQT = (keys.flatten(1)[:, None] == queries[..., None]) * torch.arange(length)
        answers = values.flatten(1).gather(1, matches_BQT.argmax(-1))
        device = self.model.log_step.device
        return keys.to(device), values.to(device), queries.to(device), answers.to(device)

    def batch_loss(self) -> Tensor:
        """Cross entropy of the answers."""
        *context, answers = self.batch(LENGTHS[0])
        return F.cross_entropy(self.model(*context)[0].flatten(0, 1), answers.flatten())

    @torch.no_grad()
    def evaluate(self, length: int) -> dict[str, float]:
        """Share of right answers, and mean norm of the state at the end; the largest float32 if it is not finite."""
        *context, answers = self.batch(length)
        logits, state = self.model(*context)
        right = (logits.argmax(-1) == answers).float().mean()
        finite = bool(state.isfinite().all())
        norm = float(spectral_norm(state).mean()) if finite else torch.finfo(torch.float32).max
        return {"accuracy": float(right), "norm": norm}


def cells(preset: Preset) -> list[Cell]:
    """Every inner loss and step, with and without a clip of the state, over seeds."""
    seeds, sizes = (8, (32, 64, 64, 4000, 128)) if preset == "paper" else (3, (16, 32, 32, 600, 64))
    settings = list(product(get_args(Inner), get_args(Step), (False, True)))
    return [Cell(*setting, *sizes, seed) for seed in range(seeds) for setting in settings]


def run(cells: Sequence[Cell], device: torch.device) -> list[dict[str, Any]]:
    """Accuracy and norm at every length, and the trained inner step size."""
    results = []
    for cell in cells:
        task = Recall(cell, device)
        fit(task)
        lengths = {str(length): task.evaluate(length) for length in LENGTHS}
        results.append({"lengths": lengths, "step": float(task.model.log_step.detach().exp())})
    return results


def values(rows: Sequence[Row], inner: Inner, step: Step, clipped: bool, what: str) -> list[list[float]]:
    """Accuracies or norms by length, of every seed."""
    wanted = {"inner": inner, "step": step, "clipped": clipped}
    own = [row["results"]["lengths"] for row in rows if wanted.items() <= row["config"].items()]
    return [[lengths[str(length)][what] for length in LENGTHS] for lengths in own]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Accuracy and norm of the state against the context's length: means, and extremes over the seeds."""
    figure, axes = panels(2, 2, (9, 7), sharex=True)
    for (column, inner), (number, step), clipped in product(
        enumerate(get_args(Inner)), enumerate(get_args(Step)), (False, True)
    ):
        for axis, what in zip(axes[:, column], ("accuracy", "norm"), strict=True):
            curves = list(zip(*values(rows, inner, step, clipped, what), strict=True))
            if curves:
                label = f"{step}{', clipped state' if clipped else ''}"
                line = "o-" if clipped else "s:"
                axis.plot(LENGTHS, list(map(fmean, curves)), line, color=f"C{number}", label=label)
                axis.fill_between(
                    LENGTHS, list(map(min, curves)), list(map(max, curves)), color=f"C{number}", alpha=0.15
                )
        axes[0, column].set(title=f"inner loss: {inner}", xscale="log")
        axes[1, column].set(xlabel="pairs in the context (trained at the least)", yscale="log")
        axes[1, column].set_xticks(LENGTHS, list(map(str, LENGTHS)))
        axes[1, column].minorticks_off()
    axes[0, 0].set_ylabel("share of right answers")
    axes[1, 0].set_ylabel("spectral norm of the state")
    legend_below(figure, "Associative recall by a layer that learns at test time, with and without a clip of its state")
    return {"ttt": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """How the norm grows and the accuracy falls from the trained length to the longest."""
    found = []
    for inner, step in product(get_args(Inner), get_args(Step)):
        norms = [values(rows, inner, step, clipped, "norm") for clipped in (False, True)]
        accuracies = [values(rows, inner, step, clipped, "accuracy") for clipped in (False, True)]
        if not all(norms):
            continue
        free, held = ([seed[-1] / seed[0] for seed in curves] for curves in norms)
        grows = min(free) > 1.5
        good = grows and max(max(seed) for seed in norms[1]) <= CAP * 1.001  # rounding
        why = "" if grows else "it does not grow without the clip either: this inner step forgets by itself"
        ours = f"{fmean(free):.2f} times without the clip, {fmean(held):.2f} times with it"
        what = f"{inner}, {step}: growth of the state's norm from {LENGTHS[0]} to {LENGTHS[-1]} pairs"
        interval = f"{min(free):.2f} to {max(free):.2f}, {min(held):.2f} to {max(held):.2f}"
        shape = "same shape" if good else "another shape"
        found.append(Verdict(what, "a clip controls the growth", ours, interval, len(free) * 2, shape, why))
        free, held = ([seed[-1] for seed in curves] for curves in accuracies)
        ours = f"{fmean(free):.2f} without the clip, {fmean(held):.2f} with it"
        interval = f"{min(free):.2f} to {max(free):.2f}, {min(held):.2f} to {max(held):.2f}"
        what = f"{inner}, {step}: share of right answers at {LENGTHS[-1]} pairs"
        found.append(Verdict(what, "-", ours, interval, len(free) * 2, "measured"))
    return found


EXPERIMENT = Experiment(
    name="ttt",
    source="SC 1.1",
    shows="what msign and clips in a layer that learns at test time do to its recall and its state at long contexts",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "width 16, 32 keys, 600 steps and 3 seeds instead of 32, 64, 4,000 and 8, which are no paper's either"
    },
)
