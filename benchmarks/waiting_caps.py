"""What it costs in loss that caps wait for eight steps, by the room that they may leave for them.

Short runs of the preset `caps`, made narrower. Its smallest caps are 0.2 and its rate begins at 0.015: a step is up to
a twelfth of a cap, for the head an eighth, so that room is felt here before it is elsewhere. The runs of a seed share
their initial weights and their batches. "acts" is the share of all steps and caps in which one looked at its weight.

    python -m benchmarks.waiting_caps [--steps 400]
"""

import argparse
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from papers.header import Stored
from wellnormed._files import read_json
from wellnormed.constraints.caps import Cap
from wellnormed.models.config import GPTConfig
from wellnormed.train import TrainConfig, train
from wellnormed.train.optimizer import CONSTRAINTS
from wellnormed.train.presets import PRESETS

OUTPUT = Path("results/waiting-caps.json")
SEEDS = (0, 1, 2)
ROOMS = (None, 0.05, 0.1, 0.25, 0.5)
"""The share of the cap that steps may wait for; None for a cap that acts after every step."""
KINDS = ("hard-cap", "soft-cap")
CAPS = 7
"""The matrices of the model that have one."""


def run(constraint: Any, room: float | None, seed: int, steps: int) -> dict[str, Any]:
    """Train once; the loss on the whole validation split, and how often caps acted."""
    preset = PRESETS["caps"]
    assert isinstance(preset, TrainConfig)
    assert isinstance(preset.model, GPTConfig)
    config = replace(
        preset, model=replace(preset.model, width=64, length=32, expansion=4), constraint=constraint, seed=seed,
        steps=steps, every=1 if room is None else 8, precision="float32", threads=1, certify="no", attack_steps=0,
        sample_tokens=0, checkpoint_every=steps,
    )  # fmt: skip
    kind = CONSTRAINTS[constraint]
    acted, apply = 0, kind.apply

    def counted(self: Cap, weights: torch.Tensor, *others: Any) -> Any:
        nonlocal acted
        acted += len(weights)
        return apply(self, weights, *others)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(kind, "apply", counted),
        patch.object(kind, "most_room", room),
    ):
        loss = float(read_json(train(config, Path(folder) / "run").results_file, "")["validation_loss"])
    return {"constraint": constraint, "room": room, "seed": seed, "loss": loss, "acts": acted / steps / CAPS}


def main() -> None:
    """Run what has no row, and write it, one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    stored = Stored(options.output, "python -m benchmarks.waiting_caps", steps=options.steps)
    for constraint, room, seed in itertools.product(KINDS, ROOMS, SEEDS):
        if not stored.has(constraint=constraint, room=room, seed=seed):
            stored.add(run(constraint, room, seed, options.steps))


if __name__ == "__main__":
    main()
