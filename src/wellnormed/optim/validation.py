"""Which settings, parameters, gradients and directions an optimizer takes, at the start and later.

The others are refused before anything is changed, by a `ValueError` that names the parameter and the remedy.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wellnormed._devices import recording
from wellnormed._finite import sizes
from wellnormed._inputs import require_flags, require_hashable, require_numbers, require_patterns
from wellnormed._ranges import KEPT
from wellnormed._warnings import warn
from wellnormed.norms import Norm
from wellnormed.optim.fallback import AdamWSettings
from wellnormed.optim.parts import MEMORIES, Direction, Group, StepRule, rule_of
from wellnormed.optim.settings import GROUP_DEFAULTS, EngineSettings
from wellnormed.parallel.layout import is_distributed, layout, local, refuse_untrainable
from wellnormed.routing import AssignedParameter, Assignment
from wellnormed.routing.assignment import check_norm

NO_GRADIENTS = (
    "step() found no gradient in any parameter and changed nothing: backward() was not called since zero_grad(), or "
    "the loss does not depend on these parameters (another copy of the model?)"
)
LOST_DECAY = (
    "weight_decay takes {:.2g} of a weight in a step, which is less than half a rounding of {}: it changes nothing in "
    "{} and bounds no norm; keep the weights in float32, raise the learning rate, or cap them by wellnormed.constrain"
)

RAISED = 10.0
"""From how many times the rate that AdamW was made with a rate is warned of."""
RAISED_RATE = (
    "AdamW, which moves the parameters without a norm, has the rate {:.3g} now, and was made with {:.3g}: its unit is "
    "another one than that of the norms. A scheduler with one rate for all groups, as OneCycleLR(optimizer, 0.02), "
    "raises it too; give it one for each: max_lr=[group['lr'] for group in optimizer.param_groups]"
)
UNMOVED = (
    "the model's {} have a gradient and are in no group of this optimizer, which does not move them: add them by "
    "optimizer.add_param_group, or make the optimizer again; if another optimizer moves them, all is well"
)
UNCAPPED = (
    "load_state_dict: the state was saved with constraints on {} parameters that have none here, such as {} ({}): call "
    "wellnormed.constrain again, and load the state of the constraints too"
)


AVERAGES = ("momentum_buffer", "exp_avg", "exp_avg_sq")
"""Keys of the tensors that an optimizer's state holds in the shape of their parameter."""


def others(model: nn.Module | None, held: Container[Tensor], frozen: bool = False) -> dict[str, Tensor]:
    """The trained parameters of a model that are not held, by name; with `frozen`, the others too."""
    named = () if model is None else model.named_parameters()
    return {name: p for name, p in named if (frozen or p.requires_grad) and p not in held}


def warn_of_unmoved(elsewhere: Mapping[str, Tensor], known: set[str]) -> None:
    """Warn, once for each, of parameters that joined the model later, have a gradient, and are in no group."""
    if unmoved := [name for name, p in elsewhere.items() if p.grad is not None and name not in known]:
        known.update(unmoved)
        warn(UNMOVED.format(", ".join(unmoved[:3]) + ", ..." * bool(unmoved[3:])))


class NonFiniteGradientError(ValueError):
    """A gradient held NaN or infinity; nothing was changed."""


