"""From a torch model to its tree: one function describes each known class of modules; other classes are refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from torch import nn

from wellnormed._inputs import require_module
from wellnormed.modular.tree import Atom, Bond, Composition, Concatenation, NormedModule
from wellnormed.norms import Norm
from wellnormed.routing import Assignment, assign_norms

Describe = Callable[[Any, "Builder"], NormedModule]
F = TypeVar("F", bound=Describe)

RULES: dict[str, Describe] = {}
"""Full name of a class -> the function that describes it. A subclass may override anything, so it needs its own entry.
"""


def modular_rule(*classes: type[nn.Module] | str) -> Callable[[F], F]:
    """Decorate a function `f(module, builder) -> NormedModule` that describes modules of exactly these classes.

    The function reads constants from the module, and takes atoms and children from the `Builder`. A class of your own
    needs no function if it has a method `modular_tree(self, builder)` of the same meaning. A class may be given by its
    full name, `"package.module.Class"`, which imports nothing.

    Example:
        >>> class Halved(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inner = nn.Linear(2, 2, bias=False)
        ...     def forward(self, x):
        ...         return self.inner(x) / 2
        >>> @modular_rule(Halved)
        ... def halved(module, builder):
        ...     return 0.5 * builder.child("inner")
        >>> modular_tree(Halved()).lr_factors()
        {'inner.weight': 2.0}
    """

    def register(function: F) -> F:
        RULES.update({c if isinstance(c, str) else _full_name(c): function for c in classes})
        return function

    return register


def modular_tree(model: nn.Module, assignment: Assignment | None = None) -> NormedModule:
    """Describe a model: where its weights act, in which norms, with what sensitivities.

    Known classes are `nn.Sequential`, linear layers, embeddings, convolutions, activations of known slope, pooling,
    flattening, and dropout in evaluation mode; this package's layers and GPT; and all classes that `modular_rule` or
    a method `modular_tree(builder)` describes. Frozen parameters do not move and become bonds.

    The sensitivities hold for weights and activations in their unit balls. A bias takes a layer's output out of the
    ball. A norm other than the operator norm of the layer measures the layer's step in its own unit only.

    An atom has mass 1 unless its rule gives it another; `with_masses` and `tare` of the tree change it.

    Args:
        model: The model whose parameters the tree names.
        assignment: The result of `assign_norms` for this model; made with its defaults if None.

    Raises:
        ValueError: A class of modules is unknown, or a trainable parameter has no norm or no place in the tree.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))
        >>> print(modular_tree(model).with_masses({"2": 3.0}))
        module       mass  sensitivity  share    lr factor  norm
        Sequential   4     1            100.00%
        ├─ 0.weight  1     1            25.00%   0.25      Spectral(...)
        ├─ tanh            1
        └─ 2.weight  3     1            75.00%   0.75      Spectral(...)
    """
    norms = norms_of("modular_tree", model, assignment)
    tree = Builder("", model, norms).build()
    placed = set(tree.names())
    if unplaced := [name for name, _ in norms.values() if name not in placed]:
        raise ValueError(
            f"the modular rules of {type(model).__name__} give no place to {', '.join(unplaced)}; they must make an "
            "atom of every trainable parameter"
        )
    return tree


def norms_of(caller: str, model: nn.Module, assignment: Assignment | None) -> dict[nn.Parameter, tuple[str, Norm]]:
    """Trainable parameter -> its name and norm in the assignment, which must give it one."""
    require_module(caller, model)
    assignment = assign_norms(model) if assignment is None else assignment
    if not isinstance(assignment, Assignment):
        raise ValueError(
            f"{caller}: assignment is of type {type(assignment).__name__}; pass the result of assign_norms(model)"
        )
    norms = {}
    for a in assignment:
        if a.norm is None:
            raise ValueError(
                f"parameter {a.name!r} has no norm in the assignment, so no share of a step can be measured; give it "
                "one in the overrides of `assign_norms`, or freeze it"
            )
        norms[a.parameter] = a.name, a.norm
    return norms


@dataclass(frozen=True)
class Builder:
    """A module with its name, from which a description takes atoms and children."""

    name: str
    """The module's name in the model; empty for the model itself."""
    module: nn.Module
    norms: Mapping[nn.Parameter, tuple[str, Norm]]
    """Trainable parameter -> its name and norm in the assignment."""

    def build(self) -> NormedModule:
        """Describe the module by its own method, or else by the function that is registered for its class."""
        if (method := getattr(self.module, "modular_tree", None)) is not None:
            tree = method(self)
        elif _full_name(type(self.module)) in RULES:
            tree = RULES[_full_name(type(self.module))](self.module, self)
        else:
            self.refuse("has no modular rule")
        if isinstance(tree, Composition | Concatenation) and not tree.label:
            return replace(tree, label=self.name or type(self.module).__name__)
        return tree

    def child(self, path: str) -> NormedModule:
        """Describe a submodule, given its path below this one."""
        return self.below(path).build()

    def below(self, path: str) -> "Builder":
        """Return the builder of a submodule, for a parent that describes the submodule's parameters itself."""
        name = f"{self.name}.{path}" if self.name else path
        return replace(self, name=name, module=self.module.get_submodule(path))

    def atom(self, leaf: str, sensitivity: float = 1.0) -> NormedModule:
        """Return an atom of mass 1 for the parameter `leaf` of this module, or a bond if the parameter is frozen.

        Args:
            leaf: Name of the parameter in this module.
            sensitivity: Largest change of the output over the change of the input through this weight, at norm 1; 0
                for a bias, which has no input.
        """
        parameter = self.module.get_parameter(leaf)
        if not parameter.requires_grad:
            return Bond(f"{self.name}.{leaf} (frozen)".lstrip("."), sensitivity)
        if parameter not in self.norms:
            self.refuse(f"holds the parameter {leaf!r}, which is not in the assignment given")
        name, norm = self.norms[parameter]
        return Atom(name, norm, sensitivity=sensitivity)

    def refuse(self, reason: str) -> NoReturn:
        """Raise an error that names the module, a reason and the remedy."""
        kind = type(self.module).__name__
        where = f"{self.name!r} ({kind})" if self.name else f"the model ({kind})"
        raise ValueError(
            f"{where} {reason}. Register a rule with `modular_rule({kind})`, give the class a method "
            "`modular_tree(self, builder)`, build the tree by hand from `Atom` and `Bond`, or call `wn.certificates."
            "traced_tree(model, example_input)`, which reads what the model executes"
        )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
