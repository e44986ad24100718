"""The trees of this room's layers, for `wellnormed.modular`."""

from wellnormed.modular import IDENTITY, Bond, Builder, NormedModule, Scalar, modular_rule, residual
from wellnormed.modular.layers import weight_and_bias
from wellnormed.nn.activation import ScaledGELU
from wellnormed.nn.attention import HeadProjection, MergeHeads, Rotary
from wellnormed.nn.embedding import CappedEmbedding, PositionMix
from wellnormed.nn.projection import BallProjection
from wellnormed.nn.scaling import ConvexResidual, Residual, Scale

_BONDS = {
    Rotary: Bond("rotary"),
    MergeHeads: Bond("merge heads"),  # the RMS of heads side by side is at most the largest of theirs
    ScaledGELU: Bond("scaled gelu"),  # divided by its largest slope
    # A projection onto a convex set; its radius takes effect only on inputs outside the unit ball, or if below 1.
    BallProjection: Bond("ball projection"),
}
for _layer, _bond in _BONDS.items():
    modular_rule(_layer)(lambda module, builder, bond=_bond: bond)
modular_rule(Scale)(lambda module, builder: Scalar(module.factor))
modular_rule(CappedEmbedding, HeadProjection)(weight_and_bias)


@modular_rule(ConvexResidual)
def convex_residual(module: ConvexResidual, builder: Builder) -> NormedModule:
    """LT equation 1."""
    return residual(builder.child("block"), module.strength)


@modular_rule(Residual)
def plain_residual(module: Residual, builder: Builder) -> NormedModule:
    """`x + block(x)`."""
    return IDENTITY + builder.child("block")


@modular_rule(PositionMix)
def position_mix(module: PositionMix, builder: Builder) -> NormedModule:
    """`share x + (1 - share) position`; a position sees no input."""
    position = builder.atom("weight", sensitivity=0.0)
    return module.token_share * IDENTITY + (1 - module.token_share) * position
