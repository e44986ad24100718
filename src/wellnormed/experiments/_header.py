"""What every file under `results/` says of the run that made it, and the look that its figures share."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wellnormed._files import write_atomically
from wellnormed.train.environment import describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIELDS = ("command", "commit", "seed", "machine")
"""The keys with which every result begins."""


def header(command: str, seed: int | list[int], device: str = "cpu") -> dict[str, Any]:
    """The keys of `FIELDS`, and `environment` with versions, system, threads and starting time of a run.

    Nothing in it identifies a person or one machine: `machine` is the kind of processor and its number of cores.

    Args:
        command: What repeats the run from the root of the project.
        seed: Of everything that is drawn at random; a list where a file holds runs of several seeds.
        device: Where the run computes.
    """
    return from_environment(command, seed, describe(torch.device(device), 0))


def from_environment(command: str, seed: int | list[int], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The same from an environment that was recorded when the run began.

    Example:
        >>> from_environment("make it", 0, {"commit": "abc", "processor": "any, 2 cores", "threads": 1})
        {'command': 'make it', 'commit': 'abc', 'seed': 0, 'machine': 'any, 2 cores', 'environment': {'threads': 1}}
    """
    rest = {key: value for key, value in environment.items() if key not in ("commit", "processor", "from_step")}
    if "machine" in rest:
        rest["architecture"] = rest.pop("machine")
    return {
        "command": command,
        "commit": environment["commit"],
        "seed": seed,
        "machine": environment["processor"],
        "environment": rest,
    }


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result as JSON, one row of `content["rows"]` a line, so that a difference between two runs can be read.

    Content that lacks a key of `FIELDS`, or holds NaN or infinity, is refused.
    """
    missing = [key for key in FIELDS if key not in content]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; begin its content with `header(command, seed)`")
    text = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1, allow_nan=False)
    if "rows" in content:
        rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in content["rows"])
        text = f'{text.removesuffix("}").rstrip()},\n "rows": [\n{rows}\n ]\n}}'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text + "\n")


def panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple["Figure", Any]:
    """A figure and its axes, `(rows, columns)`, with a grid; panels of one row share their vertical axis."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=size, layout="constrained", sharey="row", squeeze=False, **shared
    )
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def legend_below(figure: "Figure", title: str) -> None:
    """A title, and one legend under all panels, each label once, in the order in which lines were drawn."""
    drawn = [line for axis in figure.axes for line in axis.get_lines()]
    lines = {str(line.get_label()): line for line in drawn if not str(line.get_label()).startswith("_")}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(len(lines), 5), fontsize=9)
    figure.suptitle(title, fontsize=11)


def save_figure(draw: Callable[[], "Figure"], path: Path) -> None:
    """Draw without a screen, and write a PNG with the resolution that all figures share."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure = draw()
    figure.savefig(path, dpi=140)
    plt.close(figure)