def refuse_unknown(optimizer: type, settings: Mapping[str, Any]) -> None:
    """Refuse keywords that the optimizer does not know, and settings for AdamW of another type than `AdamWSettings`."""
    where = f"{optimizer.__name__}: "
    adamw = settings.get("adamw")
    by_pattern = isinstance(adamw, Mapping) and all(isinstance(each, AdamWSettings) for each in adamw.values())
    if not by_pattern and not isinstance(adamw, AdamWSettings | None):
        values = adamw if isinstance(adamw, Mapping) else {"lr": 0.01}
        call = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise ValueError(
            f"{where}adamw must be an AdamWSettings, or some by patterns of names, got {adamw!r}; pass "
            f"adamw=AdamWSettings({call})"
        )
    patterns = ("overrides", "radii", "directions", "lr_factors")
    require_patterns(where, {key: settings[key] for key in patterns if settings.get(key) is not None})
    if not isinstance(group := settings.get("process_group"), ProcessGroup | None):
        raise ValueError(f"{where}process_group={group!r} must be a ProcessGroup of torch.distributed, or None")
    if unknown := settings.keys() - EngineSettings.__annotations__.keys():
        near = get_close_matches(name := min(unknown), EngineSettings.__annotations__, n=1)
        raise TypeError(
            f"{optimizer.__name__}() got an unexpected keyword argument {name!r}"
            f"{''.join(f' (did you mean {each!r}?)' for each in near)}; steps are set by momentum, radius and radii, "
            "Newton-Schulz by a norm, overrides={'blocks': wn.Spectral(coefficients='jordan-5')}, and AdamW, for "
            "parameters without a norm, by adamw=AdamWSettings(betas=(0.9, 0.95))"
        )


def read(group: Group) -> list[Any]:
    """The settings of a group, but for its rate, by whose comparison a change is noticed."""
    return [group["step_rule"], id(group.get("vector_radii")), *map(group.get, GROUP_DEFAULTS)]


def check_settings(settings: Group) -> None:
    """Refuse settings of a group that are out of range or contradict each other."""
    lr, memory = settings["lr"], settings["memory"]
    require_numbers("", {"lr": lr}, tensor=True)
    largest = torch.finfo(torch.float32).max
    if not 0 <= lr <= largest:
        raise ValueError(f"lr={lr} must be finite and not negative, in float32 as well")
    if (rule := rule_of(settings)) is None:
        return
    require_numbers("", {"momentum": settings["momentum"]}, KEPT)
    require_numbers("", {key: settings[key] for key in ("radius", "weight_decay")})
    require_flags("", {key: settings[key] for key in ("nesterov", "maximize")})
    if not (settings["radius"] > 0 and lr * settings["radius"] <= largest):
        length = f"lr={lr} times radius={settings['radius']} must be finite in float32: it is a step's norm"
        raise ValueError(f"radius={settings['radius']} must be positive, and {length}")
    if rule.convex and lr > 1:
        raise ValueError(f"lr={lr} must be at most 1 with step_rule='constrained': it is a convex combination")
    decay = settings["weight_decay"]
    if not 0 <= decay * lr <= 1:
        raise ValueError(f"weight_decay={decay} times lr={lr} must lie in [0, 1]: it is the fraction removed")
    if rule.convex and decay:
        raise ValueError(
            f"weight_decay={decay}: SCG's step has the decay 1 / radius in it; change radius, or use another step_rule"
        )
    if settings["nesterov"] and (rule.averages == "directions" or memory == "gradient"):
        raise ValueError("nesterov=True needs an average of gradients in a buffer; leave it out here")
    if memory not in MEMORIES:
        raise ValueError(f"memory={memory!r} must be 'buffer' or 'gradient'")
    if memory == "gradient" and rule.averages == "directions":
        raise ValueError("memory='gradient' keeps no average of oracle outputs; use memory='buffer' with ALMOND")
    if memory == "gradient" and not rule.scale_free:
        raise ValueError("memory='gradient' keeps a sum, whose length a 'sharp' step would take; use memory='buffer'")


def refuse_parameters(assignment: Assignment) -> None:
    """Refuse parameters that training would not reach: on the meta device, pieces of what FSDP1 flattens, or codes."""
    if meta := [a.name for a in assignment if a.parameter.is_meta]:
        raise ValueError(
            f"{', '.join(meta[:3])}{', ...' if meta[3:] else ''} are on the meta device: an optimizer would keep "
            "what to_empty() replaces; make it afterwards"
        )
    for a in assignment:
        refuse_untrainable(a.name, a.parameter)


