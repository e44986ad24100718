"""Definitions 6 and 7 and section 4.3 of Modular Duality, written down as they stand: two modules at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from wellnormed.modular import Atom, NormedModule
from wellnormed.modular.tree import Composition, Concatenation

Tensors = dict[str, Tensor]


@dataclass
class Reference:
    mass: float
    sensitivity: float
    norm: Callable[[Tensors], float]
    dualize: Callable[[Tensors], Tensors]


def scaled(factor: float, tensors: Tensors) -> Tensors:
    return {name: factor * t for name, t in tensors.items()}


def combine(m1: Reference, m2: Reference, sensitivity: float, after_m1: float) -> Reference:
    mass = m1.mass + m2.mass

    def norm(w: Tensors) -> float:
        alpha = after_m1 * mass / m1.mass * m1.norm(w) if m1.mass else 0.0
        beta = mass / m2.mass * m2.norm(w) if m2.mass else 0.0
        return max(alpha, beta)

    def dualize(g: Tensors) -> Tensors:
        first = scaled(m1.mass / mass / after_m1 if m1.mass else 0.0, m1.dualize(g))
        return first | scaled(m2.mass / mass if m2.mass else 0.0, m2.dualize(g))

    return Reference(mass, sensitivity, norm, dualize)


def compose(m2: Reference, m1: Reference) -> Reference:
    return combine(m1, m2, m1.sensitivity * m2.sensitivity, m2.sensitivity)


def concatenate(m1: Reference, m2: Reference) -> Reference:
    return combine(m1, m2, m1.sensitivity + m2.sensitivity, 1.0)


def reference(tree: NormedModule) -> Reference:
    if isinstance(tree, Atom):
        return Reference(
            tree.mass,
            tree.sensitivity,
            lambda w: float(tree.weight_norm.norm(w[tree.name])),
            lambda g: {tree.name: tree.weight_norm.dualize(g[tree.name])},
        )
    if isinstance(tree, Composition):
        return reduce(compose, [reference(m) for m in tree.modules])
    if isinstance(tree, Concatenation):
        return reduce(concatenate, [reference(m) for m in tree.modules])
    return Reference(0.0, tree.sensitivity, lambda w: 0.0, lambda g: {})
