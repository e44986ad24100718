"""Atoms, bonds and the two ways to combine them (Modular Duality, MD, definitions 4, 6 and 7), and shares of a step.

A tree describes an existing model: the places of each weight, its share of the change of the output (mass), and the
factor by which each piece can stretch a change of its input (sensitivity), for weights and inputs in their unit balls.
It has no forward pass, so it scales no output; a factor of the model is a `Scalar`, whose sensitivity follows from the
factor.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from wellnormed._inputs import require_numbers
from wellnormed._ranges import NOT_NEGATIVE
from wellnormed.norms import Norm
from wellnormed.routing.patterns import match_patterns
from wellnormed.routing.tables import aligned


@dataclass(frozen=True)
class Place:
    """One place where a weight acts."""

    name: str
    norm: Norm
    mass: float
    downstream: float
    """Product of the sensitivities of everything from the weight's output to the tree's output."""


class NormedModule(ABC):
    """A piece of a network with a mass, a sensitivity and a norm on its weights; immutable.

    Its weights form one normed space, of dictionaries from parameter name to tensor. The definitions nest; unrolled to
    the leaves of a tree, all nested ratios of masses cancel except the outermost. With
    `factor = (mass / total mass) / (sensitivity of everything that follows)` for each weight,

    - norm(w) = max over weights of norm_i(w_i) / factor_i;
    - dual_norm(g) = sum over weights of factor_i dual_norm_i(g_i);
    - dualize(g)_i = factor_i dualize_i(g_i)  (MD section 4.3).

    A weight of mass 0 is fixed: it is absent from both norms and its update is 0. A weight that acts in several places
    (shared, tied) is one vector on the diagonal of their product space. The norm of a product restricted to its
    diagonal is the largest of the terms, so its factor is the smallest over its places (0 if one of them has mass 0: a
    fixed place would move with the others).

    Operators, read from right to left like functions: `f @ g` composes, `f @ (g, h)` feeds a tuple, `f + g` adds the
    outputs, `c * f` multiplies the output.

    Example:
        >>> from wellnormed.norms import Spectral
        >>> mlp = Atom("out", Spectral()) @ Bond("relu") @ Atom("in", Spectral())
        >>> branch = 0.5 * mlp
        >>> branch.mass, branch.sensitivity, branch.lr_factors()
        (2.0, 0.5, {'in': 1.0, 'out': 1.0})
    """

    if TYPE_CHECKING:  # real properties would shadow the fields of the frozen classes below

        @property
        def name(self) -> str:
            """The name in the printed tree."""
            ...

        @property
        def mass(self) -> float:
            """Share of feature learning among its siblings, not negative; the sum of its atoms' masses."""
            ...

        @property
        def sensitivity(self) -> float:
            """Lipschitz constant in the input, not negative."""
            ...

    @property
    def children(self) -> "tuple[NormedModule, ...]":
        """Parts, in the order in which data flows."""
        return ()

    @abstractmethod
    def places(self, downstream: float = 1.0) -> Iterator[Place]:
        """Yield every place of a weight, in the order in which data flows.

        Args:
            downstream: The sensitivity of everything that follows the whole tree.
        """

    def map_atoms(self, change: "Callable[[Atom], Atom]") -> "NormedModule":
        """The same tree with every atom changed."""
        return self

    def with_masses(self, masses: Mapping[str, float]) -> "NormedModule":
        """Set the mass of single atoms: name pattern -> mass of *each* atom it matches. Mass 0 fixes a weight.

        Patterns are those of `fnmatch`; a module's name stands for all below it. `tare` sets the sum of several masses.
        """
        owner = match_patterns(masses, {n: (n,) for n in self.names()}, "with_masses").owner
        return self.map_atoms(lambda atom: replace(atom, mass=masses[owner[atom.name]]) if atom.name in owner else atom)

    def tare(self, mass: float, pattern: str = "*") -> "NormedModule":
        """Set the sum of the masses of the atoms that a pattern matches, keeping their proportions.

        Example:
            LT appendix F gives all blocks together mass 32, beside an embedding and a head of mass 1:

            >>> from wellnormed.norms import Spectral
            >>> atoms = [Atom(name, Spectral()) for name in ("head", "blocks.1", "blocks.0", "embed")]
            >>> tree = compose(*atoms).tare(32, "blocks.*")
            >>> tree.mass, tree.lr_factors()["blocks.0"] == 16 / 34
            (34.0, True)
        """
        owner = match_patterns([pattern], {n: (n,) for n in self.names()}, "tare").owner
        total = sum(place.mass for place in self.places() if place.name in owner)
        if total == 0 and mass != 0:
            raise ValueError(f"tare: atoms of {pattern!r} have mass 0, which no factor makes {mass}; use with_masses")
        factor = mass / total if total else 0.0
        return self.map_atoms(lambda atom: replace(atom, mass=atom.mass * factor) if atom.name in owner else atom)

    def names(self) -> list[str]:
        """The names of the tree's weights, each once, in the order in which data flows."""
        return list(dict.fromkeys(place.name for place in self.places()))

    def lr_factors(self) -> dict[str, float]:
        """Parameter name -> factor on the learning rate: the norm of its part in a step of modular norm 1.

        With these factors, an optimizer whose updates have norm 1 in each parameter's norm takes MD's steps (4.3).

        Example:
            >>> from wellnormed.modular import Atom
            >>> from wellnormed.norms import Spectral
            >>> tree = Atom("head", Spectral()) @ (0.5 * Atom("body", Spectral(), mass=3))
            >>> tree.lr_factors()
            {'body': 1.5, 'head': 0.25}
        """
        return {name: factor for name, (_, factor) in self._norms_and_factors().items()}

    def norm(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Modular norm (MD definitions 6 and 7), shape `()`, of one tensor for each name; mass 0 does not count."""
        moving = self._moving(weights)
        terms = [norm.norm(weights[name]) / factor for name, (norm, factor) in moving.items()]
        return reduce(torch.maximum, terms) if terms else torch.zeros(())

    def dual_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The largest `<gradients, w>` over modular norm at most 1, shape `()`; fixed weights (mass 0) stay 0."""
        moving = self._moving(gradients)
        terms = [norm.dual_norm(gradients[name]) * factor for name, (norm, factor) in moving.items()]
        return reduce(torch.add, terms) if terms else torch.zeros(())

    def dualize(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Duality map of the modular norm (MD section 4.3): the step of norm 1 that attains the dual norm.

        The map is as exact as those of the atoms. Weights of mass 0 get zeros.

        Example:
            >>> import torch
            >>> from wellnormed.modular import Atom
            >>> from wellnormed.norms import Sign
            >>> tree = Atom("b", Sign()) @ Atom("a", Sign(), mass=3)
            >>> g = torch.tensor([[2.0, -5.0]])
            >>> {name: update.tolist() for name, update in tree.dualize({"a": g, "b": g}).items()}
            {'a': [[0.75, -0.75]], 'b': [[0.25, -0.25]]}
        """
        moving = self._moving(gradients)
        return {
            name: moving[name][0].dualize(g) * moving[name][1] if name in moving else torch.zeros_like(g)
            for name, g in gradients.items()
        }

    def param_groups(self, model: nn.Module, lr: float) -> list[dict[str, Any]]:
        """Make parameter groups for any `torch.optim.Optimizer`: named `params`, and `lr` times their `lr_factors`.

        The trainable parameters of the model must be those of the tree.

        Example:
            >>> import torch
            >>> from wellnormed.modular import modular_tree
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
            >>> optimizer = torch.optim.SGD(modular_tree(model).param_groups(model, lr=0.1))
            >>> optimizer.param_groups[0]["lr"]
            0.05
        """
        require_numbers("", {"lr": lr}, NOT_NEGATIVE)
        factors = self.lr_factors()
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_names(factors, trainable, "the model's trainable parameters")
        groups: dict[float, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in trainable.items():
            groups[factors[name]].append((name, parameter))
        return [{"params": named, "lr": lr * factor} for factor, named in groups.items()]

    def _norms_and_factors(self) -> dict[str, tuple[Norm, float]]:
        """Norm and factor of every weight; the factor of a shared weight is the smallest over its places."""
        factors: dict[str, tuple[Norm, float]] = {}
        for place in self.places():
            norm, smallest = factors.get(place.name, (place.norm, math.inf))
            if norm != place.norm:
                raise ValueError(
                    f"{place.name!r} stands in the tree with two norms, {norm!r} and {place.norm!r}; a shared weight "
                    "needs one: give both places the same norm, or untie them"
                )
            if place.mass and not 0 < place.downstream < math.inf:
                raise ValueError(
                    f"{place.name!r} has mass {place.mass:g}, but the sensitivity of what follows it is "
                    f"{place.downstream:g}, so that no finite step would be its share; give it mass 0 (then it stays "
                    "fixed) or mend the sensitivities and factors that follow it"
                )
            factor = place.mass / self.mass / place.downstream if place.mass else 0.0
            factors[place.name] = norm, min(smallest, factor)
        return factors

    def _moving(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Norm, float]]:
        """Norm and factor of every weight that is not fixed, for tensors that must be those of the tree."""
        factors = self._norms_and_factors()
        _check_names(factors, tensors, "the given tensors")
        for name, (norm, _) in factors.items():
            norm.check_shape(tensors[name].shape, name)
        return {name: (norm, factor) for name, (norm, factor) in factors.items() if factor > 0}

    def __matmul__(self, other: "NormedModule | tuple[NormedModule, ...]") -> "NormedModule":
        return compose(self, concatenate(*other) if isinstance(other, tuple) else other)

    def __add__(self, other: "NormedModule") -> "NormedModule":
        return compose(Bond("add"), concatenate(self, other))

    def __rmul__(self, factor: float) -> "NormedModule":
        return compose(Scalar(factor), self)

    def __str__(self) -> str:
        """One line for each node, in the order in which data flows; a share is the part of the output's change."""
        header = ("module", "mass", "sensitivity", "share", "lr factor", "norm")
        return aligned([header, *self._rows(self.mass, self.lr_factors(), "", "")])

    def _rows(self, total: float, factors: Mapping[str, float], first: str, rest: str) -> Iterator[tuple[str, ...]]:
        """Yield the printed rows; `first` and `rest` are the branches left of the first row and of the others."""
        mass, share, factor, norm = "", "", "", ""
        if self.mass or isinstance(self, Atom):
            mass, share = f"{self.mass:.4g}", f"{self.mass / total:.2%}" if total else ""
        if isinstance(self, Atom):
            factor, norm = f"{factors[self.name]:.4g}", repr(self.weight_norm)
        yield first + self.name, mass, f"{self.sensitivity:.4g}", share, factor, norm
        for i, child in enumerate(self.children, 1):
            branch, line = ("└─ ", "   ") if i == len(self.children) else ("├─ ", "│  ")
            yield from child._rows(total, factors, rest + branch, rest + line)


@dataclass(frozen=True)
class Atom(NormedModule):
    """A weight: the name of a parameter and the norm it lives in.

    Args:
        name: As in `model.named_parameters()`.
        weight_norm: Bounds what the weight does: |J_w dw| <= weight_norm(dw) on unit inputs (MD definition 5).
        mass: Share of feature learning; 0 fixes the weight.
        sensitivity: Largest change of its output over the change of its input at weight norm 1; 0 for a bias.
    """

    name: str
    weight_norm: Norm
    mass: float = 1.0
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        require_numbers(f"{self.name!r}: ", {"mass": self.mass, "sensitivity": self.sensitivity}, NOT_NEGATIVE)

    def places(self, downstream: float = 1.0) -> Iterator[Place]:
        yield Place(self.name, self.weight_norm, self.mass, downstream)

    def map_atoms(self, change: "Callable[[Atom], Atom]") -> NormedModule:
        return change(self)


@dataclass(frozen=True)
class Bond(NormedModule):
    """A function without weights, such as an activation (MD section 4.2).

    Its sensitivity is its Lipschitz constant, where its inputs have norm at most 1.
    """

    name: str
    sensitivity: float = 1.0
    mass: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        require_numbers(f"{self.name!r}: ", {"sensitivity": self.sensitivity}, NOT_NEGATIVE)

    def places(self, downstream: float = 1.0) -> Iterator[Place]:
        yield from ()


class Scalar(Bond):
    """Multiplication by a constant *in the model's forward pass*; its sensitivity is the constant's absolute value."""

    def __init__(self, factor: float) -> None:
        super().__init__(f"times {factor:.6g}", abs(factor))


@dataclass(frozen=True)
class _Compound(NormedModule):
    """Several modules as one, whose mass is the sum of theirs."""

    modules: tuple[NormedModule, ...]
    label: str = ""
    """Name in the printed tree, such as a module's; the kind of compound without it."""
    _kind: ClassVar[str]

    def __post_init__(self) -> None:
        if others := [each for each in self.modules if not isinstance(each, NormedModule)]:
            raise ValueError(f"{others[0]!r} has no mass; pass an Atom, a Bond('relu'), or modular_tree(module)")

    @property
    def name(self) -> str:
        return self.label or self._kind

    @cached_property
    def mass(self) -> float:
        return math.fsum(m.mass for m in self.modules)

    def map_atoms(self, change: Callable[[Atom], Atom]) -> NormedModule:
        return replace(self, modules=tuple(m.map_atoms(change) for m in self.modules))


@dataclass(frozen=True)
class Composition(_Compound):
    """One module after another (MD definition 6); `modules` stand as written, the last is applied first."""

    _kind = "compose"

    @cached_property
    def sensitivity(self) -> float:
        return math.prod(m.sensitivity for m in self.modules)

    @property
    def children(self) -> tuple[NormedModule, ...]:
        return self.modules[::-1]

    def places(self, downstream: float = 1.0) -> Iterator[Place]:
        following = []
        for module in self.modules:
            following.append((module, downstream))
            downstream *= module.sensitivity
        for module, after in reversed(following):
            yield from module.places(after)


@dataclass(frozen=True)
class Concatenation(_Compound):
    """Several modules on one input, their outputs side by side as a tuple (MD definition 7)."""

    _kind = "concatenate"

    @cached_property
    def sensitivity(self) -> float:
        return math.fsum(m.sensitivity for m in self.modules)

    @property
    def children(self) -> tuple[NormedModule, ...]:
        return self.modules

    def places(self, downstream: float = 1.0) -> Iterator[Place]:
        for module in self.modules:
            yield from module.places(downstream)


@dataclass(frozen=True)
class Network(_Compound):
    """Atoms in any arrangement, each with the sensitivity of everything that follows it up to the output."""

    _kind = "network"
    following: tuple[float, ...] = ()
    sensitivity: float = 1.0

    @property
    def children(self) -> tuple[NormedModule, ...]:
        return self.modules

    def places(self, downstream: float = 1.0) -> Iterator[Place]:
        for module, after in zip(self.modules, self.following, strict=True):
            yield from module.places(downstream * after)


def compose(*modules: NormedModule) -> Composition:
    """`compose(f, g, h)` is `f @ g @ h`: h is applied first. Compositions without a label are merged into one.

    Mass is the sum, sensitivity the product (MD definition 6).
    """
    parts: list[NormedModule] = []
    for module in modules:
        parts += module.modules if isinstance(module, Composition) and not module.label else [module]
    return Composition(tuple(parts))


def concatenate(*modules: NormedModule) -> Concatenation:
    """The tuple `(f, g, ...)` of modules on one input: masses and sensitivities add (MD definition 7)."""
    return Concatenation(modules)


def _check_names(tree: Mapping[str, Any], tensors: Mapping[str, Any], what: str) -> None:
    if missing := [name for name in tree if name not in tensors]:
        raise ValueError(f"{what} lack {', '.join(missing)}, which the modular tree holds")
    if extra := [name for name in tensors if name not in tree]:
        raise ValueError(f"the modular tree lacks {', '.join(extra)}, found among {what}; add them as atoms")
