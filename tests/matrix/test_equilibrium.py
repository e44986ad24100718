import itertools

import pytest
import torch

from wellnormed.matrix import spectral_clipped_weight_decay
from wellnormed.matrix.equilibrium import clipped_weight_decay_equilibrium

from .conftest import with_singular_values

ORDERS = ("step-then-project", "project-then-step")


def decayed(norm, upper, decay):
    return norm if norm <= upper else upper + (1 - decay) * (norm - upper)


def advance(norm, upper, decay, step, order):
    if order == "step-then-project":
        return decayed(norm + step, upper, decay)
    return decayed(norm, upper, decay) + step


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("upper", "decay", "step"), list(itertools.product([0.0, 0.5, 3.0], [0.05, 0.5, 1.0], [1e-2, 0.2, 10.0]))
)
def test_the_recursion_reaches_it_from_both_sides_and_never_crosses(order, upper, decay, step):
    held = clipped_weight_decay_equilibrium(upper, decay, step, order)
    assert advance(held, upper, decay, step, order) == pytest.approx(held)
    for start in (0.0, 0.9 * held, held + 5.0):
        norm = start
        steps = int((held + 5) / step) + 600 if step >= 0.2 else 2000
        for _ in range(steps):
            after = advance(norm, upper, decay, step, order)
            below, above = (norm <= held * (1 + 1e-12)), (norm >= held * (1 - 1e-12))
            assert (below and after <= held * (1 + 1e-9)) or (above and after <= norm * (1 + 1e-12))
            norm = after
        assert norm == pytest.approx(held, rel=1e-6)


def test_decoupled_decay_holds_at_a_distance_that_does_not_depend_on_the_rate():
    for lr in (1.0, 0.1, 1e-4):
        assert clipped_weight_decay_equilibrium(2.0, 0.5 * lr, lr, "project-then-step") == pytest.approx(2 + 1 / 0.5)
        assert clipped_weight_decay_equilibrium(2.0, 0.5, lr) == pytest.approx(2 + lr)


def test_full_decay_pulls_what_does_not_grow_to_zero_and_clipped_decay_only_to_its_threshold():
    """SC 3.4. Where the decay has the factor `lr`, sinking rates end the pull: the equilibrium stays `1 / decay`."""
    start = with_singular_values([3.0, 0.9, 0.01], 5, 3)
    full = clipped = start
    for _ in range(200):  # without steps
        full, clipped = (1 - 0.1) * full, spectral_clipped_weight_decay(clipped, 1.0, 0.1)
    assert float(torch.linalg.matrix_norm(full, 2)) < 3e-9
    torch.testing.assert_close(torch.linalg.svdvals(clipped), torch.tensor([1.0, 0.9, 0.01]).double())
    for lr in (1e-1, 1e-3, 1e-5):
        assert clipped_weight_decay_equilibrium(0.0, 0.1, lr) == pytest.approx(9 * lr)  # sinks to zero with the rate
        assert clipped_weight_decay_equilibrium(1.0, 0.1, lr) == pytest.approx(1 + 9 * lr)
        assert clipped_weight_decay_equilibrium(0.0, lr, lr, "project-then-step") == 1.0


def test_beyond_a_decay_of_one_the_published_bound_is_false():
    """LT calls `1 / decay` strict; with lr * decay = 1.5 turning steps reach three times as much."""
    decay, lr, w = 1.0, 1.5, 0.0
    for _ in range(60):
        w = (1 - lr * decay) * w + lr * (1 if (1 - lr * decay) * w >= 0 else -1)
    assert abs(w) == pytest.approx(3 / decay)
    with pytest.raises(ValueError, match=r"decay=1\.5 .*beyond 1 the sign flips"):
        clipped_weight_decay_equilibrium(0.0, lr * decay, lr)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((-1.0, 0.5, 0.1), "upper=-1"), ((float("inf"), 0.5, 0.1), "upper=inf"), ((1.0, 0.0, 0.1), "decay=0"),
        ((1.0, 1.1, 0.1), r"decay=1\.1"), ((1.0, float("nan"), 0.1), "decay=nan"), ((1.0, 0.5, -0.1), "lr=-0"),
        ((1.0, 0.5, float("nan")), "lr=nan"), ((1.0, 0.5, 0.1, "after"), "order='after'"),
    ],
)  # fmt: skip
def test_refused_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        clipped_weight_decay_equilibrium(*arguments)
