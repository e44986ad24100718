"""Certified classifiers of MNIST and CIFAR-10, ours beside those of deel-torchlip and orthogonium.

All see the same images in the same order, pixels in [0, 1], with the same loss, for as many steps. Every constant is
proved by `certify`; radii are of all test images. Of the first test images it is also said which withstand an attack:
PGD on the cross entropy, and Auto-PGD on what withstands that. A tie certifies nothing.

    WELLNORMED_DATA=data python -m papers certified-vision
    python -m papers certified-vision --only data=cifar10 network=wellnormed    # which needs no other library
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from papers._airbench import augmented
from papers._attacks import apgd, certified_radii, pgd
from papers._experiment import Experiment, Preset, Verdict
from papers._figures import legend_below, panels
from papers._resumed import fit_resumed
from papers._table import ADDED, Row
from papers.cifar10 import load_cifar10
from papers.mnist import load_mnist
from papers.one_lipschitz import attending, folded, network, of_orthogonium, of_torchlip, optimizer_of
from wellnormed.constraints import Constraints
from wellnormed.optim import Averaged
from wellnormed.train.task import DivergedError, Task

Data = Literal["cifar10", "mnist"]
Network = Literal["wellnormed", "deel-torchlip", "orthogonium", "attention"]
"""Ours, those of other libraries, and ours with attention."""
BUDGETS: dict[Data, tuple[float, ...]] = {
    "cifar10": (36 / 255, 72 / 255, 108 / 255, 1.0),
    "mnist": (0.3, 0.5, 1.0, 1.58),
}
"""Euclidean distances at which accuracy is certified in the literature."""
RATES = (0.01, 0.003, 0.001)
"""Learning rates of Adam, for the networks of other libraries."""
OURS = 0.1
"""Our usual rate."""
PEERS: dict[Network, tuple[str, ...]] = {"deel-torchlip": ("deel", "deel.torchlip"), "orthogonium": ("orthogonium",)}
"""Libraries -> the packages that they install."""
TITLES: dict[Data, str] = {"cifar10": "CIFAR-10", "mnist": "MNIST"}


@dataclass(frozen=True)
class Cell:
    """A training, the proof of its constant, radii and attacks."""

    data: Data
    network: Network
    seed: int
    rate: float
    steps: int
    batch: int
    channels: tuple[int, ...]
    """Widths of our stages, or the width of another network's first layer."""
    depths: tuple[int, ...]
    """Maps of pixels in each of our stages; none in other networks."""
    offset: float
    temperature: float
    tested: int
    """Images that are attacked."""
    pgd_steps: int
    apgd_steps: int
    hidden: tuple[int, ...] = field(default=(), metadata=ADDED)
    """Widths of our linear layers before the last one."""
    annealing: float = field(default=0.0, metadata=ADDED)
    """The power of `margin_loss`."""
    rounded: bool = field(default=False, metadata=ADDED)
    """Whether our training has products in bfloat16; the maps are made orthogonal and proved at its end."""
    momentum: float = field(default=0.9, metadata=ADDED)
    """The momentum of our optimizer."""
    shift: int = field(default=2, metadata=ADDED)
    """The pixels by which images of CIFAR-10 are moved at most."""
    averaged: float | None = field(default=None, metadata=ADDED)
    """The beta of `wn.Averaged`, whose average is made orthogonal and proved; by default nothing is averaged."""


class Setting(NamedTuple):
    """One training of ours, which those of other libraries are compared with."""

    cell: Cell
    aims: tuple[tuple[float, float], ...] = ()
    """Distances, and the shares that an hour of a core should certify there."""


