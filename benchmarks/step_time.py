"""Time of a whole training step against `torch.optim.AdamW` on the same model, in one run.

Ours: forward, backward, optimizer, constraint, and the norm estimates of every logged step, spread over the steps
between two logs. AdamW: forward, backward, optimizer. The two alternate step by step, so that
the machine's drift hits both.

    python benchmarks/step_time.py --output results/step_time.json
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from wellnormed.experiments._header import header, write_result
from wellnormed.models import build
from wellnormed.train import PRESETS, TrainConfig
from wellnormed.train.characters import build_optimizer
from wellnormed.train.weights import CONSTRAINTS


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Callable[[], None]:
    """One whole training step on fixed tokens `(batch, length)`."""

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def measure(config: TrainConfig, rounds: int) -> dict:
    """Median step times in seconds and their ratio."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocabulary_size, (config.batch, config.model.length), generator=generator)
    plain = build(config.model, torch.Generator().manual_seed(0))
    ours = build(config.model, torch.Generator().manual_seed(0))
    adamw = step_of(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), tokens)
    optimizer, constraints = build_optimizer(ours, config)
    constrained = step_of(ours, optimizer, tokens)
    times: dict[str, list[float]] = {"adamw": [], "ours": [], "norms": []}
    for _ in range(rounds):
        for name, function in (("adamw", adamw), ("ours", constrained), ("norms", constraints.norm_ratios)):
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    warm = {name: statistics.median(values[max(1, rounds // 5) :]) for name, values in times.items()}
    whole = warm["ours"] + warm["norms"] / config.log_every
    return {
        "tokens_per_step": config.batch * config.model.length,
        "rounds": rounds,
        "adamw_seconds": warm["adamw"],
        "ours_seconds": warm["ours"],
        "norm_estimates_seconds": warm["norms"],
        "log_every": config.log_every,
        "ratio": whole / warm["adamw"],
        "config": asdict(config),
    }


def main() -> None:
    """Measure the presets that were asked for and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["cpu", "caps", "paper"], choices=list(PRESETS))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--paper-rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--constraint", choices=list(CONSTRAINTS), help="instead of the presets' own")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = header("python benchmarks/step_time.py --output results/step_time.json", seed=0)
    print(f"{'preset':8} {'tokens':>7} {'AdamW':>9} {'ours':>9} {'ratio':>6}")
    for name in options.presets:
        rounds = options.paper_rounds if name == "paper" else options.rounds
        config = replace(PRESETS[name], device="cpu")
        if options.constraint:
            config = replace(config, constraint=options.constraint)
        row = measure(config, rounds)
        results[name] = row
        print(
            f"{name:8} {row['tokens_per_step']:7} {row['adamw_seconds'] * 1e3:7.1f}ms "
            f"{row['ours_seconds'] * 1e3:7.1f}ms {row['ratio']:6.2f}"
        )
    if options.output:
        write_result(options.output, results)


if __name__ == "__main__":
    main()
