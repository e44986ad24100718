"""What happens to a weight after every step, and `constrain`, which attaches it to any optimizer."""

from wellnormed.constraints.attach import Constraints as Constraints
from wellnormed.constraints.attach import constrain as constrain
from wellnormed.constraints.rules import ColumnCap as ColumnCap
from wellnormed.constraints.rules import Constraint as Constraint
from wellnormed.constraints.rules import HardCap as HardCap
from wellnormed.constraints.rules import SoftCap as SoftCap
from wellnormed.constraints.rules import SpectralNormalize as SpectralNormalize
from wellnormed.constraints.rules import WeightDecay as WeightDecay
