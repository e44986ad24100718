"""Parameter groups from the arguments of an optimizer: every parameter is in one group, with a norm or without."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn

from wellnormed._inputs import require_numbers
from wellnormed._ranges import NOT_NEGATIVE
from wellnormed.optim.fallback import AdamWSettings, refuse_lost_eps
from wellnormed.optim.parts import Group, rule_of
from wellnormed.optim.settings import GROUP_DEFAULTS, EngineSettings
from wellnormed.parallel.layout import whole
from wellnormed.routing import Assignment, assign_norms
from wellnormed.routing.recipes import DEFAULT_RECIPE
from wellnormed.routing.starting_radii import starting_radii

Params = nn.Module | Assignment | Iterable[Any]
"""A model; an assignment; or parameters, named parameters, or groups of either, as every torch optimizer takes them."""

_SETTINGS = {"params", "lr", "lr_scale", *GROUP_DEFAULTS, *(each.name for each in fields(AdamWSettings))}
"""What a group may say."""
_OF_SAM = {"rho", "adaptive"}
"""The keys that SAM reads in the groups of the optimizer that it makes of its own."""
_KEYS = _SETTINGS | _OF_SAM | {
    "norm", "steps", "param_names", "vector_radii",  # of groups that an optimizer has made
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",  # of schedulers
    "name",
}  # fmt: skip
"""What a group may hold."""

_ADAMW = AdamWSettings()


def resolve(params: Params, settings: EngineSettings) -> tuple[list[Group], Assignment]:
    """Groups whose `params` are `(name, parameter)` pairs, and the part of the assignment that names them.

    Every parameter must be in one group alone, and in the assignment. Other optimizers may move the rest of it.
    """
    norms = params if settings.get("norms") is None else settings["norms"]
    if isinstance(norms, nn.Module):
        recipe, overrides = settings.get("recipe", DEFAULT_RECIPE), settings.get("overrides")
        norms = assign_norms(norms, recipe, overrides, settings.get("per_head", False))
    elif unused := [key for key in ("recipe", "overrides", "per_head") if key in settings]:
        raise ValueError(f"{' and '.join(unused)}= choose the norms of a model; pass the model, or norms=model")
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, Assignment):
        if norms is not params:
            raise ValueError("norms= is given beside an assignment; pass the assignment alone")
        params = [a.parameter for a in params]
    if not isinstance(norms, Assignment):
        raise ValueError(
            "parameters alone do not say which norm they live in; pass the model itself, or these parameters with "
            "norms=model or norms=assign_norms(model)"
        )
    if len(norms) == 0:
        raise ValueError("the assignment holds no trainable parameter; there is nothing to optimize")
    names = {a.parameter: a.name for a in norms}
    resolved = []
    for index, group in enumerate(named(params)):
        members = [tensor for _, tensor in group["params"]]
        if unknown := [p for p in members if p not in names and p.requires_grad]:  # frozen ones are left out
            raise ValueError(
                f"a parameter of shape {tuple(unknown[0].shape)} in group {index} is not in norms=; "
                "assign norms to the same model, after it was moved, wrapped or unfrozen"
            )
        if pairs := [(names[p], p) for p in members if p in names]:
            resolved.append({**group, "params": pairs})
    counts = Counter(name for group in resolved for name, _ in group["params"])
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"parameter {twice[0]!r} is in two groups; leave it in one")
    return resolved, replace(norms, assigned=tuple(a for a in norms if a.name in counts))


def named(params: Iterable[Any]) -> list[Group]:
    """Groups whose `params` are `(name, parameter)` pairs; a parameter without a name gets its number."""
    groups = list(params)
    if not groups:
        raise ValueError("there are no parameters to optimize")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    result, count = [], 0
    for group in groups:
        if not (isinstance(group, dict) and "params" in group):
            raise ValueError(
                f"a parameter group must be a dictionary with params, got {group!r}; pass one such as "
                "{'params': parameters}"
            )
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        pairs = [m if isinstance(m, tuple) else (str(count + i), m) for i, m in enumerate(members)]
        if wrong := [m for _, m in pairs if not isinstance(m, Tensor)]:
            raise ValueError(
                f"params must hold parameters, got {wrong[0]!r}; pass parameters, (name, parameter) pairs or "
                "their groups"
            )
        result.append({**group, "params": pairs})
        count += len(members)
    return result


def split(groups: list[Group], assignment: Assignment, lr: float, settings: EngineSettings) -> list[Group]:
    """Cut groups so that each has one learning rate, one radius, and one step: the engine's, or AdamW's without a norm.

    A radius is that of `radii`, else the group's, else the keyword `radius`, else what the recipe publishes, else 1.
    Where the recipe leaves it to the start, the group holds it under `vector_radii`, by name: as a group of its own for
    every size, the vectors of a resumed run, which finds other weights, would not fit the groups that were saved.
    AdamW's settings are those of the pattern in `adamw` that names the parameter, else its defaults.
    A group's own `lr` multiplies AdamW's by as much as it differs from `lr`, so that layer-wise rates reach both. Its
    `lr_scale` is a factor on both, and is not kept, since the schedulers of timm, which write it, would apply it again.
    """
    lr_factors, radii = settings.get("lr_factors") or {}, settings.get("radii") or {}
    adamw = settings.get("adamw") or {}
    by_pattern = {"*": adamw} if isinstance(adamw, AdamWSettings) else adamw
    for what, values, within in (("radii", radii, None), ("lr_factors", lr_factors, NOT_NEGATIVE)):
        require_numbers("", {f"{what}[{pattern!r}]": value for pattern, value in values.items()}, within)
    factor_of, radius_of = assignment.match(lr_factors, "lr_factors").owner, assignment.match(radii, "radii").owner
    adamw_of = assignment.match(by_pattern, "adamw").owner
    normed = {a.name: a.norm is not None for a in assignment}
    decided = [a for a in assignment if a.radius != 1 and not a.by_start]
    published = {} if "radius" in settings else {a.name: a.radius for a in decided}
    at_start = {} if "radius" in settings else starting_radii(assignment, whole)
    result = []
    for group in groups:
        require_numbers("in a group, ", {"lr": group.get("lr", lr)}, tensor=True)
        if "lr_scale" in group:
            require_numbers("in a group, ", {"lr_scale": group["lr_scale"]}, NOT_NEGATIVE)
            rate = group.get("lr", lr) * group["lr_scale"]
            group = {**{key: value for key, value in group.items() if key != "lr_scale"}, "lr": rate}
        if "rho" in group:  # of SAM, whose groups have all keywords, too
            copies = {key for key, value in settings.items() if key not in _KEYS and group.get(key) is value}
            group = {key: value for key, value in group.items() if key not in copies}
        if of_all := sorted(group.keys() & EngineSettings.__annotations__.keys() - _KEYS):
            raise ValueError(
                f"a group has {of_all[0]!r}, which is of the whole optimizer; pass it beside the groups. "
                "(ZeroRedundancyOptimizer puts it into them; use process_group= in its place)"
            )
        if unknown := sorted(group.keys() - _KEYS):
            raise ValueError(
                f"a group has {unknown[0]!r}, and its settings are {', '.join(sorted(_SETTINGS))}; leave it out. "
                "AdamW moves what overrides={NAME: None} or the recipe leaves to it; a note of your own may be its "
                "name, and what an optimizer around this one reads is set in param_groups when this one is made"
            )
        rule = rule_of({"step_rule": GROUP_DEFAULTS["step_rule"], **settings, **group})
        parts: dict[tuple[bool, float, float | str | None], list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parameter in group["params"]:
            has_norm = normed[name] and rule is not None
            if name in radius_of and not has_norm:
                raise ValueError(f"radii: AdamW moves {name!r}, which has no norm; leave it out of {radius_of[name]!r}")
            radius = radii[radius_of[name]] if name in radius_of else group.get("radius", published.get(name))
            own = radius if has_norm else adamw_of.get(name)
            parts[has_norm, lr_factors.get(factor_of.get(name, ""), 1.0), own].append((name, parameter))
        of_adamw = [key for key in ("betas", "eps") if key in group]
        if of_adamw and rule is not None and all(has_norm for has_norm, *_ in parts):
            raise ValueError(
                f"a group has {' and '.join(of_adamw)}, which AdamW takes, and all of its parameters, such as "
                f"{group['params'][0][0]!r}, have a norm; leave them out, or pass overrides={{NAME: None}}"
            )
        for (has_norm, factor, own), pairs in parts.items():
            if has_norm:
                by_start = own is None and rule is not None and rule.scale_free and not rule.convex
                sizes = {name: at_start[name] for name, _ in pairs if name in at_start and by_start}
                cut = {**group, "lr": group.get("lr", lr) * factor, "vector_radii": sizes, "params": pairs}
                result.append(cut if own is None else {**cut, "radius": own})
            else:
                chosen = vars(by_pattern.get(own, _ADAMW))  # pyrefly: ignore[no-matching-overload]  # a pattern, or None
                cut = {**chosen, **{key: value for key, value in group.items() if key in chosen}}
                cut["lr"] = chosen["lr"] * factor * (group.get("lr", lr) / lr if lr else 1.0)
                for name, parameter in pairs:
                    refuse_lost_eps(name, parameter, cut["eps"])
                result.append({**cut, "params": pairs, "step_rule": "adamw"})
    return result
