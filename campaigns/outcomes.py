"""Campaigns over numbered random models: their options, their loop, and the outcomes that they keep on disk."""

import argparse
import json
import math
import re
import time
import traceback
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from wellnormed.program.errors import UncertifiableError
from wellnormed.train.environment import describe


@dataclass
class Outcome:
    """The outcome of one model; each campaign adds its measurements."""

    number: int
    layers: tuple[str, ...]
    radius: float
    status: str = ""
    """`refused` or `crashed`, or what the campaign calls the rest."""
    reason: str = ""
    seconds: float = 0.0
    """Processor time."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Take the time of the block, and record a refusal or any error, which then does not end the campaign."""
        start = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except UncertifiableError as error:
            self.status, self.reason = "refused", _reason(str(error))
        except Exception:  # any error belongs in the list of failures
            self.status, self.reason = "crashed", traceback.format_exc().replace(f"{Path.cwd()}/", "")
        self.seconds = round(time.process_time() - start, 3)


def _reason(message: str) -> str:
    """A refusal without names and numbers."""
    operation = re.match(r"operation `(.+?)`", message)
    text = re.sub(r"[-+]?\d[\d.e+-]*", "#", message.rpartition("`: ")[2] or message).partition(";")[0][:100]
    return f"`{operation[1]}`: {text}" if operation else text


def parser_of(description: str | None, models: int) -> argparse.ArgumentParser:
    """The options that such a campaign has at least."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=models, help="numbers 0, ..., MODELS - 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many; a later run goes on")
    parser.add_argument("--only", type=int, help="one model, printed in full")
    return parser


def go_on(
    path: Path, count: int, end: float, examine: Callable[[int], Any], failures: Container[str]
) -> list[dict[str, Any]]:
    """Examine the numbers that have no outcome on disk yet.

    Args:
        path: One outcome a line, in JSON. Numbers that were begun stand beside it, in `.begun`: one that ended the
            process has no outcome, and is left out from then on.
        count: Numbers `0, ..., count - 1`.
        end: When to stop, by `time.monotonic`.
        examine: Returns the outcome of a number, a dataclass.
        failures: Each `status` of an outcome that is printed at once.

    Returns:
        All outcomes on disk, in the order in which they were found.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begun, commit = path.with_suffix(".begun"), describe(torch.device("cpu"), 0)["commit"]
    known = {each["number"] for each in read(path)} | set(map(int, begun.read_text().split() if begun.exists() else []))
    with path.open("a") as file, begun.open("a") as mark:
        file.write("\n" if path.stat().st_size else "")
        for number in range(count):
            if number in known or time.monotonic() > end:
                continue
            mark.write(f"{number} ")
            mark.flush()
            outcome = asdict(examine(number))
            file.write(json.dumps(outcome | {"commit": commit}) + "\n")
            file.flush()
            if outcome["status"] in failures:
                print(f"{path.stem}, {number}: {outcome}", flush=True)
    return [each for each in read(path) if each["number"] < count]


def read(path: Path) -> list[dict[str, Any]]:
    """The outcomes on disk; a line that was cut off does not count."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
