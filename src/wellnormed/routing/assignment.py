"""The assignment of norms to all parameters of a model, which can be printed and leaves nothing out silently.

Overrides by pattern come first; then layers with a method `parameter_norms()` (name -> norm); then the recipe
(`recipes`), by the parameter's role (`roles`). A parameter that gets no norm is an error.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from wellnormed._inputs import require_flags, require_hashable, require_module, require_patterns
from wellnormed._warnings import warn
from wellnormed.norms.base import Norm
from wellnormed.norms.spectral import MatrixNorm
from wellnormed.routing.attributes import stored
from wellnormed.routing.patterns import Matched, match_patterns
from wellnormed.routing.places import UNKNOWN, Weak
from wellnormed.routing.recipes import DEFAULT_RECIPE, RECIPES, RecipeName
from wellnormed.routing.roles import Roles
from wellnormed.routing.tables import aligned, grouped


@dataclass(frozen=True)
class AssignedParameter:
    """One parameter, its norm, and the reason in words.

    A parameter without a norm (None) is moved by AdamW. The radius of the norm ball is the recipe's published one, or
    1, unless `starting_radii` decides it when an optimizer is made (`by_start`). A tied parameter has its first name,
    with the others as aliases. A norm that does not fit the parameter is refused.
    """

    name: str
    parameter: nn.Parameter = field(repr=False)
    norm: Norm | None
    reason: str
    radius: float = 1.0
    aliases: tuple[str, ...] = ()
    by_start: bool = False
    padding: int | None = field(default=None, repr=False)
    """The row of a table that stands for padding, and stays zero."""

    def __post_init__(self) -> None:
        if self.parameter.numel() == 0:
            raise ValueError(
                f"parameter {self.name!r} of shape {tuple(self.parameter.shape)} is empty, so it has no norm; give its "
                "layer a size of at least 1, or freeze it with requires_grad_(False)"
            )
        if self.norm is None:
            return
        if self.parameter.is_complex():
            raise ValueError(
                f"parameter {self.name!r} must be real for a norm, got {self.parameter.dtype}; override it with None"
            )
        self.norm.check_shape(self.parameter.shape, self.name)


class Weight(NamedTuple):
    """A matrix or a kernel of a model, frozen or not, by all its names."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    outputs: int


@dataclass(frozen=True)
class Assignment:
    """Every parameter of a model with its norm; `print` it to see the routing.

    Iterating yields `AssignedParameter`s in the model's order; frozen parameters are listed apart and get no update.
    """

    assigned: tuple[AssignedParameter, ...]
    frozen: tuple[str, ...] = ()
    lr: float = 0.02
    """The learning rate recommended with these norms; the default of optimizers that are made from them."""
    weights: tuple[Weight, ...] = field(default=(), repr=False)
    """All matrices and kernels; their initial sizes set the radii of vectors and embeddings."""
    model: Weak = field(default=UNKNOWN, repr=False, compare=False)
    """A weak reference to the model of these parameters: a call returns the model, or None once it is freed."""
    overrides: Mapping[str, Norm | None] = field(default_factory=dict, repr=False, compare=False)
    """The overrides by which they were assigned."""

    def __iter__(self) -> Iterator[AssignedParameter]:
        return iter(self.assigned)

    def __len__(self) -> int:
        return len(self.assigned)

    def match(
        self,
        patterns: Iterable[str],
        what: str,
        why_not: Callable[[str, AssignedParameter], str] = lambda pattern, a: "",
    ) -> Matched:
        """The single pattern that each parameter matches by any of its names; see `patterns.match_patterns`."""
        named = {a.name: a for a in self}
        places = {a.name: (a.name, *a.aliases) for a in self}
        return match_patterns(patterns, places, what, lambda pattern, name: why_not(pattern, named[name]))

    def __str__(self) -> str:
        return self.table()

    def table(self, columns: Mapping[str, Mapping[str, str]] | None = None) -> str:
        """The printed table, with further columns between norm and reason: `{title: {parameter: text}}`.

        A column without any text is left out. Parameters whose rows differ only in numbers inside their names are one
        row with their count, such as `blocks.{0..3}.mlp.weight`.
        """
        columns = {title: texts for title, texts in (columns or {}).items() if any(texts.values())}
        rows: list[tuple[str, ...]] = []
        for a in self:
            further = (texts.get(a.name, "") for texts in columns.values())
            rows.append(
                (a.name, str(tuple(a.parameter.shape)), a.norm.label if a.norm else "AdamW", *further, a.reason)
            )
        rows += [(name, "", "frozen", *("" for _ in columns), "requires_grad is False") for name in self.frozen]
        if not self.assigned and not self.frozen:
            return "no parameters"
        shown: list[tuple[str, ...]] = [("parameter", "shape", "norm", *columns, "why")] if columns else []
        for count, (name, shape, *rest) in grouped(rows):
            shown.append((name, f"{count} x {shape}".rstrip() if count > 1 else shape, *rest))
        return "\n".join([aligned(shown), *(self._totals() if len(rows) > 1 else [])])

    def _totals(self) -> list[str]:
        sizes: dict[str, list[int]] = defaultdict(list)
        for a in self:
            sizes[a.norm.label if a.norm else "AdamW"].append(a.parameter.numel())
        width = len(f"{max(map(sum, sizes.values()), default=0):,}")
        return [f"{sum(counts):>{width},} entries in {len(counts)} x {norm}" for norm, counts in sizes.items()]


