"""The tables of docs/results.md on benchmarks of optimizers that others wrote, from the content of their files."""

from statistics import fmean
from typing import Any

from benchmarks.lightbench import MATRICES, VECTORS
from wellnormed.certificates import shown

Lines = list[tuple[object, ...]]


def ranks(content: dict[str, Any]) -> tuple[str, Lines]:
    """EPFL's harness: what was run, and a line of each optimizer at the best of its cells of seed 0, best first."""
    rates, decays = content["planned_rates"], content["planned_decays"]
    lines: Lines = []
    missing = sum(len(values) for values in rates.values()) * len(decays)
    for name in rates:
        rows = [row for row in content["rows"] if row["optimizer"] == name]
        first = [row for row in rows if row["seed"] == 0]
        if not first:
            continue
        best = min(first, key=lambda row: row["validation_loss"])
        same = [row for row in rows if all(row[key] == best[key] for key in ("lr", "weight_decay"))]
        planned = sum(row["lr"] in rates[name] and row["weight_decay"] in decays for row in first)
        missing -= planned
        over = [row["largest_norm_over_cap"] for row in rows if "largest_norm_over_cap" in row]
        lines.append(
            (
                name,
                best["validation_loss"],
                f"{best['lr']:g}, {best['weight_decay']:g}",
                f"{planned} of {len(rates[name]) * len(decays)}"
                + f", {len(first) - planned} more" * (len(first) > planned),
                f"{fmean(row['validation_loss'] for row in same):.3f} ({len(same)})" if len(same) > 1 else "-",
                shown(max(over)) if over else "-",
            )
        )
    lines.sort(key=lambda line: float(str(line[1])))
    ran = {line[0] for line in lines}
    names = ", ".join(name for name in rates if name not in ran)
    none = f" Of {names} none was run." if names else ""
    lacking = (
        f"{missing} of the planned cells were not run, so an optimizer with few cells may do better than it does here."
        if missing
        else "All planned cells were run."
    )
    said = (
        f"Validation loss after 500 steps, at the best of the cells of seed 0. {lacking}{none} Ours begin with "
        f"`wn-`; with `-caps` they have a hard cap of {content['cap']:g} on every matrix of the blocks, whose norms "
        "are the largest of all cells. Commit and machine are those of the last row."
    )
    return said, [(place, *line) for place, line in enumerate(lines, 1)]


def pass_rates(content: dict[str, Any]) -> tuple[str, Lines]:
    """LightBench: what was asked, and how many tasks every optimizer passed.

    Who fails the trivial form of a task is not asked the easy one, and has failed it. Some tasks have no easy form. A
    dash stands for an optimizer that did not run on all tasks of a kind.
    """
    passed = {
        (row["task"], row["difficulty"], row["optimizer"]): row["passed"]
        for row in content["rows"]
        if row.get("error") != "no such difficulty"
    }
    won = {key for key, reached in passed.items() if reached}
    names = list(dict.fromkeys(name for _, _, name in passed))
    tasks = MATRICES + VECTORS
    easy = [task for task in tasks if any((task, "easy", name) in passed for name in names)]
    versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    said = (
        f"A task is passed if one of {content['trials']} trials of {content['steps']} steps reaches its loss "
        f"({versions}). `benchmarks/lightbench.py` names the {len(tasks)} tasks, {len(MATRICES)} with matrices, and "
        "says what is left out. Ours have their default norms, with which a vector takes steps of one length, however "
        "small its gradient. Classic Muon leaves vectors to AdamW, bounded Adam to `BoundedAdam`."
    )

    def row(name: str) -> tuple[str, ...]:
        counts = [name]
        for kind in (MATRICES, VECTORS):
            harder = [task for task in kind if task in easy]
            if any((task, "trivial", name) not in passed for task in kind):  # what lacks a task is no result
                counts += ["-", "-"]
                continue
            reached = [
                [(task, form, name) in won for task in some] for form, some in (("trivial", kind), ("easy", harder))
            ]
            counts += [f"{sum(each)} of {len(each)}" for each in reached]
        return tuple(counts)

    lines = [row(name) for name in names]
    return said, [line for line in lines if {*line[1:]} != {"-"}]
