"""The ways of Training Transformers with Enforced Lipschitz Bounds to keep weights in bounds."""

from typing import Literal

from papers._caps_as_published import HammerAsPublished
from wellnormed.constraints import Constraint
from wellnormed.train.optimizer import CONSTRAINTS

Method = Literal[
    "weight decay", "spectral weight decay", "spectral normalization", "stiefel", "hammer", "soft cap", "hard cap"
]


def constraint_of(method: Method, strength: float) -> Constraint | None:
    """The constraint of a matrix: `strength` is a cap in RMS -> RMS units, or a decay. The optimizer decays weights."""
    name = method.replace("ization", "ize").replace(" ", "-")
    if method == "hammer":
        return HammerAsPublished(strength)
    return None if method == "weight decay" else CONSTRAINTS[name](strength)
