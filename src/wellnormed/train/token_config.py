"""What the training run of a language model on tokens is, typed; free of torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from wellnormed.models.config import GPTConfig, NanoGPTConfig, TokenModelConfig
from wellnormed.train.config import NOT_NEGATIVE, POSITIVE, SEED, SHARE, Caps, ConstraintName, Range, require

Size = Literal["1m", "10m", "124m", "350m", "1b", "3b"]
Variant = Literal["lipschitz", "speedrun", "nanogpt", "modula"]
Schedule = Literal["cooldown", "cosine", "linear"]


@dataclass(frozen=True)
class TokenTrainConfig:
    """A training run of a language model. The model's vocabulary size is that of the data, rounded up."""

    model: TokenModelConfig = field(default_factory=GPTConfig)
    """Shapes and constants of the model."""
    data: str = "shakespeare"
    """A folder of shards, by path or by its name in $WELLNORMED_DATA; or shakespeare, whose bytes need no shards."""
    shuffle: bool = True
    """Read windows in a random order, another one in every epoch, instead of the order of the files."""
    steps: int = 1000
    """Optimizer steps."""
    batch: int = 32
    """Sequences a step, of all ranks together."""
    micro_batch: int | None = None
    """Sequences that a rank computes at once; their gradients add up to those of the step. None for all of its part."""
    optimizer: Literal["scion", "muon", "adamw"] = "scion"
    """scion gives every parameter a norm; muon has norms for hidden matrices and AdamW for the rest."""
    learning_rate: float = 0.02
    """First step size: in units of each weight's norm, or AdamW's."""
    embedding_rate: float = 1.0
    """Factor on the learning rate of embedding vectors."""
    head_rate: float = 1.0
    """Factor on the learning rate of the map to logits."""
    bias_rate: float = 1.0
    """Factor on the learning rate of biases."""
    adamw_rate: float = 1e-3
    """Learning rate of what `muon` leaves to AdamW."""
    adamw_average: float = 0.95
    """Fraction of the average of squares that AdamW keeps."""
    weight_decay: float = 0.0
    """Fraction of a matrix, per unit of learning rate, that is removed in a step."""
    momentum: float = 0.95
    """Fraction of the momentum that is kept (Nesterov)."""
    momentum_start: float = 0.85
    """The same in the first step, from which it rises linearly."""
    momentum_steps: int = 300
    """Steps until it has risen."""
    schedule: Schedule = "cooldown"
    """How the learning rate falls to 0: linearly over the last steps, as a cosine, or linearly from the first step."""
    cooldown: float = 0.4
    """Share of the steps over which `cooldown` falls."""
    constraint: ConstraintName | Literal["none"] = "spectral-normalize"
    """What keeps the matrices of a `gpt` below their caps after every step; other models have no caps."""
    caps: Caps = field(default_factory=lambda: Caps(*[8.0] * 7))
    """Largest norms of a `gpt` by role; embedding vectors are kept at RMS at most 1."""
    every: int = 1
    """Steps from one projection of a hard cap or a spectral normalization to the next; caps hold in between."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the model's products; weights, optimizer and constraints are float32."""
    compile: bool = False
    """Compile the model's blocks with torch.compile."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several ranks: a copy of the model on each, or a part of every weight (FSDP2)."""
    recompute: bool = False
    """Keep only the inputs of blocks for the backward pass, and compute the rest again (activation checkpointing)."""
    seed: int = 0
    """Seeds the initial weights, the order of the data, the sample and the search for the lower bound."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads of a rank; None leaves the choice to torch, or to torchrun."""
    validation_tokens: int = 2**20
    """The first tokens of the validation split, on which the model is evaluated; at most the split."""
    log_every: int = 10
    """Steps between rows of metrics.jsonl."""
    checkpoint_every: int = 250
    """Steps between checkpoints; at each, norms are proved and the model is evaluated."""
    checkpoint_minutes: float | None = 15.0
    """After so many minutes without a checkpoint one is written, and nothing evaluated; None for no clock."""
    certify: Literal["end", "checkpoints", "no"] = "end"
    """When a Lipschitz bound of the model is proved. A large model takes half a minute or more each time."""
    attack_steps: int = 20
    """Steps of the search for a lower bound on the Lipschitz constant; 0 leaves it out."""
    sample_tokens: int = 200
    """Length of the text that is generated at the end."""
    peak_tflops: float | None = None
    """Of a rank's device, in the run's precision, for the share of it that is used; known for some GPUs."""

    def __post_init__(self) -> None:
        require(self._conditions, self)

    def _conditions(self, values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
        """As of `TrainConfig`."""
        for name, value in values.items():
            if type(value) in (int, float):
                allowed, must = RANGES.get(name, POSITIVE)
                yield name, allowed(value), must
        yield "model.heads", self.model.width % self.model.heads == 0, f"divide the model's width, {self.model.width}"
        names = (*get_args(ConstraintName), "none")
        yield "constraint", self.constraint in names, f"be one of {', '.join(names)}"
        must = "be `none` for models other than `gpt`, which have no caps"
        yield "constraint", isinstance(self.model, GPTConfig) or self.constraint == "none", must
        free = isinstance(self.model, GPTConfig) or self.caps == Caps(*[8.0] * 7)
        yield "caps", free, "be left out for models other than `gpt`, which have none"
        must = "be 1 for the soft cap, which acts after every step"
        yield "every", self.every == 1 or self.constraint != "soft-cap", must
        yield "micro_batch", self.micro_batch is None or self.micro_batch <= self.batch, "be at most the batch"
        least = self.model.length + 1
        yield "validation_tokens", self.validation_tokens >= least, f"be at least one window and its target, {least}"

    def rate_factor(self, step: int) -> float:
        """What the learning rates are multiplied by in a step, counted from 0."""
        done = step / self.steps
        match self.schedule:
            case "cooldown":
                return min(1.0, (1 - done) / self.cooldown)
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                return 1 - done

    def momentum_at(self, step: int) -> float:
        """The fraction of the momentum that is kept in a step, counted from 0."""
        share = min(1.0, step / self.momentum_steps)
        return (1 - share) * self.momentum_start + share * self.momentum


FRACTION: Range = (lambda x: 0 <= x < 1, "lie in [0, 1): it is the fraction kept")
RANGES: dict[str, Range] = {
    "seed": SEED,
    "momentum": FRACTION,
    "momentum_start": FRACTION,
    "adamw_average": FRACTION,
    "cooldown": (lambda x: 0 < x <= 1, "lie in (0, 1]: it is a share of the steps"),
    **dict.fromkeys(("attack_steps", "sample_tokens", "weight_decay"), NOT_NEGATIVE),
    **dict.fromkeys(("embedding_rate", "head_rate", "bias_rate"), NOT_NEGATIVE),
    "model.residual_strength": SHARE,
    "model.token_share": SHARE,
}
"""What a number must be, where it need not be `POSITIVE`."""
SHAPES: dict[Size, dict[str, Any]] = {
    "1m": {"width": 128, "blocks": 5, "heads": 4, "length": 128},
    "10m": {"width": 320, "blocks": 8, "heads": 5, "length": 256},
    "124m": {"width": 768, "blocks": 12, "heads": 6, "length": 1024},
    "350m": {"width": 1024, "blocks": 24, "heads": 8, "length": 1024},
    "1b": {"width": 2048, "blocks": 22, "heads": 16, "length": 1024},
    "3b": {"width": 2560, "blocks": 36, "heads": 20, "length": 1024},
}
"""By the parameters of the blocks, but 124m and 350m, which are GPT-2's names for its shapes: 162 and 405 million with
tables of their own for tokens and logits. 124m has the heads of the speedrun, 3b is the shape of LMO."""


def token_preset(size: Size = "1m", variant: Variant = "lipschitz") -> TokenTrainConfig:
    """The run of a size and a model, from which the command's other options start.

    `lipschitz` is LT's transformer with enforced norms (section 4.4), the others are its peers. 1m and 10m train on
    Shakespeare's bytes, 1m in minutes on two cores, at rates from a small search there; the larger ones have LT's
    rates, steps and batch of 384 windows of FineWeb, in bfloat16.

    Peers have LT's models, but one training for all of them: Muon for the matrices of blocks, whose step is
    `sqrt(out/in)` long; AdamW with betas 0.9 and 0.95 for the rest; rates that fall to 0. In the speedrun's record Adam
    has rates of its own for the head (0.008), the embedding (0.6) and scales (0.04), betas 0.8 and 0.95, and an epsilon
    of 1e-10, no step is shorter than 1, and rates fall to a tenth. LT moves its own embedding by Adam at 0.1, where it
    is moved here by its norm at 0.05.
    """
    shape = SHAPES[size]
    small = size in ("1m", "10m")
    run = TokenTrainConfig(steps=600, batch=32, learning_rate=0.05, adamw_rate=5e-3)
    if not small:
        run = replace(
            run, data="fineweb10B", shuffle=False, steps=1770, batch=384, micro_batch=16, precision="bfloat16",
            validation_tokens=10 * 2**20, checkpoint_every=500,
        )  # fmt: skip
    match variant:
        case "lipschitz":
            form: dict[str, Any] = {"rotary": True, "relative_bias": False, "biases": False, "stream_radius": None}
            strength = 1 / (2 * shape["blocks"])
            model = GPTConfig(**shape, **form, residual_strength=strength, output_factor=1 / 3, logit_scale=8.0)
            rate, head_rate = (0.2, 1.0) if small else (0.05, 0.1)
            return replace(run, model=model, learning_rate=rate, head_rate=head_rate)
        case _:
            return replace(run, model=NanoGPTConfig(variant=variant, **shape), constraint="none", optimizer="muon")