ROOT = math.sqrt(2)
"""To be safe within r, the right logit must lead by this times r if the two rows are orthogonal."""
CIFAR = Cell("cifar10", "wellnormed", 0, OURS, 1200, 125, (32, 96, 192), (0, 3, 3), ROOT, 0.25, 300, 10, 20, (256,))
MNIST = Cell("mnist", "wellnormed", 0, OURS, 1200, 100, (16, 64), (0, 2), 1.5 * ROOT, 0.25, 300, 10, 20, (128,))
DEEP = (256, 256, 128)
CIFAR_10K = replace(CIFAR, steps=10_000, hidden=DEEP, temperature=1.0, annealing=5.0)
CIFAR_40K = replace(CIFAR_10K, steps=40_000, rounded=True)
MNIST_8K = replace(MNIST, steps=8000, batch=200, hidden=DEEP, offset=1.2, rounded=True, momentum=0.8)
FIRST = 36 / 255
SETTINGS: dict[tuple[Preset, Data], tuple[Setting, ...]] = {
    ("cpu", "cifar10"): (
        Setting(CIFAR),
        Setting(replace(CIFAR, temperature=1.0, annealing=5.0)),
        Setting(replace(CIFAR, steps=10_000, hidden=DEEP), ((FIRST, 0.5),)),
        Setting(CIFAR_10K, ((FIRST, 0.5),)),
        Setting(replace(CIFAR_10K, averaged=0.0)),
        Setting(replace(CIFAR_10K, averaged=0.9, momentum=0.5)),
        Setting(replace(CIFAR_10K, shift=4)),
        Setting(CIFAR_40K, ((FIRST, 0.57),)),
        Setting(replace(CIFAR_40K, rate=0.025), ((FIRST, 0.57),)),
        Setting(replace(CIFAR_40K, offset=2 * ROOT), ((1.0, 0.22),)),
    ),
    ("cpu", "mnist"): (
        Setting(MNIST),
        Setting(replace(MNIST, steps=2000, hidden=DEEP, offset=1.2), ((0.3, 0.96),)),
        Setting(replace(MNIST, steps=1000, hidden=DEEP, offset=3.2), ((1.58, 0.6),)),
        Setting(replace(MNIST_8K, offset=3.2), ((1.58, 0.68),)),
        Setting(MNIST_8K, ((0.3, 0.975),)),
        Setting(replace(MNIST_8K, steps=12_000), ((0.3, 0.975),)),
        Setting(replace(MNIST_8K, offset=2.8), ((0.3, 0.96), (1.58, 0.64))),
        Setting(
            replace(MNIST, network="attention", steps=2000, channels=(256,), depths=(), hidden=(256, 128), offset=2.4)
        ),
    ),
    ("paper", "cifar10"): (
        Setting(Cell("cifar10", "wellnormed", 0, OURS, 20_000, 250, (128, 512, 1024), (2, 6, 6), ROOT, 0.25,
                     1000, 100, 100, (1024,))),
    ),
    ("paper", "mnist"): (
        Setting(Cell("mnist", "wellnormed", 0, OURS, 6000, 250, (64, 256), (0, 4), 1.5 * ROOT, 0.25,
                     1000, 100, 100, (512,))),
    ),
}  # fmt: skip
"""`DEEP` ones were chosen on the last 10,000 images of the training split, by networks that had not seen them."""
WIDTHS: dict[tuple[Preset, Data], int] = {
    ("cpu", "cifar10"): 32, ("cpu", "mnist"): 16, ("paper", "cifar10"): 128, ("paper", "mnist"): 32,
}  # fmt: skip
"""The widths of the other libraries' first layers."""


def cells(preset: Preset) -> list[Cell]:
    """Seed after seed; networks of other libraries, at every rate, where steps are as few as in the first setting."""
    return [
        replace(each, seed=seed)
        for seed in range(3)
        for (part, data), settings in SETTINGS.items()
        if part == preset
        for ours, _ in settings
        for each in (ours, *(_of_peers(ours, WIDTHS[part, data]) if ours.steps == settings[0].cell.steps else ()))
    ]


def _of_peers(ours: Cell, width: int) -> Iterator[Cell]:
    """The cells of the networks of other libraries that a cell of ours is compared with."""
    for name in PEERS:
        for rate in RATES:
            yield replace(ours, network=name, rate=rate, channels=(width,), depths=(), hidden=())


