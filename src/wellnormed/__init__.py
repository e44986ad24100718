"""Norm-based deep learning in PyTorch.

A weight lives in a normed space. Choose its norm once and four things follow: how it starts, how its gradient becomes
an update, how it is kept in bounds after every step, and what can be proved about the network.
"""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace

if TYPE_CHECKING:
    from wellnormed import certificates, constraints, data, experiments, matrix, models, nn, norms, optim, train
    from wellnormed.certificates import Certificate, certify, lower_bound, verify
    from wellnormed.constraints import (
        Clip,
        ClippedWeightDecay,
        ColumnCap,
        Hammer,
        HardCap,
        OptimalCap,
        SoftCap,
        SpectralNormalize,
        SpectralWeightDecay,
        Stiefel,
        WeightDecay,
        constrain,
    )
    from wellnormed.norms import BiasRMS, ColNorm, PerHead, Sign, Spectral, assign_norms
    from wellnormed.optim import ConditionalGradient, Muon, Scion

__version__ = "0.1.0"

__all__ = [
    "BiasRMS",
    "Certificate",
    "Clip",
    "ClippedWeightDecay",
    "ColNorm",
    "ColumnCap",
    "ConditionalGradient",
    "Hammer",
    "HardCap",
    "Muon",
    "OptimalCap",
    "PerHead",
    "Scion",
    "Sign",
    "SoftCap",
    "Spectral",
    "SpectralNormalize",
    "SpectralWeightDecay",
    "Stiefel",
    "WeightDecay",
    "assign_norms",
    "certificates",
    "certify",
    "constrain",
    "constraints",
    "data",
    "experiments",
    "lower_bound",
    "matrix",
    "models",
    "nn",
    "norms",
    "optim",
    "train",
    "verify",
]

_EXPORTS = {
    "norms": ("BiasRMS", "ColNorm", "PerHead", "Sign", "Spectral", "assign_norms"),
    "optim": ("ConditionalGradient", "Muon", "Scion"),
    "constraints": (
        "Clip",
        "ClippedWeightDecay",
        "ColumnCap",
        "Hammer",
        "HardCap",
        "OptimalCap",
        "SoftCap",
        "SpectralNormalize",
        "SpectralWeightDecay",
        "Stiefel",
        "WeightDecay",
        "constrain",
    ),
    "certificates": ("Certificate", "certify", "lower_bound", "verify"),
}

_HOMES = {name: f".{room}" for room, names in _EXPORTS.items() for name in names}

# what no room exports is a room itself
__getattr__, __dir__ = lazy_namespace(__name__, {name: _HOMES.get(name, "") for name in __all__})
