"""The main job with an end and without one: what a run hands out at every 500th step, its loss and its proved constant.

Both arms are `wellnormed train` with the preset `cpu` in float32, 2,000 steps on Tiny Shakespeare. One has the preset's
rate of 0.01, which falls linearly to zero, and its last iterate; the other `--schedule none`, whose weights are an
average. The loss is that of the whole validation split.

    python -m benchmarks.without_schedule [--seeds 0]
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from papers.header import Stored
from wellnormed.train import TrainConfig, train
from wellnormed.train.presets import PRESETS

OUTPUT = Path("results/without-schedule.json")
EVERY = 500
ARMS: dict[str, dict[str, Any]] = {
    "falls to zero": {},
    "without an end, averaged": {"schedule": "none", "momentum": 0.5, "learning_rate": 0.04},
}


def main() -> None:
    """Run what has no row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    seeds = parser.parse_args().seeds
    stored = Stored(OUTPUT, "python -m benchmarks.without_schedule")
    for seed in seeds:
        for arm, settings in ARMS.items():
            if stored.has(arm=arm, seed=seed):
                continue
            preset = PRESETS["cpu"]
            assert isinstance(preset, TrainConfig)
            config = replace(
                preset, seed=seed, precision="float32", threads=1, certify="checkpoints", checkpoint_every=EVERY,
                validation_tokens=2**20, attack_steps=0, **settings,
            )  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                metrics = train(config, Path(folder) / "run").read_metrics()
            cell, keys = {"arm": arm, "seed": seed}, ("step", "validation_loss", "log10_lipschitz")
            found = {row["step"]: {key: row[key] for key in keys} for row in metrics if keys[-1] in row}
            stored.add(*(cell | row | stored.commit for row in found.values()))


if __name__ == "__main__":
    main()
