"""Rules that give the layers of `wellnormed.nn` their trees in `wellnormed.modular` (Modular Duality).

Importing this module registers the rules.

Example:
    >>> from torch import nn
    >>> from wellnormed.modular import modular_tree
    >>> modular_tree(nn.Sequential(ConvexResidual(ScaledGELU(), 0.25), Scale(2.0))).sensitivity
    2.0
"""

from wellnormed.modular import IDENTITY, Bond, Builder, NormedModule, modular_rule, residual
from wellnormed.modular.layers import weight_and_bias
from wellnormed.modular.tree import Scalar
from wellnormed.nn.activation import MaxMin, ScaledGELU
from wellnormed.nn.attention import HalfRotary, HeadProjection, MergeHeads, Rotary
from wellnormed.nn.embedding import CappedEmbedding, PositionEmbedding
from wellnormed.nn.projection import BallProjection
from wellnormed.nn.scaling import ConvexResidual, Residual, Scale

_BONDS = {
    Rotary: Bond("rotary"),
    HalfRotary: Bond("half rotary"),
    MergeHeads: Bond("merge heads"),  # the RMS of concatenated heads is at most the largest RMS of a head
    ScaledGELU: Bond("scaled gelu"),  # it is divided by its largest slope
    MaxMin: Bond("max min"),  # it orders pairs of the channels of a token or pixel
    # It projects onto a convex set. A radius of 1 or more takes effect only on inputs outside the unit ball.
    BallProjection: Bond("ball projection"),
}
for _layer, _bond in _BONDS.items():
    modular_rule(_layer)(lambda module, builder, bond=_bond: bond)
modular_rule(Scale)(lambda module, builder: Scalar(module.factor))
modular_rule(CappedEmbedding, HeadProjection)(weight_and_bias)


@modular_rule(ConvexResidual)
def convex_residual(module: ConvexResidual, builder: Builder) -> NormedModule:
    """Return the tree of `(1 - strength) x + strength block(x)` (LT equation 1)."""
    return residual(builder.child("block"), module.strength)


@modular_rule(Residual)
def plain_residual(module: Residual, builder: Builder) -> NormedModule:
    """Return the tree of `x + block(x)`."""
    return IDENTITY + builder.child("block")


@modular_rule(PositionEmbedding)
def position_mix(module: PositionEmbedding, builder: Builder) -> NormedModule:
    """Return the tree of `share x + (1 - share) position`, where the position has sensitivity 0: it reads no input."""
    position = builder.atom("weight", sensitivity=0.0)
    return module.token_share * IDENTITY + (1 - module.token_share) * position