@cache
def pixels_and_labels(data: Data, split: Literal["train", "test"], device: torch.device) -> tuple[Tensor, Tensor]:
    """All images of a split in [0, 1], and their classes."""
    images = load_mnist(split) if data == "mnist" else load_cifar10(split)
    return (images.pixels.to(device) / 255).float(), images.labels.to(device)


def margin_loss(
    logits: Tensor, labels: Tensor, offset: float, temperature: float, annealing: float = 0.0
) -> Tensor:  # fmt: skip
    """The cross entropy of `(logits - offset e_label) / temperature`, times the temperature (Prach and Lampert, 2022).

    Its gradient fades once the right logit leads by the offset and a few temperatures; sooner with `annealing`, a power
    of the probability of all other classes that multiplies it (Lai et al., 2025).
    """
    lowered = logits - offset * F.one_hot(labels, logits.shape[1])
    losses = F.cross_entropy(lowered / temperature, labels, reduction="none")
    return temperature * ((-torch.expm1(-losses)) ** annealing * losses).mean()


class Training(Task[nn.Sequential]):
    """Batches whose images and changes depend on seed and step alone, so that a run goes on as if it had not stopped.

    Images of CIFAR-10 are flipped and shifted, those of MNIST stay.
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        torch.manual_seed(cell.seed)
        self.cell, self.data = cell, pixels_and_labels(cell.data, "train", device)
        model, optimizer, constraints = built(cell, self.data[0].shape[1:], device)
        super().__init__(model, optimizer, constraints, cell.steps, torch.Generator())

    def batch_loss(self) -> Tensor:
        """The loss of the margin."""
        count, cell = len(self.data[1]), self.cell
        whole = max(1, count // cell.batch)  # batches of an epoch; the last images that fill none are left out
        epoch, place = divmod(self.step, whole)
        numbers = _order(count, self._number(epoch))[place * cell.batch : (place + 1) * cell.batch]
        pixels, labels = (part[numbers.to(part.device)] for part in self.data)
        if cell.data == "cifar10":
            generator = self.generator.manual_seed(self._number(2**31 + self.step))
            pixels = augmented(pixels, torch.randint(2, labels.shape, generator=generator), generator, cell.shift)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=cell.rounded):
            read = self.model[:-1](pixels)
        return margin_loss(self.model[-1](read.float()), labels, cell.offset, cell.temperature, cell.annealing)

    def rate_factor(self, step: int) -> float:
        """A linear fall to 0; schedule-free training has a constant rate after a twentieth of the steps."""
        return min(1.0, 20 * (step + 1) / self.steps) if self.cell.averaged else super().rate_factor(step)

    def _number(self, number: int) -> int:
        return self.cell.seed * 1_000_003 + number  # of which the low 32 bits count


@lru_cache(maxsize=1)
def _order(count: int, number: int) -> Tensor:
    """The images of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(number))


def built(
    cell: Cell, shape: Sequence[int], device: torch.device
) -> tuple[nn.Sequential, torch.optim.Optimizer, Constraints | None]:
    """The network of a cell with what moves and holds its weights."""
    if cell.network not in PEERS:
        if cell.network == "attention":
            model = attending(shape, cell.channels[0], cell.hidden)
        else:
            model = network(shape, cell.channels, cell.depths, cell.hidden)
        model = model.to(device).to(memory_format=torch.channels_last)  # pyrefly: ignore
        optimizer, constraints = optimizer_of(model, cell.rate, cell.momentum, proved=not cell.rounded)
        return model, optimizer if cell.averaged is None else Averaged(optimizer, beta=cell.averaged), constraints
    try:
        make = of_torchlip if cell.network == "deel-torchlip" else of_orthogonium
        model = make(shape, cell.channels[0]).to(device)
    except ImportError as error:
        raise ValueError(
            f"{cell.network} is not installed ({error}); pip install '.[models]', or pass --only network=wellnormed"
        ) from None
    return model, torch.optim.Adam(model.parameters(), lr=cell.rate), None


MEASURED = (
    "accuracy", "lipschitz", "certified", "seconds_of_training", "certified_of_attacked", "attacked", "contradictions",
)  # fmt: skip
"""The results of a cell; each is None where the run diverged."""


