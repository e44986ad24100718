"""A line in a terminal or notebook that shows how much of a piece of work is done; elsewhere nothing is shown."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_lines(shown: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show on standard error how far the work is while the block runs.

    Args:
        shown: Whether to show it; without a terminal or notebook nothing is shown.

    Yields:
        A function that takes the name of a part and returns another, to be called with the number done and the total.
    """
    visible = shown and (sys.stderr.isatty() or hasattr(sys, "ps1"))  # notebooks have the latter

    def part(name: str) -> Callable[[int, int], None]:
        def show(done: int, total: int) -> None:
            if visible:
                print(f"\r{name} {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

        return show

    yield part
