"""The parts of an experiment: its cells, how one is run, its figures, and the published numbers beside ours."""

import difflib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from statistics import fmean
from typing import Any, Literal

from matplotlib.figure import Figure

from papers._table import Row

Preset = Literal["cpu", "paper"]
Answer = Literal["reached", "not reached", "same shape", "another shape"]
ANSWERS: dict[Preset, tuple[Answer, Answer]] = {
    "cpu": ("same shape", "another shape"),
    "paper": ("reached", "not reached"),
}
"""Preset -> the verdicts for yes and no."""
NAMES = (
    "batch-size", "block-mass", "caps", "certified-vision", "cifar-robustness", "cifar-tradeoff", "grokking",
    "hardcap-cost", "hardcap-stability", "inflation", "lr-transfer-cnn", "lr-transfer-gpt", "lr-transfer-mlp", "memory",
    "nanogpt-table1", "rates", "scion-3b", "shakespeare-best", "shakespeare-tradeoff", "sign-only", "stability-grid",
    "warm-up", "watermark",
)  # fmt: skip
MODULES = {name: f"papers.{name.replace('-', '_')}" for name in NAMES}
"""Name of an experiment -> the module whose `EXPERIMENT` it is."""


@dataclass(frozen=True)
class Verdict:
    """One line of an experiment's table: what was published, and what was found."""

    what: str
    published: str
    ours: str
    interval: str
    """From the least to the largest over the seeds."""
    runs: int
    verdict: Answer | Literal["measured", "corrected"]
    """`measured`: nothing was published, or the setting is ours. `corrected`: the paper's own numbers say otherwise."""
    why: str = ""
    """Why a number is not reached, or in what the setting differs from the paper's."""

    @classmethod
    def of(
        cls, what: str, published: str, values: Sequence[float], verdict: Any = "measured", why: str = "",
        *, digits: str = ".3f", ours: str = "",
    ) -> "Verdict":  # fmt: skip
        """The line of one result of several runs: by default their mean, and from the least to the largest."""
        ours = ours or f"{fmean(values):{digits}}"
        return cls(what, published, ours, between(values, digits), len(values), verdict, why)

    def measured(self) -> "Verdict":
        """The line of a run whose setting is not the paper's: nothing is judged."""
        return replace(self, published="-", verdict="measured", why="")


def between(values: Sequence[float], digits: str = ".3f") -> str:
    """From the least to the largest of some values.

    Example:
        >>> between([0.5, 0.25, 1.0], ".2f")
        '0.25 to 1.00'
    """
    return f"{min(values):{digits}} to {max(values):{digits}}"


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper, as `python -m papers` knows it."""

    name: str
    source: str
    """The paper, and its figure, table or section."""
    shows: str
    """Its claim, in one sentence that follows "shows"."""
    cells: Callable[[Preset], Sequence[Any]]
    """The configs of a preset: frozen dataclasses of numbers, words and tuples, with a field `seed`."""
    run: Callable[..., Any]
    """A cell, a device and, if the experiment `keeps`, a folder -> the results, an object that JSON can hold.

    With `together` it takes several cells and returns the results of each."""
    figures: Callable[[Sequence[Row]], dict[str, Figure]]
    """Name -> figure, from the rows of a preset."""
    verdicts: Callable[[Sequence[Row], Preset], Sequence[Verdict]]
    data: Callable[[Any], str] | None = None
    """The name of what a cell reads, where that is what this machine has; no table holds rows of different data."""
    keeps: bool = False
    """Whether `run` takes a folder as well, in which cells leave what they go on from after they were stopped."""
    together: Callable[[Any], Hashable] | None = None
    """Cells of an equal value are run at once, as many models in one; None runs each alone."""
    differs: dict[str, str] = field(default_factory=dict)
    """Preset -> in what it differs from the paper's setting."""


def load(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in MODULES:
        near = difflib.get_close_matches(name, MODULES, n=3, cutoff=0.4) or sorted(MODULES)
        raise ValueError(f"there is no experiment {name!r}; did you mean {', '.join(near)}? --list shows all")
    return import_module(MODULES[name]).EXPERIMENT
