"""Bounds of any groups of a value hold for random entries, and are those of known matrices."""

from decimal import Decimal

import numpy as np
import pytest

from wellnormed.proof import Bounds
from wellnormed.proof.gather import gather
from wellnormed.proof.value import Base, Term, Value


def base(random: np.random.Generator, axes: tuple[int, ...]) -> Base:
    """Four rows of six entries, whose groups have random bounds."""
    shape = [1 if axis in axes else n for axis, n in enumerate((4, 6))]
    sizes = np.frompyfunc(Decimal, 1, 1)(random.uniform(0.5, 2.0, shape))
    return Base("base", (4, 6), axes, Bounds(sizes, sizes, sizes, sizes), None)


@pytest.mark.parametrize("seed", range(60))
def test_random_sums_of_moved_entries(seed: int) -> None:
    random = np.random.default_rng(seed)
    bases = [base(random, axes) for axes in ((1,), (0, 1), (0,), ())[: 1 + seed % 4]]
    terms = []
    for _ in range(1 + seed % 3):
        chosen = bases[random.integers(len(bases))]
        index = random.integers(-1, 24, (3, 5)) if seed % 2 else random.permutation(24)[:15].reshape(3, 5)
        factor = (random.normal(size=(3, 5)), np.array(-0.7), random.normal(size=(3, 1)))[seed % 3]
        terms.append(Term(chosen, index, factor, 1))
    value = Value("value", (3, 5), tuple(terms))
    for axes in ((), (0,), (1,), (0, 1)):
        bounds = gather(value, axes)
        for _ in range(50):
            entries = {}
            for one in bases:
                x = random.normal(size=24) * (random.random(24) < 0.4)
                norms = np.sqrt(np.bincount(one.groups(np.arange(24)), x * x))
                x *= (one.table[0].astype(float) / np.where(norms > 0, norms, 1))[one.groups(np.arange(24))]
                entries[id(one)] = x
            y = np.zeros((3, 5))
            for term in terms:
                y += np.where(term.index < 0, 0, entries[id(term.base)][term.index]) * term.factor
            lengths = np.sqrt(np.square(y).sum(axes, keepdims=True))
            assert (lengths <= bounds.radius.astype(float) * (1 + 1e-12)).all()
            assert (abs(y) <= bounds.largest.astype(float) * (1 + 1e-12)).all()