def assign_norms(
    model: nn.Module,
    recipe: RecipeName = DEFAULT_RECIPE,
    overrides: Mapping[str, Norm | None] | None = None,
    per_head: bool = False,
) -> Assignment:
    """Give every parameter of a model its norm.

    | recipe | embeddings | matrices | last `nn.Linear` | kernels | biases |
    |---|---|---|---|---|---|
    | `"modular"` (MD; LT) | `ColNorm`, see below | `Spectral` | `Spectral` | by positions | `BiasRMS` |
    | `"language"` (LMO, 1-hot input) | `ColNorm` | `Spectral` | `Sign(normalized=True)` | by patches | `BiasRMS` |
    | `"image"` (LMO) | `ColNorm` | `Spectral`, see below | `Sign(normalized=True)` | by patches | `BiasRMS` |
    | `"sign-only"` (LMO) | `Sign` | `Sign(normalized=True)` | the same | the same | `Sign` |
    | `"muon"` | AdamW | `Spectral` | AdamW | by patches | AdamW |

    `"modular"` enlarges the gradients of rare symbols at most 16 times (LT appendix F). `"image"` takes the first
    layer's inputs for pixels. `"scion-gpt"`, `"scion-shakespeare"` (as `"language"`), `"scion-mlp"` and `"scion-cnn"`
    (as `"image"`) add the radii and learning rates of LMO's experiments. Kernels get `SpectralConv`; fused weights get
    a `Split` of the matrices' `Spectral`; experts' weights get `Experts`; gains of norm layers get `Gain`, or AdamW
    under `"muon"`.

    An embedding that is also the last layer gets the embedding's norm, which also bounds every logit for inputs of RMS
    1. Under `"sign-only"` and `"scion-gpt"` it gets the last layer's norm, as published, and under `"muon"` AdamW.

    `Roles` defines the first and the last layer. The printed reasons name them, and a warning names whatever is
    uncertain. A layer with a `parameter_norms()` method decides for its parameters; `"muon"` takes only its norms of
    matrices. The original of a parametrized weight gets the norm chosen for that weight; the parametrized weight itself
    has another norm.

    Args:
        model: Any module, also one on the meta device. Tied parameters are listed once, under their first name.
        recipe: The norms of all parameters that no override and no layer decides.
        overrides: Name pattern (`fnmatch`; a module's name stands for all below it; any name of a tied parameter
            stands for it; the prefixes that `torch.compile` and DDP add may be left out) -> norm, or None for AdamW. It
            skips parameters that the norm does not fit; `print` shows which. An override that fits none is refused.
        per_head: Whether the norm of queries, keys and values is taken head by head (`PerHead`), wherever a module or
            its config states the number of heads. Otherwise this is done only where heads are the only way to tell the
            parts apart, as in GPT-NeoX's `query_key_value`. `docs/slices.md` measures the effect on the loss.

    Example:
        >>> from torch import nn
        >>> print(assign_norms(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)), "language"))
        0.weight  (5, 4)  ColNorm           nn.Embedding
        1.weight  (5, 4)  Sign(normalized)  last nn.Linear
        20 entries in 1 x ColNorm
        20 entries in 1 x Sign(normalized)
    """
    require_module("assign_norms", model)
    if scripted := [name for name, each in model.named_modules() if isinstance(each, torch.jit.ScriptModule)]:
        raise ValueError(f"assign_norms: {scripted[0]} is TorchScript; use the torch.nn.Module that it was made from")
    overrides = {} if overrides is None else overrides
    require_patterns("assign_norms: ", {"overrides": overrides})
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is not one of {', '.join(RECIPES)}; choose by what the model reads")
    require_flags("assign_norms: ", {"per_head": per_head})
    return _Routing(model, recipe, overrides, per_head).assignment()