def refuse_gradient(name: str, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
    """Refuse a gradient that is sparse, or that lies over processes in another way than its parameter.

    Also refused is one of another dtype or shape, and a parameter that was cast or grew after its averages were made.
    """
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {name!r} is sparse ({gradient.layout}), and a norm needs it whole; make the layer with "
            "sparse=False, or its gradient dense with to_dense()"
        )
    if layout(parameter) != layout(gradient):
        expected, actual = (tuple(t.placements) if is_distributed(t) else "plain" for t in (parameter, gradient))
        raise ValueError(
            f"the gradient of {name!r} lies as {actual}, its parameter as {expected}; redistribute the gradient to the "
            "parameter's placements before the step"
        )
    if gradient.dtype != parameter.dtype:
        raise ValueError(
            f"the gradient of {name!r} is of {gradient.dtype}, its parameter of {parameter.dtype}; cast it before the "
            "step, or leave the parameter's grad_dtype alone"
        )
    if gradient.shape != parameter.shape:
        raise ValueError(
            f"the gradient of {name!r} has shape {tuple(gradient.shape)}, its parameter {tuple(parameter.shape)}: it "
            "was resized since; make the gradients again after zero_grad()"
        )
    for key in AVERAGES:
        if key in state and state[key].shape != parameter.shape:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(parameter.shape)}, and its {key} {tuple(state[key].shape)}: it "
                "was resized after a step, and nothing was changed; make the optimizer again"
            )
        if key in state and state[key].dtype != parameter.dtype:
            raise ValueError(
                f"parameter {name!r} is of {parameter.dtype}, and its {key} of {state[key].dtype}: the model was cast "
                "after a step. Cast the optimizer too, by optimizer.load_state_dict(optimizer.state_dict())"
            )


