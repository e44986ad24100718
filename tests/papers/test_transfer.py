"""Minima of curves over learning rates, and how far they move, against curves with known minima."""

import math

import matplotlib
import pytest

from papers._experiment import ANSWERS
from papers._transfer import (
    agreed,
    best,
    best_losses,
    drifts,
    mean_best,
    mean_curves,
    transfer_figure,
    transfer_verdict,
    transferred,
)

NAMES = ANSWERS["cpu"]


def rows(slope, powers=range(-8, 1), seeds=(0, 1), widths=(32, 64, 256), diverged=()):
    """Parabolas in the logarithm of the rate, with the minimum at `-2 - slope log2(width / 32)`, moved by the seed."""
    return [
        {
            "config": {"method": "m", "width": width, "lr": 2.0**power, "seed": seed},
            "results": {"loss": None if power in diverged else 1 + (power - middle) ** 2},
        }
        for seed in seeds
        for width in widths
        for power in powers
        for middle in [-2 - slope * math.log2(width / 32) + 0.1 * seed]
    ]


def test_the_vertex_of_a_parabola_is_found():
    curve = {2.0**power: (power + 2.3) ** 2 + 5 for power in range(-6, 2)}
    found = best(curve)
    assert found.rate == 0.25
    assert math.log2(found.fitted) == pytest.approx(-2.3)
    assert found.loss == pytest.approx(5.09)
    assert not found.at_edge


def test_a_minimum_beside_a_run_that_ended_in_no_number_is_not_fitted():
    found = best({0.5: 2.0, 1.0: 1.0, 2.0: math.inf})
    assert (found.fitted, found.at_edge) == (1.0, False)
    assert best({0.5: 1.0, 1.0: 2.0}).at_edge


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
def test_the_drift_is_that_of_the_minima(slope):
    assert drifts(rows(slope), "width", method="m") == pytest.approx([3 * slope, 3 * slope])
    assert drifts(rows(slope), "width", method="other") == []
    assert drifts(rows(slope, widths=(32,)), "width") == []


def test_a_transferred_rate_costs_its_distance_squared():
    assert transferred(rows(1.0), "width")[0] == pytest.approx(9.0)
    assert transferred(rows(0.0), "width") == pytest.approx([0.0, 0.0])
    assert transferred(rows(1.0, diverged=(-2,)), "width")[0] < math.inf  # nor is it the smallest's best rate then
    assert best_losses(rows(0.0), width=32) == pytest.approx([1.0, 1.01])


@pytest.mark.parametrize(("slope", "stays", "verdict"), [
    (0.1, True, "same shape"), (1.0, True, "another shape"), (0.1, False, "another shape"), (1.0, False, "same shape"),
    (-1.0, True, "another shape"), (1.0, None, "measured"),
])  # fmt: skip
def test_the_verdict_follows_the_drift(slope, stays, verdict):
    (found,) = transfer_verdict(rows(slope, range(-12, 6)), "width", "best rate", "published", stays, NAMES)
    assert found.verdict == verdict
    assert found.why == ""
    assert found.runs == 2


def test_where_one_seed_disagrees_nothing_is_judged():
    assert agreed([0.1, 0.2], *NAMES) == ("same shape", "")
    assert agreed([0.1, -0.2, 0.3], *NAMES) == ("measured", "1 of 3 seeds disagree")
    assert agreed([-0.1, -0.2], *NAMES) == ("another shape", "")


def test_a_minimum_at_the_edge_is_named():
    (found,) = transfer_verdict(rows(3.0), "width", "best rate", "published", True, NAMES)
    assert "2 of the minima lie at the edge" in found.why
    assert mean_best(rows(3.0), width=32) == "1.005"
    assert mean_best(rows(3.0), width=256).endswith(" (edge)")


def test_the_figure_has_a_line_for_every_size():
    matplotlib.use("agg")
    figure = transfer_figure(rows(1.0, diverged=(-8,)), "width", {"one": {"method": "m"}, "none": {"method": "x"}}, "t")
    (axis,) = figure.axes
    assert [line.get_label() for line in axis.get_lines() if not line.get_label().startswith("_")] == [
        "width 32", "width 64", "width 256",
    ]  # fmt: skip
    assert len(mean_curves(rows(1.0), "width")[32][0.25]) == 2
