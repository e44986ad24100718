"""An experiment of numbers, some of which fail or kill their process, for the tests of the grid."""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from papers._experiment import Experiment, Verdict
from papers._grid import DataError

FAILS, DIES = 13, 99


@dataclass(frozen=True)
class Number:
    value: int
    seed: int = 0


def run(cell, device):
    if log := os.environ.get("TOY_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{cell.value}\n")
    if "TOY_PAUSE" in os.environ and cell.value > 5:
        time.sleep(600)
    if os.environ.get("TOY_TROUBLE") == "no data" and cell.value > 2:
        raise DataError("numbers.tar.gz could not be downloaded; put it there")
    if os.environ.get("TOY_TROUBLE") and cell.value == FAILS:
        raise ValueError("thirteen is refused")
    if os.environ.get("TOY_TROUBLE") and cell.value == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"square": cell.value**2}


def run_together(cells, device):
    return [run(cell, device) for cell in cells]


def cells(preset):
    return [Number(value) for value in ((1, 2, FAILS, 4, DIES, 6) if preset == "cpu" else range(100))]


def figures(rows):
    figure = Figure()
    figure.add_subplot().plot([row["config"]["value"] for row in rows], [row["results"]["square"] for row in rows])
    return {"squares": figure}


def verdicts(rows, preset):
    return [
        Verdict("largest | square", "9801", str(max(r["results"]["square"] for r in rows)), "-", len(rows), "reached")
    ]


def data(cell):
    return os.environ.get("TOY_DATA", "whole numbers")


EXPERIMENT = Experiment("toy", "no paper", "that numbers have squares", cells, run, figures, verdicts)
OF_DATA = replace(EXPERIMENT, data=data)
TOGETHER = replace(EXPERIMENT, run=run_together, together=lambda cell: cell.value > 2)
