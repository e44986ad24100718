"""The public Modula examples: masses, sensitivities and step sizes worked out by hand from its rules.

Modula hands each part `target * (its mass / mass) / (sensitivity of what follows)`; the printed facts of its examples
(atoms, mass, sensitivity) are checked too.
"""

from fractions import Fraction

import pytest

import wellnormed as wn
from wellnormed.modular import IDENTITY, Atom, Bond, NormedModule, attention, compose

EXACT = wn.Spectral(method="svd")


def linear(name: str) -> NormedModule:
    return Atom(name, EXACT)


def hello_gpt(blocks: int, blocks_mass: float, final_scale: float = 1.0) -> NormedModule:
    """Modula's GPT, with its own words: the branches of a residual are scaled, then added."""
    strength = 1 / (2 * blocks)
    stack: list[NormedModule] = []
    for i in range(blocks):
        attend = attention(linear(f"blocks.{i}.query"), linear(f"blocks.{i}.key"), linear(f"blocks.{i}.value"))
        attend = linear(f"blocks.{i}.out") @ (1 / 3 * attend)
        mlp = linear(f"blocks.{i}.down") @ Bond("gelu / 1.1289") @ linear(f"blocks.{i}.up")
        stack = [*((1 - strength) * IDENTITY + strength * branch for branch in (mlp, attend)), *stack]
    embed = Atom("embed", wn.ColNorm())
    return compose(final_scale * linear("head"), *stack, embed).tare(blocks_mass, "blocks.*")


def test_hello_mnist():
    """784 - 256 - 256 - 10 with ReLU: mass 3, sensitivity 1, a third of the step for each layer."""
    relu = Bond("relu")
    tree = linear("out") @ relu @ linear("hidden") @ relu @ linear("in")
    assert (tree.mass, tree.sensitivity) == (3, 1)
    assert tree.lr_factors() == pytest.approx({"in": 1 / 3, "hidden": 1 / 3, "out": 1 / 3})


def test_hello_gpt():
    """Four blocks of mass 5 in all: 26 atoms, mass 7, sensitivity 1."""
    tree = hello_gpt(blocks=4, blocks_mass=5)
    assert len(tree.names()) == 26
    assert tree.mass == pytest.approx(7)
    assert tree.sensitivity == pytest.approx(1)
    share = Fraction(5, 24) / 7  # six atoms in each of four blocks
    after_branch = Fraction(1, 8)  # eight residual connections; every later one has sensitivity 1
    expected = {"embed": Fraction(1, 7), "head": Fraction(1, 7)}
    for i in range(4):
        expected |= {f"blocks.{i}.{name}": share / (after_branch / 3) for name in ("query", "key", "value")}
        expected |= {f"blocks.{i}.{name}": share / after_branch for name in ("out", "up", "down")}
    assert expected["blocks.0.query"] == Fraction(5, 7)
    assert expected["blocks.3.out"] == expected["blocks.1.up"] == Fraction(5, 21)
    assert tree.lr_factors() == pytest.approx({name: float(value) for name, value in expected.items()})


def test_lipschitz_transformers_on_shakespeare():
    """LT appendix F: three blocks of mass 32, about 95% of the step (32/34)."""
    tree = hello_gpt(blocks=3, blocks_mass=32, final_scale=8.0)
    scales = tree.lr_factors()
    # 18 atoms share 32/34; six residual connections; a logit scale of 8 follows everything
    assert scales["head"] == scales["embed"] == pytest.approx(float(Fraction(1, 34) / 8))
    assert scales["blocks.2.out"] == pytest.approx(float(Fraction(32, 34) / 18 * 6 / 8))
    assert scales["blocks.0.value"] == pytest.approx(float(Fraction(32, 34) / 18 * 18 / 8))
    assert tree.sensitivity == pytest.approx(8)
