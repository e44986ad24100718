"""LT's transformer for characters and tokens, made of layers with a known bound."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from wellnormed.models.base import TokenModel
from wellnormed.models.config import GPTConfig
from wellnormed.modular import Builder, NormedModule, attention, compose, modular_rule
from wellnormed.modular.layers import sequential
from wellnormed.nn import (
    BallProjection,
    CappedEmbedding,
    CausalAttention,
    ConvexResidual,
    HalfRotary,
    HeadProjection,
    MergeHeads,
    PositionEmbedding,
    Residual,
    Rotary,
    Scale,
    ScaledGELU,
)
from wellnormed.nn.starting import Start, zeros
from wellnormed.routing import assign_norms


def _turned(projection: HeadProjection, config: GPTConfig) -> nn.Module:
    """Queries or keys, which rotate with their positions if the config says so."""
    if not config.rotary:
        return projection
    return nn.Sequential(projection, (HalfRotary if config.half_rotary else Rotary)(config.width // config.heads))


class Attention(nn.Module):
    """Per-head queries, keys and values, causal attention, output projection, output factor."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        query, key, value = (HeadProjection(config.width, config.heads) for _ in range(3))
        self.query, self.key, self.value = _turned(query, config), _turned(key, config), value
        self.attend = CausalAttention(config.heads, config.attention_scale, config.length, config.relative_bias)
        self.merge = MergeHeads()
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.factor = Scale(config.output_factor)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads_BHTK = self.attend(self.query(x_BTD), self.key(x_BTD), self.value(x_BTD))
        return self.factor(self.output(self.merge(heads_BHTK)))


class FeedForward(nn.Sequential):
    """Linear, scaled GELU, linear."""

    def __init__(self, config: GPTConfig) -> None:
        hidden = config.expansion * config.width
        super().__init__()
        self.input = nn.Linear(config.width, hidden, bias=config.biases)
        self.activation = ScaledGELU(config.sharpness)
        self.output = nn.Linear(hidden, config.width, bias=False)


class GPT(TokenModel):
    """Decoder-only transformer without any normalisation layer, QK norm or soft-capped logits.

    The generator decides the initial weights; None is torch's default.

    Shape: integers `(B, T)` -> logits `(B, T, vocabulary_size)`.

    Example:
        >>> import torch
        >>> model = GPT(GPTConfig(width=16, blocks=1))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 65])
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = CappedEmbedding(config.vocabulary_size, config.width)
        self.position: nn.Module = nn.Identity()
        if not config.rotary:
            self.position = PositionEmbedding(config.length, config.width, config.token_share)
        layers: list[nn.Module] = []
        for _ in range(config.blocks):
            for layer in (Attention(config), FeedForward(config)):
                if config.stream_radius is not None:
                    layers.append(BallProjection(config.stream_radius))
                convex = config.residual == "convex"
                layers.append(ConvexResidual(layer, config.residual_strength) if convex else Residual(layer))
        if config.stream_radius is not None:
            layers.append(BallProjection(config.stream_radius))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=config.biases)
        self.logit_scale = Scale(config.logit_scale)
        self.reset_parameters(generator)

    def starts(self) -> Iterator[Start]:
        """Matrices start at norm 1 in their own norm; output projections, biases and the head at 0 (LT appendix F)."""
        for assigned in assign_norms(self):
            at_zero = assigned.name.endswith((".output.weight", "head.weight", "bias", "bias_HT"))
            assert assigned.norm is not None  # the default recipe leaves none out
            yield assigned.parameter, zeros if at_zero else assigned.norm.initialize_

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.logit_scale(self.head(self.layers(self.position(self.embedding(tokens_BT)))))


modular_rule(FeedForward)(sequential)


@modular_rule(Attention)
def attention_tree(module: Attention, builder: Builder) -> NormedModule:
    """Projections, attention, output projection, output factor."""
    bias = None if module.attend.bias_HT is None else builder.below("attend").atom("bias_HT", sensitivity=0.0)
    query, key, value = (builder.child(name) for name in ("query", "key", "value"))
    attend = attention(query, key, value, module.attend.scale, bias)
    return compose(*(builder.child(name) for name in ("factor", "output", "merge")), attend)


@modular_rule(GPT)
def gpt_tree(module: GPT, builder: Builder) -> NormedModule:
    """From tokens to logits."""
    parts = ("logit_scale", "head", "layers", "position", "embedding")
    return compose(*(builder.child(name) for name in parts))
