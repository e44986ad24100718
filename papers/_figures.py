"""The look that the figures under `results/` share."""

from pathlib import Path
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
