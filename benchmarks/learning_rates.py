"""Which learning rate suits which recipe: one seed, rates by factors of two, two small tasks.

Characters: nanoGPT's `model.py` with a head of its own, otherwise as in `benchmarks/tied_tables.py`. Images: a
convolutional network on MNIST's digits, 400 steps of 128, linear decay to zero, accuracy and loss on the 10,000 test
images. `$WELLNORMED_DATA` holds `shakespeare/input.txt` and `mnist/*.xz`.

    python -m benchmarks.learning_rates nanoGPT/model.py --output results/learning-rates.json

Every finished run is written at once, and a run that the file holds already is not repeated. A file of another commit
is refused.
"""

import argparse
import lzma
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellnormed as wn
from papers.header import header, write_result
from wellnormed.data import load_shakespeare

from .tied_tables import finished, nanogpt, train

SEED, STEPS, BATCH = 0, 400, 128
RATES = {
    "images": tuple(0.02 * 2.0**k for k in range(-3, 6)),
    "characters": tuple(0.02 * 2.0**k for k in range(-1, 3)),
}
LANGUAGE = ("modular", "language", "sign-only", "muon")
IMAGE = ("image", "modular", "sign-only", "muon")


def untied(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """The same optimizer for a model whose head becomes a weight of its own, zero at the start."""

    def of(model: nn.Module) -> Any:
        model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
        return make(model)

    return of


def digits(part: str) -> tuple[Tensor, Tensor]:
    """Images `(count, 1, 28, 28)` with pixels in [0, 1], and labels."""
    folder = Path(os.environ["WELLNORMED_DATA"], "mnist")
    images, labels = (
        np.frombuffer(lzma.decompress((folder / f"{part}-{kind}-ubyte.xz").read_bytes()), np.uint8, offset=offset)
        for kind, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    pixels = torch.from_numpy(images.copy()).reshape(-1, 1, 28, 28).float() / 255
    return pixels, torch.from_numpy(labels.copy()).long()


def network() -> nn.Module:
    """Three convolutions, each of which halves the side, and a linear head."""
    sizes, layers = (1, 32, 64, 128), []
    for d_in, d_out in pairwise(sizes):
        layers += [nn.Conv2d(d_in, d_out, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def train_digits(make: Callable[[nn.Module], Any]) -> dict[str, float]:
    """One run: loss and accuracy on the test images."""
    torch.manual_seed(SEED)
    model = network()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    images, labels = digits("train")
    for _ in range(STEPS):
        drawn = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[drawn]), labels[drawn]).backward()
        optimizer.step()
        schedule.step()
    images, labels = digits("t10k")
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.split(1000)])
    accuracy = (logits.argmax(-1) == labels).float().mean()
    return {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(accuracy)}


def main() -> None:
    """Train what the results lack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="nanoGPT's model.py")
    parser.add_argument("--output", type=Path, default=Path("results/learning-rates.json"))
    options = parser.parse_args()
    module, text = nanogpt(options.model), load_shakespeare()
    results: dict[str, Any] = {
        **header("python -m benchmarks.learning_rates nanoGPT/model.py", SEED),
        "config": {"rates": RATES, "characters": "see benchmarks/tied_tables.py", "images": {"steps": STEPS,
                   "batch": BATCH, "schedule": "linear to 0", "network": str(network())}},
    }  # fmt: skip
    results["rows"] = finished(options.output, results["commit"], "rows")
    recipes = {"images": IMAGE, "characters": LANGUAGE}
    jobs = [(task, recipe, rate) for task in recipes for recipe in recipes[task] for rate in RATES[task]]
    for task, recipe, rate in jobs:
        cell = {"task": task, "recipe": recipe, "lr": rate}
        if any(cell.items() <= row.items() for row in results["rows"]):
            continue
        make = lambda model, recipe=recipe, rate=rate: wn.Scion(model, lr=rate, recipe=recipe)  # noqa: E731
        if task == "images":
            found = train_digits(make)
        else:
            found = {"loss": train(module, text, untied(make), SEED)["validation_loss"]}
        results["rows"].append({**cell, **found})
        write_result(options.output, results)
        print(results["rows"][-1], flush=True)


if __name__ == "__main__":
    main()
