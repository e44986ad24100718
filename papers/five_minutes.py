"""Bits a byte after five minutes of wall clock on two cores, by optimizer, with the same model.

The model is the speedruns' transformer without their learned scales (`NanoGPTConfig`, variant "nanogpt"), a million
parameters in its blocks, on bytes of English books. Every optimizer has the same windows, momentum and schedule, which
here falls with the time that is left, and moves embedding and head by AdamW or, of this package, by their norms. The
last row is this package's transformer without normalisation layers, with every weight below its cap after every step.
`RATES` are the best of `TRIED` in runs of one minute, which are cells of this experiment too. Run it with one job on a
machine that does nothing else, and compare steps, too: a machine is not equally fast at all hours. In the committed
rows those of "Scion, NorMuon" ran at another hour than the others, on a faster machine.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from matplotlib.figure import Figure

from papers._experiment import Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._table import Row
from papers._tokens import byte_corpus, byte_text
from wellnormed.constraints import Constraints
from wellnormed.models.files import Model
from wellnormed.optim import Scion
from wellnormed.train.config import TrainConfig
from wellnormed.train.language import LanguageTask
from wellnormed.train.optimizer import build_optimizer
from wellnormed.train.presets import token_preset
from wellnormed.train.ranks import Ranks
from wellnormed.train.setup import with_vocabulary
from wellnormed.train.task import fit

Method = Literal["AdamW", "torch's Muon", "Scion", "Scion, NorMuon", "Scion, caps"]
RATES: dict[Method, float] = dict(zip(get_args(Method), (0.008, 0.04, 0.04, 0.08, 0.1), strict=True))
FIRST: dict[Method, float] = {"AdamW": 0.002, "Scion, NorMuon": 0.02, "Scion, caps": 0.05}
TRIED = {method: [FIRST.get(method, 0.01) * 2**k for k in range(4)] for method in RATES}
"""The rates of the runs of one minute."""
EVERY = 20
"""Steps between the points of a curve."""
OWN = ("Scion", "Scion, NorMuon", "Scion, caps")


@dataclass(frozen=True)
class Cell:
    """One training run."""

    method: Method
    lr: float
    seconds: float
    blocks: int
    batch: int
    length: int
    seed: int
    search: bool = False
    """Whether it is one of those that find the best rate."""


class Both(torch.optim.Optimizer):
    """Several optimizers, each for its own parameters, that step together."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], {})
        self.parts, self.param_groups = parts, groups

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


