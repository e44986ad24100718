"""The ways of Training Transformers with Enforced Lipschitz Bounds to keep weights in bounds."""

from typing import Literal

import wellnormed as wn
from wellnormed.constraints import Constraint, Hammer, SpectralNormalize, SpectralWeightDecay, Stiefel

Method = Literal[
    "weight decay", "spectral weight decay", "spectral normalization", "stiefel", "hammer", "soft cap", "hard cap"
]


def constraint_of(method: Method, strength: float) -> Constraint | None:
    """What holds a matrix: `strength` is a cap in RMS -> RMS units, or a decay. Weight decay is the optimizer's own."""
    match method:
        case "weight decay":
            return None
        case "spectral weight decay":
            return SpectralWeightDecay(strength)
        case "spectral normalization":
            return SpectralNormalize(strength)
        case "stiefel":
            return Stiefel(strength)
        case "hammer":
            return Hammer(strength, as_published=True)
        case "soft cap":
            return wn.SoftCap(strength)
        case "hard cap":
            return wn.HardCap(strength)
