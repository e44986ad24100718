"""The options of campaigns over numbered random models, and their outcomes on disk."""

import argparse
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any


def parser_of(description: str | None, models: int) -> argparse.ArgumentParser:
    """The options that such a campaign has at least."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=models, help="numbers 0, ..., MODELS - 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many; a later run goes on")
    parser.add_argument("--only", type=int, help="one model, printed in full")
    return parser


def read(path: Path) -> list[dict[str, Any]]:
    """The outcomes on disk; a line that was cut off does not count."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