class TimedTask(LanguageTask):
    """A run whose schedule follows the clock; it ends when the seconds are over."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.begin = cell, time.perf_counter()
        corpus = byte_corpus()
        super().__init__(with_vocabulary(config_of(cell), corpus), corpus, Ranks(0, 1, device), self._moved)
        self.begin = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds of training."""
        return time.perf_counter() - self.begin

    def rate_factor(self, step: int) -> float:
        """Constant, then a linear fall to 0 over the last part of the time."""
        left = max(0.0, 1 - self.elapsed / self.cell.seconds)
        return min(1.0, left / self.config.cooldown)

    def _moved(self, model: Model, config: TrainConfig, group: Any) -> tuple[torch.optim.Optimizer, Constraints | None]:
        match self.cell.method:
            case "torch's Muon":
                inner = {p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks.")}
                muon = torch.optim.Muon(inner, lr=config.learning_rate, weight_decay=0.0, adjust_lr_fn="original")
                rest = [p for p in model.parameters() if p not in inner]
                return Both(muon, torch.optim.AdamW(rest, config.adamw_rate, betas=(0.9, 0.95), weight_decay=0.0)), None
            case "Scion" | "Scion, NorMuon" as method:
                averages = {"momentum": 0.95, "nesterov": True, "normuon": 0.95 if method == "Scion, NorMuon" else None}
                return Scion(model, config.learning_rate, recipe="modular", radius=1.0, **averages), None
            case _:
                return build_optimizer(model, config, group)


def cells(preset: Preset) -> list[Cell]:
    """A minute at every rate that is tried, then every optimizer at its best rate, over seeds."""
    minutes, sizes = 60 if preset == "paper" else 5, (5, 32, 128)
    search = [Cell(method, lr, 60, *sizes, 0, True) for method, rates in TRIED.items() for lr in rates]
    return search + [Cell(method, lr, 60 * minutes, *sizes, s) for s in range(3) for method, lr in RATES.items()]


def config_of(cell: Cell) -> TrainConfig:
    """The training run of a cell; how many steps it has is decided by the clock."""
    start = token_preset("1m", "lipschitz" if cell.method == "Scion, caps" else "nanogpt")
    model = replace(start.model, blocks=cell.blocks, length=cell.length)
    run = replace(start, model=model, steps=10**6, batch=cell.batch, seed=cell.seed, learning_rate=cell.lr)
    run = replace(run, validation_tokens=2**18)
    return replace(run, optimizer="adamw") if cell.method == "AdamW" else run


def run(cells: Sequence[Cell], device: torch.device) -> list[dict[str, Any]]:
    """Bits a byte at the end, steps, and the loss over the time."""
    return [_result(cell, device) for cell in cells]


def _result(cell: Cell, device: torch.device) -> dict[str, Any]:
    task, curve = TimedTask(cell, device), []

    def watch(task: TimedTask, loss: float) -> bool:
        if task.step % EVERY == 0:
            curve.append((round(task.elapsed, 2), loss))
        return task.elapsed >= cell.seconds

    fit(task, watch)
    return {"bits_per_byte": task.evaluate()["bits_per_byte"], "steps": task.step, "curve": curve}


def of(rows: Sequence[Row], method: str, search: bool = False) -> list[Row]:
    """The long runs of a method, one for each seed, or its short ones, one for each rate."""
    own = [row for row in rows if row["config"]["method"] == method and row["config"]["search"] == search]
    return sorted(own, key=lambda row: row["config"]["lr"])


def bits(rows: Sequence[Row]) -> list[float]:
    """Bits a byte at the end of every run."""
    return [row["results"]["bits_per_byte"] for row in rows]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The search for the rates, the loss of the batches against the time, and bits a byte at the end."""
    figure, ((search, curves, last),) = panels(1, 3, (14, 4.2), sharey=False)
    for number, method in enumerate(get_args(Method)):
        color, short, long = f"C{number}", of(rows, method, search=True), of(rows, method)
        search.plot([row["config"]["lr"] for row in short], bits(short), "o-", color=color, label=method)
        for row in long:
            curves.plot(*zip(*row["results"]["curve"], strict=True), color=color, lw=0.8)
        last.plot(bits(long), [number] * len(long), "o", color=color)
    search.set(xlabel="learning rate", ylabel="validation bits a byte after a minute", xscale="log")
    curves.set(xlabel="seconds", ylabel="loss of a batch (nats a byte)", ylim=(None, 3.0))
    last.set_yticks(range(len(RATES)), list(RATES))
    last.set(xlabel="validation bits a byte at the end")
    legend_below(figure, "Five minutes on two cores, by optimizer: every seed")
    return {"five-minutes": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Bits a byte of each, and by how much this package's are below the others."""
    lines = []
    for method in get_args(Method):
        if long := of(rows, method):
            found, steps = bits(long), fmean(row["results"]["steps"] for row in long)
            ours = f"{fmean(found):.3f} bits a byte after {steps:.0f} steps at rate {RATES[method]:g}"
            short = of(rows, method, search=True)
            rates = [f"{loss:.3f} at {row['config']['lr']:g}" for row, loss in zip(short, bits(short), strict=True)]
            interval, why = f"{min(found):.3f} to {max(found):.3f}", f"after a minute: {', '.join(rates)}"
            lines.append(Verdict(method, "-", ours, interval, len(found), "measured", why))
    for own in OWN:
        for other in [method for method in get_args(Method) if method not in OWN]:
            ahead, behind = bits(of(rows, own)), bits(of(rows, other))
            if ahead and behind:
                seeds = " at every seed" if max(ahead) < min(behind) else ""
                ours = f"{fmean(ahead) - fmean(behind):+.3f} bits a byte{seeds}"
                steps = [fmean(row["results"]["steps"] for row in of(rows, method)) for method in (own, other)]
                why, count = "{:.0f} steps against {:.0f}".format(*steps), len(ahead) + len(behind)
                lines.append(Verdict(f"{own} less {other}", "-", ours, "-", count, "measured", why))
    return lines


EXPERIMENT = Experiment(
    name="five-minutes",
    source="this package",
    shows="bits a byte after five minutes of wall clock on two cores, by optimizer",
    cells=cells,
    run=run,
    data=byte_text,
    figures=figures,
    verdicts=verdicts,
    differs={"paper": "an hour instead of five minutes"},
)
