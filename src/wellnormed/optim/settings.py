"""The keywords that every optimizer takes, and their defaults; `validation` refuses what contradicts itself."""

import inspect
import re
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from torch import nn
from torch.distributed import ProcessGroup

from wellnormed.norms import Norm
from wellnormed.optim.fallback import AdamWSettings
from wellnormed.optim.parts import Direction, Group
from wellnormed.routing import Assignment
from wellnormed.routing.recipes import DEFAULT_RECIPE, RecipeName

StepRuleName = Literal["unconstrained", "constrained", "averaged", "sharp"]
Memory = Literal["buffer", "gradient"]


class EngineSettings(TypedDict, total=False):
    """The keywords that every optimizer takes but those that it decides itself. Its signature has their defaults.

    Args:
        norms: The norms when the parameters do not say them: what `assign_norms` returned, or the model.
        recipe: The recipe by which the model's parameters get their norms; see `assign_norms`.
        overrides: Name pattern -> norm, or None for AdamW; see `assign_norms`.
        per_head: Whether each head's queries, keys and values have a norm of their own; see `assign_norms`.
        momentum: The fraction of the buffer that is kept, in [0, 1). The paper's alpha is `1 - momentum`.
        nesterov: Whether to look one step ahead, so that the oracle sees `momentum * buffer + (1 - momentum) *
            gradient`.
        step_rule: What a step does with the oracle's direction: "unconstrained" adds it (uSCG), "constrained" mixes the
            weight with it (SCG), "averaged" adds an average of directions (ALMOND), "sharp" adds it times the
            momentum's dual norm (steepest descent).
        radius: Radius of the norm ball, in units of each parameter's norm; but under the recipe "modular" it is the
            size of vectors, gains and tables at the start, or of their layer: see `wellnormed.routing.starting_radii`.
        radii: Name pattern -> radius. Unmatched parameters keep `radius`.
        weight_decay: Fraction of the weight, per unit of learning rate, removed before the step. With the step rule
            "unconstrained" it bounds every norm by `overshoot * radius / weight_decay`.
        maximize: Whether to climb instead of to descend.
        directions: Name pattern -> a `Direction`, one of `wellnormed.optim.directions` or of your own. Unmatched
            parameters, and those whose norm it does not act on, keep the direction of the step rule.
        lr_factors: Name pattern -> factor on the learning rate. Unmatched parameters keep factor 1.
        adamw: Settings for parameters without a norm; or name pattern -> settings, such as `{"lm_head":
            AdamWSettings(lr=1e-3)}`. Unmatched parameters keep the defaults of `AdamWSettings`.
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
    maximize: bool
    directions: Mapping[str, Direction]
    lr_factors: Mapping[str, float]
    adamw: AdamWSettings | Mapping[str, AdamWSettings]
    memory: Memory
    process_group: ProcessGroup | None


GROUP_DEFAULTS: Group = {
    "momentum": 0.9,
    "nesterov": False,
    "step_rule": "unconstrained",
    "radius": 1.0,
    "weight_decay": 0.0,
    "maximize": False,
    "memory": "buffer",
}
"""The keywords that a parameter group may set for itself, beside `lr`."""


def spell_out(optimizer: Any) -> None:
    """Show each of these keywords that a class takes, with its type and default, in its signature and in its help."""
    defaults = {**GROUP_DEFAULTS, "recipe": DEFAULT_RECIPE, "per_head": False, **optimizer.preset}
    given = inspect.signature(optimizer.__init__).parameters
    own = [each for each in given.values() if each.kind is not each.VAR_KEYWORD]
    taken = EngineSettings.__annotations__.keys() - given.keys() - optimizer.decides if len(own) < len(given) else ()
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind)
        for name, kind in EngineSettings.__annotations__.items()
        if name in taken
    ]
    optimizer.__signature__ = inspect.Signature([*own[1:], *keywords])  # without `self`
    if taken and optimizer.__doc__ and EngineSettings.__doc__:  # absent under -OO
        listed = inspect.cleandoc(EngineSettings.__doc__).partition("Args:\n")[2]
        told = [text for text in re.split(r"\n(?= {4}\w)", listed) if text.partition(":")[0].strip() in taken]
        optimizer.__doc__ = "\n".join([inspect.cleandoc(optimizer.__doc__), "", "Keyword Args:", *told, ""])
