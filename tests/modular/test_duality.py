"""Laws of the modular norm, its dual and its duality map, over random trees."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import wellnormed as wn
from tests.modular import reference as ref
from wellnormed.modular import IDENTITY, Atom, Bond, NormedModule, compose, concatenate, residual
from wellnormed.modular.tree import Scalar

EXACT = wn.Spectral(method="svd")
NORMS = [  # exact oracles only: the laws below hold up to rounding
    (EXACT, (5, 3)),
    (wn.ColNorm(), (3, 4)),
    (wn.norms.BiasRMS(), (6,)),
    (wn.Sign(), (2, 3)),
]
numbers = st.sampled_from([0.25, 0.5, 1.0, 3.0])
masses = st.sampled_from([0.0, 0.5, 1.0, 4.0])


@st.composite
def atoms(draw, mass=masses):
    number = draw(st.integers(0, 10**9))
    return Atom(f"w{number}", NORMS[number % len(NORMS)][0], mass=draw(mass), sensitivity=draw(numbers))


bonds = st.builds(Bond, st.just("bond"), numbers) | st.builds(Scalar, numbers | st.just(-2.0))


def compounds(parts):
    some = st.lists(parts, min_size=2, max_size=3)
    return (
        some.map(lambda m: compose(*m))
        | some.map(lambda m: concatenate(*m))
        | st.builds(residual, parts, st.just(0.25))
        | st.builds(lambda factor, part: factor * part, numbers, parts)
    )


trees = st.recursive(atoms() | bonds, compounds, max_leaves=10)


def tensors(tree: NormedModule, seed: int) -> dict[str, torch.Tensor]:
    shapes = {place.name: NORMS[int(place.name[1:]) % len(NORMS)][1] for place in tree.places()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def unique(*trees: NormedModule) -> bool:
    names = [place.name for tree in trees for place in tree.places()]
    return len(names) == len(set(names))


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=0)


@given(tree=trees, seed=st.integers(0, 99))
def test_unrolled_rules_equal_the_nested_definitions(tree, seed):
    assume(unique(tree) and tree.mass > 0)  # without any mass nothing moves; the definitions are silent on that
    literal, w = ref.reference(tree), tensors(tree, seed)
    assert tree.mass == pytest.approx(literal.mass)
    assert tree.sensitivity == pytest.approx(literal.sensitivity)
    assert float(tree.norm(w)) == pytest.approx(literal.norm(w), rel=1e-12)
    assert_same(tree.dualize(w), literal.dualize(w))


@given(tree=trees, seed=st.integers(0, 99))
def test_dualize_attains_the_dual_norm_on_the_unit_sphere(tree, seed):
    assume(unique(tree) and tree.mass > 0)
    g = tensors(tree, seed)
    d = tree.dualize(g)
    pairing = sum(float((g[name] * d[name]).sum()) for name in g)
    assert pairing == pytest.approx(float(tree.dual_norm(g)), rel=1e-9)
    assert float(tree.norm(d)) == pytest.approx(1, rel=1e-6)  # Spectral.norm is an estimate


@given(tree=trees, seed=st.integers(0, 98))
def test_dual_norm_is_the_largest_pairing(tree, seed):
    assume(unique(tree) and tree.mass > 0)
    g, w = tensors(tree, seed), tensors(tree, seed + 1)
    moving = {name for name, s in tree.lr_factors().items() if s > 0}
    pairing = abs(sum(float((g[name] * w[name]).sum()) for name in moving))
    assert pairing <= float(tree.dual_norm(g)) * float(tree.norm(w)) * (1 + 1e-6)  # Spectral.norm is an estimate


@given(tree=trees, seed=st.integers(0, 99))
def test_learning_rate_scales_times_each_norms_own_map_are_the_modular_map(tree, seed):
    assume(unique(tree))
    g, scales = tensors(tree, seed), tree.lr_factors()
    scaled = {place.name: place.norm.dualize(g[place.name]) * scales[place.name] for place in tree.places()}
    assert_same(tree.dualize(g), scaled)


@given(parts=st.lists(trees, min_size=3, max_size=3), seed=st.integers(0, 99))
def test_composition_and_concatenation_are_associative(parts, seed):
    assume(unique(*parts))
    f, g, h = parts
    for left, right in (
        (compose(compose(f, g), h), compose(f, compose(g, h))),
        (concatenate(concatenate(f, g), h), concatenate(f, concatenate(g, h))),
        ((f + g) + h, f + (g + h)),
    ):
        w = tensors(left, seed)
        assert left.mass == pytest.approx(right.mass)
        assert left.sensitivity == pytest.approx(right.sensitivity)
        assert float(left.norm(w)) == pytest.approx(float(right.norm(w)), rel=1e-12)
        assert float(left.dual_norm(w)) == pytest.approx(float(right.dual_norm(w)), rel=1e-12)
        assert_same(left.dualize(w), right.dualize(w))


@given(tree=trees, target=st.sampled_from([0.5, 1.0, 32.0]))
def test_tare_sets_the_mass_and_keeps_what_a_tree_does_alone(tree, target):
    assume(unique(tree) and tree.mass > 0)
    tared = tree.tare(target)
    assert tared.mass == pytest.approx(target)
    assert tared.sensitivity == tree.sensitivity
    assert tared.lr_factors() == pytest.approx(tree.lr_factors())


@given(tree=trees, other=atoms(mass=st.just(1.0)), target=st.sampled_from([0.0, 1.0, 5.0]))
def test_tare_of_a_part_sets_its_share_of_the_whole(tree, other, target):
    assume(unique(tree, other) and tree.mass > 0)
    whole = compose(other, tree)
    for name in tree.names():  # one pattern for the part; each name is a pattern that matches itself
        total = sum(p.mass for p in whole.places() if p.name == name)
        if total == 0:
            continue
        tared = whole.tare(target, name)
        assert tared.mass == pytest.approx(whole.mass - total + target)
        scale_after = tared.lr_factors()[name]
        downstream = next(p.downstream for p in whole.places() if p.name == name)
        assert scale_after == pytest.approx(target / tared.mass / downstream)


def test_operators_say_what_the_functions_say():
    f, g, h = (Atom(name, EXACT) for name in "fgh")
    assert f @ g @ h == compose(f, g, h) == f @ (g @ h)
    assert f @ (g, h) == compose(f, concatenate(g, h))
    assert f + g == compose(Bond("add"), concatenate(f, g))
    assert 0.5 * f == compose(Scalar(0.5), f)


def test_a_tree_without_mass_does_not_move():
    tree = Atom("w1", wn.ColNorm(), mass=0) @ IDENTITY
    g = tensors(tree, 0)
    assert float(tree.norm(g)) == float(tree.dual_norm(g)) == 0
    assert float(tree.dualize(g)["w1"].abs().max()) == 0


def test_a_shared_weight_is_the_diagonal_of_the_space_of_its_places(generator):
    """The norm of (w, w) in the tree with two weights is that of w in the tree with one."""
    apart = Atom("a", EXACT) @ (0.5 * Atom("b", EXACT, mass=3))
    tied = Atom("a", EXACT) @ (0.5 * Atom("a", EXACT, mass=3))
    w = torch.randn(4, 4, generator=generator)
    assert float(tied.norm({"a": w})) == float(apart.norm({"a": w, "b": w}))
    assert tied.lr_factors() == {"a": 1 / 4}
    assert tied.mass == 4


def test_a_weight_shared_with_a_fixed_place_is_fixed():
    assert (Atom("a", EXACT) @ Atom("a", EXACT, mass=0)).lr_factors() == {"a": 0.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Atom("w", EXACT, mass=-1.0), "'w': mass=-1.0 must be finite"),
        (lambda: Bond("b", float("nan")), "'b': sensitivity=nan"),
        (lambda: Atom("w", EXACT) @ torch.nn.ReLU(), r"ReLU\(\) has no mass; pass an Atom, a Bond"),
        (lambda: residual(IDENTITY, 1.5), "strength=1.5"),
        (lambda: (0.0 * Atom("w", EXACT)).lr_factors(), "'w' has mass 1, but the sensitivity of what follows it is 0"),
        (lambda: (Atom("w", EXACT) + Atom("w", wn.Sign())).lr_factors(), "'w' stands in the tree with two norms"),
        (lambda: Atom("w", EXACT).dualize({}), "lack w"),
        (lambda: Atom("w", EXACT).norm({"w": torch.eye(2), "v": torch.eye(2)}), "the modular tree lacks v"),
        (lambda: Atom("w", EXACT).norm({"w": torch.ones(2)}), r"w has shape \(2,\)"),
        (lambda: Atom("w", EXACT).tare(2.0, "blocks.*"), "matches no trainable parameter"),
        (lambda: Atom("w", EXACT, mass=0).tare(2.0), "have mass 0"),
        (lambda: Atom("w", EXACT).with_masses({"w": -2.0}), "mass=-2.0"),
    ],
)
def test_errors_name_the_value_and_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()
