"""A function in a process of its own, which has torch at once: it is forked from a server that imported it."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint", "wellnormed.train"])


def begun(function: Callable[..., Any], *arguments: Any, errors: Path) -> multiprocessing.Process:
    """A process in the present folder that runs a function, whose result is its status if it is a number.

    What it prints is lost, and its errors go to a file.
    """
    process = CONTEXT.Process(target=_run, args=(os.getcwd(), str(errors), function, arguments))
    process.start()
    return process


def ended(function: Callable[..., Any], *arguments: Any, errors: Path) -> tuple[int | None, str]:
    """The status of such a process after its end, and its errors."""
    process = begun(function, *arguments, errors=errors)
    process.join(60)
    return process.exitcode, errors.read_text()


def _run(folder: str, errors: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    status = function(*arguments)
    sys.exit(status if isinstance(status, int) else 0)
