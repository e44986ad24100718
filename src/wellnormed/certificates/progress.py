"""Bars in a terminal for work of known length: how much is done, and the time left. Elsewhere nothing is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bars(shown: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show bars while the block runs.

    Args:
        shown: Whether to show them; without a terminal nothing is shown.

    Yields:
        A function that adds a bar of a name, and returns what is to be called with the number done and the total.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    visible = shown and (console.is_terminal or console.is_jupyter)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not visible) as bars:

        def add(name: str) -> Callable[[int, int], None]:
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield add
