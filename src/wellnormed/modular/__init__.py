"""How one step is shared among layers: mass, sensitivity, composition, concatenation (Modular Duality).

Sensitivities are those of the paper and not the kernel's gains, which agree with them only where no layer leaves the
unit ball: a factor 2 before attention counts 2 here and 6 in a certificate, whose gain grows with the square of the
radius. A certificate also has the gains from the input to each layer, and a weight's share needs the one from its
layer to the output, so that reading it from the kernel would take a proof for every weight.
"""

from wellnormed.modular import layers as _layers  # registers the layers that are known  # noqa: F401
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
