"""Which constraint and which learning rate every weight of a model gets in a training run."""

from collections.abc import Callable

from torch import nn

import wellnormed.constraints as constraints
from wellnormed.constraints import Constraint
from wellnormed.models.files import CharacterModel
from wellnormed.models.gpt import GPT, Attention, FeedForward
from wellnormed.nn import ConvexPotential, constraints_of
from wellnormed.train.config import TrainConfig
from wellnormed.train.token_config import TokenTrainConfig

CONSTRAINTS: dict[str, Callable[..., Constraint]] = {
    "soft-cap": constraints.SoftCap,
    "hard-cap": constraints.HardCap,
    "spectral-normalize": constraints.SpectralNormalize,
}
PARTS: dict[type[nn.Module], dict[str, str]] = {
    Attention: {"query": "query", "key": "key", "value": "value", "output": "output"},
    FeedForward: {"input": "feed_in", "output": "feed_out"},
}
"""Part of a layer -> role of the weight matrix in it."""


def weight_roles(model: GPT) -> dict[str, str]:
    """Name of every weight matrix -> its role, as in `Caps`, or `embedding`."""
    roles = {"embedding.weight": "embedding", "head.weight": "head"}
    if not model.config.rotary:
        roles["position.weight"] = "embedding"
    for name, module in model.named_modules():
        for part, role in PARTS.get(type(module), {}).items():
            leaves = getattr(module, part).named_parameters()
            roles |= {f"{name}.{part}.{leaf}": role for leaf, parameter in leaves if parameter.ndim == 2}
    return roles


def weight_constraints(model: CharacterModel, config: TrainConfig | TokenTrainConfig) -> dict[str, Constraint]:
    """Name of every weight that is kept in bounds -> what keeps it there."""
    own = constraints_of(model)
    if isinstance(config, TrainConfig) and not isinstance(model, GPT):
        return own | {"head.weight": constraints.HardCap(config.head_cap)}
    assert isinstance(model, GPT)
    assert config.constraint != "none"
    constraint, waits = CONSTRAINTS[config.constraint], {"every": config.every} if config.every > 1 else {}
    roles = {name: role for name, role in weight_roles(model).items() if name not in own}
    return own | {name: constraint(getattr(config.caps, role), **waits) for name, role in roles.items()}


def rate_factors(model: CharacterModel, config: TrainConfig | TokenTrainConfig) -> dict[str, float]:
    """Name of a parameter -> what its learning rate is multiplied by, where that is not 1."""
    if isinstance(config, TrainConfig) and not isinstance(model, GPT):
        hidden = [f"layers.{name}.bias" for name, m in model.layers.named_children() if isinstance(m, ConvexPotential)]
        return dict.fromkeys(hidden, config.bias_rate) | {
            "embedding.weight": config.embedding_rate,
            "mixing.gain_H": config.gain_rate,
            "head.weight": config.head_rate * config.head_cap,
        }
    assert isinstance(model, GPT)
    roles = weight_roles(model)
    factors = {name: config.bias_rate for name, _ in model.named_parameters() if name not in roles}
    if model.head.bias is not None:  # it stands before the logit scale, and would move that much faster
        factors["head.bias"] = config.bias_rate / model.config.logit_scale
    own = {"embedding": config.embedding_rate, "head": config.head_rate}
    return factors | {name: own[role] for name, role in roles.items() if role in own}
