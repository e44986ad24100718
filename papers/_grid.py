"""Runs the cells of an experiment that have no row yet, in any number of processes.

A row is written the moment its cell is finished, so a kill loses only the cells that are being computed.
A cell that fails, or whose process dies, is reported, and the others go on; data that cannot be had ends them all.
"""

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from papers._experiment import Experiment, Preset
from papers._table import Row, Table, cell_key
from papers.header import header
from wellnormed.data._download import DataError
from wellnormed.train.progress import progress_display

Chunk = tuple[Any, ...]
"""Cells that are run at once."""
Outcome = list[Row] | str | DataError
"""The rows of a chunk, or why there are none."""


class Settings(NamedTuple):
    """Everything that a process needs to run chunks."""

    run: Callable[..., Any]
    together: bool
    """Whether `run` takes all cells of a chunk; else a chunk has one."""
    data: Callable[[Any], str] | None
    """The name of what a cell reads, where that depends on the machine."""
    command: str
    """The command that a row states."""
    device: str
    threads: int
    unfinished: Path | None = None
    """For an experiment that `keeps`: this folder holds another for every chunk that is not finished."""

    def folder(self, chunk: "Chunk") -> tuple[Path, ...]:
        """The folder of a chunk, where it has one."""
        return () if self.unfinished is None else (self.unfinished / cell_key(chunk[0]),)


def chosen(cells: Sequence[Any], only: Sequence[str]) -> Sequence[Any]:
    """The cells whose fields have these values, each given as `field=value` or `field=value,value`; all without any.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Cell:
        ...     width: int
        ...     seed: int
        >>> chosen([Cell(8, 0), Cell(8, 1), Cell(16, 0)], ["width=8,16", "seed=0"])
        [Cell(width=8, seed=0), Cell(width=16, seed=0)]
    """
    for condition in only:
        name, _, values = condition.partition("=")
        # words such as "by form, proved 10" hold commas themselves
        kept = [cell for cell in cells if str(getattr(cell, name, None)) in (values, *values.split(","))]
        if not kept:
            first = ", ".join(f"{key}={value}" for key, value in vars(cells[0]).items())
            raise ValueError(
                f"--only {condition} leaves no cell; a cell is {first}, for instance (NAME --list shows all)"
            )
        cells = kept
    return cells


def missing(experiment: Experiment, cells: Sequence[Any], rows: Mapping[str, Row]) -> list[Chunk]:
    """The cells that have no row, in the order of the experiment, those that are run together as one."""
    chunks: dict[Any, list[Any]] = {}
    for number, cell in enumerate(cells):
        if cell_key(cell) not in rows:
            group = number if experiment.together is None else experiment.together(cell)
            chunks.setdefault(group, []).append(cell)
    return [tuple(chunk) for chunk in chunks.values()]