class _Routing:
    """The state of one call of `assign_norms`, which collects all parameters before it warns or refuses."""

    def __init__(
        self, model: nn.Module, recipe: RecipeName, overrides: Mapping[str, Norm | None], per_head: bool
    ) -> None:
        for pattern, norm in overrides.items():
            check_norm(norm, f"overrides[{pattern!r}]")
        self.name, self.recipe, self.overrides, self.per_head = recipe, RECIPES[recipe], overrides, per_head
        self.model, self.roles = model, Roles(model)
        self.places: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.places[parameter].append(name)
        trainable = {names[0]: names for p, names in self.places.items() if p.requires_grad}
        self.first = {names[0]: p for p, names in self.places.items()}
        what = "overrides of assign_norms"
        self.overriding, self.passed_by = match_patterns(overrides, trainable, what, self._misfit)
        self.missing: list[str] = []
        self.doubts: dict[str, list[str]] = defaultdict(list)

    def assignment(self) -> Assignment:
        assigned = [self._assign(p, names) for p, names in self.places.items() if p.requires_grad]
        if self.missing:
            raise ValueError(
                "\n".join(self.missing) + "\nPass overrides={name: norm} for each, to the optimizer, or to "
                "assign_norms(model, ...), which constrain takes as norms=: Spectral() for a matrix (d_out, d_in), "
                "Spectral(input_axis=0) for (d_in, d_out), norms.Experts() for a batch of matrices, "
                "norms.BiasRMS(ndim=...) for vectors, None for AdamW; or give the layer a `parameter_norms()` method"
            )
        for doubt, names in self.doubts.items():
            what, _, override = doubt.partition("; ")
            chosen = ", ".join(f"{name!r}: ..." for name in names)
            message = f"{', '.join(names)} {what}: pass overrides={{{chosen}}} with {override}, or with the norm shown"
            warn(message + " by print(assign_norms(model)) to confirm it")
        frozen = tuple(names[0] for p, names in self.places.items() if not p.requires_grad)
        overrides = dict(self.overrides)
        return Assignment(tuple(assigned), frozen, self.recipe.lr, tuple(self._weights()), Weak(self.model), overrides)

    def _weights(self) -> Iterator[Weight]:
        for parameter, names in self.places.items():
            role = None if is_lazy(parameter) else self.roles.role(names[0], parameter.shape)
            if role is not None and (outputs := role.outputs(parameter.shape)) is not None:
                yield Weight(tuple(names), parameter, outputs)

    def _misfit(self, pattern: str, name: str) -> str:
        """The reason why an override does not fit a parameter; empty if it fits."""
        norm, parameter = self.overrides[pattern], self.first[name]
        try:
            if norm is not None and not is_lazy(parameter):
                norm.check_shape(parameter.shape, "it")
        except ValueError as error:
            return str(error)
        return ""

    def _assign(self, parameter: nn.Parameter, names: list[str]) -> AssignedParameter:
        name = names[0]
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} is not initialized; run the model once, then assign norms")
        if name in self.overriding:
            pattern = self.overriding[name]
            norm, radius, reason = self.overrides[pattern], 1.0, f"override {pattern!r}"
        else:
            norm, radius, reason = self._at_all_places(names, parameter)
            reason += "".join(f"; override {pattern!r} does not fit" for pattern in self.passed_by.get(name, ()))
        paddings = (stored(self.roles.layer_of(each)[0], "padding_idx") for each in names)
        padding = next((row for row in paddings if isinstance(row, int) and parameter.ndim == 2), None)
        by_start = radius is None or (self.recipe.by_start and radius != 1)
        return AssignedParameter(name, parameter, norm, reason, radius or 1.0, tuple(names[1:]), by_start, padding)

    def _at_all_places(self, names: list[str], parameter: nn.Parameter) -> tuple[Norm | None, float | None, str]:
        """The norm and radius on which all places of a parameter agree, and the reason."""
        known = len(self.missing)
        choices = [self._at_one_place(name, parameter) for name in names]
        if len(names) == 1 or len(self.missing) > known:
            return choices[0]
        reason = "tied: " + " and ".join(dict.fromkeys(reason for *_, reason in choices))
        asked = {(norm, radius) for norm, radius, _ in choices}
        if len(asked) == 1:
            return *choices[0][:2], reason
        if self.name == "muon":
            return None, 1.0, reason  # an embedding is not a hidden matrix
        table = self.recipe.embedding, None if self.recipe.by_start else self.recipe.radii.embedding
        last = self.recipe.last, self.recipe.radii.last
        if asked <= {table, last}:
            norm, radius = last if self.recipe.tied == "last" else table
            return norm, radius, reason
        wanted = ", ".join(f"{norm!r} as {name}" for name, (norm, *_) in zip(names, choices, strict=True))
        raise ValueError(
            f"parameter {names[0]!r} is tied, and recipe {self.name!r} asks for different norms: {wanted}; "
            f"pass overrides={{{names[0]!r}: ...}} with the norm for all"
        )

    def _at_one_place(self, name: str, parameter: nn.Parameter) -> tuple[Norm | None, float | None, str]:
        module, leaf = self.roles.layer_of(name)
        if isinstance(module, ParametrizationList):
            self.missing.append(
                f"parameter {name!r} is one of several from which a parametrization computes a weight, so it has no "
                "norm of its own; torch.nn.utils.parametrize.remove_parametrizations leaves the weight"
            )
            return None, 1.0, "one of several originals"
        original = "" if name.endswith((leaf, "original0")) else "the original of a parametrized "
        norms = getattr(module, "parameter_norms", dict)()
        if leaf in norms:
            norm = norms[leaf] if self.name != "muon" or isinstance(norms[leaf], MatrixNorm) else None
            return norm, self.recipe.radii.hidden, f"{original}chosen by {type(module).__name__}"
        role = self.roles.role(name, parameter.shape)
        if role is not None and self.recipe.serves(role):
            norm, radius, reason = self.recipe.norm(role, parameter.ndim, self.per_head)
            as_hidden = role.last and norm == self.recipe.matrix
            if role.doubt and not as_hidden and len(self.places[parameter]) == 1:
                self.doubts[role.doubt].append(name)
            return norm, radius, original + reason
        if self.name != "muon":
            self.missing.append(
                f"parameter {name!r} of shape {tuple(parameter.shape)} in {type(module).__name__} has no norm under "
                f"recipe {self.name!r}"
            )
        return None, 1.0, f"no norm for it in {type(module).__name__}"


def check_norm(norm: object, where: str) -> None:
    """Refuse, with a `ValueError`, a value that is neither a norm nor None."""
    if norm is None:
        return
    if isinstance(norm, Norm):
        return require_hashable(f"{where}={norm!r}: ", norm)
    if isinstance(norm, type) and issubclass(norm, Norm):
        raise ValueError(f"{where} must be a norm, got the class {norm.__name__}; pass {norm.__name__}()")
    raise ValueError(
        f"{where} must be a norm, got {norm!r}; pass one of wellnormed.norms, such as Spectral(), or None for AdamW"
    )