def run(cell: Cell, device: torch.device, folder: Path) -> dict[str, Any]:
    """Accuracy, the proved constant, and the shares that are certified and that withstand attacks at every budget."""
    task, seconds, last = Training(cell, device), [], time.process_time()

    def watch(task: Training, loss: float) -> None:
        nonlocal last
        before, last = last, time.process_time()
        seconds[:] = [sum(seconds) + last - before]

    try:
        fit_resumed(task, folder, watch, seconds)
    except DivergedError:  # as deel-torchlip's at large rates
        return dict.fromkeys(MEASURED)
    budgets, (images, labels) = BUDGETS[cell.data], pixels_and_labels(cell.data, "test", device)
    if isinstance(task.optimizer, Averaged):
        task.optimizer.eval()
    if cell.rounded or cell.averaged is not None:
        optimizer_of(task.model, cell.rate)
    model = folded(task.model)
    constant, radii = certified_radii(model, images, labels)
    found = {
        "accuracy": _share(torch.cat([model(part).argmax(1) for part in images.split(500)]) == labels),
        "lipschitz": constant,
        "certified": [_share(radii > budget) for budget in budgets],
        "seconds_of_training": round(sum(seconds), 1),
    }
    images, labels, radii = (part[: cell.tested] for part in (images, labels, radii))
    generator, attacked, contradictions = torch.Generator().manual_seed(cell.seed), [], 0
    for budget in budgets:
        holds = model(pgd(model, images, labels, budget, cell.pgd_steps)).argmax(1) == labels
        if bool(holds.any()):
            moved = apgd(model, images[holds], labels[holds], budget, cell.apgd_steps, generator)
            holds[holds.clone()] = model(moved).argmax(1) == labels[holds]
        attacked.append(_share(holds))
        contradictions += int(((radii > budget) & ~holds).sum())
    of_tested = [_share(radii > budget) for budget in budgets]
    return {**found, "certified_of_attacked": of_tested, "attacked": attacked, "contradictions": contradictions}


def _share(which: Tensor) -> float:
    return float(which.double().mean())


class Best(NamedTuple):
    """A network at the rate with the most images certified at the first budget."""

    rate: float
    tried: int
    """Rates that have a row."""
    results: list[dict[str, Any]]
    """The results of the seeds that have a row."""


def finite(rows: Sequence[Row]) -> list[Row]:
    """The rows whose run did not diverge."""
    return [row for row in rows if row["results"]["accuracy"] is not None]


class Kind(NamedTuple):
    """Networks are compared on the same data, after as many steps with the same loss."""

    data: Data
    steps: int
    offset: float
    annealing: float
    network: Network
    change: str = ""
    """How the training differs from the usual one, in words."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Kind":
        """The kind of a cell or of a setting."""
        beta, shift = config.get("averaged"), config.get("shift", 2)
        usual = config["network"] in PEERS or config["rate"] == OURS
        words = (
            "" if beta is None else "averaged" if beta == 0 else "schedule-free",
            "" if shift == 2 else f"shifts of {shift} pixels",
            "" if usual else f"rate {config['rate']:g}",
        )
        loss = config["offset"], config.get("annealing", 0.0)
        return cls(config["data"], config["steps"], *loss, config["network"], ", ".join(filter(None, words)))


def best(rows: Sequence[Row]) -> dict[Kind, Best]:
    """Every kind that has a row, shorter runs first; other libraries gain from a choice that test images make."""
    found: dict[Kind, dict[float, list[dict[str, Any]]]] = {}
    for row in finite(rows):
        config = row["config"]
        found.setdefault(Kind.of(config), {}).setdefault(config["rate"], []).append(row["results"])
    chosen = {kind: max(rates, key=lambda rate: mean(rates[rate], "certified")[0]) for kind, rates in found.items()}
    kinds = sorted(chosen, key=lambda kind: (kind[:4], kind.change))  # networks stay in order
    return {kind: Best(chosen[kind], len(found[kind]), found[kind][chosen[kind]]) for kind in kinds}


def mean(results: list[dict[str, Any]], what: str) -> list[float]:
    """Over the seeds, of each entry of a list."""
    return np.mean([result[what] for result in results], 0).tolist()


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Certified and attacked accuracy against the distance, of each network at its best rate; a panel a data set."""
    found = best(rows)
    drawn = list(dict.fromkeys(kind.data for kind in found))
    if not drawn:
        return {}
    figure, axes = panels(1, len(drawn), (5.5 * len(drawn), 4.8))
    for number, (kind, (_, _, results)) in enumerate(found.items()):
        axis, budgets = axes[0, drawn.index(kind.data)], BUDGETS[kind.data]
        certified = [fmean(result["accuracy"] for result in results), *mean(results, "certified")]
        axis.plot((0, *budgets), certified, "s-", color=f"C{number}", label=f"{named(kind)}, {kind.network}")
        axis.plot(budgets, mean(results, "attacked"), "o--", color=f"C{number}", markersize=4)
        axis.set(xlabel="Euclidean distance, pixels in [0, 1]", title=TITLES[kind.data])
    axes[0, 0].set_ylabel("share of test images")
    legend_below(figure, "Images classified rightly, and proved to stay so within a distance; dashed: under attack")
    return {"certified": figure}


