"""Runs the matrix benchmarks and prints their one table: function, shape, ours, peer, ratio, error.

Times are medians, the error is ours and then the peer's (spectral, in float32; what it is over stands in
`comparisons` and `accuracy`), a ratio that is demanded is marked. `--print` prints the files of the last run.

    python -m benchmarks.matrix.table
"""

import argparse
import json
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from . import accuracy, operations, speed
from .record import RESULTS

COLUMNS = ("function", "shape", "ours", "peer", "ratio", "error: ours, peer")
WIDTH = 220
"""Columns of text, so that a log holds the whole table."""
_PAPER = ("nested", "block", "blockwise")

Line = tuple[str, str, str, str, str, str]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.0e}"


def _met(met: bool, demand: str) -> str:
    return f"[green]{demand}[/]" if met else f"[red]{demand}: missed[/]"


def speed_lines(results: dict) -> Iterator[Line]:
    """Times."""
    for row in results["rows"]:
        ours = f"{row['ours_seconds'] * 1e3:.1f} ms"
        if row["peer_missing"]:
            yield row["function"], row["input"], ours, f"{row['peer']}: {row['peer_missing']}", "", ""
            continue
        peer = f"{row['peer'].removesuffix(', well').removesuffix(', ill')} {row['peer_seconds'] * 1e3:.1f} ms"
        ratio = f"{row['ratio']:.2f}"
        if row["demand"]:
            ratio += " " + _met(row["met"], f"≤ {row['demand']:g}")
        known = row["ours_error"] is not None or row["peer_error"] is not None
        error = f"{_number(row['ours_error'])}, {_number(row['peer_error'])}" if known else ""
        yield row["function"], row["input"], ours, peer, ratio, error


def accuracy_lines(results: dict) -> Iterator[Line]:
    """The worst case of the suite; a method of the paper fails where it misses what is demanded of the default."""
    defaults = {(r["dtype"], r["function"]): r for r in results["summary"] if r["method"] == "auto"}
    for row in results["summary"]:
        limit = results["limits"][row["dtype"]]
        where = f"suite of {row['cases']}, {row['dtype']}"
        misses = f"misses {row['missed']} of {row['cases']}"
        if row["method"] == "auto":
            verdict = _met(not row["missed"], f"≤ {limit:.0e}") if row["demanded"] else ""
            state = misses if row["missed"] else "holds on all"
            yield row["function"], where, state, "float64 SVD", verdict, \
                f"{_number(row['worst_error'])} ({row['worst_case']})"  # fmt: skip
            continue
        default = defaults.get((row["dtype"], row["function"]))
        own = f"{_number(default['worst_error'])}, " if default else ""
        whose = "SC" if row["method"] in _PAPER else "our method"
        peer = f"{whose} {row['method']}: {misses if row['missed'] else 'holds on all'}"
        if (row["worst_excess"] or 0) > results["excess_limit"]:
            peer += f"; norm up to {1 + row['worst_excess']:.4g} x cap"
        yield row["function"], where, "", peer, "", f"{own}{_number(row['worst_error'])} ({row['worst_case']})"


def operation_lines(results: dict) -> Iterator[Line]:
    """Operations over those of a training step of NanoGPT-140M."""
    for row in results["rows"]:
        paper = row["paper_overhead_5_steps"]
        ratio = f"{row['overhead'] / paper:.2f}"
        if row["demand"]:
            ratio += " " + _met(row["overhead"] <= row["demand"], f"overhead ≤ {row['demand']:.1%}")
        ours = f"{row['overhead']:.2%} of a step ({row['overhead_gpt2']:.2%} of GPT-2 small)"
        shape = f"{results['side']} x {results['side']}, operations"
        formula = (
            f"SC section 5: {row['paper_printed_percent']:.2f}% (T = 5; {row['paper_overhead_6_steps']:.2%} for T = 6)"
        )
        yield row["function"], shape, ours, formula, ratio, ""


def build(results: dict[str, dict]) -> Table:
    """The table, in three sections."""
    run, environment = results["speed"], results["speed"]["environment"]
    table = Table(
        title=f"Matrix functions: torch {environment['packages']['torch']}, {environment['threads']} threads, "
        f"{run['machine']}",
        width=WIDTH,
    )
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("ours", "ratio") else "left", overflow="fold")
    sections = (speed_lines, accuracy_lines, operation_lines)
    for name, lines in zip(("speed", "accuracy", "operations"), sections, strict=True):
        for line in lines(results[name]):
            table.add_row(*line)
        table.add_section()
    return table


def main() -> None:
    """Run the three benchmarks, unless told not to, and print the table from their files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", dest="only_print", help="the files of the last run")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if not options.only_print:
        for module in (operations, accuracy, speed):
            module.main(["--threads", str(options.threads), "--quiet"])
    results = {n: json.loads((RESULTS / f"{n}.json").read_text()) for n in ("speed", "accuracy", "operations")}
    Console(width=WIDTH).print(build(results))


if __name__ == "__main__":
    main()
