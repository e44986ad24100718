"""The optimizer of a run, with the constraint and the learning rate of every weight."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import wellnormed.constraints as constraints
from wellnormed.certificates import constrain
from wellnormed.constraints import Constraint
from wellnormed.models.files import Model
from wellnormed.models.gpt import GPT, Attention, FeedForward
from wellnormed.models.potential_gpt import PotentialGPT
from wellnormed.nn import ConvexPotential, constraints_of
from wellnormed.optim import AdamWSettings, Averaged, Muon, Scion
from wellnormed.routing import assign_norms
from wellnormed.train.config import TrainConfig

CONSTRAINTS: dict[str, Callable[..., Constraint]] = {
    "soft-cap": constraints.SoftCap,
    "hard-cap": constraints.HardCap,
    "spectral-normalize": constraints.SpectralNormalize,
    "stiefel": constraints.Stiefel,
    "weight-decay": constraints.WeightDecay,
    "spectral-weight-decay": constraints.SpectralWeightDecay,
    "hammer": constraints.Hammer,
}
GAIN_RATE = 0.3
"""Factor on the learning rate of the gains of a `potential` model's averages."""
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


def weight_constraints(model: Model, config: TrainConfig) -> dict[str, Constraint]:
    """Name of every constrained weight -> its constraint."""
    own = constraints_of(model)
    if isinstance(model, PotentialGPT):
        return own | {"head.weight": constraints.HardCap(config.head_cap)}
    assert isinstance(model, GPT)
    assert config.constraint != "none"
    constraint = partial(CONSTRAINTS[config.constraint], **({"every": config.every} if config.every > 1 else {}))
    roles = {name: role for name, role in weight_roles(model).items() if name not in own}
    return own | {name: constraint(getattr(config.caps, role)) for name, role in roles.items()}


def rate_factors(model: Model, config: TrainConfig) -> dict[str, float]:
    """Name of a parameter -> the factor on its learning rate, where that is not 1."""
    if isinstance(model, PotentialGPT):
        hidden = [f"layers.{name}.bias" for name, m in model.layers.named_children() if isinstance(m, ConvexPotential)]
        return dict.fromkeys(hidden, config.bias_rate) | {
            "embedding.weight": config.embedding_rate,
            "mixing.gain_H": GAIN_RATE,
            "head.weight": config.head_rate * config.head_cap,
        }
    assert isinstance(model, GPT)
    roles = weight_roles(model)
    factors = {name: config.bias_rate for name, _ in model.named_parameters() if name not in roles}
    if model.head.bias is not None:  # the logit scale multiplies it, so it would move that much faster
        factors["head.bias"] = config.bias_rate / model.config.logit_scale
    own = {"embedding": config.embedding_rate, "head": config.head_rate}
    return factors | {name: own[role] for name, role in roles.items() if role in own}


def build_optimizer(
    model: Model, config: TrainConfig, group: Any = None
) -> tuple[torch.optim.Optimizer, constraints.Constraints | None]:
    """The optimizer of a run, and the constraints that hold after each of its steps, if there are any.

    `group` is the processes that hold copies of the weights.
    """
    betas = (0.9, config.adamw_average)
    if config.optimizer == "adamw":
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas)
    else:
        shared: dict[str, Any] = {
            "momentum": config.momentum, "nesterov": True, "weight_decay": config.weight_decay, "process_group": group,
        }  # fmt: skip
        if config.optimizer == "scion":
            factors = rate_factors(model, config) if isinstance(model, GPT | PotentialGPT) else {}
            norms = assign_norms(model, recipe="modular")
            optimizer = Scion(norms, config.learning_rate, radius=1.0, lr_factors=factors, **shared)
        else:
            adamw = AdamWSettings(lr=config.adamw_rate, betas=betas)
            optimizer = Muon(model, config.learning_rate, recipe="muon", adamw=adamw, **shared)
    moved = Averaged(optimizer) if config.schedule == "none" else optimizer
    if not isinstance(model, PotentialGPT) and (config.constraint == "none" or not isinstance(model, GPT)):
        return moved, None
    norms = optimizer.assignment if isinstance(optimizer, Scion) else assign_norms(model, recipe="modular")
    # without proofs at every step: constraints keep their caps, checkpoints have checksums, and results are proved
    return moved, constrain(optimizer, weight_constraints(model, config), norms, prove=False)
