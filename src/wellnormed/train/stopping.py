"""Requests for additional checkpoints, by SIGINT, SIGTERM, and the clock. Free of torch."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME = 1.0
"""Seconds in which signals under `torchrun` count as one: a scheduler signals the launcher and the ranks, and the
launcher then signals the ranks again."""


class Stopped(KeyboardInterrupt):
    """A signal with this number has ended the run."""

    def __init__(self, number: int) -> None:
        super().__init__("")
        self.number = number


class Requests:
    """The requests to a run from outside; as a context it handles SIGINT and SIGTERM.

    The first signal makes `after_step` write a checkpoint and raise `Stopped`; the second ends the process at once, as
    by default. Outside the main thread signals are not handled, since Python does not allow it.

    Args:
        minutes: The largest time between checkpoints, in minutes; None sets no limit.
        speaks: Whether this process prints a line at the first signal.
    """

    def __init__(self, minutes: float | None = None, speaks: bool = True) -> None:
        self._minutes, self._speaks = minutes, speaks
        self._number: int | None = None
        self._heard = 0.0
        self._at_once = False
        self._saved = time.monotonic()
        self._before: dict[int, Any] = {}
        self.agreed: Sequence[float] = (0, 0, 0)
        """The sums of all processes' requests in this step; see `own`."""

    def own(self) -> tuple[float, float, float]:
        """Whether SIGINT or SIGTERM has asked this process to stop, and whether its clock asks for a checkpoint.

        A run of several processes adds these up in every step, so that all act in the same step.
        """
        due = self._minutes is not None and time.monotonic() - self._saved >= 60 * self._minutes
        return float(self._number == signal.SIGINT), float(self._number == signal.SIGTERM), float(due)

    def after_step(self, saved: bool, save: Callable[[], None]) -> None:
        """Write the checkpoint requested in this step, unless one was `saved` already; then stop if requested."""
        if any(self.agreed) and not saved:
            save()
        if any(self.agreed) or saved:
            self._saved = time.monotonic()
        for number, asked in zip(SIGNALS, self.agreed[: len(SIGNALS)], strict=True):
            if asked:
                raise Stopped(number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In the block, stop at the first signal, also at an earlier one; its work can be repeated."""
        self._at_once = True
        try:
            if self._number is not None:
                raise Stopped(self._number)
            yield
        finally:
            self._at_once = False

    def __enter__(self) -> "Requests":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        self._saved = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self._number is not None:
            if time.monotonic() - self._heard > SAME:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._number, self._heard = number, time.monotonic()
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
        if self._at_once:
            raise Stopped(number)
        if self._speaks:  # without print, which the signal may have interrupted
            what = f"\n{signal.Signals(number).name}: a checkpoint follows after this step, then the run stops; "
            os.write(2, f"{what}a second signal ends it at once\n".encode())
