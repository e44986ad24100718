"""What each choice is worth to a transformer with the Lipschitz constant 10: one change at a time, one seed.

The `LEVERS` change the default run (2,000 steps of 12 x 64 characters); the forms of `CONTENT` read 256 characters and
are trained on 8.2 million; `CAPS` are of the published architecture, whose constant follows from its caps. Every run
leaves one file under `results/levers/`; a run that has one is not repeated.

    python -m benchmarks.levers              # all that are missing
    python -m benchmarks.levers noise-0.1    # one of them

`$WELLNORMED_DATA` holds `shakespeare/input.txt`, which is downloaded otherwise.
"""

import argparse
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

import wellnormed as wn
from papers.characters import validation_loss
from papers.header import header, write_result
from wellnormed.certificates.sizes import largest_rms
from wellnormed.constraints import Constraint
from wellnormed.data import load_shakespeare
from wellnormed.data.characters import CharacterText
from wellnormed.models.config import GPTConfig, ModelConfig, PotentialConfig
from wellnormed.models.files import Model
from wellnormed.models.gpt import GPT, FeedForward
from wellnormed.models.potential_gpt import ContentAttention, PotentialGPT
from wellnormed.nn import BallProjection, constraints_of
from wellnormed.train.optimizer import rate_factors, weight_constraints
from wellnormed.train.presets import PRESETS
from wellnormed.train.task import Task, fit

SEED, LIPSCHITZ = 0, 10.0
FOLDER = Path("results/levers")


@dataclass(frozen=True)
class Variant:
    """The default run, but for what is named."""

    model: ModelConfig = field(default_factory=PotentialConfig)
    factors: dict[str, float] = field(default_factory=dict)
    """End of a parameter's name -> what the default factor on its learning rate is multiplied by."""
    steps: int = 2000
    batch: int = 12
    learning_rate: float = 0.01
    momentum: float = 0.95
    noise: float = 0.0
    """Standard deviation of Gaussian noise on every entry of the embedded text, whose RMS is 1."""
    replaced: float = 0.0
    """Share of the characters read that are replaced by random ones."""
    dropped_heads: float = 0.0
    """Share of the heads of mixing that are left out of a sequence; the others grow in proportion."""
    average_from: float = 1.0
    """Share of the steps after which the weights are averaged; the rate stops falling at as much of its start."""
    ball: float | None = None
    """Radius of ball projections on every head's queries and keys; the largest logit stays."""
    late: bool = False
    """Attention stands before the last convex potential instead of the first."""
    output_bias: bool = False
    """The second map of every feed-forward layer of the published architecture has a bias."""
    relative_rates: bool = False
    """The learning rate of every matrix of the published architecture is relative to its cap."""


SMALL = PotentialConfig()
LONG = Variant(model=replace(SMALL, length=256), batch=16)


def _long(**changes: Any) -> Variant:
    return replace(LONG, model=replace(LONG.model, **changes))


