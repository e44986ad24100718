"""Shares of a step among layers: mass, sensitivity, composition, concatenation (Modular Duality).

Sensitivities are those of the paper, and not the gains of a certificate, which agree with them only if no layer leaves
the unit ball: a factor 2 before attention counts 2 here and 6 in a certificate, whose gain grows with the square of the
radius. Moreover, a certificate has the gains from the input to each layer, where a weight's share needs the gain from
its layer to the output; `certificates.traced_tree` takes one proof for every weight, for models that no rule describes.
"""

from wellnormed.modular import layers as _layers  # registers the rules of torch's layers  # noqa: F401
from wellnormed.modular.builder import Builder as Builder
from wellnormed.modular.builder import modular_rule as modular_rule
from wellnormed.modular.builder import modular_tree as modular_tree
from wellnormed.modular.combinators import IDENTITY as IDENTITY
from wellnormed.modular.combinators import attention as attention
from wellnormed.modular.combinators import residual as residual
from wellnormed.modular.tree import Atom as Atom
from wellnormed.modular.tree import Bond as Bond
from wellnormed.modular.tree import NormedModule as NormedModule
from wellnormed.modular.tree import compose as compose
from wellnormed.modular.tree import concatenate as concatenate
