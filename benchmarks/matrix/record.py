"""Shared by the benchmarks: what a result file says of its run, and timings that alternate between contenders."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from papers.header import header, write_result

SHORT = 0.1
"""Seconds."""
RESULTS = Path(__file__).parents[2] / "results" / "matrix"


def write(name: str, command: str, content: Mapping) -> Path:
    """Write `results/matrix/<name>.json`: what every result says of its run, then the content.

    Every matrix is drawn from another seed, counted up from 0.
    """
    path = RESULTS / f"{name}.json"
    write_result(path, {**header(command, seed=0), **content})
    return path


def finite(value: float) -> float | None:
    """Three digits, and for JSON, which has no infinity, None where a method returned NaN or infinity."""
    return float(f"{value:.3g}") if abs(value) < float("inf") else None


def alternate(
    contenders: Mapping[str, Callable[[], object]], rounds: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, object]]:
    """Time the contenders in turn, round by round, so that the machine's drift hits all of them.

    A call shorter than `SHORT` is made twice in a round and the second is timed: as in a loop over weights, it finds
    its own data and memory pages, and not those of the contender before it.

    Args:
        contenders: What to call, by name.
        rounds: At most so many timed rounds.
        seconds: A contender sits out once it has used so much time, after one timed round at least.

    Returns:
        Times in seconds, and what each returned at its first call. The first round warms up and is not timed,
        except for a contender that used up its seconds in it.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    used = dict.fromkeys(contenders, 0.0)
    values: dict[str, object] = {}
    for index in range(rounds + 1):
        for name, call in contenders.items():
            if used[name] > seconds and times[name]:
                continue
            for _ in range(2):
                start = time.perf_counter()
                value = call()
                elapsed = time.perf_counter() - start
                used[name] += elapsed
                if elapsed > SHORT:
                    break
            values.setdefault(name, value)
            if index > 0 or elapsed > seconds:
                times[name].append(elapsed)
    return times, values


def median(times: list[float]) -> float:
    """Median of the rounds."""
    return statistics.median(times)
