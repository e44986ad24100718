"""Three jobs for networks of constant 1, ours beside a usual peer, each at the best of its three rates.

- **Wasserstein-1**: a critic between the spheres of radius 1 and 3 in eight dimensions, which are 2 apart. The figure
  is the estimate over its proved constant, so that none can be too large but by the sample.
- **Signed distance** to a rectangle in the plane: the mean error, and how far a step of the length of the network's
  value can cross the surface, proved on a grid with what both functions can change between its points.
- **Digits**: scikit-learn's 8 x 8 images, the last 500 for the test; the share that is certified within 0.5.

All networks have three hidden layers of 64 units with MaxMin, but for the gradient penalty's (ReLU), and rates that
fall to zero; our caps act after every step. `seconds` is processor time of all steps. Needs deel-torchlip and
scikit-learn.

    python -m benchmarks.constant_one                    # the rows that are missing, then the table
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import wellnormed as wn
from papers.header import Stored

OUTPUT = Path("results/constant-one.json")
STEPS, BATCH, HIDDEN, SEEDS, SEARCHED = 400, 256, (64, 64, 64), (0, 1, 2), 0
RADIUS = 0.5
DIVERGED = "seconds_until_it_diverged"
OURS, LIP, NORMED, PENALTY = "wellnormed", "deel-torchlip", "spectral_norm", "gradient penalty"
ARMS = {
    OURS: (0.02, 0.08, 0.3), LIP: (0.002, 0.01, 0.05), NORMED: (0.002, 0.01, 0.05), PENALTY: (0.0002, 0.0005, 0.002),
}  # fmt: skip
"""The rates of each: Scion's, and Adam's."""


@dataclass(frozen=True)
class Job:
    """Sizes of an input and of a result, the loss of a step, and the figures of a network with a proved constant."""

    inputs: int
    outputs: int
    loss: Callable[[nn.Module], Tensor]
    figures: Callable[[nn.Module, float], dict[str, float]]
    best: Callable[[dict[str, float]], float]
    """The least is the best."""
    arms: tuple[str, ...] = (OURS, LIP, NORMED)


def sphere(radius: float, count: int = BATCH) -> Tensor:
    """Points on the sphere in eight dimensions."""
    return radius * F.normalize(torch.randn(count, 8), dim=1)


def critic(model: nn.Module) -> Tensor:
    """Minus the difference of means."""
    return model(sphere(1.0)).mean() - model(sphere(3.0)).mean()


def wasserstein(model: nn.Module, constant: float) -> dict[str, float]:
    """The estimate on fresh points, as it is and over the proved constant, relative to the truth."""
    estimate = float(model(sphere(3.0, 20_000)).mean() - model(sphere(1.0, 20_000)).mean())
    return {"error": estimate / 2 - 1, "proved_error": estimate / constant / 2 - 1}


def rectangle(points: Tensor) -> Tensor:
    """The signed distance to a rectangle, negative inside."""
    beyond = points.abs() - points.new_tensor([0.6, 0.35])
    return (beyond.clamp(min=0).norm(dim=1) + beyond.amax(1).clamp(max=0))[:, None]


def distance(model: nn.Module) -> Tensor:
    """The mean square of the error."""
    points = 2 * torch.rand(BATCH, 2) - 1
    return (model(points) - rectangle(points)).square().mean()


def surface(model: nn.Module, constant: float, side: int = 801) -> dict[str, float]:
    """The mean error, and the largest overshoot: on a grid, and as proved between its points."""
    line = torch.linspace(-1, 1, side)
    points = torch.cartesian_prod(line, line)
    found, true = model(points), rectangle(points)
    between = (1 + constant) * math.sqrt(2) / (side - 1)  # both functions, on the way to the next point of the grid
    over = float((found.abs() - true.abs()).max())
    return {"error": float((found - true).abs().mean()), "overshoot": over, "proved_overshoot": over + between}


def digits(test: bool) -> tuple[Tensor, Tensor]:
    """Images with entries from 0 to 1, and their classes."""
    from sklearn.datasets import load_digits

    images, classes = (torch.tensor(each) for each in load_digits(return_X_y=True))
    part = slice(-500, None) if test else slice(-500)
    return images[part].float() / 16, classes[part]


def classes(model: nn.Module) -> Tensor:
    """Cross entropy of logits, of which the right one is lowered by what the radius costs."""
    images, labels = digits(test=False)
    chosen = torch.randint(len(labels), (BATCH,))
    lowered = model(images[chosen]) - math.sqrt(2) * RADIUS * F.one_hot(labels[chosen], 10)
    return 0.2 * F.cross_entropy(lowered / 0.2, labels[chosen])


def certified(model: nn.Module, constant: float) -> dict[str, float]:
    """Shares of right and of certified test images."""
    images, labels = digits(test=True)
    largest, which = model(images).topk(2)
    right = which[:, 0] == labels
    radii = (largest[:, 0] - largest[:, 1]) / (math.sqrt(2) * constant)
    return {"accuracy": float(right.float().mean()), "certified": float((right & (radii > RADIUS)).float().mean())}


JOBS = {
    "Wasserstein-1": Job(8, 1, critic, wasserstein, lambda row: -row["proved_error"], (OURS, LIP, NORMED, PENALTY)),
    "signed distance": Job(2, 1, distance, surface, lambda row: row["error"]),
    "digits": Job(64, 10, classes, certified, lambda row: -row["certified"]),
}


def network(job: Job, arm: str) -> nn.Module:
    """Three hidden layers, of the arm's linear maps."""
    from deel import torchlip

    linear: Callable[[int, int], nn.Module] = nn.Linear
    if arm == LIP:
        linear = torchlip.SpectralLinear
    elif arm == NORMED:
        linear = lambda d_in, d_out: spectral_norm(nn.Linear(d_in, d_out))  # noqa: E731
    *inner, last = pairwise((job.inputs, *HIDDEN, job.outputs))
    bend = nn.ReLU if arm == PENALTY else wn.nn.MaxMin
    return nn.Sequential(*(layer for sizes in inner for layer in (linear(*sizes), bend())), linear(*last))


