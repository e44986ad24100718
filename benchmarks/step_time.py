"""Time of a whole training step against `torch.optim.AdamW` on the same model, in one run.

Ours: forward, backward, optimizer, constraint, and the norm estimates of every logged step, spread over the steps
between two logs. AdamW: forward, backward, optimizer. Beside them ours with hard caps that project every 8 steps, where
a preset has such caps, ours without constraints, and `torch.optim.Muon` on the hidden matrices with AdamW on the rest:
what a matrix sign costs that is not ours. All alternate step by step, so that the machine's drift hits all,
and each is reported by the median over blocks of 8 consecutive steps of the mean of a block.

    python -m benchmarks.step_time --output results/step_time.json
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from papers.header import header, write_result
from wellnormed.certificates import constrain
from wellnormed.constraints import Constraints, HardCap, SpectralNormalize
from wellnormed.models import build
from wellnormed.models.files import Model
from wellnormed.optim import Scion
from wellnormed.train import PRESETS, TrainConfig
from wellnormed.train.optimizer import CONSTRAINTS, build_optimizer, weight_constraints

EVERY = 8
"""Steps between projections, of the caps that may wait."""


def build_amortised(model: Model, config: TrainConfig) -> tuple[Scion, Constraints]:
    """The optimizer of a run, whose caps project every `EVERY` steps where they can."""
    optimizer, constraints = build_optimizer(model, config)
    constraints.remove()
    held = {
        name: replace(constraint, every=EVERY) if isinstance(constraint, HardCap | SpectralNormalize) else constraint
        for name, constraint in weight_constraints(model, config).items()
    }
    return optimizer, constrain(optimizer, held)


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Callable[[], None]:
    """One whole training step on fixed tokens `(batch, length)`."""

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def torch_muon(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """A step of torch's Muon on the hidden matrices, and of AdamW on the rest, as its documentation asks."""
    held = dict(model.named_parameters())
    hidden = [p for name, p in held.items() if p.ndim == 2 and not name.startswith(("embedding", "position", "head"))]
    muon = torch.optim.Muon(hidden, lr=1e-3)
    rest = torch.optim.AdamW([p for p in held.values() if not any(p is each for each in hidden)], lr=1e-3)

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        for optimizer in (muon, rest):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (muon, rest):
            optimizer.step()

    return step


def measure(config: TrainConfig, rounds: int) -> dict:
    """Typical step times in seconds and their ratios."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocabulary_size, (config.batch, config.model.length), generator=generator)

    def model() -> Model:
        return build(config.model, torch.Generator().manual_seed(0))

    plain, peer, ours, waiting, free = (model() for _ in range(5))
    optimizer, constraints = build_optimizer(ours, config)
    amortised, held = build_amortised(waiting, config)
    without, removed = build_optimizer(free, config)
    removed.remove()
    steps = {
        "adamw": step_of(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), tokens),
        "torch_muon": torch_muon(peer, tokens),
        "ours": step_of(ours, optimizer, tokens),
        "norm_estimates": constraints.norm_ratios,
        "without_constraints": step_of(free, without, tokens),
    }
    if f"every={EVERY}" in str(held):
        steps["amortised"] = step_of(waiting, amortised, tokens)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, function in steps.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    typical = {name: typical_mean(values[max(1, rounds // 5) :]) for name, values in times.items()}
    logging = typical["norm_estimates"] / config.log_every
    rows = {
        "tokens_per_step": config.batch * config.model.length,
        "rounds": rounds,
        **{f"{name}_seconds": value for name, value in typical.items()},
        "log_every": config.log_every,
        "ratio": (typical["ours"] + logging) / typical["adamw"],
    }
    if "amortised" in typical:
        rows |= {"every": EVERY, "amortised_ratio": (typical["amortised"] + logging) / typical["adamw"]}
    return rows | {"config": asdict(config)}


def typical_mean(seconds: list[float], block: int = EVERY) -> float:
    """The median, over blocks of consecutive steps, of their mean: projections every few steps count in full.

    >>> typical_mean([1.0, 1.0, 4.0, 1.0, 1.0, 4.0, 1.0, 100.0, 4.0], block=3)
    2.0
    """
    blocks = [seconds[i : i + block] for i in range(0, len(seconds) - block + 1, block)] or [seconds]
    return statistics.median(map(statistics.fmean, blocks))


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
    results = header("python -m benchmarks.step_time --output results/step_time.json", seed=0)
    print(f"{'preset':8} {'tokens':>7} {'AdamW':>9} {'Muon':>9} {'ours':>9} {'ratio':>6} {f'every {EVERY}':>8}")
    for name in options.presets:
        rounds = options.paper_rounds if name == "paper" else options.rounds
        config = replace(PRESETS[name], device="cpu")
        if options.constraint:
            config = replace(config, constraint=options.constraint)
        row = measure(config, rounds)
        results[name] = row
        print(
            f"{name:8} {row['tokens_per_step']:7} {row['adamw_seconds'] * 1e3:7.1f}ms "
            f"{row['torch_muon_seconds'] * 1e3:7.1f}ms {row['ours_seconds'] * 1e3:7.1f}ms {row['ratio']:6.2f} "
            f"{row.get('amortised_ratio', float('nan')):8.2f}"
        )
    if options.output:
        write_result(options.output, results)


if __name__ == "__main__":
    main()
