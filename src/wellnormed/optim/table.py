"""An optimizer in words: its settings, a row for every parameter, and what a reader of the table may ask."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wellnormed.norms.spectral import RMS_TO_RMS, MatrixNorm
from wellnormed.optim.batch import Moved
from wellnormed.optim.parts import Group
from wellnormed.optim.settings import GROUP_DEFAULTS
from wellnormed.routing import Assignment

_COMMON = ("momentum", "nesterov", "step_rule", "weight_decay")
_USUAL = dict(zip(("coefficients", "method"), RMS_TO_RMS.msign_settings, strict=True))


def table(
    assignment: Assignment, moved: Sequence[Moved], defaults: Group, rates: Mapping[str, float], caps: dict[str, str]
) -> str:
    """The settings that differ from the defaults of every optimizer, in brackets, and below them the table.

    A rate that all parameters have, and settings of `msign` that all norms have, are said once, in the brackets.

    Args:
        assignment: Every parameter with the norm that it moves by; None for AdamW.
        moved: The parameters that move along a direction.
        defaults: The settings of a group that chooses none.
        rates: Name -> learning rate.
        caps: Name -> the constraint, in a few letters.
    """
    said = {key: defaults[key] for key in _COMMON if defaults[key] != GROUP_DEFAULTS[key]}
    shown = {name: f"{rate:.4g}" for name, rate in rates.items()}
    if len({*shown.values()}) == 1:
        said, shown = {"lr": min(shown.values())} | said, {}
    sets = {a.norm.msign_settings for a in assignment if isinstance(a.norm, MatrixNorm)}
    if len(sets) == 1:
        said |= {key: value for key, value in zip(_USUAL, *sets, strict=True) if value != _USUAL[key]}
    rows = []
    for a in assignment:
        norm = a.norm and a.norm.with_settings(**_USUAL) if len(sets) == 1 else a.norm
        rows.append(replace(a, norm=norm))
    columns = {"radius": {one.name: f"{one.radius:g}" for one in moved}, "lr": shown, "cap": caps}
    columns["differs"] = {one.name: _differing(one, defaults) for one in moved}
    settings = ", ".join(f"{key}={value}" for key, value in said.items())
    return f"({settings})\n{replace(assignment, assigned=tuple(rows)).table(columns)}"


def _differing(one: Moved, defaults: Group) -> str:
    """The settings of a parameter's group that differ from the optimizer's, and a direction of the user's."""
    differs = [f"{key}={one.group[key]}" for key in _COMMON if one.group[key] != defaults[key]]
    return ", ".join(differs + ([f"direction={one.direction!r}"] if one.direction != one.rule.direction else []))


def notes(moved: Sequence[Moved], gone: Sequence[str], elsewhere: Sequence[str]) -> list[str]:
    """What a reader of the table may ask; which of its parameters the model has no longer, and which it lacks."""
    lines = [f"no longer in the model: {', '.join(gone)}"] if gone else []
    lines += [f"in no group of this optimizer: {', '.join(elsewhere)}"] if elsewhere else []
    if any(radius < 1 for one in moved for radius in one.group.get("vector_radii", {}).values()):
        lines += [
            "radii below 1, in powers of 2: if a layer at the start maps RMS 1 to RMS s,",
            "a bias has s, a gain s/2, a vector max(s/4, own RMS), a table max(2s, own RMS)",
        ]
    return lines
