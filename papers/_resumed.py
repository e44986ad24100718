"""Runs in memory that leave their state in a file, from which cells of hours go on after their process has ended."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wellnormed._files import write_atomically
from wellnormed.train.task import T, fit

EVERY = 300.0
"""Seconds between two states."""


def fit_resumed(
    task: T, folder: Path, watch: Callable[[T, float], None] | None = None, notes: list[Any] | None = None
) -> None:
    """Train to the end, from the state that an earlier call left in the folder if there is one.

    The end is that of a run without a stop, to the bit: the state holds the weights, the optimizer, the constraints,
    the rates, the place in the data, and the generators of the task and of torch.

    Args:
        task: A run at its start.
        folder: Where `run.pt` is written after every `EVERY` seconds. It is made if needed, and stays.
        watch: It is called after every step, as by `fit`.
        notes: A list that `watch` fills. A run that goes on finds it as it was when the state was written.
    """
    path, notes = folder / "run.pt", [] if notes is None else notes
    if path.exists():
        _restore(task, torch.load(path, weights_only=True), notes)
    last = time.monotonic()

    def after(task: T, loss: float) -> None:
        nonlocal last
        if watch is not None:
            watch(task, loss)
        if time.monotonic() - last >= EVERY:
            content = io.BytesIO()
            torch.save(_state(task, notes), content)
            write_atomically(path, content.getvalue())
            last = time.monotonic()

    fit(task, after)


def _parts(task: Any) -> dict[str, Any]:
    """Everything that has a state, in the order in which it is loaded."""
    parts = {key: getattr(task, key, None) for key in ("model", "optimizer", "constraints", "scheduler", "stream")}
    return {key: part for key, part in parts.items() if part is not None}


def _state(task: Any, notes: list[Any]) -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {key: part.state_dict() for key, part in _parts(task).items()} | {
        "generators": [task.generator.get_state(), torch.get_rng_state(), *cuda],
        "step": task.step,
        "notes": notes,
    }


def _restore(task: Any, state: dict[str, Any], notes: list[Any]) -> None:
    for key, part in _parts(task).items():
        part.load_state_dict(state[key])
    own, default, *cuda = state["generators"]
    task.generator.set_state(own)
    torch.set_rng_state(default)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    task.step, notes[:] = state["step"], state["notes"]
