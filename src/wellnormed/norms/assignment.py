"""Which parameter of a model gets which norm: total, printable, and never silent.

Overrides by pattern come first; then a layer that knows its own structure and says so by a method `parameter_norms()`
(name -> norm); then the recipe (`recipes`), by the parameter's role (`roles`). What remains without a norm is an error.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from wellnormed.norms.base import MatrixNorm, Norm
from wellnormed.norms.recipes import DEFAULT_RECIPE, RECIPES, Recipe
from wellnormed.norms.roles import Roles


@dataclass(frozen=True)
class AssignedParameter:
    """One parameter, the norm it lives in (None: no norm, AdamW moves it), and the reason."""

    name: str
    parameter: nn.Parameter = field(repr=False)
    norm: Norm | None
    reason: str


@dataclass(frozen=True)
class Assignment:
    """Every parameter of a model with its norm; `print` it to see the routing.

    Iterating yields `AssignedParameter`s in the model's order; frozen parameters are listed apart and get no update.
    """

    assigned: tuple[AssignedParameter, ...]
    frozen: tuple[str, ...] = ()
    lr: float = 0.02
    """The learning rate recommended with these norms, which optimizers take that are given none."""

    def __iter__(self) -> Iterator[AssignedParameter]:
        return iter(self.assigned)

    def __len__(self) -> int:
        return len(self.assigned)

    def __str__(self) -> str:
        rows = [(a.name, str(tuple(a.parameter.shape)), _shown(a.norm), a.reason) for a in self.assigned]
        rows += [(name, "", "frozen", "requires_grad is False") for name in self.frozen]
        if len(rows) < 2:
            return "\n".join("  ".join(row) for row in rows) or "no parameters"
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])) for row in rows]
        return "\n".join(lines + self._totals())

    def _totals(self) -> list[str]:
        tensors = Counter(_shown(a.norm) for a in self.assigned)
        entries: Counter[str] = Counter()
        for a in self.assigned:
            entries[_shown(a.norm)] += a.parameter.numel()
        width = len(f"{max(entries.values(), default=0):,}")
        return [f"{entries[shown]:>{width},} entries in {tensors[shown]} x {shown}" for shown in tensors]


def _shown(norm: Norm | None) -> str:
    return "AdamW" if norm is None else repr(norm)


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
    model: nn.Module, recipe: Recipe = DEFAULT_RECIPE, overrides: Mapping[str, Norm | None] | None = None
) -> Assignment:
    """Give every parameter of a model its norm.

    | recipe | embeddings | matrices | last `nn.Linear` | kernels | biases |
    |---|---|---|---|---|---|
    | `"modular"` (MD; LT) | `ColNorm`, see below | `Spectral` | `Spectral` | by positions | `BiasRMS` |
    | `"language"` (LMO, 1-hot input) | `ColNorm` | `Spectral` | `Sign(scaled=True)` | by patches | `BiasRMS` |
    | `"image"` (LMO) | `ColNorm` | `Spectral`, see below | `Sign(scaled=True)` | by patches | `BiasRMS` |
    | `"tied"` (LMO, weight sharing) | `Sign` | `Spectral` | `Sign(scaled=True)` | by patches | `BiasRMS` |
    | `"sign-only"` (LMO) | `Sign` | `Sign(scaled=True)` | the same | the same | `Sign` |
    | `"muon"` | AdamW | `Spectral` | AdamW | by patches | AdamW |

    `"modular"` inflates rare symbols at most 16 times (LT appendix F). `"image"` takes the first layer's inputs for
    pixels. Kernels get `SpectralConv`; fused weights (`nn.MultiheadAttention`, `nn.LSTM`, `nn.GRU`) a `Split` of the
    matrices' `Spectral`; gains of norm layers `Gain`, or AdamW under `"muon"`. An embedding that is also the last layer
    gets the last layer's norm under `"tied"` and `"sign-only"`, AdamW under `"muon"`, and is refused by the others.

    `Roles` says what the first and last layer are; the printed reason says which were taken. A layer with a
    `parameter_norms()` method decides for its own parameters, except that `"muon"` takes only its norms of matrices.
    The original of a parametrized weight gets the norm of that weight; what the parametrization makes of it has another
    norm.

    Args:
        model: Any module. Tied parameters are listed once, under their first name.
        recipe: Which rule serves the parameters that nothing else decides.
        overrides: Name pattern (`fnmatch`; a module's name stands for all below it) -> norm, or None for AdamW.

    Raises:
        ValueError: A pattern matches nothing or overlaps another, a parameter has no rule or is not initialized, a
            norm does not fit or has no oracle, or the places of a tied parameter ask for different norms.

    Example:
        >>> from torch import nn
        >>> print(assign_norms(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)), "language"))
        0.weight  (5, 4)  ColNorm(input_axis=0)  nn.Embedding
        1.weight  (5, 4)  Sign(scaled=True)      last nn.Linear by order of registration
        20 entries in 1 x ColNorm(input_axis=0)
        20 entries in 1 x Sign(scaled=True)
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is not one of {', '.join(RECIPES)}; choose by what the model reads")
    overrides = overrides or {}
    parameters = dict(model.named_parameters())
    places: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)].append(name)
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    overriding = match_patterns(overrides, names, "overrides of assign_norms")
    roles = Roles(model)
    assigned = []
    for name in names:
        parameter = parameters[name]
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} is not initialized; run the model once, then assign norms")
        if name in overriding:
            norm, reason = overrides[overriding[name]], f"override {overriding[name]!r}"
        else:
            norm, reason = _at_all_places(roles, places[id(parameter)], parameter, recipe)
        if norm is not None:
            norm.check_shape(parameter.shape, name)
            if not norm.has_oracle:
                raise ValueError(
                    f"parameter {name!r}: {norm!r} measures but has no oracle to step by; use SpectralConv"
                )
        assigned.append(AssignedParameter(name, parameter, norm, reason))
    frozen = tuple(name for name, parameter in parameters.items() if not parameter.requires_grad)
    return Assignment(tuple(assigned), frozen)