LEVERS = {
    "default": Variant(),
    "mixing-rate-0.3": Variant(factors={"logits_HT": 0.3}),
    "mixing-rate-3": Variant(factors={"logits_HT": 3.0}),
    "head-rate-0.3": Variant(factors={"head.weight": 0.3}),
    "head-rate-3": Variant(factors={"head.weight": 3.0}),
    "head-bias-rate-0.3": Variant(factors={"head.bias": 0.3}),
    "embedding-rate-0.5": Variant(factors={"embedding.weight": 0.5}),
    "embedding-rate-2": Variant(factors={"embedding.weight": 2.0}),
    "gain-rate-3": Variant(factors={"gain_H": 3.0}),
    "hidden-bias-rate-10": Variant(factors={f"layers.{layer}.bias": 10.0 for layer in range(6)}),
    "momentum-0.9": Variant(momentum=0.9),
    "momentum-0.98": Variant(momentum=0.98),
    "half-batch": Variant(batch=6, steps=4000, learning_rate=0.007),
    "twice-the-batch": Variant(batch=24, steps=1000, learning_rate=0.014),
    "noise-0.1": Variant(noise=0.1),
    "replaced-0.05": Variant(replaced=0.05),
    "dropped-heads-0.1": Variant(dropped_heads=0.1),
    "averaged": Variant(average_from=0.75),
}
CONTENT = {
    "long-positions": _long(attention_blocks=0),
    "long-default": LONG,
    "long-four-blocks": _long(attention_blocks=4),
    "long-wide-share": _long(attention_share=0.2),
    "long-sharp": _long(attention_heads=1, attention_share=0.01, attention_logit=4.0),
    "long-balls": replace(_long(attention_heads=8), ball=0.5),
    "long-late": replace(LONG, late=True),
}
PUBLISHED = Variant(model=PRESETS["caps"].model, learning_rate=PRESETS["caps"].learning_rate)
CAPS = {
    "caps-default": PUBLISHED,
    "caps-output-bias": replace(PUBLISHED, output_bias=True),
    "caps-relative-rates": replace(PUBLISHED, relative_rates=True, learning_rate=0.01),
    "caps-relative-rates-output-bias": replace(PUBLISHED, output_bias=True, relative_rates=True, learning_rate=0.01),
}
VARIANTS = LEVERS | CONTENT | CAPS


class BalledAttention(ContentAttention):
    """Queries and keys of every head in a ball of less than the stream's radius, at the same largest logit."""

    def __init__(self, config: PotentialConfig, radius: float) -> None:
        super().__init__(config)
        self.ball = BallProjection(radius)
        self.attend.scale /= radius**2

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key = self.ball(self.query(x_BTD)), self.ball(self.key(x_BTD))
        return self.join(x_BTD, self.merge(self.attend(query, key, self.value(x_BTD))))


def build(variant: Variant, generator: torch.Generator) -> Model:
    """The model of a variant."""
    if isinstance(variant.model, GPTConfig):
        published = GPT(variant.model, generator)
        for module in published.modules():
            if variant.output_bias and isinstance(module, FeedForward):
                module.output.bias = nn.Parameter(torch.zeros(variant.model.width))
        return published
    model = PotentialGPT(variant.model, generator)
    layers = list(model.layers)
    if variant.late:
        layers = [*layers[2:-1], *layers[:2], layers[-1]]
    if variant.ball is not None:
        layers[1] = BalledAttention(variant.model, variant.ball)
    model.layers = nn.Sequential(*layers)
    model.reset_parameters(generator)
    return model


def settings(model: Model, variant: Variant) -> tuple[dict[str, float], dict[str, Constraint]]:
    """Factors on the learning rates by parameter, and constraints by weight."""
    if isinstance(variant.model, GPTConfig):
        config = replace(PRESETS["caps"], model=variant.model)
        factors, kept = rate_factors(model, config), weight_constraints(model, config)
        if variant.relative_rates:
            factors |= {name: held.max_norm for name, held in kept.items() if isinstance(held, wn.HardCap | wn.SoftCap)}
        return factors, kept
    head_cap = LIPSCHITZ / _body_lipschitz(wn.certify(model))
    factors = rate_factors(model, replace(PRESETS["cpu"], model=variant.model)) | {"head.weight": head_cap}
    for name, _ in model.named_parameters():
        for end, factor in variant.factors.items():
            if name.endswith(end):
                factors[name] = factors.get(name, 1.0) * factor
    return factors, {**constraints_of(model), "head.weight": wn.HardCap(head_cap)}


def _body_lipschitz(certificate: wn.certificates.Certificate) -> float:
    """The constant of everything before the map to logits."""
    rows = [row for row in certificate.layers if not row.name.startswith(("head", "output"))]
    return float(largest_rms(rows[-1], "gain"))


