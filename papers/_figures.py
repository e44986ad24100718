"""The look that the figures under `results/` share."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, Any]:
    """A figure and its axes, `(rows, columns)`, with a grid; panels of one row share their vertical axis by default."""
    settings: dict[str, Any] = {"sharey": "row"} | shared
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **settings)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def draw_band(
    axis: Any, values: Mapping[Any, Sequence[float]], style: str = "-", *, middle: Callable[[Any], float] = fmean,
    alpha: float = 0.2, edge: float | None = None, **line: Any,
) -> None:  # fmt: skip
    """A line through the means, and a band from the least to the largest, of the values at every place.

    Args:
        axis: Where it is drawn.
        values: Place -> values, such as those of the seeds; places in order.
        style: The line's, as matplotlib has it.
        middle: In the place of the mean.
        alpha: The band's.
        edge: The width of the band's edges.
        line: Further settings of the line, of which the band has the colour.
    """
    (drawn,) = axis.plot(list(values), list(map(middle, values.values())), style, **line)
    low, high = (list(map(end, values.values())) for end in (min, max))
    axis.fill_between(list(values), low, high, color=drawn.get_color(), alpha=alpha, linewidth=edge)


def legend_below(figure: Figure, title: str) -> None:
    """A title, and one legend under all panels, each label once, in the order in which lines were drawn."""
    drawn = [line for axis in figure.axes for line in axis.get_lines()]
    lines = {str(line.get_label()): line for line in drawn if not str(line.get_label()).startswith("_")}
    # in inches, letters of this size are half as wide as high, and a line and its spaces take half an inch
    wide = 9 / 2 / 72 * max(map(len, lines), default=0) + 0.5
    columns = max(1, min(len(lines), int(figure.get_figwidth() / wide)))
    if lines:  # of a table that has only begun there may be none
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns, fontsize=9)
    figure.suptitle(title, fontsize=11)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG with the resolution that all figures share; the same figure, the same bytes."""
    figure.savefig(path, dpi=140)
    plt.close(figure)
