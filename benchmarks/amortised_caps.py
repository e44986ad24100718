"""What it costs in loss that caps project every 8 steps only: short runs of the preset `caps`, made narrower.

Room for steps lowers the norm that a projection leaves, so the caps in effect are smaller: most where steps are long
beside the cap, as for the head and the queries here, of which a step is an eighth and a twelfth of the cap at first.
The runs of a seed share their initial weights and their batches. The last of each caps as a GPU does, by products
alone, which leaves large singular values anywhere within a quarter of the room.

    python -m benchmarks.amortised_caps
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import wellnormed as wn
from papers.header import header, write_result
from wellnormed.constraints import Constraints
from wellnormed.data import Corpus, load_corpus
from wellnormed.models.config import GPTConfig
from wellnormed.models.files import Model
from wellnormed.train import PRESETS, TrainConfig
from wellnormed.train.config import CHARACTERS
from wellnormed.train.language import LanguageTask
from wellnormed.train.ranks import Ranks
from wellnormed.train.task import fit

from .step_time import build_amortised

SEEDS = (0, 1, 2)
WAYS = ((1, "auto"), (8, "auto"), (8, "products"))
"""Steps from one projection to the next, and the method of the caps."""
OUTPUT = Path(__file__).parents[1] / "results" / "amortised_caps.json"


def settings(steps: int, corpus: Corpus) -> TrainConfig:
    """The preset `caps` at half its width and length, and an eighth of its hidden units; caps and rates are its own."""
    preset = PRESETS["caps"]
    assert isinstance(preset.model, GPTConfig)
    model = replace(preset.model, width=64, length=32, expansion=4, vocabulary_size=corpus.vocabulary)
    return replace(preset, model=model, steps=steps, device="cpu")


def run(config: TrainConfig, every: int, method: str, corpus: Corpus) -> dict:
    """Train; the loss on the whole validation split, how often weights were projected, and norms that were proved."""

    def optimizer_of(model: Model, config: TrainConfig, _: Any) -> tuple[wn.Scion, Constraints]:
        return build_amortised(model, config, every)

    task = LanguageTask(config, corpus, Ranks(0, 1, torch.device("cpu")), optimizer_of)
    constraints = task.constraints
    assert constraints is not None
    projections: Counter[str] = Counter()
    reached: dict[str, float] = {}
    largest = 0.0

    def watch(task: LanguageTask, loss: float) -> None:
        nonlocal largest
        for name, bound in constraints.state_dict().items():
            projections[name.removesuffix(".reach")] += float(bound) < reached.get(name, math.inf)
            reached[name] = float(bound)
        if task.step % 25 == 0:
            largest = max(largest, task.require_caps())

    with patch.object(wn.HardCap, "_method", method):
        fit(task, watch)
    return {
        "every": every,
        "method": method,
        "seed": config.seed,
        "validation_loss": task.evaluate(last=True)["validation_loss"],
        "steps_per_projection": {name: config.steps / count for name, count in projections.items()},
        "largest_proved_ratio": largest,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train every pair, and write and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    corpus = load_corpus(CHARACTERS)
    config, rows = settings(options.steps, corpus), []
    for seed in SEEDS:
        for every, method in WAYS:
            rows.append(run(replace(config, seed=seed), every, method, corpus))
            print(f"seed {seed}, every {every}, {method}: loss {rows[-1]['validation_loss']:.4f}", flush=True)
    content = header("python -m benchmarks.amortised_caps", seed=list(SEEDS))
    write_result(options.output, {**content, "text": corpus.name, "config": asdict(config), "rows": rows})


if __name__ == "__main__":
    main()
