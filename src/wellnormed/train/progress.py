"""Progress of a run: a bar in a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


@contextmanager
def progress_display(
    console: Console, first: int, steps: int, line_every: int, what: str = "step"
) -> Iterator[Callable[[int, str | None], None]]:
    """Show work that starts at step `first` of `steps`; `what` is the word for one step.

    Yields a function of the steps done and, where a step is logged, its values in words. Without a terminal, one line
    is printed every `line_every` steps.
    """
    # in a narrow terminal the values take several lines, and the numbers of steps and the time stay whole
    values = TextColumn("{task.fields[values]}", table_column=Column(no_wrap=False, overflow="fold"))
    done, remaining = (kind(table_column=Column(no_wrap=True)) for kind in (MofNCompleteColumn, TimeRemainingColumn))
    columns = (f"{what}s", BarColumn(bar_width=12), done, values, remaining)
    bar = Progress(*columns, console=console, refresh_per_second=4)
    task = bar.add_task("", total=steps, completed=first, values="")
    start = time.perf_counter()

    def show(step: int, values: str | None) -> None:
        bar.update(task, completed=step)
        if values is None:
            return
        bar.update(task, values=values)
        if not console.is_terminal and not console.quiet and (step % line_every == 0 or step == steps):
            left = (time.perf_counter() - start) / (step - first) * (steps - step)
            print(f"{what} {step:>{len(str(steps))}}/{steps}  {values}  {left:.0f} s left", flush=True)

    with bar if console.is_terminal and not console.quiet else nullcontext():
        yield show