def gradient_sizes(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """For each gradient of this process, by its parameter's name, a number that is finite where all its entries are.

    While a CUDA graph is recorded no value can be looked at, so that all are taken for finite.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, gradient in gradients.items():
        part = local(gradient)
        by_device[part.device][name] = part
    found = dict.fromkeys(gradients, 0.0)
    for device, parts in by_device.items():
        if not recording(device):
            found |= zip(parts, sizes(list(parts.values())), strict=True)
    return found


def refuse_not_finite(sizes: Mapping[str, float], step: int) -> None:
    """Refuse, by name, gradients whose sizes are not finite."""
    if bad := [name for name, size in sizes.items() if not size < math.inf]:
        others = f" and {len(bad) - 5} others" if len(bad) > 5 else ""
        raise NonFiniteGradientError(
            f"the gradient of {', '.join(bad[:5])}{others} holds NaN or infinity at step {step}; nothing was changed. "
            "Lower the learning rate, or find the operation with torch.autograd.set_detect_anomaly(True)"
        )


def directions_of(assignment: Assignment, directions: Mapping[str, Direction]) -> dict[Tensor, Direction]:
    """The user's direction of every parameter whose name a pattern matches and whose norm the direction acts on."""
    for pattern, direction in directions.items():
        if not isinstance(direction, Direction):
            raise ValueError(
                f"directions[{pattern!r}] must be a wellnormed.optim.Direction, got {direction!r}; pass an instance"
            )
        _check_declared(f"directions[{pattern!r}]={direction!r}: ", direction)
    pattern_of = assignment.match(directions, "directions").owner
    chosen = ((a, directions[pattern_of[a.name]]) for a in assignment if a.name in pattern_of)
    return {a.parameter: direction for a, direction in chosen if a.norm is not None and direction.acts_on(a.norm)}


def _check_declared(where: str, direction: Direction) -> None:
    """Refuse a direction that says of itself what the optimizer does not understand, as a string for a tuple."""
    sees, keeps, returns = direction.sees, direction.keeps, direction.returns
    if not isinstance(sees, tuple) or not {"gradient", "weight"}.issuperset(sees) or len(set(sees)) < len(sees):
        raise ValueError(f"{where}sees={sees!r} must be a tuple of 'gradient' and 'weight', or of one of them")
    taken = {"gradient", "weight", "momentum", "result", *(key for memory in MEMORIES.values() for key in memory.state)}
    if not isinstance(keeps, tuple) or taken.intersection(keeps) or len(set(keeps)) < len(keeps):
        raise ValueError(f"{where}keeps={keeps!r} must be a tuple of names, each once, and none of {sorted(taken)}")
    require_hashable(where, direction)
    if not isinstance(same := direction.same_at_any_rate, bool):
        raise ValueError(f"{where}same_at_any_rate={same!r} must be True or False")
    if returns not in ("direction", "weight"):
        raise ValueError(f"{where}returns={returns!r} must be 'direction' or 'weight'")


def refuse_direction(name: str, direction: Direction | None, norm: Norm | None, group: Group) -> None:
    """Refuse a direction of the user's that contradicts itself, or that the settings of its group cannot serve."""
    rule = rule_of(group)
    if direction is None or norm is None or rule is None:
        return
    if contradiction := _contradiction(direction, direction.bound(norm), rule, group):
        raise ValueError(f"directions: {direction!r} of {name!r} {contradiction}")


def _contradiction(direction: Direction, largest: float | None, rule: StepRule, group: Group) -> str:
    """What a direction of this bound cannot go with; empty where nothing contradicts it."""
    if direction.returns == "weight":
        if largest is not None:
            return "returns the weight, whose step has no bound; leave bound out, or use HardCap"
        if rule.averages == "directions":
            return "returns the weight, and step_rule='averaged' averages directions; use another step rule"
        if decay := group["weight_decay"]:
            return (
                f"returns the weight, which weight_decay={decay} does not reach; decay it in the direction, and give "
                "the parameter a group with weight_decay=0"
            )
    if rule.convex and largest is None:
        return (
            "has no bound, and step_rule='constrained' needs one to keep a weight in its ball; use another step rule, "
            "with a constraint"
        )
    if group["memory"] == "gradient" and (direction.keeps or "gradient" in direction.sees):
        does = f"keeps {', '.join(direction.keeps)}" if direction.keeps else "sees the gradient"
        return (
            f"{does}, and memory='gradient' keeps the momentum in place of the gradient and no other state; use "
            "memory='buffer'"
        )
    return ""


def assign_later(
    members: list[tuple[str, nn.Parameter]],
    group: Mapping[str, Any],
    known: Mapping[nn.Parameter, AssignedParameter],
    taken: Iterable[str],
) -> tuple[AssignedParameter, ...]:
    """Names and norms of parameters that come in the middle of training.

    Their group's key `norm` decides for all `members`; without it, the entries that are `known` of them do. A name that
    is given stands before that of the entry. A parameter without an entry, and a name that is among those `taken` by
    the optimizer, are refused.
    """
    names, entries = set(taken), []
    for name, parameter in members:
        entry = known.get(parameter)
        if entry is not None and name != entry.name:
            given = not name.isdigit()  # such names `named` makes
            name = name if given else entry.name
            entry = replace(entry, name=name, aliases=(entry.name, *entry.aliases)) if given else entry
        while name.isdigit() and name in names:
            name = str(int(name) + 1)
        if "norm" in group:
            check_norm(group["norm"], "add_param_group: norm")
            entry = AssignedParameter(name, parameter, group["norm"], "add_param_group")
        elif entry is None:
            raise ValueError(
                f"add_param_group: nothing says which norm parameter {name!r} of shape {tuple(parameter.shape)} lives "
                "in; give the group a key 'norm' (None for AdamW), or make the optimizer with the model"
            )
        if name in names:
            raise ValueError(
                f"add_param_group: parameter {name!r} is in this optimizer already; pass ('another name', parameter)"
            )
        names.add(name)
        entries.append(entry)
    return tuple(entries)
