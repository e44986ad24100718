"""Times of the functions against the paper's forms and the peers, on the same inputs, alternating round by round.

python -m benchmarks.matrix.speed
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from .comparisons import Group, caps, orthonormal, signs, unit_norm
from .inputs import SHAPES
from .record import alternate, finite, median, write

WEIGHT_SHAPES = ((256, 1024), (768, 768))
"""Shapes at which peers that parametrise a weight are timed."""


def groups() -> Iterator[Group]:
    """Everything that is timed, built one at a time."""
    for shape in SHAPES:
        yield caps(shape)
        yield signs(shape)
    for shape in WEIGHT_SHAPES:
        yield orthonormal(shape)
        yield unit_norm(shape)


@torch.no_grad()
def measure(group: Group, rounds: int, seconds: float) -> list[dict]:
    """One dictionary per row of the group; times are medians in seconds, the ratio is that of the medians."""
    calls = {name: c.call for name, c in group.contenders.items() if not isinstance(c.call, str)}
    times, values = alternate(calls, rounds, seconds)
    errors = {}
    for name, value in values.items():
        error = group.contenders[name].error
        errors[name] = finite(error(value)) if error and isinstance(value, Tensor) else None
    rows = []
    for row in group.rows:
        ours, reason = median(times[row.ours]), group.contenders[row.peer].call
        peer = median(times[row.peer]) if row.peer in times else None
        rows.append(
            {
                "function": row.function,
                "input": row.input,
                "ours": row.ours,
                "ours_seconds": ours,
                "ours_rounds": len(times[row.ours]),
                "ours_error": errors[row.ours],
                "peer": row.peer,
                "peer_seconds": peer,
                "peer_rounds": len(times.get(row.peer, ())),
                "peer_error": errors.get(row.peer),
                "peer_missing": reason if isinstance(reason, str) else None,
                "ratio": ours / peer if peer else None,
            }
        )
    return rows


def line(row: dict) -> str:
    """One line for the terminal."""
    if row["peer_missing"]:
        return f"{row['function']:28} {row['input']:32} {row['peer']:36} {row['peer_missing']}"
    return (
        f"{row['function']:28} {row['input']:32} {row['ours_seconds'] * 1e3:8.1f}ms  {row['peer']:36} "
        f"{row['peer_seconds'] * 1e3:8.1f}ms {row['ratio']:6.2f}"
    )


def main() -> None:
    """Measure, print as it goes, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each contender, after which it sits out")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(False)
    for warm_up in (caps((8, 24)), signs((8, 24))):  # what torch loads at its first call, about a second
        measure(warm_up, 1, 1.0)
    rows = []
    for group in groups():
        for row in measure(group, options.rounds, options.seconds):
            rows.append(row)
            print(line(row), flush=True)
    settings = {"rounds": options.rounds, "seconds": options.seconds, "flush_denormal": False}
    write("speed", "python -m benchmarks.matrix.speed", {**settings, "rows": rows})


if __name__ == "__main__":
    main()