def _at_all_places(roles: Roles, names: list[str], parameter: nn.Parameter, recipe: Recipe) -> tuple[Norm | None, str]:
    """The norm that all places of a parameter ask for."""
    choices = {name: _at_one_place(roles, name, parameter, recipe) for name in names}
    norm, reason = choices[names[0]]
    asked = {asked for asked, _ in choices.values()}
    if len(names) > 1:
        reason = "tied: " + " and ".join(dict.fromkeys(reason for _, reason in choices.values()))
    if len(asked) > 1 and recipe == "muon":
        norm = None  # an embedding is not a hidden matrix
    elif asked == {RECIPES["tied"].embedding, RECIPES["tied"].last} and recipe in ("tied", "sign-only"):
        norm = RECIPES["tied"].last  # the larger of the two bounds both
    elif len(asked) > 1:
        wanted = ", ".join(f"{norm!r} as {name}" for name, (norm, _) in choices.items())
        raise ValueError(
            f"parameter {names[0]!r} is tied, and recipe {recipe!r} asks for different norms: {wanted}; use "
            f"recipe='tied' (Sign for both), or pass overrides={{{names[0]!r}: ...}}"
        )
    return norm, reason


def _at_one_place(roles: Roles, name: str, parameter: nn.Parameter, recipe: Recipe) -> tuple[Norm | None, str]:
    module, leaf = roles.layer_of(name)
    original = "" if name.endswith(leaf) else "the original of a parametrized "
    own = getattr(module, "parameter_norms", None)
    if own is not None and leaf in (norms := own()):
        norm = norms[leaf] if recipe != "muon" or isinstance(norms[leaf], MatrixNorm) else None
        return norm, f"{original}chosen by {type(module).__name__}"
    role = roles.role(name, parameter.ndim)
    if role is not None:
        norm, reason = RECIPES[recipe].norm(role, parameter.ndim)
        return norm, original + reason
    if recipe == "muon":
        return None, f"no rule for it in {type(module).__name__}"
    raise ValueError(
        f"parameter {name!r} of shape {tuple(parameter.shape)} in {type(module).__name__} has no norm under "
        f"recipe {recipe!r}; pass overrides={{{name!r}: ...}} or give the layer a `parameter_norms()` method"
    )
