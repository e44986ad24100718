"""Norm-based deep learning in PyTorch.

A weight lives in a normed space. Choose its norm once and four things follow: how it starts, how its gradient becomes
an update, how it is kept in bounds after every step, and what can be proved about the network.
"""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace

if TYPE_CHECKING:
    from wellnormed import (
        certificates,
        constraints,
        data,
        experiments,
        matrix,
        models,
        modular,
        nn,
        norms,
        optim,
        parallel,
        train,
    )
    from wellnormed.certificates import (
        Certificate,
        certify,
        lower_bound,
        verify,
    )
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
    from wellnormed.modular import (
        modular_tree,
    )
    from wellnormed.norms import (
        BiasRMS,
        ColNorm,
        ConvOperator,
        Euclidean,
        Experts,
        Gain,
        PerHead,
        RowNorm,
        Sign,
        Spectral,
        SpectralConv,
        Split,
        assign_norms,
        initialize_,
    )
    from wellnormed.optim import (
        AdamWSettings,
        Almond,
        ConditionalGradient,
        ModularDescent,
        Muon,
        NormalizedSGD,
        Scion,
        Signum,
        SpectralDescent,
    )

__version__ = "0.1.0"

__all__ = [
    "AdamWSettings",
    "Almond",
    "BiasRMS",
    "Certificate",
    "Clip",
    "ClippedWeightDecay",
    "ColNorm",
    "ColumnCap",
    "ConditionalGradient",
    "ConvOperator",
    "Euclidean",
    "Experts",
    "Gain",
    "Hammer",
    "HardCap",
    "ModularDescent",
    "Muon",
    "NormalizedSGD",
    "OptimalCap",
    "PerHead",
    "RowNorm",
    "Scion",
    "Sign",
    "Signum",
    "SoftCap",
    "Spectral",
    "SpectralConv",
    "SpectralDescent",
    "SpectralNormalize",
    "SpectralWeightDecay",
    "Split",
    "Stiefel",
    "WeightDecay",
    "assign_norms",
    "certificates",
    "certify",
    "constrain",
    "constraints",
    "data",
    "experiments",
    "initialize_",
    "lower_bound",
    "matrix",
    "models",
    "modular",
    "modular_tree",
    "nn",
    "norms",
    "optim",
    "parallel",
    "train",
    "verify",
]

_EXPORTS = {
    "norms": (
        "BiasRMS",
        "ColNorm",
        "ConvOperator",
        "Euclidean",
        "Experts",
        "Gain",
        "PerHead",
        "RowNorm",
        "Sign",
        "Spectral",
        "SpectralConv",
        "Split",
        "assign_norms",
        "initialize_",
    ),
    "modular": ("modular_tree",),
    "optim": (
        "AdamWSettings",
        "Almond",
        "ConditionalGradient",
        "ModularDescent",
        "Muon",
        "NormalizedSGD",
        "Scion",
        "Signum",
        "SpectralDescent",
    ),
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
    "certificates": (
        "Certificate",
        "certify",
        "lower_bound",
        "verify",
    ),
}

_HOMES = {name: f".{room}" for room, names in _EXPORTS.items() for name in names}

# what no room exports is a room itself
__getattr__, __dir__ = lazy_namespace(__name__, {name: _HOMES.get(name, "") for name in __all__})
