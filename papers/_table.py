"""The finished cells of an experiment on disk: one sealed line of JSON each, never lost and never counted twice."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from wellnormed._files import json_text, parse_json, write_atomically, writing

Row = dict[str, Any]
"""`cell` (its key), `config`, `results`, `seconds`, where it ran: `command`, `commit`, `seed`, `machine`, ..., and what
it read where that depends on the machine: `data`."""
ADDED = {"added": True}
"""Metadata of a field of a config that rows were stored without."""


def cell_key(config: Any) -> str:
    """The key of a cell: a hash of its config, which is a dataclass of numbers, words and tuples.

    A field that was added when rows of its class had been stored is declared with the metadata `ADDED`; it is left out
    at its default, so that those rows keep their keys.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Point:
        ...     lr: float
        >>> cell_key(Point(0.1)) == cell_key(Point(0.1)) != cell_key(Point(0.2))
        True
    """
    content = {"kind": type(config).__qualname__, **dataclasses.asdict(config)}
    for field in dataclasses.fields(config):
        if field.metadata == ADDED and content[field.name] == field.default:
            del content[field.name]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def results_by(rows: Iterable[Row], setting: str, what: str, **where: Any) -> dict[Any, list[Any]]:
    """The values of a setting, in order -> a result of every row that has them, and whose config has `where`.

    Example:
        >>> rows = [{"config": {"lr": lr, "seed": seed}, "results": {"loss": 0.5}} for lr in (2, 1) for seed in (0, 1)]
        >>> results_by(rows, "lr", "loss", seed=1)
        {1: [0.5], 2: [0.5]}
    """
    found: dict[Any, list[Any]] = {}
    for row in rows:
        if where.items() <= row["config"].items():
            found.setdefault(row["config"][setting], []).append(row["results"][what])
    return dict(sorted(found.items()))


def seconds_of(cells: Sequence[Any], rows: Mapping[str, Row]) -> list[float | None]:
    """The seconds that each cell takes, as far as rows (by the key of their cell) tell.

    They are those of its row; else the mean of rows that differ in the seed alone, or else in the seed and in numbers
    with a fraction, such as rates. None if there are no such rows.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Run:
        ...     width: int
        ...     lr: float
        ...     seed: int = 0
        >>> rows = {cell_key(run): {"config": vars(run), "seconds": run.lr} for run in (Run(8, 1.0), Run(8, 3.0))}
        >>> seconds_of([Run(8, 3.0), Run(8, 3.0, 1), Run(8, 5.0), Run(16, 3.0)], rows)
        [3.0, 3.0, 2.0, None]
    """

    def likenesses(config: dict[str, Any]) -> list[str]:
        but_the_seed = {key: value for key, value in config.items() if key != "seed"}
        sizes = {key: value for key, value in but_the_seed.items() if not isinstance(value, float)}
        return [json.dumps(part, sort_keys=True) for part in (but_the_seed, sizes)]

    alike: dict[str, list[float]] = {}
    for row in rows.values():
        for likeness in likenesses(row["config"]):
            alike.setdefault(likeness, []).append(row["seconds"])
    known = [
        [[row["seconds"]] if (row := rows.get(cell_key(cell))) else []]
        + [alike.get(likeness, []) for likeness in likenesses(dataclasses.asdict(cell))]
        for cell in cells
    ]
    return [next((fmean(seconds) for seconds in each if seconds), None) for each in known]


class Table:
    """The rows in `path`. A line that a kill or a bad disk left damaged does not count: its cell is run again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[dict[str, Row], list[str]]:
        """Rows by the key of their cell, and for every line that does not count a sentence that says why."""
        rows, problems = {}, []
        for number, line in enumerate(self._lines(), start=1):
            try:
                row = parse_json(line, f"{self.path}, line {number},", "its cell is run again", sealed=True)
                rows[row["cell"]] = row
            except (ValueError, KeyError) as error:
                problems.append(str(error))
        return rows, problems

    def rows_of(self, cells: Iterable[Any]) -> list[Row]:
        """The rows of these cells, in their order, as far as there are any."""
        rows, _ = self.read()
        return [rows[key] for key in map(cell_key, cells) if key in rows]

    def repair(self) -> list[str]:
        """Remove lines that do not count, and say why not, or that a later one of their cell replaces."""
        rows, problems = self.read()
        if len(rows) < len(self._lines()):
            write_atomically(self.path, "".join(json_text(row, sealed=True) for row in rows.values()))
        return problems

    def append(self, row: Row) -> None:
        """Add a row, durably and whole: after an `OSError` the file is as it was."""
        line = json_text(row, sealed=True).encode()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                size = file.tell()
                try:
                    file.write(line if not size or self._ends_a_line() else b"\n" + line)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise

    def _lines(self) -> list[bytes]:
        return [line for line in self.path.read_bytes().split(b"\n") if line] if self.path.exists() else []

    def _ends_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
