"""The table of docs/results.md on LightBench, from the content of its file."""

from typing import Any

from benchmarks.lightbench import MATRICES, VECTORS

Lines = list[tuple[object, ...]]


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
