"""The keywords that every optimizer takes, their defaults, and which of them contradict each other."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup

from wellnormed._inputs import require_flags, require_numbers, require_patterns
from wellnormed.norms import Norm
from wellnormed.optim.fallback import AdamWSettings
from wellnormed.optim.parts import MEMORIES, STEP_RULES, Direction, Group, rule_of
from wellnormed.routing import Assignment
from wellnormed.routing.recipes import RecipeName

StepRuleName = Literal["unconstrained", "constrained", "averaged", "sharp"]
Memory = Literal["buffer", "gradient"]


class EngineSettings(TypedDict, total=False):
    """The keywords that every optimizer takes. An optimizer's own text says which defaults differ from these.

    Args:
        norms: The norms when the parameters do not say them: what `assign_norms` returned, or the model.
        recipe: The recipe by which the model's parameters get their norms; see `assign_norms`.
        overrides: Name pattern -> norm, or None for AdamW; see `assign_norms`.
        per_head: Whether each head's queries, keys and values have a norm of their own; see `assign_norms`.
        momentum: The fraction of the buffer that is kept, in [0, 1); 0.9. The paper's alpha is `1 - momentum`.
        nesterov: Whether to look one step ahead, so that the oracle sees `momentum * buffer + (1 - momentum) *
            gradient`; False.
        step_rule: What a step does with the oracle's output; "unconstrained". See `ConditionalGradient`.
        radius: Radius of the norm ball, in units of each parameter's norm; 1, but under the recipe "modular" the
            size of vectors, gains and tables at the start, or of their layer: see `wellnormed.routing.starting_radii`.
        radii: Name pattern -> radius. Unmatched parameters keep `radius`.
        weight_decay: Fraction of the weight, per unit of learning rate, removed before the step; 0. With the step rule
            "unconstrained" it bounds every norm by `overshoot * radius / weight_decay`.
        cautious_decay: Whether only those entries decay that the step moves towards zero as well (Chen et al., 2025);
            False. Such a decay bounds no norm.
        maximize: Whether to climb instead of to descend; False.
        normuon: The fraction that NorMuon keeps of its averages of the squares of every neuron (published: 0.95); None
            for no NorMuon. With it the steps of matrices have no bound. See `parts`.
        clip_gain: The gain of spectral clipping, which replaces a matrix's oracle: the direction is the gain times what
            the oracle sees, with its singular values capped at one unit of the norm; None for the oracle. See `parts`.
        directions: Name pattern -> a `Direction` of your own. Unmatched parameters, and those whose norm it does not
            act on, keep the direction of the other settings.
        lr_factors: Name pattern -> factor on the learning rate. Unmatched parameters keep factor 1.
        adamw: Settings for parameters without a norm.
        memory: "buffer", or "gradient" (LMO, memory-light): the momentum is kept in `parameter.grad`, no state at all,
            one parameter at a time. `zero_grad` then does nothing, and gradients must not be rescaled between steps.
        process_group: Processes that hold copies of the parameters, as under DDP: each then computes its share of the
            oracles, and `step` is a collective call. Parameters that are cut (`fully_shard`) are recognised without.
    """

    norms: Assignment | nn.Module | None
    recipe: RecipeName
    overrides: Mapping[str, Norm | None]
    per_head: bool
    momentum: float
    nesterov: bool
    step_rule: StepRuleName
    radius: float
    radii: Mapping[str, float]
    weight_decay: float
    cautious_decay: bool
    maximize: bool
    normuon: float | None
    clip_gain: float | None
    directions: Mapping[str, Direction]
    lr_factors: Mapping[str, float]
    adamw: AdamWSettings
    memory: Memory
    process_group: ProcessGroup | None


GROUP_DEFAULTS: Group = {
    "momentum": 0.9,
    "nesterov": False,
    "step_rule": "unconstrained",
    "radius": 1.0,
    "weight_decay": 0.0,
    "cautious_decay": False,
    "maximize": False,
    "normuon": None,
    "clip_gain": None,
    "memory": "buffer",
}
"""The keywords that a parameter group may set for itself, beside `lr`."""


NO_GRADIENTS = (
    "step() found no gradient in any parameter and changed nothing: backward() was not called since zero_grad(), or "
    "the loss does not depend on these parameters (another copy of the model?)"
)
LOST_DECAY = (
    "a decay of {:.2g} a step is lost where weights round to {}, so it bounds no norm there; keep the weights in "
    "float32, raise the learning rate, or cap them by wellnormed.constrain"
)


def refuse_unknown(optimizer: type, settings: Mapping[str, Any]) -> None:
    """Refuse keywords that the optimizer does not know, and AdamW's settings where they are no `AdamWSettings`."""
    where = f"{optimizer.__name__}: "
    if not isinstance(adamw := settings.get("adamw"), AdamWSettings | None):
        values = adamw if isinstance(adamw, Mapping) else {"lr": 3e-4}
        call = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise ValueError(f"{where}adamw={adamw!r} is no AdamWSettings; pass adamw=AdamWSettings({call})")
    patterns = ("overrides", "radii", "directions", "lr_factors")
    require_patterns(where, {key: settings[key] for key in patterns if settings.get(key) is not None})
    if not isinstance(group := settings.get("process_group"), ProcessGroup | None):
        raise ValueError(f"{where}process_group={group!r} is no process group; pass one of torch.distributed, or None")
    if unknown := settings.keys() - EngineSettings.__annotations__.keys():
        raise TypeError(f"{optimizer.__name__}() got an unexpected keyword argument {min(unknown)!r}")


