"""SC 1.1: a layer that learns at test time, by steps through `msign` or a clip, and what a clip of its state does.

The layer reads key-value pairs in chunks and holds a matrix S. A chunk moves S by a step against the gradient of its
squared error `sum |S k - v|^2 / 2`, or of its inner products `-sum v . S k`, which is linear attention. The gradient is
taken as it is, clipped at 1, or through `msign`. S may be clipped after every step, as SC suggests "to control the
growth of the attention state and prevent it from blowing up". A query is answered by `S q`. All is trained through
these steps, also their size. The task is associative recall: keys come again with other values, none twice in a chunk,
and the last value counts. SC publishes no measurement; sizes are ours.
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

from papers._experiment import Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._table import Row
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
    tokens: int
    """Different keys, and values."""
    steps: int
    batch: int
    seed: int


class Layer(nn.Module):
    """Keys and values `(B, N, C)` in chunks, and queries `(B, Q)` -> logits `(B, Q, V)`, and the state `(B, D, D)`."""

    def __init__(self, cell: Cell, generator: torch.Generator) -> None:
        super().__init__()
        self.cell = cell
        rows = torch.randn(4, cell.tokens, cell.width, generator=generator) / cell.width**0.5
        self.keys, self.queries, self.values, self.readout = (nn.Parameter(part.clone()) for part in rows)
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
        keys = torch.rand(cell.batch, chunks, cell.tokens, generator=self.generator).argsort(-1)[..., :CHUNK]
        values = torch.randint(cell.tokens, keys.shape, generator=self.generator)
        recent = torch.randint(min(length, 2 * cell.tokens), (cell.batch, QUERIES), generator=self.generator)
        queries = keys.flatten(1).gather(1, length - 1 - recent)
        matches_BQT = (keys.flatten(1)[:, None] == queries[..., None]) * torch.arange(length)
        answers = values.flatten(1).gather(1, matches_BQT.argmax(-1))
        to = self.model.log_step.device
        return keys.to(to), values.to(to), queries.to(to), answers.to(to)

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
        norm = spectral_norm(state).mean() if bool(state.isfinite().all()) else torch.finfo(torch.float32).max
        return {"accuracy": float(right), "norm": float(norm)}


def cells(preset: Preset) -> list[Cell]:
    """Every inner loss and step, with and without a clip of the state, over seeds."""
    seeds, sizes = (8, (32, 64, 4000, 128)) if preset == "paper" else (3, (16, 32, 800, 64))
    settings = list(product(get_args(Inner), get_args(Step), (False, True)))
    return [Cell(*setting, *sizes, seed) for seed in range(seeds) for setting in settings]


def run(cells: Sequence[Cell], device: torch.device) -> list[dict[str, Any]]:
    """Accuracy and norm at every length."""
    for task in (tasks := [Recall(cell, device) for cell in cells]):
        fit(task)
    return [{"lengths": {str(length): task.evaluate(length) for length in LENGTHS}} for task in tasks]


def curves(rows: Sequence[Row], inner: Inner, step: Step, what: str) -> dict[str, list[list[float]]]:
    """Accuracies or norms by length, of every seed, without and with a clip of the state."""
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        config, lengths = row["config"], row["results"]["lengths"]
        if (config["inner"], config["step"]) == (inner, step):
            name = "with it" if config["clipped"] else "without the clip"
            found.setdefault(name, []).append([lengths[str(length)][what] for length in LENGTHS])
    return found


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Accuracy and norm of the state against the context's length: means, and extremes over the seeds."""
    figure, axes = panels(2, 2, (10, 7), sharex=True)
    for (column, inner), (number, step) in product(enumerate(get_args(Inner)), enumerate(get_args(Step))):
        for axis, what in zip(axes[:, column], ("accuracy", "norm"), strict=True):
            for name, of in curves(rows, inner, step, what).items():
                mean, low, high = (list(map(by, zip(*of, strict=True))) for by in (fmean, min, max))
                line, colour = "o-" if name == "with it" else "s:", f"C{number}"
                axis.plot(LENGTHS, mean, line, color=colour, label=step + ", state clipped" * (name == "with it"))
                axis.fill_between(LENGTHS, low, high, color=colour, alpha=0.15)
        axes[0, column].set(title=f"inner loss: {inner}", xscale="log")
        axes[1, column].set(xlabel="pairs in the context (trained at the least)", yscale="log")
        axes[1, column].set_xticks(LENGTHS, list(map(str, LENGTHS)))
        axes[1, column].minorticks_off()
    axes[0, 0].set_ylabel("share of right answers")
    axes[1, 0].set_ylabel("spectral norm of the state")
    legend_below(figure, "Associative recall by a layer that learns at test time, with and without a clip of its state")
    return {"ttt": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """How the state grows from the trained length to the longest, and what is recalled there. Nothing was published."""
    found: list[Verdict] = []

    def add(what: str, named: dict[str, list[float]], why: str = "") -> None:
        ours = ", ".join(f"{fmean(values):.2f} {name}" for name, values in named.items())
        interval = ", ".join(f"{min(values):.2f} to {max(values):.2f}" for values in named.values())
        found.append(Verdict(what, "-", ours, interval, sum(map(len, named.values())), "measured", why))

    for inner in get_args(Inner):
        ends: dict[str, list[float]] = {}
        for step in get_args(Step):
            norms, right = (curves(rows, inner, step, what) for what in ("norm", "accuracy"))
            if len(norms) < 2:
                continue
            growth = {name: [seed[-1] / seed[0] for seed in of] for name, of in norms.items()}
            flat = min(growth["without the clip"]) < 1.5
            why = "the steps of this inner loss forget: the state hardly grows without the clip" if flat else ""
            add(
                f"{inner}, {step}: factor by which the state grows from {LENGTHS[0]} to {LENGTHS[-1]} pairs",
                growth,
                why,
            )
            last = {name: [seed[-1] for seed in of] for name, of in right.items()}
            ends[f"by {step}"] = last["without the clip"]
            add(f"{inner}, {step}: share of right answers at {LENGTHS[-1]} pairs", last)
        if ends.keys() >= {"by gradient", "by msign"}:
            add(f"{inner}, no clip: right answers at {LENGTHS[-1]} pairs", ends)
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
        "cpu": "width 16, 32 keys, 800 steps, 3 seeds; SC has no setting, and preset `paper` is a larger one",
        "paper": "SC has no setting and no measurement; task and sizes are ours",
    },
)
