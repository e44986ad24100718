"""Radii of networks on MNIST that were trained without constraints: around each image, and from the proved constant.

Every network is trained by Adam on all training images. `wn.certified_radius` has the first test
images; those classified rightly are attacked at multiples of their radius by APGD (Croce and Hein, ICML 2020, with the
lead of the label as its loss), from the rim of the ball. A success within the radius is an error.

    WELLNORMED_DATA=data python -m benchmarks.local_radii        # ten minutes of one core
"""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from papers._attacks import apgd, margins
from papers.header import header, write_result
from papers.mnist import load_mnist

OUTPUT, SEED, EPOCHS, BATCH, STEPS = Path("results/local-radii.json"), 0, 10, 100, 50
TIMES = (1.0, 1.5, 2.0)
"""Multiples of the radius at which an image is attacked."""
NETWORKS = {"256-256-256": 1000, "128-128-128": 1000, "256-256": 1000, "256": 1000, "convolutions": 50}
"""Hidden layers -> how many test images."""


def network(name: str) -> nn.Module:
    """A network with ReLUs between its layers."""
    if name == "convolutions":
        first, second = nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.Conv2d(8, 16, 4, stride=2, padding=1)
        end = nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *end)
    widths = [784, *map(int, name.split("-"))]
    hidden = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(widths[-1], 10))


def train(name: str, images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """A network after training by cross entropy."""
    torch.manual_seed(SEED)
    model = network(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return model.eval()


def broken(model: nn.Module, x: Tensor, labels: Tensor, radii: Tensor) -> Tensor:
    """Which images APGD brings to another class within their radius, `(N,)`."""
    moved = apgd(model, x, labels, radii, STEPS, torch.Generator().manual_seed(SEED), _behind, pixels=False)
    return model(moved).argmax(1) != labels


def _behind(logits: Tensor, labels: Tensor) -> Tensor:
    """By how much the label does not lead."""
    return -margins(logits, labels)


def measure(name: str, count: int, data: dict[str, Any]) -> dict[str, Any]:
    """One row: accuracy, radii and their ratio in the median over the images classified rightly, attacks, seconds."""
    model = train(name, data["images"], data["labels"], data.get("epochs", EPOCHS))
    images, labels = data["test_images"], data["test_labels"]
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).double().mean())
    x, y = images[:count], labels[:count]
    start = time.perf_counter(), time.process_time()
    radii = wn.certified_radius(model, x, y)
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    certificate = wn.certify(model, x[:1], radius=math.inf, margins=True)
    model, x = model.double(), x.double()
    with torch.no_grad():
        known = certificate.certified_radius(model(x))
        right = model(x).argmax(1) == y
    shares = {
        str(times): float(broken(model, x[right], y[right], times * radii[right]).double().mean()) for times in TIMES
    }
    if shares["1.0"] or not bool((radii[right] >= known[right] * (1 - 1e-6)).all()):
        raise AssertionError(f"{name}: a radius is false, or less than the global one")
    return {
        "hidden": name,
        "images": count,
        "accuracy": accuracy,
        "l2_lipschitz": certificate.l2_lipschitz,
        "median_global": float(known[right].median()),
        "median_local": float(radii[right].median()),
        "median_ratio": float((radii / known)[right].median()),
        "broken": shares,
        "seconds": round(wall, 1),
        "seconds_of_processor": round(cpu, 1),
    }


def main() -> None:
    """Measure every network, and write the rows."""
    torch.set_num_threads(1)
    about, rows, data = header("python -m benchmarks.local_radii", SEED), [], {}
    for split, prefix in (("train", ""), ("test", "test_")):
        pixels, data[prefix + "labels"] = load_mnist(split)
        data[prefix + "images"] = pixels / 255
    for name, count in NETWORKS.items():
        rows.append(measure(name, count, data))
        print(rows[-1], flush=True)
        write_result(OUTPUT, {**about, "train_images": len(data["images"]), "epochs": EPOCHS, "rows": rows})


if __name__ == "__main__":
    main()
