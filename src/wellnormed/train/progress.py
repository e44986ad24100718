"""Progress of a run: a bar in a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressDisplay:
    """A context manager; `update` after every step, `show` with the values of a logged step.

    Args:
        console: Where to write.
        first: Step from which this session starts.
        steps: Steps of the whole run.
        line_every: Steps between plain lines where there is no terminal.
    """

    def __init__(self, console: Console, first: int, steps: int, line_every: int) -> None:
        self._console, self._first, self._steps, self._line_every = console, first, steps, line_every
        self._start = time.perf_counter()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[values]}"),
                TimeRemainingColumn(),
                console=console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=steps, completed=first, values="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int) -> None:
        """Steps done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, step: int, loss: float, rate: float, tokens_per_second: float, ratio: float) -> None:
        """Values of a logged step."""
        values = f"loss {loss:.3f}  lr {rate:.4f}  {tokens_per_second:,.0f} tokens/s  norm/cap {ratio:.4f}"
        if self._bar is not None:
            self._bar.update(self._task, values=values)
        elif step % self._line_every == 0 or step == self._steps:
            left = (time.perf_counter() - self._start) / (step - self._first) * (self._steps - step)
            print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {values}  {left:.0f} s left", flush=True)
