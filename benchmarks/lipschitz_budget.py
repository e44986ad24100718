"""Compares `wn.constrain(lipschitz=...)`, which needs no search, with the best of many caps that are set by hand.

Every arm trains the same model with `wn.Scion` at rates that fall to zero, of which the best counts, within caps by
which the same constant is proved: caps that are found and move every 20 steps, and caps by hand, which are one factor
times those of a pattern. The factor makes the constant equal. `layers` of a pattern are groups of matrices; the start's
are proportional to the norms of the weights. The figure is the loss on data that was not trained on: 2,000 images of
CIFAR-10 after training on 10,000, the texts of a Markov chain, or the end of Shakespeare's plays for LT's transformer.
`seconds` is the time of the processor for all steps of a run.

    python -m benchmarks.lipschitz_budget                   # the rows that are missing, then the table
    python -m benchmarks.lipschitz_budget --seeds 0         # those of one seed
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellnormed as wn
from benchmarks.public_defaults import chain
from papers._cifar import pixels_and_labels
from papers.header import Stored
from wellnormed.certificates.budget import Budget
from wellnormed.data import load_shakespeare
from wellnormed.models import GPTConfig, build

OUTPUT = Path("results/lipschitz-budget.json")
SEEDS, RATES = (0, 1, 2), (0.02, 0.04, 0.08, 0.16)
STEPS, BATCH, MOVE_EVERY = 240, 64, 20
FOUND = "found, and moved"
STAYED = "found, and kept"


class Block(nn.Module):
    """One block of attention with four heads and a feed-forward layer, no norm layers, between two tables."""

    def __init__(self, symbols: int = 64, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, symbols, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next symbol, `(B, T)` -> `(B, T, symbols)`."""
        x = self.table(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.feed(x))


def mlp() -> nn.Module:
    """3072-128-128-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def cnn() -> nn.Module:
    """Three convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1),
        nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


@cache
def images(split: str, count: int) -> tuple[Tensor, Tensor]:
    """The first images of a split and their classes."""
    pixels, labels = pixels_and_labels(split, torch.device("cpu"))  # pyrefly: ignore[bad-argument-type]
    return pixels[:count].clone(), labels[:count].clone()


@cache
def texts(split: str, count: int) -> tuple[Tensor, Tensor]:
    """Texts of a Markov chain and their next symbols; the table of the chain is the same for both splits."""
    tokens = chain(torch.Generator().manual_seed(1234), length=33, count=12_000)["input_ids"]
    own = tokens[:count] if split == "train" else tokens[-count:]
    return own[:, :-1], own[:, 1:]


@cache
def plays(split: str, count: int) -> tuple[Tensor, Tensor]:
    """Windows of 32 characters and those that follow, spread evenly over a part of Shakespeare's plays."""
    text = load_shakespeare()
    tokens = text.train if split == "train" else text.validation
    windows = tokens[torch.linspace(0, len(tokens) - 33, count).long()[:, None] + torch.arange(33)]
    return windows[:, :-1], windows[:, 1:]


def lt() -> nn.Module:
    """LT's transformer as the package has it, two blocks deep; it starts from torch's global generator."""
    config = GPTConfig(vocabulary_size=len(load_shakespeare().symbols), length=32, width=32)
    return build(config, torch.default_generator)


@dataclass(frozen=True)
class Case:
    """A model, its data, the constant, and caps by hand: for each pattern a factor for each group of layers."""

    model: Callable[[], nn.Module]
    data: Callable[[str, int], tuple[Tensor, Tensor]]
    lipschitz: float
    layers: tuple[tuple[str, ...], ...]
    patterns: tuple[tuple[float, ...], ...]


