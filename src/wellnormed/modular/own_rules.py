"""Rules for this package's layers and models, which stand in rooms below this one and are known by name only.

A rule reads the constants of the layer that applies them.
"""

from typing import Any

from wellnormed.modular.builder import Builder, modular_rule
from wellnormed.modular.combinators import IDENTITY, attention, residual
from wellnormed.modular.torch_rules import sequential
from wellnormed.modular.tree import Bond, NormedModule, Scalar, compose

modular_rule("wellnormed.models.gpt.FeedForward")(sequential)


@modular_rule("wellnormed.nn.embedding.CappedEmbedding", "wellnormed.nn.attention.HeadProjection")
def weight_only(module: Any, builder: Builder) -> NormedModule:
    """One weight in its layer's own norm."""
    return builder.atom("weight")


@modular_rule("wellnormed.nn.activation.ScaledGELU")
def scaled_gelu(module: Any, builder: Builder) -> NormedModule:
    """Divided by its largest slope."""
    return Bond("scaled gelu")


@modular_rule("wellnormed.nn.projection.BallProjection")
def ball_projection(module: Any, builder: Builder) -> NormedModule:
    """A projection onto a convex set. Its radius only takes effect on inputs outside the unit ball, or if below 1."""
    return Bond("ball projection")


@modular_rule("wellnormed.nn.attention.MergeHeads")
def merge_heads(module: Any, builder: Builder) -> NormedModule:
    """The RMS of heads side by side is at most the largest of theirs."""
    return Bond("merge heads")


@modular_rule("wellnormed.nn.scaling.Scale")
def scale(module: Any, builder: Builder) -> NormedModule:
    """A factor of the forward pass."""
    return Scalar(module.factor)


@modular_rule("wellnormed.nn.scaling.ConvexResidual")
def convex_residual(module: Any, builder: Builder) -> NormedModule:
    """LT equation 1."""
    return residual(builder.child("block"), module.strength)


@modular_rule("wellnormed.nn.embedding.PositionMix")
def position_mix(module: Any, builder: Builder) -> NormedModule:
    """`share x + (1 - share) position`; a position sees no input."""
    position = builder.atom("weight", sensitivity=0.0)
    return module.token_share * IDENTITY + (1 - module.token_share) * position


@modular_rule("wellnormed.models.gpt.Attention")
def gpt_attention(module: Any, builder: Builder) -> NormedModule:
    """Projections, attention, output projection, output factor."""
    bias = None if module.attend.bias_HT is None else builder.below("attend").atom("bias_HT", sensitivity=0.0)
    query, key, value = (builder.child(name) for name in ("query", "key", "value"))
    attend = attention(query, key, value, module.attend.scale, bias)
    return compose(*(builder.child(name) for name in ("factor", "output", "merge")), attend)


@modular_rule("wellnormed.models.gpt.GPT")
def gpt(module: Any, builder: Builder) -> NormedModule:
    """From tokens to logits."""
    parts = ("logit_scale", "head", "layers", "position", "embedding")
    return compose(*(builder.child(name) for name in parts))
