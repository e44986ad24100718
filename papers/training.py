"""Runs of language models that only papers need: LipsFormer and other peers, and layers that multiply 8-bit floats."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from papers.float8 import use_float8_
from papers.float8_layers import require_device
from papers.lipsformer import LipsFormerConfig
from papers.peers import ModulaConfig, SpeedrunConfig
from wellnormed import cli
from wellnormed._ranges import Range
from wellnormed.models.config import GPTConfig, ModelConfig
from wellnormed.models.files import Model
from wellnormed.models.gpt import GPT
from wellnormed.train.config import RANGES, TrainConfig
from wellnormed.train.language import LanguageTask
from wellnormed.train.loop import resume, train
from wellnormed.train.optimizer import build_optimizer
from wellnormed.train.presets import SHAPES, Size, Variant, token_preset

PaperVariant = Literal[Variant, "lipsformer", "speedrun", "modula"]
PEERS = {"lipsformer": LipsFormerConfig, "speedrun": SpeedrunConfig, "modula": ModulaConfig}
RANGES["model.drop_path"] = Range(lambda x: 0 <= x < 1, "lie in [0, 1): it is the share of layers that is left out")


@dataclass(frozen=True)
class PaperConfig(TrainConfig):
    """A run of a language model with what only papers need."""

    model: ModelConfig | LipsFormerConfig | SpeedrunConfig | ModulaConfig = field(default_factory=GPTConfig)  # pyrefly: ignore[bad-override]
    """Shapes and constants of the model."""
    float8: Literal["no", "emulated", "scaled_mm"] = "no"
    """8-bit floats in the linear layers of a `gpt`'s blocks whose proved ranges fit; scaled_mm needs a GPU for them."""

    def _conditions(self, values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
        yield from super()._conditions(values)
        must = "be `no` without a model `gpt` and a constraint, from which the ranges are proved"
        capped = isinstance(self.model, GPTConfig) and self.constraint != "none"
        yield "float8", self.float8 == "no" or capped, must


def paper_preset(size: Size = "1m", variant: PaperVariant = "lipschitz") -> PaperConfig:
    """As `token_preset`; LipsFormer is trained as LT appendix E says, changes 8 to 11, other peers as NanoGPT."""
    run = PaperConfig(**vars(token_preset(size, "nanogpt" if variant in PEERS else variant)))  # pyrefly: ignore
    if variant in PEERS:
        run = replace(run, model=PEERS[variant](**SHAPES[size]))
    if variant != "lipsformer":
        return run
    return replace(run, weight_decay=0.1, schedule="cosine", adamw_rate=1e-3, adamw_average=0.999)


class PaperTask(LanguageTask):
    """A `LanguageTask` whose layers may multiply 8-bit floats."""

    config_type: ClassVar[type[TrainConfig]] = PaperConfig
    command: ClassVar[str] = "papers"
    float8: tuple[str, ...] = ()
    """The layers that multiply 8-bit floats."""

    def prepared(self, model: Model) -> Model:
        """The model with 8-bit products in the layers whose ranges are proved, if the config asks for them."""
        config = self.config
        if not isinstance(config, PaperConfig) or config.float8 == "no":
            return model
        if config.float8 == "scaled_mm":
            require_device(self.device, "--float8 scaled_mm")
        _, held = build_optimizer(model, config)  # for what the constraints promise; the run has its own
        assert isinstance(model, GPT)
        assert held is not None
        try:
            self.float8 = tuple(use_float8_(model, config, held, self.ranks.world))
        finally:
            held.remove()
        self.notes = (f"8-bit floats in {', '.join(self.float8)}; the certificate is of the model without",)
        return model


@dataclass(frozen=True)
class TrainPaper:
    """Train a language model as `wellnormed train nanogpt` does, or another peer, or with products of 8-bit floats."""

    config: Annotated[PaperConfig, tyro.conf.arg(name="")]
    preset: Size = "1m"
    """Where all other options start from: the size of the model."""
    variant: PaperVariant = "lipschitz"
    """The model; LipsFormer, the speedrun and Modula beside those of `wellnormed train nanogpt`."""
    name: str | None = None
    """The run folder is runs/NAME; by default the date, the preset and the variant."""
    resume: Path | None = None
    """Continue this run folder, with its own config, on any number of processes."""

    def __call__(self) -> None:
        if self.resume is None:
            train(self.config, cli.new_folder(self.name, f"{self.preset}-{self.variant}"), task_of=PaperTask)
            return
        if self.config != paper_preset(self.preset, self.variant) or self.name is not None:
            raise ValueError("--resume continues with the run's own config and folder; leave out all other options")
        resume(self.resume, task_of=PaperTask)
