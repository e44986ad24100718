"""Presets of runs, which set the defaults of the command's options; free of torch."""

from dataclasses import replace
from typing import Any, Literal

from wellnormed.models.config import GPTConfig, NanoGPTConfig, PotentialConfig
from wellnormed.train.config import BYTES, Caps, TrainConfig

Size = Literal["1m", "10m", "124m", "350m"]
Variant = Literal["lipschitz", "potential", "nanogpt"]
_ASKED = TrainConfig(
    model=PotentialConfig(), lipschitz=10.0, learning_rate=0.01, embedding_rate=2.0, bias_rate=0.1, threads=2
)
PRESETS: dict[str, TrainConfig] = {
    # The form of everything before the head makes it 1-Lipschitz, except for a share of attention that reads content.
    "cpu": _ASKED,
    # The same without that attention: averages of the past depend on positions alone.
    "positions": replace(_ASKED, model=PotentialConfig(attention_blocks=0)),
    # LT's architecture: one wide block, with small caps where the loss allows them.
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
SHAPES: dict[Size, dict[str, Any]] = {
    "1m": {"width": 128, "blocks": 5, "heads": 4, "length": 128},
    "10m": {"width": 320, "blocks": 8, "heads": 5, "length": 256},
    "124m": {"width": 768, "blocks": 12, "heads": 6, "length": 1024},
    "350m": {"width": 1024, "blocks": 24, "heads": 8, "length": 1024},
}
"""The shapes of the sizes, named by the parameters of the blocks, but 124m and 350m are GPT-2's names for its shapes:
162 and 405 million with tables of their own for tokens and logits. 124m has the heads of the speedrun."""

TOKEN_WIDTHS: dict[Size, int] = {"1m": 16, "10m": 32}
"""Entries of a token's vector in the models `potential` of these sizes; the others have 64."""


def token_preset(size: Size = "1m", variant: Variant = "lipschitz") -> TrainConfig:
    """The config of a size and a variant, which sets the defaults of the command's other options.

    `lipschitz` is LT's transformer with enforced norms (section 4.4). `potential` is the model whose blocks are
    1-Lipschitz by form, with as many parameters in them as the others, in a stream that is twice as wide. `nanogpt` is
    a peer without enforced norms. 1m and 10m train on Shakespeare's bytes, 1m in minutes on two cores, at rates from a
    small search there; the larger ones have LT's rates, steps and batch of 384 windows of FineWeb, in bfloat16.

    The peer is trained by Muon for the matrices of blocks, whose step is `sqrt(out/in)` long, and by AdamW with betas
    0.9 and 0.95 for the rest, at rates that fall to 0. In the speedrun's record Adam has rates of its own for the head
    (0.008), the embedding (0.6) and scales (0.04), betas 0.8 and 0.95, and an epsilon of 1e-10, no step is shorter than
    1, and rates fall to a tenth. LT moves its own embedding by Adam at 0.1, where it is moved here by its norm at 0.05.
    """
    shape = SHAPES[size]
    small = size in ("1m", "10m")
    run = TrainConfig(
        data=BYTES, steps=600, batch=32, learning_rate=0.05, adamw_rate=5e-3, momentum_start=0.85, schedule="cooldown",
        constraint="spectral-normalize", caps=Caps(*[8.0] * 7), validation_tokens=2**20, attack_steps=20,
        sample_tokens=200,
    )  # fmt: skip
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
        case "potential":
            width, token_width = 2 * shape["width"], TOKEN_WIDTHS.get(size, 64)
            potentials = round(3 / 4 * shape["blocks"]) - 1
            # what the 12 width^2 parameters of each of a peer's blocks leave after attention, which has 5 width^2 here
            rows = (12 * shape["blocks"] * shape["width"] ** 2 - 5 * width**2) // (potentials * width)
            by_form = PotentialConfig(
                length=shape["length"], token_width=token_width, mixing_heads=width // token_width, blocks=potentials,
                hidden=rows // 16 * 16, attention_heads=shape["heads"],
            )  # fmt: skip
            return replace(
                run, model=by_form, lipschitz=10.0, caps=Caps(), constraint="none", learning_rate=0.02,
                embedding_rate=2.0, bias_rate=0.1, schedule="linear",
            )  # fmt: skip
        case "nanogpt":
            return replace(run, model=NanoGPTConfig(**shape), caps=Caps(), constraint="none", optimizer="muon")
