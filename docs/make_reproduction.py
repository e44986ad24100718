"""Write docs/reproduction.md from the rows under results/reproduce/: `python -m docs.make_reproduction`.

Nothing there is typed by hand; a test compares the page with what this script writes.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from papers._experiment import MODULES, Experiment, Preset, load
from papers._table import Row, Table, cell_key
from papers.reproduce import markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "reproduction.md", ROOT / "results" / "reproduce"
HEAD = """# The four papers, one command each

```sh
python -m papers --list                  # every experiment: finished cells, cost, verdicts
python -m papers rates                   # minutes on two cores
python -m papers rates --list            # its cells, and which are finished
python -m papers rates --only seed=0     # some of them
python -m papers rates --dry-run         # the memory that they need; starts none
python -m papers rates --preset paper    # the paper's own setting, on whatever it needs
```

An experiment is a set of cells, each one configuration and seed. A finished cell is a line of `rows.jsonl` in a
folder such as `results/reproduce/rates-cpu`, and is never run twice: a command that was stopped, or killed, goes on
when it is given again. `--jobs 4` runs four cells at a time; `--cluster slurm` submits them with `submitit`;
`--device cuda` computes there. Figures, a table and one self-contained page of all experiments, `index.html` in
`results/reproduce`, are drawn at the end.

Some experiments read what text there is: English books or Tiny Shakespeare in `$WELLNORMED_DATA`, else the plays that
the package installs. Their rows say which, and a command that would add rows of another text is refused.

Below is what has been run, as it stands in the committed rows; this page is written by `python -m
docs.make_reproduction`. The preset `paper` is a paper's own setting, and its numbers are compared: a verdict is
"reached" or "not reached"; the next section says in what it differs from the publication. Where the preset `cpu` is
smaller than the paper, its text says in what, and the verdict is about the shape of a curve. "Measured" stands where
nothing was published, or where size or number of runs forbid a comparison. Intervals reach from the least to the
largest value over the seeds."""


def finished(experiment: Experiment, preset: Preset) -> list[Row]:
    """The rows that there are."""
    return Table(RESULTS / f"{experiment.name}-{preset}" / "rows.jsonl").rows_of(experiment.cells(preset))


def state() -> Iterator[str]:
    """Every experiment, in a table."""
    yield "| experiment | source | `cpu` | `paper` |"
    yield "|---|---|---|---|"
    for name in MODULES:
        experiment = load(name)
        columns = []
        for preset in get_args(Preset):
            rows, total = finished(experiment, preset), len(experiment.cells(preset))
            if not rows:
                columns.append(f"not run, {total:,} cells")
                continue
            counts = Counter(verdict.verdict for verdict in experiment.verdicts(rows, preset))
            verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            part = "" if len(rows) == total else f"{len(rows):,} of {total:,} cells: "
            columns.append(f"{part}[{verdicts}](#{name}-preset-{preset})")
        yield f"| `{name}` | {experiment.source} | {columns[0]} | {columns[1]} |"


def deviations() -> Iterator[str]:
    """What the preset `paper` of every experiment has otherwise than the publication, also where it was not run."""
    yield from ("## In what the preset `paper` differs from the publications", "")
    for name in MODULES:
        if note := load(name).differs.get("paper"):
            yield f"- `{name}`: {note}."


def not_run(experiment: Experiment, preset: Preset, rows: list[Row]) -> str:
    """How many cells of a preset have no row, and the values that only these have."""
    cells = experiment.cells(preset)
    done = {row["cell"] for row in rows}
    left = [vars(cell) for cell in cells if cell_key(cell) not in done]
    known = {(key, str(value)) for row in rows for key, value in row["config"].items()}
    own = dict.fromkeys((key, str(value)) for cell in left for key, value in cell.items())
    named = "; ".join(f"{key}: {value}" for key, value in own if (key, value) not in known)
    return f"{len(left)} of {len(cells)} cells were not run" + (f" ({named})" if named else "") if left else ""


def section(experiment: Experiment, preset: Preset, rows: list[Row]) -> Iterator[str]:
    """Figures and table of one preset, and where they come from."""
    name = f"{experiment.name}-{preset}"
    yield from (f"## {experiment.name}, preset {preset}", "", f"{experiment.source}: {experiment.shows}.")
    if note := experiment.differs.get(preset):
        yield from ("", f"In what it differs from the paper's setting: {note}.")
    commits = ", ".join(dict.fromkeys(_short(row["commit"]) for row in rows))
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    seeds, minutes = len({row["seed"] for row in rows}), sum(row["seconds"] for row in rows) / 60
    if missing := not_run(experiment, preset, rows):
        yield from ("", f"{missing}.")
    yield from (
        "",
        f"[{name}](../results/reproduce/{name}/rows.jsonl): `{rows[0]['command']}`; {len(rows):,} cells, {seeds} "
        f"seed{'s' * (seeds > 1)}, {minutes:.1f} minutes of one process; {machines}; commit {commits}.",
        "",
        *markdown(experiment.verdicts(rows, preset)).splitlines(),
    )
    for figure in sorted(path.stem for path in (RESULTS / name).glob("*.png")):
        yield from ("", f"![{figure}](../results/reproduce/{name}/{figure}.png)")


def _short(commit: str) -> str:
    """Ten digits, and whether something was changed since."""
    return commit[:10] + commit[40:]


def page() -> str:
    """The whole page."""
    lines = [HEAD, "", *state(), "", *deviations()]
    for name in MODULES:
        experiment = load(name)
        for preset in get_args(Preset):
            if rows := finished(experiment, preset):
                lines += ["", *section(experiment, preset, rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
