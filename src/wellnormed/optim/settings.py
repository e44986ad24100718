"""What the engine can be told, and which settings contradict each other."""

from typing import Literal, get_args

from wellnormed.optim.routing import Group

StepRule = Literal["unconstrained", "constrained", "averaged", "sharp"]
Memory = Literal["buffer", "gradient"]


def check_settings(settings: Group, memory: Memory) -> None:
    """Refuse settings of a group that are out of range or contradict each other.

    Raises:
        ValueError: Naming setting, value and remedy.
    """
    lr, momentum, rule = settings["lr"], settings["momentum"], settings["step_rule"]
    if not 0 <= lr < float("inf"):
        raise ValueError(f"lr={lr} must be finite and not negative")
    if rule == "adamw":
        return
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1): it is the fraction kept")
    if not 0 < settings["radius"] < float("inf"):
        raise ValueError(f"radius={settings['radius']} must be positive and finite")
    if rule not in get_args(StepRule):
        raise ValueError(f"step_rule={rule!r} must be one of {', '.join(get_args(StepRule))}")
    if rule == "constrained" and lr > 1:
        raise ValueError(f"lr={lr} must be at most 1 with step_rule='constrained': it is a convex combination")
    decay = settings["weight_decay"]
    if not 0 <= decay * lr <= 1:
        raise ValueError(f"weight_decay={decay} times lr={lr} must lie in [0, 1]: it is the fraction removed")
    if decay and rule == "constrained":
        raise ValueError(f"weight_decay={decay}: SCG has the decay 1 / radius already; change radius instead")
    if settings["nesterov"] and (rule == "averaged" or memory == "gradient"):
        raise ValueError("nesterov=True needs an average of gradients in a buffer; leave it out here")
    if memory not in get_args(Memory):
        raise ValueError(f"memory={memory!r} must be 'buffer' or 'gradient'")
    if memory == "gradient" and rule == "averaged":
        raise ValueError("memory='gradient' keeps no average of oracle outputs; use memory='buffer' with ALMOND")
    if memory == "gradient" and rule == "sharp":
        raise ValueError("memory='gradient' keeps a sum, whose length a 'sharp' step would take; use memory='buffer'")
