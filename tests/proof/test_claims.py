"""Every measure against exact rational arithmetic, over all exponents of float64: what is proved is true."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellnormed.proof import CheckError, Claim, Proof, claims
from wellnormed.proof.claims import MEASURES
from wellnormed.proof.matrices import absolute_kernel, absolute_norm, shares
from wellnormed.proof.value import LARGE

Rows = list[list[Fraction]]
SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "spectral": (((4, 2),), {"parts": 2}),
    "product": (((4, 2), (2, 3)), {"pairs": [(0, 0), (1, 0)], "parts": (2, 1), "transposed": (False, False)}),
    "group_norm": (((6,),), {"parts": 2}),
    "positive_norm": (((4,),), {}),
    "row_norm": (((3, 2),), {}),
    "row_difference": (((3, 2),), {}),
    "row_sum": (((4, 3),), {"parts": 2}),
    "diameter": (((3, 2),), {}),
    "max_abs": (((3,),), {}),
    "convolution": (((2, 1, 2),), {"size": (3,), "stride": (1,), "dilation": (1,), "groups": 1}),
    "taps": (((2, 1, 3),), {"groups": 2}),
}
"""Measure -> shapes of its tensors, settings. Channels of `taps` are single, so that norms are absolute values."""


def exact(array: np.ndarray) -> Any:
    return np.vectorize(Fraction, otypes=[object])(array)


def no_less(value: Fraction, matrix: Any) -> bool:
    """Whether `value^2 I - M^T M` is positive semidefinite, by elimination."""
    a = value * value * np.eye(matrix.shape[1], dtype=int) - matrix.T @ matrix
    for k in range(len(a)):
        if a[k, k] < 0 or (a[k, k] == 0 and a[k, k:].any()):
            return False
        if a[k, k]:
            a = a - np.outer(a[:, k], a[k]) / a[k, k]
    return True


def parts(x: Any, count: int) -> Iterator[Any]:
    yield from x.reshape(count, -1, *x.shape[1:])


def truths(measure: str, tensors: list[Any], c: dict[str, Any]) -> list[Callable[[Fraction], bool]]:
    """For every value of a claim, whether it holds, in exact arithmetic."""
    x = tensors[0]
    columns = [each.reshape(-1, 1) for each in x] if x.ndim == 2 else []
    if measure == "spectral":
        return [lambda v, m=m: no_less(v, m) for m in parts(x, c["parts"])]
    if measure == "product":
        left, right = (list(parts(w, n)) for w, n in zip(tensors, c["parts"], strict=True))
        return [lambda v, m=left[i].T @ right[j]: no_less(v, m) for i, j in c["pairs"]]
    if measure == "group_norm":
        return [lambda v, m=m: no_less(v, m.reshape(-1, 1)) for m in parts(x, c["parts"])]
    if measure == "positive_norm":
        return [lambda v: no_less(v, np.maximum(x, 0).reshape(-1, 1))]
    if measure == "row_norm":
        return [lambda v: all(no_less(v, m) for m in columns)]
    if measure in ("row_difference", "diameter"):
        return [lambda v: all(no_less(v, a - b) for a, b in combinations(columns, 2))]
    if measure == "row_sum":
        return [lambda v, m=m: bool((abs(m).sum(-1) <= v).all()) for m in parts(x, c["parts"])]
    if measure == "taps":
        return [lambda v: abs(x).max((0, 1)).sum() <= v]
    if measure == "convolution":
        (n,), zero = c["size"], x[:, :, 0] * 0  # of n pixels n - 1 results have two taps each
        taps = [[(x[:, :, 0], x[:, :, 1])[q - p] if 0 <= q - p < 2 else zero for q in range(n)] for p in range(n - 1)]
        return [lambda v: no_less(v, np.block(taps))]
    return [lambda v: bool((abs(x) <= v).all())]


def exponents() -> st.SearchStrategy[int]:
    return st.one_of(st.integers(-1074, 1023), st.sampled_from((-1074, -1073, -1023, -1000, -1, 0, 1, 1000, 1018)))


@st.composite
def numbers(draw: Any, count: int, least: float) -> list[float]:
    """Floats of up to three sizes, so that some vanish beside others."""
    sizes, mantissa = draw(st.lists(exponents(), min_size=1, max_size=3)), st.floats(least, 1)
    return [math.ldexp(draw(mantissa), draw(st.sampled_from(sizes))) for _ in range(count)]


@pytest.mark.parametrize("measure", MEASURES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_proved_is_true(measure: str, data: st.DataObject) -> None:
    shapes, constants = SHAPES[measure]
    arrays = [np.array(data.draw(numbers(math.prod(shape), -1))).reshape(shape) for shape in shapes]
    names = tuple("ab"[: len(arrays)])
    proof = Proof(dict(zip(names, arrays, strict=True)))
    true = truths(measure, [exact(each) for each in arrays], constants)
    if max(float(abs(each).max()) for each in arrays) > LARGE:
        with pytest.raises(CheckError, match=r"beyond 2\^1000"):
            proof.claim(measure, *names, **constants)
        return
    try:
        claim = proof.claim(measure, *names, **constants)
    except CheckError as error:
        assert "beyond all floats" in str(error)  # noqa: PT017
        # the rounding errors of a product are relative to the sizes of its factors, which may cancel
        assert measure == "product" or not all(each(Fraction(2) ** 1023) for each in true)
        values = [1.0] * len(true)
    else:
        values = list(claim.values)
        assert all(each(Fraction(v)) for each, v in zip(true, values, strict=True))
        claims.prove(claims.stated(claim), proof.tensor)
    stated = data.draw(
        st.one_of(
            numbers(len(values), 0),
            st.sampled_from((0.5, 1 - 1e-7, 1 - 2.0**-52, 1.5, 2.0)).map(
                lambda f: [min(v, 2.0**1022) * f for v in values]
            ),
        )
    )
    try:
        claims.prove(claims.stated(Claim(measure, names, tuple(stated), constants)), proof.tensor)
    except CheckError:
        return
    assert all(each(Fraction(v)) for each, v in zip(true, stated, strict=True)), stated


def test_a_product_of_weights_of_far_sizes_is_not_proved() -> None:
    """`value / scale` is infinite for the one scale, and was compared before the other brought it back."""
    tensors = {"a": np.full((64, 64), 1e-313), "b": np.full((64, 64), 1e306)}
    settings = {"pairs": [(0, 0)], "parts": (1, 1), "transposed": (False, False)}
    for value in (5e-5, 2e-4, 4.09e-4):  # of 64^2 * 1e-7
        with pytest.raises(CheckError, match="could not be proved"):
            claims.prove(claims.stated(Claim("product", ("a", "b"), (value,), settings)), tensors.__getitem__)
    claims.prove(claims.stated(Claim("product", ("a", "b"), (4.1e-4,), settings)), tensors.__getitem__)


@cache
def trees(leaves: int) -> frozenset[tuple[int, ...]]:
    """The depths of the leaves of all binary trees, from the deepest on."""
    joined = ((a, b) for left in range(1, leaves) for a in trees(left) for b in trees(leaves - left))
    return frozenset(tuple(sorted((d + 1 for d in a + b), reverse=True)) for a, b in joined) or frozenset({(0,)})


def test_addends_of_any_tree_are_rounded_no_more_often_than_their_shares_say() -> None:
    for addends in range(1, 11):
        deepest = np.array(list(trees(addends + 1))).max(0)[:-1]  # the bias is one more leaf
        assert np.array_equal(shares(addends), ((deepest + 1) / (addends + 1)) ** 2)


MATRICES = {
    "normal": lambda g: g.standard_normal((4, 30)), "equal": lambda g: np.ones((3, 40)),
    "rows of far sizes": lambda g: g.standard_normal((5, 20)) * 10.0 ** -np.arange(0, 500, 100)[:, None],
    "columns of far sizes": lambda g: g.standard_normal((5, 6)) * 10.0 ** -np.arange(0, 300, 50),
    "sparse": lambda g: g.standard_normal((9, 9)) * (g.random((9, 9)) < 0.2), "one row": lambda g: np.ones((1, 99)),
    "one column": lambda g: g.standard_normal((9, 1)), "diagonal": lambda g: np.diag(g.standard_normal(8)),
}  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e290])
@pytest.mark.parametrize("name", MATRICES)
def test_sizes_of_sums_in_the_worst_order_do_not_exceed_their_bound(name: str, scale: float) -> None:
    """The worst order of each sum is a chain that begins with its largest addends, which gradients make larger."""
    a = abs(MATRICES[name](np.random.default_rng(0))) * scale
    n, unit = a.shape[1], a.max()
    plain, ordered = (float(absolute_norm(a, each)) / unit for each in (False, True))
    a = a / unit
    true, most = np.linalg.norm(a, 2), np.linalg.norm(a) * (1 + 1e-12)
    assert true * (1 - 1e-12) <= plain <= min(most, 1.05 * true)
    share, x, found = np.minimum(1, (n + 2 - np.arange(1, n + 1)) / (n + 1)), np.ones(n), 0.0
    for _ in range(200):
        x = x / np.linalg.norm(x)
        places = np.argsort(np.argsort(-a * x, axis=1), axis=1)
        weighted = a * share[places]
        found = max(found, float(np.linalg.norm(weighted @ x)))
        x = weighted.T @ (weighted @ x)
    assert 0.6 * ordered <= found <= ordered <= plain
    kernel = a.T[:, :, None] * np.ones(3)
    assert float(absolute_kernel(kernel, 1, False)) == pytest.approx(3 * plain, rel=0.05)
