"""Which norm a table needs that is embedding and head at once: nanoGPT's own model, unchanged, on Tiny Shakespeare.

Four blocks of width 128 with 4 heads, context 64, batches of 12, no dropout, no biases, 600 steps, cosine to a tenth
of the learning rate, gradients clipped at 1.0, characters, 90/10 split by position, loss over the whole validation
split. The model is `model.py` of https://github.com/karpathy/nanoGPT, whose path is the argument; the text is read
from `$WELLNORMED_DATA/shakespeare/input.txt`.

    python -m benchmarks.tied_tables nanoGPT/model.py --output results/tied-tables.json

Every finished run is written at once, and a run that the file holds already is not repeated. A file of another commit
is refused.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import wellnormed as wn
from papers.characters import validation_loss
from papers.header import header, write_result
from wellnormed._files import read_json
from wellnormed.data import load_shakespeare
from wellnormed.data.characters import CharacterText

LENGTH, BATCH, STEPS, SEEDS = 64, 12, 600, (0, 1, 2)
TABLES = ("transformer.wte", "transformer.wpe")
SIGN, SIGN_BY_INPUTS = wn.Sign(), wn.Sign(normalized=True)

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Scion(model, lr=0.02)": lambda model: wn.Scion(model, lr=0.02),
    "Muon(model)": wn.Muon,
}
COMPARISONS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW(lr=0.003)": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
    "Scion(lr=0.02), tied table Sign(normalized=True), positions Sign()": lambda model: wn.Scion(
        model, lr=0.02, overrides=dict(zip(TABLES, (SIGN_BY_INPUTS, SIGN), strict=True))
    ),
    "Scion(lr=0.02), fused projections as one matrix": lambda model: wn.Scion(
        model, lr=0.02, overrides={"*.c_attn": wn.Spectral()}
    ),
    "Muon(lr=0.02, recipe='muon'), AdamW(lr=0.003) on the tables": lambda model: wn.Muon(
        model, lr=0.02, recipe="muon", adamw=wn.optim.AdamWSettings(lr=3e-3)
    ),
    "Scion(model, lr=0.01)": lambda model: wn.Scion(model, lr=0.01),
    "Scion(model, lr=0.04)": lambda model: wn.Scion(model, lr=0.04),
}


class Logits(nn.Module):
    """nanoGPT's model, which gives the logits of every position only when it is given targets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, tokens)[0]


def nanogpt(path: Path) -> ModuleType:
    """The module `model.py`."""
    specification = importlib.util.spec_from_file_location("nanogpt_model", path)
    if specification is None or specification.loader is None:
        raise ValueError(f"{path} is no Python file; pass nanoGPT's model.py")
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def train(module: ModuleType, text: CharacterText, make: Callable[[nn.Module], Any], seed: int) -> dict[str, Any]:
    """One run: its model's settings, and its validation loss."""
    torch.manual_seed(seed)
    config = module.GPTConfig(LENGTH, len(text.symbols), n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False)
    model = module.GPT(config)
    fit(model, text, make, seed)
    return {"model": asdict(config), "validation_loss": validation_loss(Logits(model), text.validation, LENGTH)}


def fit(model: nn.Module, text: CharacterText, make: Callable[[nn.Module], Any], seed: int) -> None:
    """Train a model that gives `(logits, loss)` for tokens and targets, as nanoGPT's does."""
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS))
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        starts = torch.randint(len(text.train) - LENGTH, (BATCH,), generator=generator)
        windows = text.train[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())[1]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def finished(path: Path, commit: str | None, key: str) -> list[dict[str, Any]]:
    """The runs that a file holds under a key; none without a file. A file of another commit is refused.

    A file has one commit for all its runs. That the tree has changes since may be due to the file itself.
    """
    if not path.exists():
        return []
    remedy = "choose another --output, or remove the file"
    stored = read_json(path, remedy)
    if commit not in (stored["commit"], f"{stored['commit']}+changes"):
        raise ValueError(f"{path} holds runs of commit {stored['commit']}, but this is {commit}; {remedy}")
    return stored[key]


def main() -> None:
    """Train what the results lack, the defaults first with every seed, then the comparisons with the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="nanoGPT's model.py")
    parser.add_argument("--output", type=Path, default=Path("results/tied-tables.json"))
    options = parser.parse_args()
    module, text = nanogpt(options.model), load_shakespeare()
    results: dict[str, Any] = {
        **header("python -m benchmarks.tied_tables nanoGPT/model.py", list(SEEDS)),
        "config": {"length": LENGTH, "batch": BATCH, "steps": STEPS, "clip": 1.0, "schedule": "cosine to 0.1"},
        "source": text.source,
    }
    results["runs"] = finished(options.output, results["commit"], "runs")
    todo = [(name, make, seed) for seed in SEEDS for name, make in OPTIMIZERS.items()]
    todo += [(name, make, SEEDS[0]) for name, make in COMPARISONS.items()]
    for name, make, seed in todo:
        if any((run["optimizer"], run["seed"]) == (name, seed) for run in results["runs"]):
            continue
        results["runs"].append({"optimizer": name, "seed": seed, **train(module, text, make, seed)})
        results["number_of_runs"] = len(results["runs"])
        write_result(options.output, results)
        print(f"{name}, seed {seed}: {results['runs'][-1]['validation_loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
