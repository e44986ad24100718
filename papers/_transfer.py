"""Whether the best learning rate of one size serves another: curves over rates, their minima, and how far these move.

Rows have `lr` and `seed` in their config and `loss` in their results, None for a run that diverged.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple

from matplotlib.figure import Figure

from papers._experiment import Answer, Verdict
from papers._figures import draw_band, legend_below, panels
from papers._table import Row

Curve = dict[float, float]
"""Learning rate -> loss, in order; infinity for a run that diverged."""
STAYS = 1.0
"""Most factors of two by which a rate that stays may move: the step of the grids of rates."""


class Best(NamedTuple):
    """The minimum of a curve."""

    rate: float
    """On the grid."""
    fitted: float
    """The vertex of the parabola in the logarithm of the rate through the minimum and its neighbours."""
    loss: float
    at_edge: bool
    """Whether a better rate may lie beyond the grid."""


def best(curve: Curve) -> Best:
    """The minimum; without two neighbours of a finite loss it is not fitted.

    Example:
        >>> best({0.125: 2.25, 0.25: 1.25, 0.5: 1.25, 1.0: 2.25})
        Best(rate=0.25, fitted=0.3535..., loss=1.25, at_edge=False)
    """
    rates, losses = list(curve), list(curve.values())
    place = min(range(len(rates)), key=lambda i: losses[i])
    rate, fitted = rates[place], rates[place]
    around = [(math.log2(rates[i]), losses[i]) for i in range(max(0, place - 1), min(len(rates), place + 2))]
    if len(around) == 3 and all(map(math.isfinite, losses[place - 1 : place + 2])):
        (a, _), (b, _), (c, _) = around
        down, up = ((right[1] - left[1]) / (right[0] - left[0]) for left, right in pairwise(around))
        if up > down:
            fitted = 2 ** ((a + b) / 2 - down * (c - a) / (up - down) / 2)
    return Best(rate, fitted, losses[place], place in (0, len(rates) - 1))


def curves(rows: Sequence[Row], by: str, **where: Any) -> dict[int, dict[Any, Curve]]:
    """Seed -> size -> curve, of the rows whose config has these values; sizes in order."""
    found: dict[int, dict[Any, Curve]] = {}
    for row in sorted(rows, key=lambda row: (row["config"][by], row["config"]["lr"])):
        config, loss = row["config"], row["results"]["loss"]
        if all(config.get(key) == value for key, value in where.items()):
            sizes = found.setdefault(config["seed"], {})
            sizes.setdefault(config[by], {})[config["lr"]] = math.inf if loss is None else loss
    return dict(sorted(found.items()))


def mean_curves(rows: Sequence[Row], by: str, **where: Any) -> dict[Any, dict[float, list[float]]]:
    """Size -> learning rate -> the losses of the seeds."""
    found: dict[Any, dict[float, list[float]]] = {}
    for sizes in curves(rows, by, **where).values():
        for size, curve in sizes.items():
            for rate, loss in curve.items():
                found.setdefault(size, {}).setdefault(rate, []).append(loss)
    return {size: dict(sorted(rates.items())) for size, rates in sorted(found.items())}


def best_losses(rows: Sequence[Row], **where: Any) -> list[float]:
    """The lowest loss over all rates of the rows whose config has these values, for every seed that has one."""
    found = [best(curve).loss for sizes in curves(rows, "seed", **where).values() for curve in sizes.values()]
    return [loss for loss in found if math.isfinite(loss)]


def edges(rows: Sequence[Row], by: str, **where: Any) -> int:
    """How many minima of these curves lie at the edge of the rates, so that the best rate may be further."""
    return sum(best(curve).at_edge for sizes in curves(rows, by, **where).values() for curve in sizes.values())


def mean_best(rows: Sequence[Row], **where: Any) -> str:
    """The mean over the seeds of `best_losses`, marked where the best rate of a seed lies at the edge of the rates."""
    return f"{fmean(best_losses(rows, **where)):.3f}" + " (edge)" * bool(edges(rows, "seed", **where))


def drifts(rows: Sequence[Row], by: str, **where: Any) -> list[float]:
    """By how many factors of two the fitted best rate falls from the smallest to the largest size, for every seed."""
    ends = [(best(small), best(large)) for small, large in _ends(rows, by, **where)]
    return [math.log2(a.fitted / b.fitted) for a, b in ends if math.isfinite(a.loss) and math.isfinite(b.loss)]


def transferred(rows: Sequence[Row], by: str, **where: Any) -> list[float]:
    """How much the largest size loses at the best rate of the smallest instead of its best, for every seed.

    It is infinite where that run diverged; a seed is left out if the largest size was not run at that rate.
    """
    ends = [(best(small).rate, large) for small, large in _ends(rows, by, **where)]
    return [large[rate] - best(large).loss for rate, large in ends if rate in large]


def _ends(rows: Sequence[Row], by: str, **where: Any) -> list[tuple[Curve, Curve]]:
    """The curves of the smallest and the largest size of every seed that has two."""
    found = [list(sizes.values()) for sizes in curves(rows, by, **where).values()]
    return [(sizes[0], sizes[-1]) for sizes in found if len(sizes) > 1]


def agreed(gains: Sequence[float], yes: Answer, no: Answer) -> tuple[Answer | Literal["measured"], str]:
    """`yes` if every seed has a gain, `no` if none has; where they disagree, nothing is judged, and why."""
    lost = sum(gain <= 0 for gain in gains)
    if 0 < lost < len(gains):
        return "measured", f"{lost} of {len(gains)} seeds disagree"
    return (no if lost else yes), ""


def transfer_verdict(
    rows: Sequence[Row],
    by: str,
    what: str,
    published: str,
    stays: bool | None,
    names: tuple[Answer, Answer],
    **where: Any,
) -> list[Verdict]:
    """Whether the best rate stays, as `stays` says it should; `names` are the verdicts for yes and no."""
    moved, lost = drifts(rows, by, **where), transferred(rows, by, **where)
    if not moved:
        return []
    sizes = {key: None for found in curves(rows, by, **where).values() for key in found}
    sign, word = (1, "falls") if (mean := fmean(moved)) >= 0 else (-1, "rises")
    ours = f"{word} by 2^{abs(mean):.1f} from {min(sizes)} to {max(sizes)}"
    if lost:
        ours += f", where the rate of {min(sizes)} costs {fmean(lost):.3f}"
    interval = " to ".join(f"2^{sign * end:.1f}" for end in (min(moved), max(moved))[::sign])
    count = edges(rows, by, **where)
    why = f"{count} of the minima lie at the edge of the rates, so the best may be further" if count else ""
    if stays is None:
        return [Verdict(what, published, ours, interval, len(moved), "measured", why)]
    verdict = names[(abs(mean) <= STAYS) != stays]
    return [Verdict(what, published, ours, interval, len(moved), verdict, why)]


def transfer_figure(
    rows: Sequence[Row], by: str, titles: Mapping[str, Mapping[str, Any]], title: str, *,
    ylabel: str = "validation loss", above: float | None = None,
) -> Figure:  # fmt: skip
    """Loss against rate by size, a panel for every entry of `titles`; bands hold the seeds, marks are the minima.

    Losses that exceed the lowest by more than `above` are cut off.
    """
    shown = {name: found for name, where in titles.items() if (found := mean_curves(rows, by, **where))}
    figure, axes = panels(1, max(1, len(shown)), (max(7.0, 1 + 2.7 * len(shown)), 4))
    sizes = sorted({size for found in shown.values() for size in found})
    losses = [loss for found in shown.values() for rates in found.values() for each in rates.values() for loss in each]
    low = min(filter(math.isfinite, losses), default=0.0)
    for axis, (name, found) in zip(axes[0], shown.items(), strict=False):
        for size, rates in found.items():
            colour = f"C{sizes.index(size)}"
            kept = {rate: losses for rate, losses in rates.items() if all(map(math.isfinite, losses))}
            if not kept:
                continue
            means = {rate: fmean(losses) for rate, losses in kept.items()}
            draw_band(axis, kept, color=colour, edge=0, label=f"{by} {size:g}")
            lowest = min(means, key=lambda rate: means[rate])
            axis.plot(lowest, means[lowest], "o", color=colour)
        axis.set_xscale("log", base=2)
        axis.set(title=name, xlabel="learning rate")
    axes[0, 0].set_ylabel(ylabel)
    if above is not None:
        axes[0, 0].set_ylim(low - 0.05 * above, low + above)
    legend_below(figure, title)
    return figure
