"""What happens to a weight after every step. `wn.constrain` attaches it to any optimizer."""

from wellnormed.constraints.base import TARGET as TARGET
from wellnormed.constraints.base import Constraint as Constraint
from wellnormed.constraints.base import State as State
from wellnormed.constraints.caps import ColumnCap as ColumnCap
from wellnormed.constraints.caps import EntryCap as EntryCap
from wellnormed.constraints.caps import HardCap as HardCap
from wellnormed.constraints.caps import SoftCap as SoftCap
from wellnormed.constraints.caps import SpectralInterval as SpectralInterval
from wellnormed.constraints.caps import SpectralNormalize as SpectralNormalize
from wellnormed.constraints.decays import ClippedWeightDecay as ClippedWeightDecay
from wellnormed.constraints.decays import WeightDecay as WeightDecay
from wellnormed.constraints.equalities import FixedNorm as FixedNorm
from wellnormed.constraints.equalities import Orthogonal as Orthogonal
from wellnormed.constraints.equalities import Sphere as Sphere
from wellnormed.constraints.equalities import Stiefel as Stiefel
from wellnormed.constraints.leading import Hammer as Hammer
from wellnormed.constraints.leading import SpectralWeightDecay as SpectralWeightDecay
from wellnormed.constraints.of_optimizer import Constraints as Constraints
from wellnormed.constraints.qk_clip import QKClip as QKClip
