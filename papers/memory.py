"""LMO section 6: what optimizers keep for every parameter of a transformer, also memory-light and in half precision.

Bytes of the gradients and of the optimizer's state after two steps; in the memory-light mode the gradients hold the
momentum, and there is no other state. On a GPU the peak of a step is measured as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import wellnormed as wn
from papers._experiment import ANSWERS, Experiment, Preset, Verdict
from papers._figures import panels
from papers._table import Row
from wellnormed.train.task import Task, fit

Optimizer = Literal["AdamW", "Muon, AdamW for embeddings and head", "Scion", "Scion, memory-light"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Cell:
    """One optimizer on a transformer's weights."""

    optimizer: Optimizer
    precision: Precision
    width: int
    blocks: int
    vocabulary: int
    seed: int


class Shapes(nn.Module):
    """The weights of a GPT: embeddings, per block the four matrices of attention and the two that follow, a head."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        width = cell.width
        self.embedding = nn.Embedding(cell.vocabulary, width)
        sizes = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
        self.blocks = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes * cell.blocks))
        self.head = nn.Linear(width, cell.vocabulary, bias=False)


class Slopes(Task[Shapes]):
    """A loss that is linear in every weight, so that every gradient is there and random."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        torch.manual_seed(cell.seed)
        model = Shapes(cell).to(device, getattr(torch, cell.precision))
        super().__init__(model, make(cell.optimizer, model), None, 2, torch.Generator().manual_seed(cell.seed))

    def batch_loss(self) -> Tensor:
        """The sum of all weights times random signs."""
        terms = []
        for parameter in self.model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=self.generator).mul_(2).sub_(1)
            terms.append((parameter * signs.to(parameter)).sum())
        return torch.stack(terms).sum()

    def kept(self) -> int:
        """Bytes beside the weights: gradients, and state but for single numbers."""
        state = sum(t.nbytes for entries in self.optimizer.state.values() for t in entries.values() if t.numel() > 1)
        return state + sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)


def make(name: Optimizer, model: Shapes) -> torch.optim.Optimizer:
    """The optimizer of that name."""
    match name:
        case "AdamW":
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        case "Muon, AdamW for embeddings and head":
            return wn.Muon(model, lr=0.02, recipe="muon")
        case "Scion":
            return wn.Scion(model, lr=0.02)
        case "Scion, memory-light":
            return wn.Scion(model, lr=0.02, memory="gradient", nesterov=False)


def cells(preset: Preset) -> list[Cell]:
    """GPT-2 small, or a smaller one of the same proportions; nothing depends on the seed but the signs."""
    width, blocks, vocabulary, seeds = (768, 12, 50304, 1) if preset == "paper" else (128, 4, 4096, 3)
    return [
        Cell(optimizer, precision, width, blocks, vocabulary, seed)
        for seed in range(seeds)
        for precision in get_args(Precision)
        for optimizer in get_args(Optimizer)
    ]


def run(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Bytes of the weights and of everything that is kept beside them, and on a GPU the peak of a step."""
    task = Slopes(cell, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    fit(task)
    return {
        "weights": sum(p.nbytes for p in task.model.parameters()),
        "kept": task.kept(),
        "peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def _share(rows: Sequence[Row], optimizer: str, precision: str) -> list[float]:
    """Bytes beside the weights over those of the weights in float32, of every run."""
    return [
        row["results"]["kept"] / row["results"]["weights"] * (1.0 if precision == "float32" else 0.5)
        for row in rows
        if (row["config"]["optimizer"], row["config"]["precision"]) == (optimizer, precision)
    ]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Bytes beside the weights, for every weight."""
    figure, ((axes,),) = panels(1, 1, (8, 3.5))
    names = get_args(Optimizer)
    for offset, precision in ((-0.2, "float32"), (0.2, "bfloat16")):
        values = [max(_share(rows, name, precision), default=0.0) for name in names]
        places = [number + offset for number in range(len(names))]
        axes.barh(places, [4 * value for value in values], height=0.38, label=precision)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("bytes of gradients and state for every weight")
    axes.legend()
    return {"memory": figure}


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """Multiples of the weights' own bytes in float32, and which LMO's buffers come to."""
    counted, (yes, no) = {"Scion": 2.0, "Scion, memory-light": 1.0}, ANSWERS[preset]
    found = []
    for precision in get_args(Precision):
        for name in get_args(Optimizer):
            values = _share(rows, name, precision)
            if not values:
                continue
            ours = f"{max(values):.2f} times the weights in float32"
            published, verdict = "-", "measured"
            if name in counted:
                most = counted[name] * (1.0 if precision == "float32" else 0.5)
                published, verdict = f"{most:g} by its buffers", no if max(values) > 1.01 * most else yes
            found.append(Verdict.of(f"{name}, {precision}", published, values, verdict, digits=".2f", ours=ours))
    return found


EXPERIMENT = Experiment(
    name="memory",
    source="LMO section 6",
    shows="that Scion keeps one number beside the gradient where AdamW keeps two, and none in its memory-light mode",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    differs={
        "cpu": "width 128, 4 blocks and 4,096 symbols instead of GPT-2 small",
        "paper": "LMO states what is kept and measures nothing; GPT-2 small is chosen",
    },
)
