"""Layers with a known Lipschitz bound. Every constant that a layer multiplies by is an attribute of that layer.

In the docstrings, LT is "Training Transformers with Enforced Lipschitz Bounds" (Newhouse et al., 2025), and RMS is the
root mean square of the entries of a vector.
"""

from wellnormed.nn import modular_rules as _modular_rules  # registers these layers with `wellnormed.modular`  # noqa: F401
from wellnormed.nn.activation import MaxMin as MaxMin
from wellnormed.nn.activation import ScaledGELU as ScaledGELU
from wellnormed.nn.attention import CausalAttention as CausalAttention
from wellnormed.nn.attention import HalfRotary as HalfRotary
from wellnormed.nn.attention import HeadProjection as HeadProjection
from wellnormed.nn.attention import MergeHeads as MergeHeads
from wellnormed.nn.attention import Rotary as Rotary
from wellnormed.nn.embedding import CappedEmbedding as CappedEmbedding
from wellnormed.nn.embedding import PositionEmbedding as PositionEmbedding
from wellnormed.nn.floored import FlooredNorm as FlooredNorm
from wellnormed.nn.joining import OrthogonalJoin as OrthogonalJoin
from wellnormed.nn.layer_constraints import constraints_of as constraints_of
from wellnormed.nn.mixing import PositionAverages as PositionAverages
from wellnormed.nn.potential import ConvexPotential as ConvexPotential
from wellnormed.nn.projection import BallProjection as BallProjection
from wellnormed.nn.scaling import ConvexResidual as ConvexResidual
from wellnormed.nn.scaling import Residual as Residual
from wellnormed.nn.scaling import Scale as Scale