def check_settings(settings: Group) -> None:
    """Refuse settings of a group that are out of range or contradict each other."""
    lr, momentum, memory = settings["lr"], settings["momentum"], settings["memory"]
    require_numbers("", {"lr": lr}, tensor=True)
    largest = torch.finfo(torch.float32).max
    if not 0 <= lr <= largest:
        raise ValueError(f"lr={lr} must be finite and not negative, in float32 as well")
    if settings["step_rule"] not in STEP_RULES:
        raise ValueError(f"step_rule={settings['step_rule']!r} must be one of {', '.join(get_args(StepRuleName))}")
    if (rule := rule_of(settings)) is None:
        return
    require_numbers("", {key: settings[key] for key in ("momentum", "radius", "weight_decay")})
    require_numbers("", {key: settings[key] for key in ("normuon", "clip_gain") if settings[key] is not None})
    require_flags("", {key: settings[key] for key in ("nesterov", "cautious_decay", "maximize")})
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1): it is the fraction kept")
    if not (settings["radius"] > 0 and lr * settings["radius"] <= largest):
        length = f"lr={lr} times radius={settings['radius']} must be finite in float32: it is a step's norm"
        raise ValueError(f"radius={settings['radius']} must be positive, and {length}")
    if rule.convex and lr > 1:
        raise ValueError(f"lr={lr} must be at most 1 with step_rule='constrained': it is a convex combination")
    decay = settings["weight_decay"]
    if not 0 <= decay * lr <= 1:
        raise ValueError(f"weight_decay={decay} times lr={lr} must lie in [0, 1]: it is the fraction removed")
    if rule.convex and (decay or settings["cautious_decay"]):
        decays = f"weight_decay={decay}, cautious_decay={settings['cautious_decay']}"
        raise ValueError(
            f"{decays}: SCG's step has the decay 1 / radius in it; change radius, or use another step_rule"
        )
    keep, gain = settings["normuon"], settings["clip_gain"]
    if keep is not None and not 0 <= keep < 1:
        raise ValueError(f"normuon={keep} must lie in [0, 1): it is the fraction kept; None for no NorMuon")
    if keep is not None and (rule.convex or not rule.scale_free or memory == "gradient"):
        raise ValueError(
            f"normuon={keep} changes the norm of a step and keeps averages; it goes with the step rules "
            "'unconstrained' and 'averaged' and memory='buffer'"
        )
    if gain is not None and (not rule.scale_free or not 0 < gain < float("inf")):
        raise ValueError(f"clip_gain={gain} must be positive and finite, and step_rule not 'sharp'")
    if settings["nesterov"] and (rule.averages == "directions" or memory == "gradient"):
        raise ValueError("nesterov=True needs an average of gradients in a buffer; leave it out here")
    if memory not in MEMORIES:
        raise ValueError(f"memory={memory!r} must be 'buffer' or 'gradient'")
    if memory == "gradient" and rule.averages == "directions":
        raise ValueError("memory='gradient' keeps no average of oracle outputs; use memory='buffer' with ALMOND")
    if memory == "gradient" and not rule.scale_free:
        raise ValueError("memory='gradient' keeps a sum, whose length a 'sharp' step would take; use memory='buffer'")