def penalty(model: nn.Module) -> Tensor:
    """Ten times the mean square of what the gradient's length lacks to 1, between the spheres (Gulrajani et al.)."""
    share = torch.rand(BATCH, 1)
    points = (share * sphere(1.0) + (1 - share) * sphere(3.0)).requires_grad_()
    (gradient,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    return 10 * (gradient.norm(dim=1) - 1).square().mean()


def plain(model: nn.Module) -> nn.Module:
    """The same network of torch's linear maps, with the weights as they are now."""
    model = copy.deepcopy(model).eval()
    for place, layer in enumerate(model):  # type: ignore[arg-type]
        if hasattr(layer, "vanilla_export"):
            model[place] = layer.vanilla_export()  # type: ignore[index]
        elif hasattr(layer, "parametrizations"):
            nn.utils.parametrize.remove_parametrizations(layer, "weight")
    return model.requires_grad_(False)


def train(job: Job, arm: str, rate: float, seed: int) -> dict[str, float]:
    """One run."""
    torch.manual_seed(seed)
    model, example = network(job, arm), torch.rand(2, job.inputs)
    if arm == OURS:
        optimizer: torch.optim.Optimizer = wn.Scion(model, lr=rate)
        wn.constrain(optimizer, lipschitz=1.0, example_input=example, every=1)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    start = time.process_time()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = job.loss(model) + (penalty(model) if arm == PENALTY else 0)
        loss.backward()
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - start
    model = plain(model)
    if not all(p.isfinite().all() for p in model.parameters()):
        return {DIVERGED: seconds}
    constant = float(wn.certify(model, example).lipschitz)
    return {"constant": constant, **job.figures(model, constant), "seconds": seconds}


def best(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Job and arm -> the rows of the rate that was best with the first seed, of those at which no run diverged."""
    found = {}
    for name, job in JOBS.items():
        for arm in job.arms:
            own = [row for row in rows if (row["job"], row["arm"]) == (name, arm)]
            wild = {row["rate"] for row in own if DIVERGED in row}
            rate = min((row for row in own if row["seed"] == SEARCHED and row["rate"] not in wild), key=job.best)[
                "rate"
            ]
            found[name, arm] = [row for row in own if row["rate"] == rate]
    return found


def main() -> None:
    """All rates with the first seed, the best of them with the others, then the table."""
    stored = Stored(OUTPUT, "python -m benchmarks.constant_one", steps=STEPS, radius=RADIUS)

    def complete(name: str, arm: str, rate: float, seed: int) -> None:
        cell = {"job": name, "arm": arm, "rate": rate, "seed": seed}
        if not stored.has(**cell):
            stored.add(cell | train(JOBS[name], arm, rate, seed) | stored.commit)

    for name, job in JOBS.items():
        for arm in job.arms:
            for rate in ARMS[arm]:
                complete(name, arm, rate, SEARCHED)
    for _ in range(2):  # again, where one diverged
        for ((name, arm), rows), seed in product(best(stored.rows).items(), SEEDS):
            complete(name, arm, rows[0]["rate"], seed)
    for (name, arm), rows in best(stored.rows).items():
        keys = rows[0].keys() - {"job", "arm", "seed", "commit"}
        print(
            f"{name:16} {arm:18}", {key: round(fmean(row[key] for row in rows), 4) for key in sorted(keys)}, len(rows)
        )


if __name__ == "__main__":
    main()