THREE = (
    (1, 1, 1), (2, 1, 1), (0.5, 1, 1), (1, 2, 1), (1, 0.5, 1), (1, 1, 2), (1, 1, 4), (0.5, 1, 2), (2, 1, 0.5),
)  # fmt: skip
FOUR = (
    (1, 1, 1, 1), (0.5, 1, 1, 1), (0.25, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (0.5, 1, 1, 2), (0.25, 1, 2, 2),
    (0.25, 0.5, 1, 2), (0.5, 2, 1, 1), (0.25, 1, 1, 4),
)  # fmt: skip
CASES = {
    "MLP": Case(mlp, images, 10.0, (("1.",), ("3.",), ("5.",)), THREE),
    "CNN": Case(cnn, images, 10.0, (("0.",), ("2.", "4."), ("7.",)), THREE),
    "transformer": Case(
        Block, texts, 6.0, (("query", "key"), ("value", "out"), ("feed",), ("head", "positions")), FOUR
    ),
    "LT's transformer": Case(
        lt,
        plays,
        10.0,
        (("query", "key"), ("value", "1.block.output", "5.block.output"), ("3.block", "7.block"), ("head",)),
        FOUR,
    ),
}


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def arms(case: Case) -> list[str]:
    """The names of the ways to constrain the model: two by `lipschitz=`, the others by caps that are set by hand."""
    return [FOUND, STAYED, *(" ".join(f"{each:g}" for each in pattern) for pattern in case.patterns)]


def by_hand(model: nn.Module, case: Case, arm: str, example: Tensor) -> dict[str, wn.constraints.Constraint]:
    """The caps of a pattern that give the constant, which are found on a copy of the model."""
    optimizer = wn.Scion(copy.deepcopy(model), lr=RATES[0])
    found = wn.constrain(optimizer, lipschitz=case.lipschitz, norm="rms", example_input=example)
    assert isinstance(found, Budget)
    factors = list(zip(case.layers, map(float, arm.split()), strict=True))
    relative = {
        name: next(factor for group, factor in factors if any(map(name.__contains__, group)))
        for name, cost in found._costs.items()
        if float(cost) > 0
    }
    still = {name: cap for name, cap in found.caps().items() if name not in relative}
    caps = found._within.scaled(relative, case.lipschitz, still, len(relative))
    kinds = {c.name: type(c.constraint) for c in found._constrained}
    return {name: kinds[name](cap) for name, cap in caps.items()}


def train(case: Case, arm: str, rate: float, seed: int) -> dict[str, Any]:
    """One run."""
    torch.manual_seed(seed)
    model, (inputs, targets) = case.model(), case.data("train", 10_000)
    optimizer = wn.Scion(model, lr=rate)
    example = inputs[:2]
    if arm in (FOUND, STAYED):
        every = MOVE_EVERY if arm == FOUND else 0
        held = wn.constrain(optimizer, lipschitz=case.lipschitz, norm="rms", example_input=example, move_every=every)
    else:
        held = wn.constrain(optimizer, by_hand(model, case, arm, example))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    draws, begun = torch.Generator().manual_seed(seed), time.process_time()
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (BATCH,), generator=draws)
        optimizer.zero_grad()
        loss_of(model, inputs[chosen], targets[chosen]).backward()
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - begun
    model.eval()
    with torch.no_grad():
        loss = float(loss_of(model, *case.data("test", 2_000)))
    proved = wn.certify(model, example, within=held).rms_lipschitz
    caps = {name: round(cap, 4) for name, cap in held.promised().items() if cap < 999}
    return {"loss": round(loss, 6), "proved": proved, "seconds": round(seconds, 2), "caps": caps}


def best(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Model -> arm -> its rows at the rate whose mean loss is the least, of the seeds that all arms and rates have."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in CASES:
        own: dict[str, dict[float, dict[int, dict[str, Any]]]] = {}
        for row in (row for row in rows if row["model"] == name):
            own.setdefault(row["arm"], {}).setdefault(row["rate"], {})[row["seed"]] = row
        seeds = set.intersection(*(set(each) for rates in own.values() for each in rates.values())) if own else set()
        for arm, rates in own.items():
            complete = [[each[seed] for seed in sorted(seeds)] for each in rates.values()]
            if seeds:
                found.setdefault(name, {})[arm] = min(complete, key=lambda each: fmean(row["loss"] for row in each))
    return found


def main() -> None:
    """Run what has no row yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds that run")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), help="models that run")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    stored = Stored(OUTPUT, "python -m benchmarks.lipschitz_budget")
    for seed, name, rate in product(chosen.seeds, chosen.models, RATES):
        for arm in arms(CASES[name]):
            cell = {"model": name, "arm": arm, "rate": rate, "seed": seed}
            if not stored.has(**cell):
                found = {"lipschitz": CASES[name].lipschitz, **train(CASES[name], arm, rate, seed)}
                stored.add(cell | found | stored.commit)
    for name, found in best(stored.rows).items():
        for arm, rows in found.items():
            print(f"{name:16} {arm:20} {fmean(row['loss'] for row in rows):.4f} {rows[0]['rate']:g} {len(rows)}")


if __name__ == "__main__":
    main()
