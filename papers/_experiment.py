"""What an experiment is: its cells, how one is run, what is drawn from them, and what was published."""

import difflib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
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
Run = Callable[..., Sequence[dict[str, Any]]]
"""Cells and a device, and of an experiment that `keeps` also a folder -> the results of every cell."""
MODULES: dict[str, str] = {
    "batch-size": "papers.batch_size",
    "block-mass": "papers.block_mass",
    "caps": "papers.caps",
    "certified-vision": "papers.certified_vision",
    "cifar-robustness": "papers.cifar_robustness",
    "cifar-tradeoff": "papers.cifar_tradeoff",
    "grokking": "papers.grokking",
    "hardcap-cost": "papers.hardcap_cost",
    "hardcap-stability": "papers.hardcap_stability",
    "inflation": "papers.inflation",
    "lr-transfer-cnn": "papers.lr_transfer_cnn",
    "lr-transfer-gpt": "papers.lr_transfer_gpt",
    "lr-transfer-mlp": "papers.lr_transfer_mlp",
    "memory": "papers.memory",
    "nanogpt-table1": "papers.nanogpt_table1",
    "rates": "papers.rates",
    "scion-3b": "papers.scion_3b",
    "shakespeare-best": "papers.shakespeare_best",
    "shakespeare-tradeoff": "papers.shakespeare_tradeoff",
    "sign-only": "papers.sign_only",
    "stability-grid": "papers.stability_grid",
    "warm-up": "papers.warm_up",
    "watermark": "papers.watermark",
}
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

    def measured(self) -> "Verdict":
        """The line of a run whose setting is not the paper's: nothing is judged."""
        return replace(self, published="-", verdict="measured", why="")


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper, as `python -m papers` knows it."""

    name: str
    source: str
    """The paper, and its figure, table or section."""
    shows: str
    """What it must show, in one sentence."""
    cells: Callable[[Preset], Sequence[Any]]
    """The configs of a preset: frozen dataclasses of numbers, words and tuples, with a field `seed`."""
    run: Run
    """Results of cells that are run at once, each an object that JSON can hold."""
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
