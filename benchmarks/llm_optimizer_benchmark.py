"""EPFL's llm-optimizer-benchmark with this package's optimizers in it: characters of Shakespeare, on the CPU.

git clone https://github.com/epfml/llm-optimizer-benchmark HARNESS
python -m benchmarks.llm_optimizer_benchmark HARNESS [--only soap wn-scion] [--seeds 0]

The harness is somebody else's: its model, data, schedule, evaluation and optimizers. Its code stays as it is; one
branch is added to its `main.py` while that is read, which makes the optimizers whose names begin with `wn-`, and
packages that its part for this run only imports (trackers, tokenizers, data sets) need not be installed. Its Muon and
D-Muon ask for CUDA and are left out. Runs that have a row in the results are not repeated. The rates of every
optimizer are four, with and without the harness's weight decay of 0.1; those whose best is at an edge get another.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._dynamo  # before the packages below are replaced: it looks for them when it is imported
from torch import nn

import wellnormed as wn
from docs.run_examples import code_of
from papers.header import Stored

RESULTS = Path(__file__).parents[1] / "results" / "llm_optimizer_benchmark.json"
SETTINGS = """
--dataset shakespeare-char --device cpu --model base --n_layer 4 --n_embd 128 --n_head 4 --sequence_length 64
--batch_size 12 --vocab_size 96 --dtype float32 --dropout 0 --iterations 500 --warmup_steps 50 --scheduler wsd
--eval_interval 1000 --log_interval 0 --experiment_name run
""".split()  # noqa: SIM905 (a command line reads best so)
RATES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("wn-soap-caps", "wn-scion-caps", "wn-scion", "wn-muon"), (0.02, 0.01, 0.04, 0.08)),
    "soap": (0.006, 0.003, 0.012, 0.001), "sf-adamw": (0.01, 0.003, 0.03, 0.1),
    "adamw": (0.003, 0.006, 0.001, 0.012), "adopt": (0.003, 0.006, 0.001, 0.012),
    "lion": (0.0003, 0.001, 0.0001, 0.003), "ademamix": (0.001, 0.003, 0.006, 0.012),
    "mars": (0.003, 0.006, 0.001, 0.012), "prodigy": (1.0, 0.5, 2.0, 0.25),
}  # fmt: skip
"""Optimizer -> its rates, first the best of a preliminary run, so that a run that ends early has the likeliest."""
ELSEWHERE = "wandb tiktoken datasets transformers requests zstandard gdown yaml tqdm tqdm.auto".split()  # noqa: SIM905
"""Packages that the harness imports, and does not use in these runs."""
DECAYS = (0.1, 0.0)
CAP = 4.0
"""The cap of every matrix of the blocks, with `-caps`."""
PAGE = Path(__file__).parents[1] / "docs" / "directions.md"


def ours(name: str, model: nn.Module, lr: float, decay: float) -> tuple[torch.optim.Optimizer, Any]:
    """One of this package's optimizers, and the constraints that hold after its steps."""
    settings: dict[str, Any] = {"weight_decay": decay}
    if name.startswith("wn-soap"):
        settings["directions"] = {"transformer.h": direction("SoapMuon")}
    optimizer = (wn.Muon if name == "wn-muon" else wn.Scion)(model, lr, **settings)
    matrices = [n for n, p in model.named_parameters() if ".h." in n and p.ndim == 2]
    caps = dict.fromkeys(matrices, wn.HardCap(CAP)) if name.endswith("caps") else {}
    return optimizer, wn.constrain(optimizer, caps) if caps else None


def direction(name: str) -> wn.optim.Direction:
    """A direction of docs/directions.md, as the page defines it."""
    module = types.ModuleType("directions")
    sys.modules[module.__name__] = module  # where dataclasses look
    for block in code_of(PAGE):
        exec(block, vars(module))
        if hasattr(module, name):
            break
    return getattr(module, name)()


