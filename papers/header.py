"""The header of every file under `results/`, which describes the run that made it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wellnormed._files import write_atomically
from wellnormed.train.environment import describe

FIELDS = ("command", "commit", "seed", "machine")
"""The keys with which every result begins."""


def header(command: str, seed: int | list[int], device: str = "cpu") -> dict[str, Any]:
    """The keys of `FIELDS`, and `environment` with versions, system, threads and starting time of a run.

    The command repeats the run from the root of the project, and a file that holds runs of several seeds lists them.
    Nothing in it identifies a person or one machine: `machine` is the kind of processor and its number of cores.
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
    first = {"command": command, "commit": environment["commit"], "seed": seed, "machine": environment["processor"]}
    return {**first, "environment": rest}


class Stored:
    """The rows of a result that a script goes on with: each is printed and written when it is made, and made once.

    The file's `seed` is the list of those of its rows, if they have any.

    Args:
        path: The file, whose rows of before count.
        command: As for `header`.
        content: Further entries of the file, beside the rows.
    """

    def __init__(self, path: Path, command: str, **content: Any) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
        self.content: dict[str, Any] = header(command, 0) | content
        self.commit = {"commit": self.content["commit"][:10]}
        """An entry for rows of this run, where others may be of other commits."""

    def has(self, **cell: Any) -> bool:
        """Whether some row has these entries."""
        return any(cell.items() <= row.items() for row in self.rows)

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Print rows, and write all."""
        for row in rows:
            self.rows.append(dict(row))
            print(row, flush=True)
        seeds = sorted({row["seed"] for row in self.rows if "seed" in row}) or self.content["seed"]
        write_result(self.path, {**self.content, "seed": seeds, "rows": self.rows})


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
