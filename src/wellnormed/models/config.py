"""Shapes and constants of the models; free of torch, so that a command line can read them quickly."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer of Lipschitz layers (LT section 4.1). Every constant here enters the certificate."""

    architecture: Literal["gpt"] = "gpt"
    """The name of the model."""
    vocabulary_size: int = 65
    """Symbols."""
    length: int = 64
    """Tokens of context."""
    width: int = 128
    """Entries of a token's vector."""
    heads: int = 4
    """Attention heads; divides the width."""
    blocks: int = 2
    """Pairs of attention and feed-forward layers."""
    expansion: int = 4
    """Hidden width of the feed-forward layer over the width."""
    residual: Literal["convex", "plain"] = "convex"
    """The residual connection: "convex" is `(1 - s) x + s layer(x)`, as in LT's text, "plain" `x + layer(x)`."""
    residual_strength: float = 0.25
    """Share `s` of a layer's branch in the convex residual; LT: 1 / (2 blocks)."""
    attention_scale: float = 1.0
    """Factor on <q, k> / d_head; LT: 1."""
    output_factor: float = 1.0
    """Factor on the output of attention; LT: 1/3."""
    sharpness: float = 1.0
    """The factor on the inputs of GELU; the larger it is, the closer GELU comes to ReLU."""
    token_share: float = 0.5
    """Share of the token against the position in the first activation."""
    logit_scale: float = 16.0
    """Factor on the head's output."""
    relative_bias: bool = True
    """Learn additive attention biases by head and distance; free in the certificate."""
    rotary: bool = False
    """Rotate queries and keys by their position (LT's released code), instead of mixing positions into the tokens."""
    half_rotary: bool = False
    """Rotate only half of the entries, as LT does at NanoGPT's size; only with `rotary`."""
    biases: bool = True
    """Learn biases of the hidden layer and of the logits; free in the certificate."""
    stream_radius: float | None = 1.0
    """Ball projection on the residual stream before every layer and before the head; None switches it off."""


@dataclass(frozen=True)
class PotentialConfig:
    """A decoder-only model of blocks that are 1-Lipschitz by form, and of attention with a stated constant."""

    architecture: Literal["potential"] = "potential"
    """The name of the model."""
    vocabulary_size: int = 65
    """Symbols."""
    length: int = 64
    """Tokens of context."""
    token_width: int = 16
    """Entries of a token's vector."""
    mixing_heads: int = 8
    """Averages of the past by position; with the token's width they make the width of the stream."""
    blocks: int = 4
    """Convex-potential layers."""
    hidden: int = 1024
    """Hidden width of those layers."""
    attention_blocks: int = 1
    """Blocks of attention that reads the content, before the first convex-potential layers, one each; 0 is allowed."""
    attention_heads: int = 2
    """Heads of attention; divides the width of the stream."""
    attention_share: float = 0.05
    """Share of attention in the squares of the stream that it is joined to."""
    attention_logit: float = 0.5
    """Largest logit that the content can cause, `t`; the constant of attention is `sqrt(1 + t^2) + t`."""

    @property
    def width(self) -> int:
        """Entries of a token in the stream."""
        return self.token_width * self.mixing_heads

    @property
    def body_lipschitz(self) -> float:
        """The constant of everything but the head: convex potentials and mixing have 1, so it is that of attention."""
        attention = math.hypot(1.0, self.attention_logit) + self.attention_logit
        return (1.0 - self.attention_share + self.attention_share * attention**2) ** (self.attention_blocks / 2)


@dataclass(frozen=True)
class NanoGPTConfig:
    """NanoGPT, an unconstrained peer of LT's table 1, made of the speedrun of GPT-2."""

    architecture: Literal["nanogpt"] = "nanogpt"
    """The name of the model."""
    vocabulary_size: int = 50304
    """Symbols; the 50,257 of GPT-2, padded to a multiple of 128."""
    length: int = 1024
    """Tokens of context."""
    width: int = 768
    """Entries of a token's vector; a multiple of 4 x heads."""
    heads: int = 6
    """Attention heads."""
    blocks: int = 12
    """Pairs of attention and feed-forward layers."""
    expansion: int = 4
    """Hidden width of the feed-forward layer over the width."""
    epsilon: float = 2.0**-23
    """Added to the mean square in every RMS norm; torch's default, the spacing of float32 numbers at 1."""
    rotary_base: float = 1024.0
    """Ratio of the largest to the smallest angle by which a token's position rotates queries and keys."""
    attention_scale: float = 0.12
    """Factor on <q, k>."""
    logit_cap: float = 30.0
    """Largest logit; the smallest is 0."""
    logit_width: float = 7.5
    """The divisor of the head's output before the sigmoid that caps it."""


ModelConfig = GPTConfig | PotentialConfig | NanoGPTConfig
"""The config of any model of this package; its `architecture` names the model."""
