"""What each choice is worth to a transformer with the Lipschitz constant 10: one change at a time, one seed.

The `levers` change the default run (2,000 steps of 12 x 64 characters); the forms of `content` read 256 characters and
are trained on 8.2 million. Every run leaves one file under `results/levers/`; a run that has one is not repeated.

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
from torch.utils.hooks import RemovableHandle

import wellnormed as wn
from wellnormed.data import load_shakespeare
from wellnormed.experiments._header import header, write_result
from wellnormed.models import PotentialGPT
from wellnormed.models.config import PotentialConfig
from wellnormed.models.potential_gpt import ContentAttention
from wellnormed.nn import BallProjection, constraints_of
from wellnormed.train.config import PRESETS
from wellnormed.train.evaluate import validation_loss
from wellnormed.train.weights import rate_factors

SEED, LIPSCHITZ = 0, 10.0
FOLDER = Path("results/levers")


@dataclass(frozen=True)
class Variant:
    """The default run, but for what is named."""

    model: PotentialConfig = field(default_factory=PotentialConfig)
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
VARIANTS = LEVERS | CONTENT


class BalledAttention(ContentAttention):
    """Queries and keys of every head in a ball of less than the stream's radius, at the same largest logit."""

    def __init__(self, config: PotentialConfig, radius: float) -> None:
        super().__init__(config)
        self.ball = BallProjection(radius)
        self.attend.scale /= radius**2

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key = self.ball(self.query(x_BTD)), self.ball(self.key(x_BTD))
        return self.join(x_BTD, self.merge(self.attend(query, key, self.value(x_BTD))))


def build(variant: Variant, generator: torch.Generator) -> PotentialGPT:
    """The model of a variant."""
    model = PotentialGPT(variant.model, generator)
    layers = list(model.layers)
    if variant.late:
        layers = [*layers[2:-1], *layers[:2], layers[-1]]
    if variant.ball is not None:
        layers[1] = BalledAttention(variant.model, variant.ball)
    model.layers = nn.Sequential(*layers)
    model.reset_parameters(generator)
    return model


def disturb(model: PotentialGPT, variant: Variant) -> list[RemovableHandle]:
    """Add the variant's noise to the forward pass, until the handles are removed."""

    def add_noise(_: nn.Module, __: Any, x: Tensor) -> Tensor:
        return x + variant.noise * torch.randn_like(x)

    def drop_heads(_: nn.Module, __: Any, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (variant.model.mixing_heads, -1))
        kept = torch.rand(len(x), 1, heads.shape[-2], 1) >= variant.dropped_heads
        return (heads * kept / (1 - variant.dropped_heads)).flatten(-2)

    handles = [model.embedding.register_forward_hook(add_noise)] if variant.noise else []
    return handles + ([model.mixing.register_forward_hook(drop_heads)] if variant.dropped_heads else [])


def run(variant: Variant) -> dict[str, float]:
    """Train, evaluate on the whole of both splits, certify and attack."""
    text, start = load_shakespeare("tiny-shakespeare"), time.perf_counter()
    length, preset = variant.model.length, PRESETS["cpu"]
    generator = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    model = build(variant, generator)
    certified = wn.certify(model)
    head_cap = LIPSCHITZ / float(max(certified.layers[-2].lipschitz))
    factors = {**rate_factors(model, replace(preset, model=variant.model)), "head.weight": head_cap}
    for name, _ in model.named_parameters():
        for end, factor in variant.factors.items():
            if name.endswith(end):
                factors[name] = factors.get(name, 1.0) * factor
    optimizer = wn.Scion(
        model, lr=variant.learning_rate, recipe="modular", momentum=variant.momentum, nesterov=True, lr_factors=factors
    )
    held = wn.constrain(optimizer, {**constraints_of(model), "head.weight": wn.HardCap(head_cap)})
    floor = 0.0 if variant.average_from == 1 else 1 - variant.average_from
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / variant.steps, floor))
    handles = disturb(model, variant)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for step in range(variant.steps):
        starts = torch.randint(len(text.train) - length, (variant.batch,), generator=generator)
        windows = text.train[starts[:, None] + torch.arange(length + 1)]
        read, following = windows[:, :-1], windows[:, 1:]
        if variant.replaced:
            other = torch.randint(len(text.symbols), read.shape)
            read = torch.where(torch.rand(read.shape) < variant.replaced, other, read)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(read).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        if step >= variant.average_from * variant.steps:
            averaged.update_parameters(model)
        if step % 100 == 0:
            print(f"step {step}, loss {loss.item():.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    trained = time.perf_counter() - start
    if variant.average_from < 1:
        model.load_state_dict(averaged.module.state_dict())
    for handle in handles:
        handle.remove()
    return {
        "validation_loss": validation_loss(model, text.validation, length),
        "training_loss": validation_loss(model, text.train[: len(text.validation)], length),
        "body_lipschitz": LIPSCHITZ / head_cap,
        "log10_lipschitz": wn.certify(model).log10_lipschitz,
        "lower_bound": float(wn.lower_bound(model, steps=50, generator=generator).value),
        "proved_norm_over_cap": max(held.proved_ratios().values()),
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
