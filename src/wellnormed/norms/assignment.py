"""Which parameter of a model gets which norm: total, printable, and never silent.

A layer that knows its own structure says so by a method `parameter_norms()` (name -> norm); overrides by pattern come
first, then the layer's word, then the recipe. What remains without a norm is an error.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from wellnormed.norms.base import Norm
from wellnormed.norms.entrywise import BiasRMS, ColNorm, Sign
from wellnormed.norms.spectral import Spectral

Recipe = Literal["language", "sign-head"]


@dataclass(frozen=True)
class AssignedParameter:
    """One parameter, the norm it lives in, and the reason."""

    name: str
    parameter: nn.Parameter = field(repr=False)
    norm: Norm
    reason: str


@dataclass(frozen=True)
class Assignment:
    """Every parameter of a model with its norm; `print` it to see the routing.

    Iterating yields `AssignedParameter`s in the model's order; frozen parameters are listed apart and get no update.
    """

    assigned: tuple[AssignedParameter, ...]
    frozen: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[AssignedParameter]:
        return iter(self.assigned)

    def __len__(self) -> int:
        return len(self.assigned)

    def __str__(self) -> str:
        rows = [(a.name, str(tuple(a.parameter.shape)), repr(a.norm), a.reason) for a in self.assigned]
        rows += [(name, "", "frozen", "requires_grad is False") for name in self.frozen]
        if not rows:
            return "no parameters"
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])) for row in rows)


def matches(pattern: str, name: str) -> bool:
    """Whether an `fnmatch` pattern means a parameter: by its own name, or by that of a module above it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def match_patterns(patterns: Iterable[str], names: Iterable[str], what: str) -> dict[str, str]:
    """Which single pattern each name matches: `{name: pattern}`, names without a match left out.

    Raises:
        ValueError: A pattern matches no name, or two patterns match the same one.
    """
    names = list(names)
    owner: dict[str, str] = {}
    for pattern in patterns:
        hits = [name for name in names if matches(pattern, name)]
        if not hits:
            raise ValueError(
                f"{what}: the pattern {pattern!r} matches no trainable parameter; the names are {', '.join(names)}"
            )
        for name in hits:
            if name in owner:
                raise ValueError(
                    f"{what}: parameter {name!r} matches both {owner[name]!r} and {pattern!r}; "
                    "make the patterns disjoint"
                )
            owner[name] = pattern
    return owner


def assign_norms(
    model: nn.Module, recipe: Recipe = "language", overrides: Mapping[str, Norm] | None = None
) -> Assignment:
    """Give every parameter of a model its norm.

    Recipe `"language"`: `nn.Linear` weights get `Spectral`, `nn.Embedding` weights `ColNorm` over rows (rare symbols
    inflated at most 16 times), vectors `BiasRMS`. `"sign-head"`: the same, with `Sign` for the last `nn.Linear` (LMO
    table 3). A layer with a `parameter_norms()` method decides for its own parameters.

    Args:
        model: Any module. Tied parameters are listed once, under their first name.
        recipe: Which rule serves the parameters that nothing else decides.
        overrides: Name pattern (`fnmatch`; a module's name stands for all below it) -> norm.

    Raises:
        ValueError: A pattern matches nothing or overlaps another, a parameter has no rule, or a norm does not fit.

    Example:
        >>> from torch import nn
        >>> print(assign_norms(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))))
        0.weight  (5, 4)  ColNorm(input_axis=0, max_inflation=16)                         nn.Embedding
        1.weight  (5, 4)  Spectral(coefficients='you-5-nanogpt', method='auto')  nn.Linear
    """
    overrides = overrides or {}
    owners = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    overriding = match_patterns(overrides, names, "overrides of assign_norms")
    linears = [name for name, module in owners.items() if isinstance(module, nn.Linear)]
    assigned = []
    for name in names:
        parameter = parameters[name]
        module_name, _, leaf = name.rpartition(".")
        module = owners[module_name]
        if name in overriding:
            norm, reason = overrides[overriding[name]], f"override {overriding[name]!r}"
        else:
            norm, reason = _default_norm(module, leaf, parameter, recipe, bool(linears) and module_name == linears[-1])
        if norm is None:
            raise ValueError(
                f"parameter {name!r} of shape {tuple(parameter.shape)} in {type(module).__name__} has no norm under "
                f"recipe {recipe!r}; pass overrides={{{name!r}: ...}} or give the layer a `parameter_norms()` method"
            )
        norm.check_shape(parameter.shape, name)
        assigned.append(AssignedParameter(name, parameter, norm, reason))
    frozen = tuple(name for name, parameter in parameters.items() if not parameter.requires_grad)
    return Assignment(tuple(assigned), frozen)


def _default_norm(
    module: nn.Module, leaf: str, parameter: nn.Parameter, recipe: Recipe, last: bool
) -> tuple[Norm | None, str]:
    own = getattr(module, "parameter_norms", None)
    if own is not None and leaf in (norms := own()):
        return norms[leaf], f"chosen by {type(module).__name__}"
    if isinstance(module, nn.Embedding):
        return ColNorm(input_axis=0, max_inflation=16), "nn.Embedding"
    if isinstance(module, nn.Linear) and leaf == "weight":
        if recipe == "sign-head" and last:
            return Sign(), "last nn.Linear"
        return Spectral(), "nn.Linear"
    if parameter.ndim == 1:
        return BiasRMS(), "vector"
    return None, ""
