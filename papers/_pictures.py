"""Small pictures in the rows of an experiment, and how they are drawn."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from papers._figures import panels

Picture = dict[str, Any]
"""A picture in JSON: `shape`, `pixels` and `title`."""


def picture(image: Tensor, title: str) -> Picture:
    """An image `(3, height, width)` of numbers in [0, 1], rounded to 8 bits."""
    pixels = (image * 255).round().byte().cpu().permute(1, 2, 0).contiguous().numpy()
    return {"shape": list(pixels.shape), "pixels": base64.b64encode(pixels.tobytes()).decode(), "title": title}


def draw_pictures(rows: Sequence[tuple[str, Sequence[Picture]]], columns: Sequence[str], title: str) -> Figure:
    """Rows of pictures, each row and each column with its name, each picture below its title."""
    figure, axes = panels(len(rows), len(columns), (2.2 * len(columns), 2.3 * len(rows)))
    for line, (name, pictures) in zip(axes, rows, strict=True):
        line[0].set_ylabel(name, fontsize=8)
        for axis, own, column in zip(line, pictures, columns, strict=True):
            _draw(axis, own)
            axis.set_xlabel(column, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw(axis: Axes, own: Picture) -> None:
    pixels = np.frombuffer(base64.b64decode(own["pixels"]), np.uint8)
    axis.imshow(pixels.reshape(own["shape"]))
    axis.set_title(own["title"], fontsize=9)
    axis.set(xticks=[], yticks=[])
