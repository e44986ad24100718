"""Write docs/reproduction.md from the rows under results/reproduce/: `python -m docs.make_reproduction`.

Nothing there is typed by hand; a test compares the page with what this script writes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from papers._experiment import MODULES, Experiment, Preset, Verdict, load
from papers._table import Row, Table, cell_key

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "reproduction.md", ROOT / "results" / "reproduce"
HEAD = """# Experiments of the four papers, one command each

```sh
python -m papers --list                  # every experiment: cells, cost, verdicts
python -m papers rates                   # minutes on two cores
python -m papers rates --list            # its cells, as --only takes them, and seconds
python -m papers rates --dry-run         # what would run, and how long it took before
python -m papers rates --only seed=0     # some of them
python -m papers rates --preset paper    # the paper's own setting, on whatever it needs
```

A finished cell, one configuration and seed, is a line of `rows.jsonl` in a folder such as
`results/reproduce/rates-cpu`, and is never run twice: a command that was stopped goes on when it is given again.
With `--folder mine` it begins without the committed rows, and runs all cells.
`--jobs 4` runs four cells at a time, `--cluster slurm` submits them with `submitit`, `--device cuda` computes there.
Figures and a table are drawn at the end. Some experiments read what text there is: English books or Tiny Shakespeare
in `$WELLNORMED_DATA`, else the plays that the package installs; a command that would add rows of another
text is refused.

Below are the committed rows; [the papers' claims](papers.md#what-the-papers-claim) are a table of their own. The preset
`paper` is a paper's own setting, judged "reached" or "not reached". Where `cpu` is smaller, the verdict is about the
shape of a curve; "corrected" where the paper's own formulas or logs say otherwise. Nothing is judged where nothing was
published, or where size or number of runs forbid a comparison: such lines, commits, machines and minutes stand in
`table.md` beside the rows. Brackets hold the least and the largest over the seeds. "(log)" marks
numbers that are in a paper's released logs and not in its text; "(edge)" a best loss at the smallest or largest rate
that was tried, so that another rate may be better."""


NAMES = [name for name in MODULES if not load(name).source.startswith("no paper")]
"""The experiments of the papers; what was not published stands in docs/results.md."""


def finished(experiment: Experiment, preset: Preset) -> list[Row]:
    """The rows that there are."""
    return Table(RESULTS / f"{experiment.name}-{preset}" / "rows.jsonl").rows_of(experiment.cells(preset))


def shown(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The table of an experiment, without the columns that say nothing there and reasons that stand a line above."""
    rows, why = [], ""
    for verdict in verdicts:
        reason, why = ("as above" if verdict.why and verdict.why == why else verdict.why), verdict.why
        judged = ": ".join(filter(None, ("" if verdict.verdict == "measured" else verdict.verdict, reason)))
        ours = verdict.ours + (f" [{verdict.interval}]" if verdict.runs > 1 and verdict.interval != "-" else "")
        cells = (verdict.what, verdict.published, ours, judged)
        rows.append([cell.replace("|", "\\|") for cell in cells])
    names = ("", "published", "ours", "verdict")
    kept = [place for place in range(len(names)) if any(row[place] not in ("", "-") for row in rows)]
    yield f"| {' | '.join(names[place] for place in kept)} |"
    yield f"|{'---|' * len(kept)}"
    yield from (f"| {' | '.join(row[place] for place in kept)} |" for row in rows)


def not_run(experiment: Experiment, preset: Preset, rows: list[Row]) -> str:
    """How many cells of a preset have no row, and the values that only these have."""
    text = lambda value: str(list(value) if isinstance(value, tuple) else value)  # noqa: E731 (as JSON has it)
    cells = experiment.cells(preset)
    done = {row["cell"] for row in rows}
    left = [vars(cell) for cell in cells if cell_key(cell) not in done]
    known = {(key, text(value)) for row in rows for key, value in row["config"].items()}
    own: dict[str, list[str]] = {}
    for key, value in dict.fromkeys((key, text(value)) for cell in left for key, value in cell.items()):
        own.setdefault(key, []).extend([value] * ((key, value) not in known))
    several = lambda of: ", ".join(of) if len(of) < 5 else f"{of[0]} to {of[-1]}"  # noqa: E731 (such as seeds)
    named = "; ".join(f"{key}: {several(values)}" for key, values in own.items() if values)
    return f"{len(left)} of {len(cells)} cells were not run" + (f" ({named})" if named else "") if left else ""


def seeds(experiment: Experiment, preset: Preset, rows: Sequence[Row]) -> str:
    """How many seeds a configuration has, the least and the most."""
    done = {row["cell"] for row in rows}
    run = [vars(cell) for cell in experiment.cells(preset) if cell_key(cell) in done]
    counts = Counter(str({key: value for key, value in cell.items() if key != "seed"}) for cell in run)
    least, most = min(counts.values()), max(counts.values())
    return f"{least} to {most} seeds" if least < most else f"{most} seed{'s' * (most > 1)}"


def section(experiment: Experiment, preset: Preset, rows: list[Row]) -> Iterator[str]:
    """Figures and table of one preset, and where they come from."""
    name = f"{experiment.name}-{preset}"
    note = f" Here: {note}." if (note := experiment.differs.get(preset)) else ""
    yield from (f"## {experiment.name}, preset {preset}", "", f"{experiment.source}: {experiment.shows}.{note}")
    if missing := not_run(experiment, preset, rows):
        yield from ("", f"{missing}.")
    verdicts = experiment.verdicts(rows, preset)
    first = finished(experiment, "cpu") if preset == "paper" else []
    before = experiment.verdicts(first, "cpu") if first else []  # what needs no training is the same in both presets
    judged = [verdict for verdict in verdicts if verdict.verdict != "measured" and verdict not in before]
    yield from (
        "",
        f"[rows](../results/reproduce/{name}/rows.jsonl): {len(rows):,} cells, {seeds(experiment, preset, rows)}.",
    )
    names = sorted(path.stem for path in (RESULTS / name).glob("*.png"))
    figures = [f"![{figure}](../results/reproduce/{name}/{figure}.png)" for figure in names]
    others = figures[:-1] if judged else []
    if judged:
        counts = Counter(verdict.verdict for verdict in judged)
        summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        more = f"; {len(others)} more figure{'s' * (len(others) > 1)}" if others else ""
        yield from ("", f"<details><summary>Verdicts: {summary}{more}</summary>", "", *shown(judged))
        yield from (line for figure in others for line in ("", figure))
        yield from ("", "</details>")
    yield from (line for figure in figures[len(others) :] for line in ("", figure))


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for name in NAMES:
        experiment = load(name)
        for preset in get_args(Preset):
            if rows := finished(experiment, preset):
                lines += ["", *section(experiment, preset, rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
