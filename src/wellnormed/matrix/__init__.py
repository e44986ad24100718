"""Functions of a matrix through its singular values: signs, clips, caps, norms and proved bounds.

All take `(*batch, m, n)` in any floating dtype, entries from 1e-30 to 1e30, and work in plain spectral (l2 -> l2)
units; nothing here knows of layers or optimizers. A `ValueError` names the argument at fault: a tensor other than real
floating-point matrices, NaN and infinity (not checked under `torch.compile`), a number out of its range, a bound that
does not broadcast to the batch, an unknown name.
"""

from wellnormed.matrix.bounds import spectral_norm_upper_bound as spectral_norm_upper_bound
from wellnormed.matrix.clips import spectral_clip as spectral_clip
from wellnormed.matrix.clips import spectral_clipped_weight_decay as spectral_clipped_weight_decay
from wellnormed.matrix.clips import spectral_hardcap as spectral_hardcap
from wellnormed.matrix.clips import spectral_relu as spectral_relu
from wellnormed.matrix.coefficients import REGISTRY as REGISTRY
from wellnormed.matrix.coefficients import CoefficientSet as CoefficientSet
from wellnormed.matrix.equilibrium import clipped_weight_decay_equilibrium as clipped_weight_decay_equilibrium
from wellnormed.matrix.leading import leading_singular_triplet as leading_singular_triplet
from wellnormed.matrix.leading_maps import spectral_hammer as spectral_hammer
from wellnormed.matrix.leading_maps import spectral_weight_decay as spectral_weight_decay
from wellnormed.matrix.minimax import optimal_coefficients as optimal_coefficients
from wellnormed.matrix.msign import msign as msign
from wellnormed.matrix.msign import overshoot as overshoot
from wellnormed.matrix.msign import semi_orthogonal as semi_orthogonal
from wellnormed.matrix.msign import stiefel_project as stiefel_project
from wellnormed.matrix.soft_cap import soft_cap as soft_cap
from wellnormed.matrix.soft_cap import soft_cap_strength as soft_cap_strength
from wellnormed.matrix.spectral_norms import spectral_norm as spectral_norm
from wellnormed.matrix.spectral_norms import spectral_normalize as spectral_normalize
