"""Sums and products modulo a prime, learned by many networks at once (Spectral clipping, SC, section 6.2).

Each network has another start and another 40% of all pairs to train on (as Prieto et al., 2025, whose setup SC
follows). All weights and operations are bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from wellnormed.constraints import ClippedWeightDecay, Constraint, SpectralNormalize, Stiefel
from wellnormed.norms import Experts
from wellnormed.routing import assign_norms
from wellnormed.train.task import Task

Projection = Literal[
    "none", "embedding", "stiefel", "spectral-normalize", "hard-cap", "clipped-decay-0.5", "clipped-decay-0.1"
]
MOMENTUM = 0.9
"""SC does not say which it takes. At 0.95 every setting that was tried takes about twice as many steps."""
SLOPE = 1.13
"""More than the largest slope of GELU."""


@dataclass(frozen=True)
class Cell:
    """One model."""

    operation: Literal["sum", "product"]
    projection: Projection
    prime: int
    width: int
    cap: float
    lr: float
    steps: int
    seed: int


class Stack(nn.Module):
    """Two-layer networks on two embedded numbers, one for each seed, in stacked weights.

    Shape: two of `(S, N)` integers -> logits `(S, N, P)`.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        super().__init__()
        stack, prime, width = len(cells), cells[0].prime, cells[0].width
        self.prime = prime
        self.embedding = nn.Parameter(torch.empty(stack * prime, prime))
        self.up = nn.Parameter(torch.empty(stack, width, 2 * prime))
        self.down = nn.Parameter(torch.empty(stack, prime, width))

    def forward(self, a_SN: Tensor, b_SN: Tensor) -> Tensor:
        rows = self.prime * torch.arange(len(a_SN), device=a_SN.device)[:, None]
        x = torch.cat((F.embedding(a_SN + rows, self.embedding), F.embedding(b_SN + rows, self.embedding)), -1)
        return F.gelu(x @ self.up.mT) @ self.down.mT


class ModularArithmetic(Task[Stack]):
    """Full batches of the pairs that each seed trains on, at a learning rate that stays."""

    def __init__(self, cells: Sequence[Cell], device: torch.device) -> None:
        first = cells[0]
        model, pairs = Stack(cells), first.prime**2
        train, test = [], []
        for index, cell in enumerate(cells):
            generator = torch.Generator().manual_seed(cell.seed)
            order = torch.randperm(pairs, generator=generator)
            train.append(order[: int(0.4 * pairs)])
            test.append(order[int(0.4 * pairs) :])
            with torch.no_grad():
                wn.ColNorm(0).initialize_(model.embedding[index * first.prime : (index + 1) * first.prime], generator)
                for weight in (model.up, model.down):
                    wn.Spectral().initialize_(weight[index], generator)
        self.train, self.test = (self._pairs(torch.stack(part).to(device), first) for part in (train, test))
        model = model.to(device, torch.bfloat16)
        matrices = Experts(wn.Spectral("spectral-clipping-6", "newton-schulz"))  # the steps of SC's code, in bfloat16
        norms = assign_norms(model, overrides={"embedding": wn.ColNorm(0), "up": matrices, "down": matrices})
        optimizer = wn.Scion(norms, lr=first.lr, momentum=MOMENTUM, nesterov=True)
        held = wn.constrain(optimizer, constraints(first)) if first.projection != "none" else None
        super().__init__(model, optimizer, held, first.steps, torch.Generator().manual_seed(first.seed))

    def _pairs(self, index_SN: Tensor, cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
        a, b = index_SN // cell.prime, index_SN % cell.prime
        return a, b, (a + b if cell.operation == "sum" else a * b) % cell.prime

    def rate_factor(self, step: int) -> float:
        """The rate stays."""
        return 1.0

    def batch_loss(self) -> Tensor:
        """Summed over the seeds, so that each network has the gradient of its mean loss."""
        a, b, result = self.train
        return F.cross_entropy(self.model(a, b).flatten(0, 1), result.flatten()) * len(a)

    @torch.no_grad()
    def accuracies(self) -> Tensor:
        """The accuracy of every seed on the pairs that it did not see."""
        a, b, result = self.test
        return (self.model(a, b).argmax(-1) == result).float().mean(-1)

    def lipschitz(self) -> list[float]:
        """Product of the proved norms of every seed's matrices and the slope of GELU: from embeddings to logits."""
        norms = [
            [float(wn.Spectral().upper_bound(w)) for w in stack.detach()] for stack in (self.model.up, self.model.down)
        ]
        return [SLOPE * up * down for up, down in zip(*norms, strict=True)]


def constraints(cell: Cell) -> dict[str, Constraint]:
    """The constraints of a projection, all of which cap the embeddings."""
    held: Constraint | None = None
    match cell.projection:
        case "stiefel":
            held = Stiefel(cell.cap)
        case "spectral-normalize":
            held = SpectralNormalize(cell.cap)
        case "hard-cap":
            held = wn.HardCap(cell.cap)
        case "clipped-decay-0.5":
            held = ClippedWeightDecay(cell.cap, 0.5)
        case "clipped-decay-0.1":
            held = ClippedWeightDecay(cell.cap, 0.1)
    return {"embedding": wn.ColumnCap(1.0)} | ({} if held is None else {"up": held, "down": held})
