"""Models without a bound on the tokens of the frontier: the peers of its figure, trained as well as we can.

nanoGPT's model and the speedrun's, both with 4 blocks of width 128, read the same 1.5 million characters of Tiny
Shakespeare as the points of `papers.frontier`, by this package's Scion, plain or with NorMuon's normalisation, at rates
that fall to 0. Rates are searched for seed 0, by factors of two until the best one lies between two others, and the
best one is run for three seeds. A row is written when its run ends, and is not run again.

    python -m benchmarks.frontier_peers --output results/frontier_peers.json
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import wellnormed as wn
from papers.frontier import best_rate
from papers.header import Stored
from papers.peers import SpeedrunConfig
from wellnormed.data.corpus import load_corpus
from wellnormed.models.config import NanoGPTConfig
from wellnormed.optim import Direction
from wellnormed.optim.directions import NorMuon
from wellnormed.train.config import CHARACTERS, TrainConfig
from wellnormed.train.language import LanguageTask
from wellnormed.train.ranks import Ranks
from wellnormed.train.setup import with_precision, with_vocabulary
from wellnormed.train.task import fit

KINDS: dict[str, tuple[type[NanoGPTConfig], dict[str, Direction], tuple[float, ...]]] = {
    "nanoGPT, Scion": (NanoGPTConfig, {}, (0.01, 0.02, 0.04)),
    "speedrun, Scion": (SpeedrunConfig, {}, (0.01, 0.02, 0.04)),
    "speedrun, NorMuon": (SpeedrunConfig, {"*": NorMuon(0.95)}, (0.025, 0.05, 0.1)),
}
"""Name -> model, directions, and the rates that the search begins with."""
SEEDS = (0, 1, 2)


def run(kind: str, rate: float, seed: int) -> dict[str, Any]:
    """One training run of 2,000 steps of 12 windows of 64 characters."""
    model, directions, _ = KINDS[kind]
    corpus = load_corpus(CHARACTERS, "tiny-shakespeare")
    config = TrainConfig(
        model=model(length=64, width=128, blocks=4, heads=4), data=CHARACTERS,
        constraint="none", learning_rate=rate, seed=seed,
    )  # fmt: skip
    alone = Ranks(0, 1, torch.device("cpu"))
    config = with_precision(with_vocabulary(config, corpus), alone)

    def scion(model: Any, config: TrainConfig, group: Any) -> tuple[torch.optim.Optimizer, None]:
        rate = config.learning_rate
        return wn.Scion(model, rate, momentum=0.95, nesterov=True, radius=1.0, directions=directions), None

    task = LanguageTask(config, corpus, alone, scion)
    fit(task)
    found = task.evaluate(last=True)
    counts = {"parameters": sum(p.numel() for p in task.model.parameters()), "precision": config.precision}
    return {"kind": kind, "rate": rate, "seed": seed, **counts, **found}


def _ends(rows: list[dict[str, Any]], kind: str) -> tuple[float, float]:
    """The lowest and the highest rate that was tried."""
    tried = [row["rate"] for row in rows if row["kind"] == kind]
    return min(tried), max(tried)


def main() -> None:
    """Run what has no row yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/frontier_peers.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored = Stored(options.output, f"python -m benchmarks.frontier_peers --output {options.output}")

    def ensure(kind: str, rate: float, seed: int) -> None:
        if not stored.has(kind=kind, rate=rate, seed=seed):
            stored.add(run(kind, rate, seed))

    for kind, (_, _, rates) in KINDS.items():
        for rate in rates:
            ensure(kind, rate, 0)
        while (best := best_rate(stored.rows, kind)) in (ends := _ends(stored.rows, kind)):
            ensure(kind, best / 2 if best == ends[0] else 2 * best, 0)
    for kind in KINDS:
        for seed in SEEDS:
            ensure(kind, best_rate(stored.rows, kind), seed)


if __name__ == "__main__":
    main()