def named(kind: Kind) -> str:
    """Data, steps, loss and training, in words."""
    more = ", annealed" * bool(kind.annealing) + f", {kind.change}" * bool(kind.change)
    return f"{TITLES[kind.data]}, {kind.steps:,} steps, offset {kind.offset:.3g}{more}"


def verdicts(rows: Sequence[Row], preset: Preset) -> list[Verdict]:
    """The aims, and who is ahead; docs/certified-vision.md has a table of everything that was measured."""
    found, lines = best(rows), []
    for kind, (_, _, results) in found.items():
        data, made_by = kind.data, kind.network
        spent = f"{fmean(result['seconds_of_training'] for result in results) / 60:.1f} minutes of a core"
        aims = [aim for cell, some in SETTINGS[preset, data] if Kind.of(vars(cell)) == kind for aim in some]
        for budget, aim in aims:
            values = [result["certified"][BUDGETS[data].index(budget)] for result in results]
            verdict = "reached" if fmean(values) >= aim else "not reached"
            what = f"{named(kind)}, {made_by}: certified within {distance(budget)}"
            lines.append(Verdict.of(what, f"{aim:g}, an aim", values, verdict, spent))
        if made_by in PEERS and (own := found.get(kind._replace(network="wellnormed"))):
            ours, theirs = mean(own.results, "certified"), mean(results, "certified")
            ahead = sum(a > b for a, b in zip(ours, theirs, strict=True))
            verdict = "reached" if ahead == len(ours) else "not reached"
            what = f"{named(kind)}: distances at which more is certified than by {made_by}"
            lines.append(Verdict(what, f"all {len(ours)}, an aim", f"{ahead}", "-", len(results), verdict))
    broken = [row["results"]["contradictions"] for row in finite(rows)]
    line = ("certified images that an attack changed", "-", f"{sum(broken)}", "-", len(broken))
    lines.append(Verdict(*line, verdict="measured"))
    return lines


def distance(budget: float) -> str:
    """A distance, where it is a number of grey levels as such."""
    levels = budget * 255
    return f"{budget:g}" if abs(levels - round(levels)) > 1e-9 or budget == 1 else f"{round(levels)}/255"


EXPERIMENT = Experiment(
    name="certified-vision",
    source="no paper; radii as in the literature on 1-Lipschitz networks",
    shows="the share of test images proved to stay right within a distance, beside deel-torchlip and orthogonium",
    cells=cells,
    run=run,
    figures=figures,
    verdicts=verdicts,
    keeps=True,
    differs={
        "cpu": "at most an hour of one core each; 300 images are attacked, in 10 and 20 steps",
        "paper": "wider and deeper networks, 20,000 steps of 250 images, for a GPU; 1,000 images are attacked",
    },
)
