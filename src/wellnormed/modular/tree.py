"""Atoms, bonds and the two ways to combine them (Modular Duality, definitions 4, 6 and 7).

A tree describes an existing model: where each weight acts, its share of the change of the output (mass), and how far
each piece can stretch a change of its input (sensitivity), for weights and inputs in their unit balls. It has no
forward pass, so it scales no output; a factor of the model is a `Scalar`, whose sensitivity follows from the factor.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from wellnormed.modular.sharing import Place, WeightSpace
from wellnormed.norms import Norm
from wellnormed.routing.patterns import match_patterns
from wellnormed.routing.tables import aligned


class NormedModule(WeightSpace):
    """A piece of a network with a mass, a sensitivity and a norm on its weights; immutable.

    Operators, read from right to left like functions: `f @ g` composes, `f @ (g, h)` feeds a tuple, `f + g` adds the
    outputs, `c * f` multiplies the output.

    Example:
        >>> from wellnormed.norms import Spectral
        >>> mlp = Atom("out", Spectral()) @ Bond("relu") @ Atom("in", Spectral())
        >>> branch = 0.5 * mlp
        >>> branch.mass, branch.sensitivity, branch.lr_factors()
        (2.0, 0.5, {'in': 1.0, 'out': 1.0})
    """

    if TYPE_CHECKING:  # as for `mass` in `WeightSpace`

        @property
        def name(self) -> str:
            """As the printed tree shows it."""
            ...

        @property
        def sensitivity(self) -> float:
            """Lipschitz constant in the input, not negative."""
            ...

    @property
    def children(self) -> "tuple[NormedModule, ...]":
        """Parts, in the order in which data flows."""
        return ()

    def map_atoms(self, change: "Callable[[Atom], Atom]") -> "NormedModule":
        """The same tree with every atom changed."""
        return self

    def with_masses(self, masses: Mapping[str, float]) -> "NormedModule":
        """Set the mass of single atoms: name pattern -> mass of *each* atom it matches. Mass 0 fixes a weight.

        Patterns are those of `fnmatch`; a module's name stands for all below it. `tare` sets the sum of several masses.
        """
        owner = match_patterns(masses, {n: (n,) for n in self.names()}, "with_masses")
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
        owner = match_patterns([pattern], {n: (n,) for n in self.names()}, "tare")
        total = sum(place.mass for place in self.places() if place.name in owner)
        if total == 0 and mass != 0:
            matching = f"the atoms matching {pattern!r}"
            raise ValueError(f"{matching} have mass 0, which no factor turns into {mass}; use with_masses")
        factor = mass / total if total else 0.0
        return self.map_atoms(lambda atom: replace(atom, mass=atom.mass * factor) if atom.name in owner else atom)

    def names(self) -> list[str]:
        """The names of the tree's weights, each once, in the order in which data flows."""
        return list(dict.fromkeys(place.name for place in self.places()))

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
        """Yield the printed rows; `first` and `rest` are the lines to the left of the first row and of the others."""
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
        _check(self.name, mass=self.mass, sensitivity=self.sensitivity)

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
        _check(self.name, sensitivity=self.sensitivity)

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


def compose(*modules: NormedModule) -> Composition:
    """`compose(f, g, h)` is `f @ g @ h`: h is applied first. Compositions without a label are merged into one.

    Mass is the sum, sensitivity the product (MD definition 6). That each output fits the next input is up to the model.
    """
    parts: list[NormedModule] = []
    for module in modules:
        parts += module.modules if isinstance(module, Composition) and not module.label else [module]
    return Composition(tuple(parts))


def concatenate(*modules: NormedModule) -> Concatenation:
    """The tuple `(f, g, ...)` of modules on one input: masses and sensitivities add (MD definition 7)."""
    return Concatenation(modules)


def _check(name: str, **numbers: float) -> None:
    for what, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{what}={number} of {name!r} must be finite and not negative")
