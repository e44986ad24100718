"""Checks and a lock for run folders: a folder is new, and one process at a time writes it. Free of torch."""

import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from wellnormed._files import TEMPORARY, is_there, require_possible, writing

LOCK, HOLDER = ".lock", ".holder"


def require_new(folder: Path) -> None:
    """Refuse a folder that cannot be made or is not empty, apart from leftovers of a run that was killed at its start.

    Nothing on the disk changes.
    """
    require_possible(folder)
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} exists; continue it with {resume_command(folder)} or choose another --name")
    names = {path.name for path in folder.glob("*") if not path.name.endswith(TEMPORARY)}
    if (stranger := min(names - {LOCK, HOLDER}, default=None)) is not None:
        raise ValueError(f"{folder} holds {stranger!r} but no config.json; choose another --name")


def resume_command(folder: Path, module: str = "wellnormed.cli") -> str:
    """The command line that continues a run in this folder, by the command in `module` and on as many processes."""
    start = "wellnormed" if module == "wellnormed.cli" else f"python -m {module}"
    if os.environ.get("WORLD_SIZE", "1") != "1":
        ranks, nodes = (os.environ.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
        many = f"--nnodes {nodes} " if nodes != "1" else ""
        start = f"torchrun {many}--nproc-per-node {ranks} -m {module}"
    return f"`{start} train --resume {shlex.quote(str(folder))}`"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one writer; it is made if needed. Readers take no lock.

    The lock on `.lock` decides; the system releases it when its process ends in any way. The file `.holder` describes
    the writer, but the content that a killed process leaves there has no effect. A second writer is refused with the
    process id, host and starting time of the first.
    """
    is_there(folder)
    with writing(folder / LOCK):
        folder.mkdir(parents=True, exist_ok=True)
        lock, holder = FileLock(folder / LOCK), folder / HOLDER
        try:
            lock.acquire(blocking=False)
        except Timeout:
            who = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
            raise ValueError(f"{folder} is being written by {who}; wait until it ends, or stop it") from None
    try:
        since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        with writing(holder):
            holder.write_text(f"process {os.getpid()} on host {socket.gethostname()} since {since}", encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
