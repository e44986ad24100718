"""Saved states as an optimizer takes them: with its parameters in their order, and with the tensors that it keeps."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wellnormed.matrix.coefficients import BFLOAT16_ERROR
from wellnormed.norms import Norm
from wellnormed.norms.base import widened
from wellnormed.optim.parts import Direction, Group, rule_of
from wellnormed.optim.validation import refuse_direction
from wellnormed.parallel.layout import whole
from wellnormed.proof.decimals import shown
from wellnormed.routing.patterns import bare_names

Norms, Directions = Mapping[Tensor, Norm | None], Mapping[Tensor, Direction]
"""The norm of every parameter, None for AdamW; and the directions that a user has given."""


def admitted(state_dict: dict[str, Any], groups: list[Group], norms: Norms, directions: Directions) -> dict[str, Any]:
    """A saved state as these groups take it. A state that they cannot take is refused, with what it holds instead."""
    state = by_name(state_dict, groups)
    begun = [group for group in state["param_groups"] if group["steps"] and group.get("memory") != "gradient"]
    if begun and not state["state"]:
        raise ValueError(
            f"load_state_dict: the state was saved after {begun[0]['steps']} steps, and holds no tensor of any "
            "parameter, as when torch.distributed.checkpoint loads into an optimizer that has made no step; load it by "
            "torch.distributed.checkpoint.state_dict.set_state_dict"
        )
    return {**state, "state": state["state"] | _rescaled_averages(state, groups, norms, directions)}


def restore_kept(
    saved: Mapping[str, Any], groups: list[Group], states: dict[Tensor, Any], norms: Norms, directions: Directions
) -> None:
    """Put what the user's directions keep back as it was saved, in the dtype of `start`; torch cast it to the weight's.

    Counters and averages of more digits than the weight has would come back rounded.
    """
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    parameters = (parameter for group in groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        norm, direction, kept = norms[parameter], directions.get(parameter), saved["state"].get(number, {})
        if norm is None or direction is None:
            continue
        for key in kept.keys() & set(direction.keeps):
            first = direction.start(key, parameter, norm)
            states[parameter][key] = kept[key].to(first.device, first.dtype, copy=True)


def by_name(state_dict: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
    """A saved state in the order of `groups`; unchanged if it carries no names. Prefixes of wrappers do not count."""
    saved = state_dict.get("param_groups") if isinstance(state_dict, dict) and "state" in state_dict else None
    if not (isinstance(saved, list) and all(isinstance(group, dict) for group in saved)):
        raise ValueError(
            f"load_state_dict: the state must be a dictionary of an optimizer, got {type(state_dict).__name__}; pass "
            "what its state_dict() returned"
        )
    if foreign := [group for group in saved if "step_rule" not in group]:
        raise ValueError(
            "load_state_dict: this is the state of an optimizer of another library, whose groups have "
            f"{', '.join(key for key in foreign[0] if key != 'params')} and no step_rule; its averages mean something "
            "else here. Load what state_dict() of an optimizer of wellnormed returned, or begin with a fresh state"
        )
    if not all("param_names" in group for group in saved):
        return state_dict
    theirs_bare = bare_names(name for group in saved for name in group["param_names"])
    bare = bare_names(name for group in groups for name in group["param_names"])
    number = {theirs_bare[n]: i for group in saved for n, i in zip(group["param_names"], group["params"], strict=True)}
    home = {theirs_bare[name]: group for group in saved for name in group["param_names"]}
    names = {bare[name]: i for i, name in enumerate(n for group in groups for n in group["param_names"])}
    if names.keys() != number.keys():
        raise ValueError(
            f"the state lacks {sorted(names.keys() - number.keys())} and has unknown "
            f"{sorted(number.keys() - names.keys())}; load it into the model that it was saved from"
        )
    ordered = []
    for group in groups:
        members = group["param_names"]
        theirs = home[bare[members[0]]]
        if (count := len({id(home[bare[name]]) for name in members})) > 1:
            raise ValueError(
                f"{', '.join(members)} are one group here and {count} in the saved state, with "
                "settings of their own; make the groups as they were"
            )
        if theirs["step_rule"] != group["step_rule"]:
            raise ValueError(
                f"{', '.join(members)} follow {group['step_rule']!r} here, {theirs['step_rule']!r} in the saved one; "
                "make the optimizer, and assign the norms, as they were"
            )
        ordered.append({**theirs, "params": [names[bare[name]] for name in members], "param_names": members})
        if "vector_radii" in theirs:
            radii = {theirs_bare[name]: radius for name, radius in theirs["vector_radii"].items()}
            here = {name: radii[bare[name]] for name in members if bare[name] in radii}
            ordered[-1]["vector_radii"] = here
    tensors = state_dict["state"]
    state = {i: tensors[number[name]] for name, i in names.items() if number[name] in tensors}
    return {**state_dict, "state": state, "param_groups": ordered}


def _rescaled_averages(
    state_dict: Mapping[str, Any], groups: list[Group], norms: Norms, directions: Directions
) -> dict[Any, dict[str, Tensor]]:
    """Saved averages of directions, rescaled where their norm exceeds this optimizer's bound.

    A state whose tensors are not those that its groups keep of these parameters, as of other sizes, is refused.
    """
    rescaled = {}
    saved = [(group, number) for group in state_dict["param_groups"] for number in group["params"]]
    here = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    for (group, number), (name, parameter) in zip(saved, here, strict=False):  # torch refuses other counts
        tensors, norm, rule = state_dict["state"].get(number), norms[parameter], rule_of(group)
        refuse_direction(name, directions.get(parameter), norm, group)  # settings come along with the state
        if not tensors:
            continue
        stored = {key: tuple(getattr(value, "shape", ())) for key, value in tensors.items()}
        shape = tuple(parameter.shape)
        if norm is None or rule is None:
            kept: dict[str, tuple[int, ...]] = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        else:
            direction = directions.get(parameter) or rule.direction
            kept = dict.fromkeys(("momentum_buffer",), shape)
            later = [key for key in direction.keeps if key in stored]  # begun by the first step along the direction
            kept |= {key: tuple(direction.start(key, parameter, norm).shape) for key in later}
        if stored != kept:
            raise ValueError(
                f"load_state_dict: the state of {name!r} holds {_shapes(stored)}, and here {norm or 'AdamW'} keeps "
                f"{_shapes(kept)}; load it into an optimizer with the same norms, of a model of the same sizes"
            )
        if norm is not None and rule is not None and rule.averages == "directions":
            bound = (directions.get(parameter) or rule.direction).bound(norm)
            # weights of 16 bits are proved again after every step, and rounding adds up in their averages
            if bound is not None and parameter.dtype.itemsize > 2:
                average = _within(name, tensors["momentum_buffer"], norm, bound)
                rescaled[number] = {**tensors, "momentum_buffer": average}
    return rescaled


_ROUNDING = 1e-5
"""By how much, relatively, rounding in 32 bits may lengthen a direction."""


def _within(name: str, average: Tensor, norm: Norm, most: float) -> Tensor:
    """An average of directions, of at most this norm: steps along a longer one would exceed their bound.

    One of 16 bits, which rounding has lengthened, is rescaled; a longer one is of other directions, and refused.
    """
    entries = widened(whole(average))
    if not bool(entries.isfinite().all()):
        raise ValueError(f"load_state_dict: the state of {name!r} holds NaN or infinity; load an earlier one")
    length = float(norm.norm(entries))
    if length <= most * (1 + _ROUNDING):
        return average
    if not length <= most * (1 + BFLOAT16_ERROR):
        raise ValueError(
            f"load_state_dict: the state of {name!r} holds an average of directions of norm "
            f"{shown(length, '.4g', up=False)} in {norm}, whose directions here have at most {shown(most, '.4g')}; "
            "load it into an optimizer with the same norms"
        )
    return widened(average) * (most / length)


def _shapes(tensors: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in sorted(tensors.items()))
