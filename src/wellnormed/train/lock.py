"""One writer at a time in a run folder: a lock that the kernel drops when its process ends, however it ends."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from wellnormed._files import writing

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only writer of a folder, which is made if needed. Readers take no lock; Windows has none.

    The file `.lock` stays and names its holder while there is one. What a killed process left in it means nothing: the
    kernel's lock alone decides. A second writer is refused with the first one's process id, host and starting time.
    """
    path = folder / LOCK
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    with file:
        try:
            if os.name == "posix":
                import fcntl

                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode() or "another process"
            raise ValueError(f"{folder} is being written by {holder}; wait until it ends, or stop it") from None
        with writing(path):
            file.truncate(0)
            since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            file.write(f"process {os.getpid()} on host {socket.gethostname()} since {since}".encode())
        try:
            yield
        finally:
            file.truncate(0)