def disturb(model: Model, variant: Variant) -> list[RemovableHandle]:
    """Add the variant's noise to the forward pass, until the handles are removed."""

    def add_noise(_: nn.Module, __: Any, x: Tensor) -> Tensor:
        return x + variant.noise * torch.randn_like(x)

    def drop_heads(_: nn.Module, __: Any, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (variant.model.mixing_heads, -1))
        kept = torch.rand(len(x), 1, heads.shape[-2], 1) >= variant.dropped_heads
        return (heads * kept / (1 - variant.dropped_heads)).flatten(-2)

    handles = [model.embedding.register_forward_hook(add_noise)] if variant.noise else []
    return handles + ([model.mixing.register_forward_hook(drop_heads)] if variant.dropped_heads else [])


class LeverTask(Task[Model]):
    """The run of a variant."""

    def __init__(self, variant: Variant, text: CharacterText) -> None:
        self.variant, self.text = variant, text
        generator = torch.Generator().manual_seed(SEED)
        torch.manual_seed(SEED)
        model = build(variant, generator)
        factors, kept = settings(model, variant)
        optimizer = wn.Scion(
            model,
            lr=variant.learning_rate,
            recipe="modular",
            momentum=variant.momentum,
            nesterov=True,
            radius=1.0,
            lr_factors=factors,
        )
        super().__init__(model, optimizer, wn.constrain(optimizer, kept), variant.steps, generator)

    def rate_factor(self, step: int) -> float:
        floor = 0.0 if self.variant.average_from == 1 else 1 - self.variant.average_from
        return max(super().rate_factor(step), floor)

    def batch_loss(self) -> Tensor:
        variant, length = self.variant, self.variant.model.length
        starts = torch.randint(len(self.text.train) - length, (variant.batch,), generator=self.generator)
        windows = self.text.train[starts[:, None] + torch.arange(length + 1)]
        read, following = windows[:, :-1], windows[:, 1:]
        if variant.replaced:
            other = torch.randint(len(self.text.symbols), read.shape)
            read = torch.where(torch.rand(read.shape) < variant.replaced, other, read)
        return F.cross_entropy(self.model(read).flatten(0, 1), following.flatten())


def run(variant: Variant) -> dict[str, float]:
    """Train, evaluate on the whole of both splits, certify and attack."""
    text, start = load_shakespeare("tiny-shakespeare"), time.perf_counter()
    task, length = LeverTask(variant, text), variant.model.length
    model, handles = task.model, disturb(task.model, variant)
    averaged = AveragedModel(model)

    def watch(task: LeverTask, loss: float) -> None:
        if task.step > variant.average_from * variant.steps:
            averaged.update_parameters(model)
        if task.step % 100 == 0:
            print(f"step {task.step}, loss {loss:.4f}, {time.perf_counter() - start:.0f} s", flush=True)

    fit(task, watch)
    trained = time.perf_counter() - start
    if variant.average_from < 1:
        model.load_state_dict(averaged.module.state_dict())
    for handle in handles:
        handle.remove()
    assert task.constraints is not None
    certificate = wn.certify(model)
    return {
        "validation_loss": validation_loss(model, text.validation, length),
        "training_loss": validation_loss(model, text.train[: len(text.validation)], length),
        "body_lipschitz": _body_lipschitz(certificate),
        "log10_lipschitz": certificate.log10_lipschitz,
        "lower_bound": float(wn.lower_bound(model, steps=50, generator=task.generator).value),
        "proved_norm_over_cap": max(task.constraints.proved_ratios().values()),
        "training_tokens": variant.steps * variant.batch * length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": trained,
    }


def main() -> None:
    """Train what has no file yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*VARIANTS, []], help="variants; all of them if none is named")
    for name in parser.parse_args().names or VARIANTS:
        path, variant = FOLDER / f"{name}.json", VARIANTS[name]
        if not path.exists():
            content = header(f"python -m benchmarks.levers {name}", SEED)
            write_result(path, {**content, "runs": 1, "config": asdict(variant), "results": run(variant)})


if __name__ == "__main__":
    main()