def run_cell(harness: Path, name: str, lr: float, decay: float, seed: int) -> dict[str, float]:
    """One run in this process: the harness's validation loss, and the largest proved norm over its cap."""
    attached: list[Any] = []

    def make(args: Any, model: nn.Module) -> torch.optim.Optimizer:
        optimizer, constraints = ours(args.wn, model, args.lr, args.weight_decay)
        attached.append(constraints)
        return optimizer

    for package in ELSEWHERE:
        sys.modules[package] = MagicMock()
    sys.path.insert(0, str(harness / "src"))
    source = (harness / "src" / "main.py").read_text(encoding="utf-8")
    branch = 'if args.opt == "adamw":'
    if source.count(branch) != 1:
        raise SystemExit(f"{harness} holds another version of the harness; use that of December 2025, fdecd5d")
    source = source.replace(branch, f"if args.wn:\n        opt = make(args, model)\n    el{branch}")
    own = name if name.startswith("wn-") else ""
    source = source.replace("def main(args, parser):", f"def main(args, parser):\n    args.wn = {own!r}", 1)
    opt = "adamw" if own else name
    arguments = [*SETTINGS, "--opt", opt, "--lr", str(lr), "--weight_decay", str(decay), "--seed", str(seed)]
    arguments += ["--mars_lr", str(lr)] if name == "mars" else []
    arguments += ["--results_base_folder", str(harness / "exps" / f"{name}-{lr}-{decay}-{seed}")]
    arguments += ["--datasets_dir", str(harness / "datasets")]
    sys.argv = ["main.py", *arguments]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(source, "main.py", "exec"), {"__name__": "__main__", "make": make})
    loss = float(re.findall(r"Iter=500 .*?val_loss=([\d.a-z]+)", shown.getvalue())[-1])
    over = {} if not attached or attached[0] is None else attached[0].proved_ratios()
    return {"validation_loss": loss, **({"largest_norm_over_cap": max(over.values())} if over else {})}


def unlikely(name: str, lr: float, decay: float, seed: int) -> tuple[int, bool, int]:
    """The place of a cell: of a seed first those with the decay that is usual for the name, by `RATES`."""
    rates = RATES[name]
    return seed, (decay == 0) != name.startswith("wn-"), rates.index(lr) if lr in rates else 0


def main() -> None:
    """Run the cells that have no row, one process each, and write a row after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("harness", type=Path)
    parser.add_argument("--only", nargs="+", default=list(RATES))
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--decays", nargs="+", type=float, default=DECAYS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.cell:
        name, lr, decay, seed = chosen.cell
        print(json.dumps(run_cell(chosen.harness.resolve(), name, float(lr), float(decay), int(seed))))
        return
    about = {"settings": " ".join(SETTINGS), "cap": CAP, "planned_rates": RATES, "planned_decays": DECAYS}
    stored = Stored(RESULTS, "python -m benchmarks.llm_optimizer_benchmark HARNESS", **about)
    run = {key: stored.content[key] for key in ("machine", "commit")}  # the file's own are those of its last row
    cells = [
        (name, lr, decay, seed)
        for seed in chosen.seeds
        for name in chosen.only
        for lr in chosen.rates or RATES[name]
        for decay in chosen.decays
    ]
    cells.sort(key=lambda cell: unlikely(*cell))
    for cell in cells:
        own = dict(zip(("optimizer", "lr", "weight_decay", "seed"), cell, strict=True))
        if stored.has(**own):
            continue
        command = [sys.executable, "-m", "benchmarks.llm_optimizer_benchmark", str(chosen.harness), "--cell"]
        alone = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *map(str, cell)], capture_output=True, text=True, env=alone)
        if done.returncode:
            raise SystemExit(f"{cell}: {done.stderr[-2000:]}")
        stored.add(own | json.loads(done.stdout.splitlines()[-1]) | run)


if __name__ == "__main__":
    main()
