"""What changes of a model by form are worth on bytes of books, one at a time, at a proved 10.

With 32 windows a step none that was run brings 0.01.

Every run takes 420 steps of "by position, proved 10" in `papers.nanogpt_table1`, of 32 windows if its name says so, and
else of 8, at a quarter of the cost. All have 0.98 or 0.99 million parameters in their blocks, have seed 0, and compute
in float32. Their losses are of 2^19 tokens, and with 8 windows of 2^17. A row is written when its run ends, and is not
run again. `$WELLNORMED_DATA` holds the books as for that table.

The rows of 2026-11-27 were made by a prototype of this script, whose first two losses are the same in every digit that
was printed, five, for six levers with layers of their own. `stopped` names runs that were ended early, behind; one
of them, rows of equal size before the sign (MuonEq in docs/directions.md), is not a lever here.

    python -m benchmarks.token_levers [--only NAME ...]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed.train.optimizer as training
from papers._by_form import Matched, config_of
from papers._tokens import byte_corpus, token_task
from papers.header import header, stored_rows, write_result
from wellnormed.constraints import Constraint, Orthogonal
from wellnormed.models.config import PotentialConfig
from wellnormed.models.files import BUILDERS
from wellnormed.models.potential_gpt import PotentialGPT
from wellnormed.nn import CappedEmbedding, ConvexPotential, PositionMixing
from wellnormed.nn.starting import Start, drawn, zeros
from wellnormed.norms import BiasRMS, Norm, Spectral
from wellnormed.train.finish import certify_model
from wellnormed.train.setup import blocks
from wellnormed.train.task import fit

OUTPUT = Path("results/token-levers.json")
BASE = Matched("by position, proved 10", 0.02, 4)
EUCLIDEAN = Spectral(units="l2")


class Mapped(nn.Module):
    """A layer whose matrices have norm 1 in every direction, and whose biases are drawn at `std N(0, 1)`, or below 0.

    Args:
        shapes: Name of a matrix -> its shape.
        biases: The entries of each of its biases, by name; they begin below 0 if their `std` is negative.
    """

    def __init__(self, shapes: dict[str, tuple[int, int]], biases: dict[str, tuple[int, float]] | None = None) -> None:
        super().__init__()
        self.stds = {name: std for name, (_, std) in (biases or {}).items()}
        self.matrices = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        for name, (count, _) in (biases or {}).items():
            self.register_parameter(name, nn.Parameter(torch.empty(count)))

    def parameter_norms(self) -> dict[str, Norm]:
        """The largest singular value of matrices, the RMS of biases."""
        return dict[str, Norm](dict.fromkeys(self.matrices, EUCLIDEAN)) | dict.fromkeys(self.stds, BiasRMS())

    def parameter_constraints(self) -> dict[str, Constraint]:
        """All singular values are 1."""
        return dict.fromkeys(self.matrices, Orthogonal(1.0))

    def starts(self) -> Iterator[Start]:
        """Random orthogonal matrices and the biases; a matrix named `join` begins as [I, 0]."""
        for name in self.matrices:
            yield getattr(self, name), _eye if name == "join" else EUCLIDEAN.initialize_
        for name, std in self.stds.items():
            yield getattr(self, name), drawn(lambda bias, own, std=std: _biases(bias, own, std))


def _eye(weight: Tensor, _: Any) -> Tensor:
    return nn.init.eye_(weight)


def _biases(bias: Tensor, own: torch.Generator | None, std: float) -> Tensor:
    bias.normal_(0.0, abs(std), generator=own)
    return bias.abs_().neg_() if std < 0 else bias


def maxmin(x: Tensor) -> Tensor:
    """The larger entries of the pairs that the halves of x make, and then the lesser ones."""
    a, b = x.chunk(2, -1)
    return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), -1)


class Map(Mapped):
    """`maxmin(W x + b)`, or without the maximum `W x + b`."""

    def __init__(self, width: int, result: int, sorts: bool) -> None:
        super().__init__({"weight": (result, width)}, {"bias": (result, 0.1)})
        self.sorts = sorts

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return maxmin(y) if self.sorts else y


class Joined(Mapped):
    """`J [sqrt(0.6) x, sqrt(0.4) relu(W x + b)]`, a residual block whose way back has weights of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        shapes = {"weight": (hidden, width), "join": (width, width + hidden)}
        super().__init__(shapes, {"bias": (hidden, -0.3)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.weight, self.bias).relu()
        return F.linear(torch.cat((sqrt(0.6) * x, sqrt(0.4) * hidden), -1), self.join)


class Folded(Mapped):
    """`-W^T (||W x + b| - c| + b + c)`: a convex potential has one kink a unit, this has three."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__({"weight": (hidden, width)}, {"bias": (hidden, -0.5), "second": (hidden, 0.5)})

    def forward(self, x: Tensor) -> Tensor:
        folded = (F.linear(x, self.weight, self.bias).abs() - self.second).abs()
        return -((folded + (self.bias + self.second)) @ self.weight)


class Potential(Mapped):
    """A convex potential with another factor than 2."""

    def __init__(self, width: int, hidden: int, factor: float) -> None:
        super().__init__({"weight": (hidden, width)}, {"bias": (hidden, -0.5)})
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x - self.factor * (F.linear(x, self.weight, self.bias).relu() @ self.weight)


class Read(Mapped):
    """`[sqrt(0.75) x, 0.5 z]`, where z averages 32 directions of x at distances near 4 and 8, and over 32 tokens."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__({"value": (32, width)})
        self.mixing = PositionMixing(length, 32, 3)

    def starts(self) -> Iterator[Start]:
        """The directions, equal gains, and logits that begin at those distances."""
        yield from super().starts()
        yield self.mixing.gain_H, lambda gains, _: gains.fill_(1.0)
        yield self.mixing.before_1K, zeros
        yield self.mixing.logits_HT, self._start_logits

    @staticmethod
    def _start_logits(logits_HT: Tensor, _: Any) -> Tensor:
        logits_HT.fill_(-6.0)[:2] = 0.0
        logits_HT[0, 4] = logits_HT[1, 8] = 6.0
        logits_HT[2, :32] = 0.0
        return logits_HT

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((sqrt(0.75) * x, sqrt(0.25 / 3) * self.mixing(F.linear(x, self.value))), -1)


class Wider(nn.Module):
    """The stream, times what keeps its root mean square, beside so many zeros."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count, self.factor = count, sqrt((width + count) / width)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x * self.factor, (0, self.count))


Layer = Callable[[int, int], nn.Module]
"""The width of the stream and the length of the context -> a layer."""


@dataclass(frozen=True)
class Lever:
    """What differs from the run that it stands beside."""

    layers: tuple[Layer, ...] = ()
    """The layers between the averages and the head; none for those of the library."""
    model: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    """Factors on the rates of single weights."""
    wider: int = 0
    """By how many entries the stream ends wider than its averages, which certificates take per entry."""
    windows: int = 8
    """Windows of a step; with 32 the tokens are those of the rows of `papers.nanogpt_table1`."""


SORTED = tuple([lambda width, _: Map(width, 256, True)] * 15)
PAIRS = tuple([lambda width, _: Map(width, 640, True), lambda width, _: Map(width, 256, False)] * 3)
JOINED = tuple([lambda width, _: Joined(width, 512)] * 3)
FOLDED = tuple([lambda width, _: Folded(width, 1280)] * 3)
HALF = tuple([lambda width, _: Potential(width, 1280, 1.0)] * 3)
READS_LATER = (
    lambda width, _: ConvexPotential(width, 1280), Read,
    lambda width, _: ConvexPotential(width, 928), lambda width, _: ConvexPotential(width, 928),
)  # fmt: skip
SPARE = (lambda width, _: Wider(width, 64), *[lambda width, _: ConvexPotential(width, 1280)] * 3)
DOUBLE = (lambda width, _: Wider(width, 256), *[lambda width, _: ConvexPotential(width, 640)] * 3)
LEVERS: dict[str, Lever] = {
    "none": Lever(),
    "asked for 30": Lever(run={"lipschitz": 30.0, "head_rate": 0.34}),
    "later averages, at 8.53": Lever(READS_LATER),
    "64 zeros for two averages": Lever(SPARE, {"mixing_heads": 6}),
    "256 zeros more": Lever(DOUBLE),
    "six averages": Lever(model={"mixing_heads": 6, "hidden": 1712}),
    "15 potentials of 256": Lever(model={"blocks": 15, "hidden": 256}, run={"learning_rate": 0.01}),
    "15 maps with MaxMin": Lever(SORTED, run={"learning_rate": 0.01}),
    "3 pairs with MaxMin": Lever(PAIRS),
    "3 joined blocks": Lever(JOINED),
    "three kinks a unit": Lever(FOLDED),
    "factor 1": Lever(HALF),
    "averages' logits faster": Lever(rates={"mixing.logits_HT": 4.0}),
    "momentum 0.9": Lever(run={"momentum": 0.9}),
    "momentum 0.8": Lever(run={"momentum": 0.8, "momentum_start": 0.8}),
    "none, 32 windows": Lever(windows=32),
    "momentum 0.85, 32 windows": Lever(run={"momentum": 0.85}, windows=32),
    "momentum 0.85, rate 0.03, 32 windows": Lever(run={"momentum": 0.85, "learning_rate": 0.03}, windows=32),
    "asked for 30, 32 windows": Lever(run={"lipschitz": 30.0, "head_rate": 0.34}, windows=32),
    "three kinks a unit, 32 windows": Lever(FOLDED, windows=32),
    "later averages, 32 windows": Lever(READS_LATER, wider=96, windows=32),
}
"""Name -> what it changes."""


@dataclass(frozen=True)
class LeverConfig(PotentialConfig):
    """The model of a lever with layers of its own."""

    architecture: Literal["levers"] = "levers"  # pyrefly: ignore[bad-override]
    lever: str = ""

    @property
    def body_lipschitz(self) -> float:
        """No layer expands; a stream that has become wider has a lesser root mean square for it."""
        return sqrt(self.width / (self.width + LEVERS[self.lever].wider))


class LeverGPT(PotentialGPT):
    """A `PotentialGPT` whose layers are those of a lever."""

    def __init__(self, config: LeverConfig, generator: torch.Generator | None = None) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.embedding = CappedEmbedding(config.vocabulary_size, config.token_width)
        self.mixing = PositionMixing(config.length, config.token_width, config.mixing_heads)
        width, layers = config.width, list[nn.Module]()
        for layer in LEVERS[config.lever].layers:
            layers.append(layer(width, config.length))
            width = layers[-1](torch.zeros(1, 1, width)).shape[-1]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, config.vocabulary_size)
        self.reset_parameters(generator)

    def starts(self) -> Iterator[Start]:
        """Those of every layer, and zeros for the head."""
        yield self.embedding.weight, self.embedding.parameter_norms()["weight"].initialize_
        yield from self.mixing.starts()
        for layer in self.layers:
            yield from getattr(layer, "starts", tuple)()
        yield self.head.weight, zeros
        yield self.head.bias, zeros


BUILDERS[LeverConfig] = LeverGPT
RATES = training.rate_factors


def rate_factors(model: Any, config: Any) -> dict[str, float]:
    """Those of the library, and for layers of a lever the like."""
    factors = RATES(model, config)
    for name, module in model.layers.named_children():
        if isinstance(module, Mapped):
            factors |= {f"layers.{name}.{bias}": config.bias_rate for bias in module.stds}
        if isinstance(module, Read):
            factors[f"layers.{name}.mixing.gain_H"] = training.GAIN_RATE
    return factors


def run(name: str) -> dict[str, Any]:
    """Losses and the proved bound of one lever."""
    lever, config = LEVERS[name], config_of(BASE)
    model: Any = replace(config.model, **lever.model)
    if lever.layers:
        model = LeverConfig(**{key: value for key, value in vars(model).items() if key != "architecture"}, lever=name)
    tokens = 2**17 if lever.windows == 8 else 2**19
    settings = {"batch": lever.windows, "precision": "float32", "validation_tokens": tokens}
    with patch.object(training, "rate_factors", lambda *run: rate_factors(*run) | lever.rates):
        task = token_task(replace(config, model=model, **settings, **lever.run), byte_corpus(), torch.device("cpu"))
    losses: list[float] = []
    begun = time.monotonic()
    fit(task, lambda _, loss: losses.append(loss))
    seconds = time.monotonic() - begun
    found = task.evaluate()["validation_loss"]
    certificate = certify_model(task.copy(task.whole_weights()), 0, task.generators["lower bound"])
    return {
        "lever": name,
        "windows": lever.windows,
        "block_parameters": sum(p.numel() for block in blocks(task.model) for p in block.parameters()),
        "validation_loss": found,
        "training_loss": sum(losses[-50:]) / 50,
        "lipschitz": 10**certificate.log10_lipschitz,
        "seconds": seconds,
    }


def main() -> None:
    """Run what has no row yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(LEVERS), default=list(LEVERS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, about = stored_rows(options.output), header("python -m benchmarks.token_levers", BASE.seed)
    for name in options.only:
        if name not in {row["lever"] for row in rows}:
            rows.append(run(name))
            print(rows[-1], flush=True)
            write_result(options.output, {**about, "steps": 420, "rows": rows})


if __name__ == "__main__":
    main()
