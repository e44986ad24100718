"""Shapes and constants of the models; free of torch, so that a command line can read them quickly."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer of Lipschitz layers (LT section 4.1). Every constant here enters the certificate."""

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
    residual_strength: float = 0.25
    """Share of a layer's branch in the convex residual; LT: 1 / (2 blocks)."""
    attention_scale: float = 1.0
    """Factor on <q, k> / d_head; LT: 1."""
    output_factor: float = 1.0
    """Factor on the output of attention; LT: 1/3."""
    sharpness: float = 1.0
    """How fast GELU bends."""
    token_share: float = 0.5
    """Share of the token against the position in the first activation."""
    logit_scale: float = 16.0
    """Factor on the head's output."""
    relative_bias: bool = True
    """Learn additive attention biases by head and distance; free in the certificate."""
    biases: bool = True
    """Learn biases of the hidden layer and of the logits; free in the certificate."""
    stream_radius: float | None = 1.0
    """Ball projection on the residual stream before every layer and before the head; None switches it off."""
    query_radius: float | None = None
    """Ball projection on every head's queries."""
    key_radius: float | None = None
    """Ball projection on every head's keys."""
    value_radius: float | None = None
    """Ball projection on every head's values."""