def run_missing(
    experiment: Experiment,
    preset: Preset,
    table: Table,
    device: str,
    jobs: int,
    cluster: str | None,
    console: Console,
    only: Sequence[str] = (),
) -> list[str]:
    """Run what has no row, here or on a cluster that `submitit` knows, and return what failed, in words."""
    cells = chosen(experiment.cells(preset), only)
    chunks = missing(experiment, cells, table.read()[0])
    total, failures = len(cells), []
    done = total - sum(map(len, chunks))
    if experiment.data and chunks:
        _require_same_data(experiment, preset, table)
        for cell in (cell for chunk in chunks for cell in chunk):
            experiment.data(cell)  # data that cannot be had end all before the first cell is run
    command = f"python -m papers {experiment.name} --preset {preset}"
    threads, unfinished = max(1, torch.get_num_threads() // jobs), table.path.parent / "unfinished"
    kept = unfinished if experiment.keeps else None
    together = experiment.together is not None
    settings = Settings(experiment.run, together, experiment.data, command, device, threads, kept)
    with progress_display(console, done, total, 1, "cell") as show:
        logs = table.path.parent / "jobs"
        outcomes = _outcomes(chunks, settings, jobs) if cluster is None else _jobs(chunks, settings, cluster, logs)
        for chunk, outcome in outcomes:
            if isinstance(outcome, DataError):
                raise outcome
            done += len(chunk)
            if isinstance(outcome, str):
                failures.append(outcome)
                show(done, f"FAILED: {outcome}")
                continue
            for row in outcome:
                table.append(row)
            for path in settings.folder(chunk):
                shutil.rmtree(path, ignore_errors=True)
            show(done, f"{sum(row['seconds'] for row in outcome):.0f} s")
    return failures


def _require_same_data(experiment: Experiment, preset: Preset, table: Table) -> None:
    """Refuse to put rows beside those of other data than their cells read here, where those can be had."""
    assert experiment.data is not None
    rows, path = table.read()[0], table.path
    other, here = set[str](), set[str]()
    for cell in experiment.cells(preset):
        if "data" in (row := rows.get(cell_key(cell), {})):
            with suppress(DataError):
                found = experiment.data(cell)
                if row["data"] != found:
                    other.add(row["data"])
                    here.add(found)
    if other:
        raise DataError(
            f"{path} has rows of {', '.join(sorted(other))}, and what is found on this machine is "
            f"{', '.join(sorted(here))}; these cannot be compared: set WELLNORMED_DATA to the folder that holds the "
            "former, or keep the new rows apart with another --folder"
        )


def run_chunk(chunk: Chunk, settings: Settings) -> list[Row]:
    """The rows of cells that are run at once, in this process."""
    start = time.perf_counter()
    where = torch.device(settings.device), *settings.folder(chunk)
    results = settings.run(chunk, *where) if settings.together else [settings.run(chunk[0], *where)]
    seconds = (time.perf_counter() - start) / len(chunk)
    return [
        {**header(settings.command, cell.seed, settings.device),
         **({"data": settings.data(cell)} if settings.data else {}),
         "cell": cell_key(cell), "config": asdict(cell), "results": result, "seconds": round(seconds, 3)}
        for cell, result in zip(chunk, results, strict=True)
    ]  # fmt: skip


class _Worker:
    """A process that runs one chunk after another."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()
        self.chunk: Chunk | None = None

    def begin(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.connection.send(chunk)

    def end(self) -> Outcome:
        """The outcome of the chunk, which a dead process cannot send."""
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            why = f"was killed by signal {-code}" if code and code < 0 else f"ended with exit status {code}"
            return f"the process of {_shown(self.chunk)} {why}"


def _outcomes(chunks: Sequence[Chunk], settings: Settings, jobs: int) -> Iterator[tuple[Chunk, Outcome]]:
    """Each chunk with its rows, or with what went wrong, as they come."""
    waiting = list(reversed(chunks))
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.chunk for worker in workers):
            while waiting and len([w for w in workers if w.chunk]) < jobs:
                idle = next((w for w in workers if w.chunk is None), None)
                if idle is None:
                    workers.append(idle := _Worker(settings))
                idle.begin(waiting.pop())
            ready = wait([w.connection for w in workers if w.chunk])
            for worker in [w for w in workers if w.connection in ready]:
                outcome = worker.end()
                chunk, worker.chunk = worker.chunk, None
                assert chunk is not None  # only those at work are waited for
                if not worker.process.is_alive():
                    workers.remove(worker)
                yield chunk, outcome
    finally:
        for worker in workers:
            worker.process.kill()


def _jobs(chunks: Sequence[Chunk], settings: Settings, cluster: str, logs: Path) -> Iterator[tuple[Chunk, Outcome]]:
    """The same, every chunk as a job of a cluster."""
    try:
        import submitit  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ValueError("a cluster needs the package submitit: pip install '.[cluster]'") from None
    executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
    gpus = int(settings.device.startswith("cuda"))
    executor.update_parameters(cpus_per_task=settings.threads, gpus_per_node=gpus, timeout_min=720)
    with executor.batch():
        jobs = [executor.submit(_outcome, chunk, settings) for chunk in chunks]
    waiting = dict(zip(jobs, chunks, strict=True))
    while waiting:
        time.sleep(0.2)
        for job in [job for job in waiting if job.done()]:
            chunk, error = waiting.pop(job), job.exception()
            yield chunk, f"the job of {_shown(chunk)} failed: {error}" if error else job.result()


def _serve(connection: Connection, settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        while True:
            connection.send(_outcome(connection.recv(), settings))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # the parent has ended, or is ending us
        return


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers, and what they compute would be lost."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # only workers call this
    parent.join()
    os._exit(1)


def _outcome(chunk: Chunk, settings: Settings) -> Outcome:
    try:
        return run_chunk(chunk, settings)
    except DataError as error:
        return error
    except (ValueError, RuntimeError, ArithmeticError, OSError) as error:
        return f"{_shown(chunk)}: {error}"


def _shown(chunk: Chunk | None) -> str:
    assert chunk
    return str(chunk[0]) if len(chunk) == 1 else f"{len(chunk)} cells from {chunk[0]} on"
