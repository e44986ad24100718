"""Patterns of names, and the parameters that they match."""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def unwrapped(name: str) -> str:
    """A name without the prefixes that `torch.compile`, DDP, FSDP and checkpoint wrappers add."""
    return _WRAPPERS.sub("", name)


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Name -> the name without prefixes of wrappers; if two became equal, only prefixes common to all are removed.

    A module of the user's model may be called `module`, too.

    Example:
        >>> bare_names(["_orig_mod.0.weight"]), bare_names(["weight", "module.weight"])
        ({'_orig_mod.0.weight': '0.weight'}, {'weight': 'weight', 'module.weight': 'module.weight'})
    """
    bare = {name: unwrapped(name) for name in names}
    times = Counter(bare.values())
    inner = {name: name for name in bare}
    while len(heads := {_wrapper(rest) for rest in inner.values()}) == 1 and "" not in heads:
        inner = {name: rest.removeprefix(min(heads)) for name, rest in inner.items()}
    return {name: short if times[short] == 1 else inner[name] for name, short in bare.items()}


def _wrapper(name: str) -> str:
    """The prefix of a wrapper with which a name begins."""
    found = _WRAPPERS.match(name)
    return found[0] if found else ""


def matches(pattern: str, name: str) -> bool:
    """Whether an `fnmatch` pattern matches a parameter's name, or the name of a module that contains it.

    Prefixes of wrappers are optional in both.

    Example:
        >>> matches("_orig_mod.blocks", "blocks.0.weight"), matches("blocks.?.weight", "module.blocks.0.weight")
        (True, True)
    """
    return any(
        fnmatchcase(spelling, form) or fnmatchcase(spelling, f"{form}.*")
        for spelling in {name, unwrapped(name)}
        for form in {pattern, unwrapped(pattern)}
    )


class Matched(NamedTuple):
    """The patterns that serve each parameter."""

    owner: dict[str, str]
    """Name of a parameter -> the only pattern that serves it; in the order of the patterns."""
    passed_by: dict[str, dict[str, str]]
    """Name of a parameter -> the patterns that match it and do not serve it, each with the reason."""


def match_patterns(
    patterns: Iterable[str],
    names: Mapping[str, Sequence[str]],
    what: str,
    why_not: Callable[[str, str], str] = lambda pattern, name: "",
) -> Matched:
    """Find the single pattern that each parameter matches by any of its names.

    A pattern skips parameters that its value cannot serve, as a cap of singular values skips biases. A pattern that
    serves no parameter is an error. So are two patterns that serve one parameter, unless `patterns` maps both to equal
    values. A pattern that equals a name matches that parameter alone.

    Args:
        patterns: The patterns, or a mapping from patterns to values.
        names: Name of a parameter -> all of its names.
        what: The owner of the patterns in messages.
        why_not: The reason why a pattern cannot serve a parameter, by pattern and name; "" if it can.
    """
    owner: dict[str, str] = {}
    passed_by: dict[str, dict[str, str]] = defaultdict(dict)
    refused = []
    bare = bare_names(place for places in names.values() for place in places)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(
                f"{what}: a pattern must be a string, got {pattern!r}; pass the name of a parameter or a module"
            )
        hits = [name for name, places in names.items() if pattern in {*places, *(bare[place] for place in places)}]
        hits = hits or [name for name, places in names.items() if any(matches(pattern, place) for place in places)]
        reasons = {name: why_not(pattern, name) for name in hits}
        if not hits:
            refused.append(_no_match(pattern, names, what))
        elif all(reasons.values()):
            every = "; ".join(map(": ".join, reasons.items()))
            refused.append(f"{what}: {pattern!r} serves none of the parameters that it matches: {every}")
        for name, reason in reasons.items():
            if reason:
                passed_by[name][pattern] = reason
            elif name in owner and not (isinstance(patterns, Mapping) and patterns[owner[name]] == patterns[pattern]):
                both = f"{owner[name]!r} and {pattern!r}"
                raise ValueError(f"{what}: parameter {name!r} matches both {both}; make the patterns disjoint")
            else:
                owner[name] = pattern
    if refused:
        raise ValueError("\n".join(refused))
    return Matched(owner, passed_by)


def _no_match(pattern: str, names: Mapping[str, Sequence[str]], what: str) -> str:
    every = [unwrapped(place) for places in names.values() for place in places]
    if any(matches(f"*.{pattern}", name) for name in every):  # written as for `re.search`
        return f"{what}: the pattern {pattern!r} stands for whole names alone; pass '*.{pattern}'"
    modules = {".".join(parts[:i]) for parts in (name.split(".") for name in every) for i in range(1, len(parts))}
    near = difflib.get_close_matches(unwrapped(pattern), sorted({*every, *modules}), 3, cutoff=0.5)
    known = f"the nearest names are {', '.join(near)}" if near else f"the names are {', '.join(every[:20])}"
    more = ", ..." if not near and every[20:] else ""
    return f"{what}: the pattern {pattern!r} matches no trainable parameter; {known}{more}"
