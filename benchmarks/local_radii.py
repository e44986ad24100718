"""Radii of networks on MNIST that were trained without constraints: around each image, and from the proved constant.

Every network is trained by Adam on all training images. `wn.certified_radius` has the first test
images; those classified rightly are attacked at multiples of their radius by APGD (Croce and Hein, ICML 2020, with the
lead of the label as its loss), from the image and from the rim of the ball. A success within the radius is an error.

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


def least_lead(model: nn.Module, x: Tensor, labels: Tensor, radii: Tensor) -> Tensor:
    """The least lead of the label that APGD finds within the radii, `(N,)`."""
    budget, least = radii.view(-1, *[1] * (x.ndim - 1)), torch.full_like(radii, math.inf)
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(SEED), dtype=x.dtype)
    for start in (torch.zeros_like(x), drawn):
        least = torch.minimum(least, _apgd(model, x, labels, budget, _within(start / _length(start) * budget, budget)))
    return least


def _apgd(model: nn.Module, x: Tensor, labels: Tensor, budget: Tensor, change: Tensor) -> Tensor:
    """Gradient steps with momentum, whose size is halved where it has stopped to help, back at the best point."""
    step, last, points = 2 * budget, change, _checkpoints()
    best, (least, slope) = change, _lead(model, x + change, labels)
    best_slope, rises, since = slope, torch.zeros_like(least), least.clone()
    for number in range(1, STEPS + 1):
        moved = _within(change - step * slope / _length(slope), budget)
        share = 1.0 if number == 1 else 0.75
        change, last = _within(change + share * (moved - change) + (1 - share) * (change - last), budget), change
        lead, slope = _lead(model, x + change, labels)
        better = lead < least
        rises += better
        best, best_slope = _where(better, change, best), _where(better, slope, best_slope)
        least = torch.minimum(least, lead)
        if number in points:
            stuck = (rises < 0.75 * points[number]) | (since <= least)
            step = _where(stuck, step / 2, step)
            change, last, slope = (_where(stuck, a, b) for a, b in ((best, change), (best, last), (best_slope, slope)))
            rises, since = torch.zeros_like(rises), least.clone()
    return least


def _checkpoints() -> dict[int, int]:
    """Step at which progress is judged -> the number of steps before it, from the last one: 22%, then fewer."""
    found, at, width = {}, 0.0, 0.22
    while at + width < 1:
        found[math.ceil((at + width) * STEPS)] = math.ceil((at + width) * STEPS) - math.ceil(at * STEPS)
        at, width = at + width, max(width - 0.03, 0.06)
    return found


def _lead(model: nn.Module, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """By how much the label leads, and its gradient."""
    x = x.detach().requires_grad_()
    logits = model(x)
    lead = logits.gather(1, labels[:, None])[:, 0] - logits.scatter(1, labels[:, None], -math.inf).amax(1)
    (slope,) = torch.autograd.grad(lead.sum(), x)
    return lead.detach(), slope


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True).clamp(min=1e-300)


def _within(change: Tensor, budget: Tensor) -> Tensor:
    return change * (budget / _length(change)).clamp(max=1)


def _where(which: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(which.view(-1, *[1] * (a.ndim - 1)), a, b)


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
    broken = {
        str(times): float((least_lead(model, x[right], y[right], times * radii[right]) <= 0).double().mean())
        for times in TIMES
    }
    if broken["1.0"] or not bool((radii[right] >= known[right] * (1 - 1e-6)).all()):
        raise AssertionError(f"{name}: a radius is false, or less than the global one")
    return {
        "hidden": name,
        "images": count,
        "accuracy": accuracy,
        "l2_lipschitz": certificate.l2_lipschitz,
        "median_global": float(known[right].median()),
        "median_local": float(radii[right].median()),
        "median_ratio": float((radii / known)[right].median()),
        "broken": broken,
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
