"""`python -m papers`: the experiments of the four papers, and their state.

Every experiment and preset has a folder with `rows.jsonl`, one line for each finished cell, from which all else is
drawn: figures, and `table.md`, which puts what was found beside what was published.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from shlex import join
from typing import Any, get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Printed

from papers._experiment import MODULES, Experiment, Preset, Verdict, load
from papers._figures import save_figure
from papers._grid import chosen, missing, run_missing
from papers._table import Row, Table, seconds_of
from wellnormed._files import write_atomically
from wellnormed.train.lock import locked

FOLDER = Path("results/reproduce")
COLUMNS = ("", "published", "ours", "interval", "runs", "verdict", "why")


def reproduce(
    name: str, preset: Preset = "cpu", device: str = "cpu", jobs: int = 1, cluster: str | None = None,
    folder: Path = FOLDER, console: Console | None = None, only: Sequence[str] = (),
) -> int:  # fmt: skip
    """Run the cells that have no row yet, draw the figures, and print what was published beside what was found.

    Args:
        name: An experiment of `MODULES`.
        preset: "cpu", minutes on two cores, or "paper", the paper's own setting.
        device: Where the cells compute.
        jobs: Processes; each gets an equal part of the CPU's cores.
        cluster: Submits every cell as a job instead, with the package `submitit`: "slurm", or "local" to try it.
        folder: Holds a folder for every experiment and preset.
        console: Standard output by default.
        only: Cells to run, such as `["width=32,64", "seed=0"]`; all by default.

    Returns:
        The number of cells that failed, whose rows are missing; the same command runs them again.
    """
    experiment, console = load(name), console or Console()
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    path = folder / f"{name}-{preset}"
    console.print("Lipschitz constants are from RMS to RMS, as in the papers, unless they are called Euclidean")
    with locked(path):
        table = Table(path / "rows.jsonl")
        for problem in table.repair():
            console.print(problem, highlight=False, soft_wrap=True)
        try:
            failures = run_missing(experiment, preset, table, device, jobs, cluster, console, only)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("; finished cells are kept, and the same command goes on") from None
        rows = table.rows_of(experiment.cells(preset))
        if rows:
            draw(experiment, preset, rows, path)
            console.print(_printed(experiment.verdicts(rows, preset)))
        left = len(failures)
        console.print(
            f"{path}: {len(rows)} of {len(experiment.cells(preset))} cells, figures, table.md"
            + (f"; {left} failed: the same command runs them again" if left else ""),
            highlight=False,
            soft_wrap=True,
        )
    return left


def draw(experiment: Experiment, preset: Preset, rows: Sequence[Row], path: Path) -> None:
    """Write the figures and `table.md` of rows into their folder."""
    for figure_name, figure in experiment.figures(rows).items():
        save_figure(figure, path / f"{figure_name}.png")
    write_atomically(path / "table.md", markdown(experiment.verdicts(rows, preset), rows))


def markdown(verdicts: Sequence[Verdict], rows: Sequence[Row]) -> str:
    """The table of an experiment, and where its rows come from."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(str(x).replace('|', chr(92) + '|') for x in astuple(verdict))} |" for verdict in verdicts]
    minutes = sum(row["seconds"] for row in rows) / 60
    machines, commits = (dict.fromkeys(row[key] for row in rows) for key in ("machine", "commit"))
    short = ", ".join(commit[:10] + commit[40:] for commit in commits)
    return "\n".join([*lines, "", f"{len(rows):,} cells, {minutes:.1f} minutes; {'; '.join(machines)}; {short}.", ""])


def cost(cells: Sequence[Any], rows: Mapping[str, Row], beyond: int = 0) -> str:
    """The minutes that one process takes for cells, as far as `seconds_of` knows them from the rows.

    Nothing if they are known of no more than `beyond` cells.
    """
    known = [seconds for seconds in seconds_of(cells, rows) if seconds is not None]
    if len(known) <= beyond:
        return ""
    of = "" if len(known) == len(cells) else f" for {len(known):,} of {len(cells):,} cells"
    return f"{sum(known) / 60:,.1f} min{of}"


def plan(name: str, preset: Preset = "cpu", folder: Path = FOLDER, only: Sequence[str] = ()) -> str:
    """The runs of the same command without --dry-run, and how long they took before."""
    experiment = load(name)
    rows, _ = Table(folder / f"{name}-{preset}" / "rows.jsonl").read()
    cells = chosen(experiment.cells(preset), only)
    left = [cell for chunk in missing(experiment, cells, rows) for cell in chunk]
    machines = {f"{row['machine']}, {row['environment']['threads']} of them in use" for row in rows.values()}
    said = cost(left, rows)
    lines = [f"{name}, preset {preset}: {len(left):,} of {len(cells):,} cells would run"]
    lines += [f"one process would take {said}, by rows of {' and '.join(sorted(machines))}"] if said else []
    return "\n".join(lines)


def overview(folder: Path = FOLDER) -> Printed:
    """Every experiment and preset: how many cells are finished, the minutes of one process, and what came of them.

    The minutes are those of the finished cells, and of all, as far as these tell.
    """
    printed = Printed(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("experiment", "preset", "cells"):
        printed.add_column(column, no_wrap=True)
    for column in ("cost", "source", "verdicts"):
        printed.add_column(column)
    for name in MODULES:
        experiment = load(name)
        for preset in get_args(Preset):
            cells = experiment.cells(preset)
            table = Table(folder / f"{name}-{preset}" / "rows.jsonl")
            rows = table.rows_of(cells)
            spent = f"{sum(row['seconds'] for row in rows) / 60:,.1f} min" if rows else "not run"
            if more := cost(cells, table.read()[0], beyond=len(rows)):
                spent += f"; all {more}" if more.endswith("min") else f"; {more}"
            counts = Counter(verdict.verdict for verdict in experiment.verdicts(rows, preset)) if rows else {}
            found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            printed.add_row(name, preset, f"{len(rows)}/{len(cells)}", spent, experiment.source, found)
    return printed


def states(name: str, preset: Preset, folder: Path = FOLDER) -> str:
    """A line for each cell: whether it has its row, its seconds as far as rows tell, its fields as for `--only`."""
    experiment = load(name)
    cells = experiment.cells(preset)
    rows, _ = Table(folder / f"{name}-{preset}" / "rows.jsonl").read()
    left = {cell for chunk in missing(experiment, cells, rows) for cell in chunk}
    fields = [[f"{key}={value}" for key, value in vars(cell).items()] for cell in cells]
    shared = set(fields[0]).intersection(*fields)
    lines = [f"in all cells: {join(field for field in fields[0] if field in shared)}"]
    for cell, given, seconds in zip(cells, fields, seconds_of(cells, rows), strict=True):
        said = "missing " if cell in left else "finished", "" if seconds is None else f"{seconds:.0f} s"
        lines.append(f"{said[0]}  {said[1]:>7}  {join(field for field in given if field not in shared)}")
    return "\n".join(lines)


def _printed(verdicts: Sequence[Verdict]) -> Printed:
    printed = Printed(*COLUMNS)
    for verdict in verdicts:
        printed.add_row(*map(str, astuple(verdict)))
    return printed
