"""Norm-based deep learning in PyTorch.

A weight lives in a normed space. Choose its norm once and four things follow: how it starts, how its gradient becomes
an update, how it is kept in bounds after every step, and what can be proved about the network.

At the root are the names that a training script needs; all others are reached through their rooms (`wn.norms.Gain`).
"""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace
from wellnormed._version import VERSION

if TYPE_CHECKING:
    from wellnormed import certificates, constraints, matrix, models, modular, nn, norms, optim
    from wellnormed import data as data
    from wellnormed import lowering as lowering
    from wellnormed import parallel as parallel
    from wellnormed import program as program
    from wellnormed import proof as proof
    from wellnormed import routing as routing
    from wellnormed import train as train
    from wellnormed.certificates import calibrate, capture, certify, constrain, lower_bound, verify
    from wellnormed.constraints import ColumnCap, HardCap, SoftCap
    from wellnormed.models import export
    from wellnormed.norms import ColNorm, Sign, Spectral
    from wellnormed.optim import Almond, Averaged, Muon, Scion
    from wellnormed.routing import assign_norms, initialize_
else:
    __getattr__, __dir__ = lazy_namespace(__name__)

__version__ = VERSION

__all__ = [
    "Almond",
    "Averaged",
    "ColNorm",
    "ColumnCap",
    "HardCap",
    "Muon",
    "Scion",
    "Sign",
    "SoftCap",
    "Spectral",
    "assign_norms",
    "calibrate",
    "capture",
    "certificates",
    "certify",
    "constrain",
    "constraints",
    "export",
    "initialize_",
    "lower_bound",
    "matrix",
    "models",
    "modular",
    "nn",
    "norms",
    "optim",
    "verify",
]
