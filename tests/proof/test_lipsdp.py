"""Joint bounds: what the kernel proves of a network, and what it refuses."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellnormed.proof import CheckError, Proof, Row
from wellnormed.proof.lipsdp import DEEPEST, MOST, Network

ONES = np.ones(2)
W = np.array([[1.0, 1.0], [-1.0, 1.0]])
"""sqrt(2) times a rotation."""


class Made(Proof):
    """A proof with rows of vectors, one a line."""

    def __init__(self, inputs: int, **tensors: np.ndarray) -> None:
        super().__init__(tensors)
        self.add(Row("x", "input", (), (1, inputs), {"dtype": "float64", "radius": 1.0}, axes=(1,)))

    def primitive(
        self, name: str, operation: str, of: str | tuple[str, ...], size: int, claims=(), **constants
    ) -> None:
        names = (of,) if isinstance(of, str) else of
        self.add(Row(name, operation, names, (1, size), constants, tuple(claims), ((1,),) * len(names), (1,)))

    def linear(self, name: str, of: str, weight: str) -> None:
        self.primitive(name, "linear", of, len(self.tensor(weight)), [self.claim("spectral", weight)], parts=1)

    def function(self, name: str, of: str, function: str, *numbers: float) -> None:
        size = self.values[of].shape[1]
        self.primitive(name, "elementwise", of, size, function=function, numbers=list(numbers))

    def move(self, name: str, operation: str, of: tuple[str, ...], size: int, **constants: Any) -> None:
        self.add(Row(name, operation, of, (1, size), constants))

    def joint(self, end: str, start: str, bound: Any, *multipliers: str) -> float:
        """The bound in Euclidean norms that the row leaves."""
        size = self.values[end].shape[1]
        self.primitive("joint", "lipsdp", (end, start), size, multipliers=list(multipliers), bound=bound)
        bounds = self.rows["joint"].bounds
        assert bounds is not None
        return float(bounds.gain.max()) / math.sqrt(self.values["x"].shape[1])


def two_layers(d: Any, function: str = "relu", *numbers: float, scale: float = 1.0, **tensors: np.ndarray) -> Made:
    """`W f(scale W x)`, which ends in y."""
    proof = Made(2, first=scale * W, second=W, d=np.asarray(d), **tensors)
    proof.linear("h", "x", "first")
    proof.function("z", "h", function, *numbers)
    proof.linear("y", "z", "second")
    return proof


def by_hand(low: float, high: float, d: float) -> float:
    """The least L for `W f(W x)` with all multipliers d: the form falls apart into two equal ones, of x and z."""
    centre, radius = (low + high) / 2, (high - low) / 2
    xx, xz, zz = 2 * d * d * (centre**2 - radius**2), -(d * d) * centre * math.sqrt(2), d * d - 2
    return math.sqrt(xz * xz / zz - xx)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize(
    ("function", "numbers", "low", "high"),
    [
        ("relu", (), 0.0, 1.0), ("tanh", (), 0.0, 1.0), ("sigmoid", (), 0.0, 0.25), ("abs", (), -1.0, 1.0),
        ("leaky_relu", (0.25,), 0.25, 1.0), ("leaky_relu", (-2.0,), -2.0, 1.0), ("elu", (2.0, 0.5, 1.5), 0.0, 1.5),
        ("gelu", (), -0.12890414518515478, 1.12890414518515478),
    ],
)  # fmt: skip
def test_the_least_bound_of_given_multipliers_is_proved_and_no_lower_one(function, numbers, low, high, scale) -> None:
    exact = by_hand(low, high, 2.0) * scale
    proof = two_layers(2 * ONES, function, *numbers, scale=scale)
    with pytest.raises(CheckError, match="do not prove the bound"):
        proof.joint("y", "x", exact * (1 - 1e-9), "d")
    product = max(abs(low), abs(high)) * 2 * scale
    assert proof.joint("y", "x", exact * (1 + 1e-9), "d") == pytest.approx(min(exact, product), rel=1e-8)


@pytest.mark.parametrize(
    "d",
    [0 * ONES, -2 * ONES, [2.0, 0.0], [2.0, -2.0], [1e300, 2.0], [1e-300, 2.0], 1.4 * ONES, 2 * np.ones(3),
     2 * np.ones(1), 2 * np.ones((2, 1)), 2 * np.ones((1, 2)), np.ones(()), np.zeros(0), [2, np.nan], [2, np.inf]],
)  # fmt: skip
def test_multipliers_that_prove_nothing_are_refused(d: Any) -> None:
    with pytest.raises(CheckError):
        two_layers(d).joint("y", "x", 1e6, "d")


@pytest.mark.parametrize("bound", [0.0, -2.0, math.nan, math.inf, 1e300, 1e-300, "2", None])
def test_bounds_that_are_none_are_refused(bound: Any) -> None:
    with pytest.raises(CheckError):
        two_layers(2 * ONES).joint("y", "x", bound, "d")


def test_weights_other_than_those_of_the_multipliers_are_refused() -> None:
    bound = by_hand(0, 1, 2.0) * (1 + 1e-9)
    assert two_layers(2 * ONES).joint("y", "x", bound, "d") < 2.9
    with pytest.raises(CheckError, match="do not prove"):
        two_layers(2 * ONES, scale=1.001).joint("y", "x", bound, "d")
    with pytest.raises(CheckError, match="do not prove"):
        two_layers(2 * ONES, "gelu").joint("y", "x", bound, "d")  # of other slopes


def test_the_start_must_lead_to_the_end_by_maps_and_functions_alone() -> None:
    proof = two_layers(2 * ONES)
    proof.primitive("s", "softmax", "y", 2, over=1)
    proof.linear("t", "s", "first")
    proof.move("turned", "pick", ("y",), 2, offset=1, tables=[0, -1])
    proof.linear("u", "turned", "first")
    proof.move("both", "add", ("t", "y"), 2)
    for end, words in (("t", "another operation"), ("u", "moved"), ("both", "another operation")):
        with pytest.raises(CheckError, match=words):
            proof.joint(end, "x", 1e6, "d")
    with pytest.raises(CheckError, match="another operation"):
        proof.joint("x", "y", 1e6)  # backwards
    with pytest.raises(CheckError, match="groups"):
        proof.add(
            Row("joint", "lipsdp", ("y", "x"), (1, 2), {"multipliers": ["d"], "bound": 9.0}, (), ((1,), ()), (1,))
        )
    with pytest.raises(CheckError, match="result"):
        proof.primitive("joint", "lipsdp", ("y", "x"), 3, multipliers=["d"], bound=9.0)
    assert proof.joint("t", "s", math.sqrt(2) * (1 + 1e-9)) > 0  # from the softmax on, without a function


def test_a_start_that_is_a_sum_is_one_value() -> None:
    proof = two_layers(2 * ONES)
    proof.move("sum", "add", ("x", "y"), 2)
    proof.linear("h2", "sum", "first")
    proof.function("z2", "h2", "relu")
    proof.linear("y2", "z2", "second")
    bound = by_hand(0, 1, 2.0) * (1 + 1e-9)
    proof.joint("y2", "sum", bound, "d")
    with pytest.raises(CheckError):  # the sum has two terms, of which one alone is no start
        proof.primitive("other", "lipsdp", ("y2", "y"), 2, multipliers=["d"], bound=bound)


def test_it_holds_for_the_tokens_of_a_sequence_and_not_across_them() -> None:
    proof = Proof({"w": W})
    proof.add(Row("x", "input", (), (1, 3, 2), {"dtype": "float64", "radius": 1.0}, axes=(2,)))
    claim, shape = proof.claim("spectral", "w"), (1, 3, 2)
    for name, of in (("a", "x"), ("b", "a")):
        proof.add(Row(name, "linear", (of,), shape, {"parts": 1}, (claim,), ((2,),), (2,)))
    constants = {"multipliers": [], "bound": 2 * (1 + 1e-9)}
    for axes in ((2,), (1, 2)):
        proof.add(Row(f"over {len(axes)}", "lipsdp", ("b", "x"), shape, constants, (), (axes, axes), axes))
    for axes in ((1,), ()):
        with pytest.raises(CheckError):
            proof.add(Row("joint", "lipsdp", ("b", "x"), shape, constants, (), (axes, axes), axes))


def test_a_learned_slope_may_have_either_sign() -> None:
    proof = Made(2, first=W, second=W, slope=np.array([0.25]), d=2 * ONES)
    proof.linear("h", "x", "first")
    claim = proof.claim("max_abs", "slope")
    constants = {"function": "leaky_relu", "numbers": [0.25]}
    proof.add(Row("z", "elementwise", ("h",), (1, 2), constants, (claim,), ((1,),), (1,)))
    proof.linear("y", "z", "second")
    with pytest.raises(CheckError, match="do not prove"):
        proof.joint("y", "x", by_hand(-0.25, 1, 2.0) * (1 - 1e-9), "d")
    proof.joint("y", "x", by_hand(-0.25, 1, 2.0) * (1 + 1e-9), "d")


def test_what_is_too_large_or_too_deep_is_refused_before_memory_is_asked_for() -> None:
    proof = Made(MOST, wide=np.ones((1, MOST)))
    proof.linear("y", "x", "wide")
    with pytest.raises(CheckError, match="more than"):
        proof.joint("y", "x", 1e6)
    proof = Made(1, d=np.ones(1))
    for i in range(DEEPEST + 1):
        proof.function(f"z{i}", f"z{i - 1}" if i else "x", "tanh")
    with pytest.raises(CheckError, match="too many"):
        proof.joint(f"z{DEEPEST}", "x", 1e6, *["d"] * (DEEPEST + 1))


def exact_form(network: Network, end: dict, d: list[np.ndarray], bound: float, inputs: int) -> list[list[Fraction]]:
    """The matrix of the quadratic form in rational numbers, whose maps must be exact."""
    widths = [inputs, *map(len, d)]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    n = sum(widths)
    form = [[Fraction(0)] * n for _ in range(n)]

    def add(row: dict[int, Fraction], weight: Fraction) -> None:
        for i, a in row.items():
            for j, b in row.items():
                form[i][j] += weight * a * b

    for i in range(inputs):
        add({i: Fraction(1)}, Fraction(bound) ** 2)
    for i, (own, function) in enumerate(zip(d, network.functions, strict=True), 1):
        for k, each in enumerate(own.tolist()):
            y = {starts[j] + c: Fraction(m.matrix[k, c]) for j, m in function.maps.items() for c in range(widths[j])}
            z = {c: -Fraction(function.centre) * a for c, a in y.items()} | {starts[i] + k: Fraction(1)}
            add(z, Fraction(each) ** 2)
            add(y, -((Fraction(each) * Fraction(function.radius)) ** 2))
    for k in range(len(next(iter(end.values())).matrix)):
        add({starts[j] + c: Fraction(m.matrix[k, c]) for j, m in end.items() for c in range(widths[j])}, Fraction(-1))
    return form


def is_semidefinite(form: list[list[Fraction]]) -> bool:
    """By elimination in rational numbers."""
    form = [list(row) for row in form]
    for i in range(len(form)):
        if form[i][i] < 0 or (form[i][i] == 0 and any(form[i][i + 1 :])):
            return False
        for j in range(i + 1, len(form)) if form[i][i] else ():
            factor = form[j][i] / form[i][i]
            form[j] = [a - factor * b for a, b in zip(form[j], form[i], strict=True)]
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["relu", "gelu", "leaky_relu"]), st.integers(-60, 60))
def test_what_is_proved_holds_in_rational_numbers(seed: int, function: str, exponent: int) -> None:
    # `x + B f(A x)` and then a second map and function; entries of few bits, so that all maps are exact in float64
    random = np.random.default_rng(seed)
    a, b, c = (random.integers(-8, 9, shape) / 8.0 for shape in ((2, 2), (2, 2), (2, 2)))
    d = [np.ldexp(random.uniform(1.5, 3, 2) * 3, exponent), np.ldexp(random.uniform(0.8, 2, 2), exponent)]
    proof = Made(2, a=a, b=b, c=np.ldexp(c, -exponent), d0=d[0], d1=d[1], e=np.ldexp(np.eye(2), exponent))
    proof.linear("h", "x", "a")
    proof.function("z", "h", function, *([0.25] if function == "leaky_relu" else []))
    proof.linear("y", "z", "b")
    proof.move("r", "add", ("x", "y"), 2)
    proof.linear("h2", "r", "e")
    proof.function("z2", "h2", function, *([0.25] if function == "leaky_relu" else []))
    proof.linear("end", "z2", "c")
    network = Network(proof.values["x"], proof.tensor)
    end = network.maps(proof.values["end"])
    low, high = 2.0**-190, 2.0**190
    if not network.proves(end, d, high):  # these multipliers prove nothing
        return
    while math.nextafter(low, math.inf) < high:
        middle = math.sqrt(low) * math.sqrt(high)
        if not low < middle < high:
            break
        low, high = (low, middle) if network.proves(end, d, middle) else (middle, high)
    assert is_semidefinite(exact_form(network, end, d, high, 2))  # the least bound that is proved
    assert not is_semidefinite(exact_form(network, end, d, high * (1 - 1e-6), 2))  # and hardly more than is needed
