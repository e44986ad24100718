"""Where data sets lie, and how they come there: the user's folder, the cache, a checked download."""

import hashlib
import os
import urllib.request
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from wellnormed._files import write_atomically

_PIECE = 2**20


class DataError(ValueError):
    """A data set is neither on this machine nor to be had, or is damaged; says what to do about it."""


def places(name: str) -> list[Path]:
    """Where the folder or file `name` may lie: in `$WELLNORMED_DATA` first, then in the user's cache."""
    own = os.environ.get("WELLNORMED_DATA")
    return ([Path(own, name)] if own else []) + [cache(name)]


def cache(name: str) -> Path:
    """Where a download of that name is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wellnormed", name)


def download(url: str, name: str, sha256: str, otherwise: str = "") -> bytes:
    """The content behind a URL, with progress, kept in the cache once its checksum is right.

    A machine that is offline, and a content that is another one, are a `ValueError`, which ends with what to do
    otherwise.
    """
    pieces: list[bytes] = []
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    ways = [f"set WELLNORMED_DATA to a folder that holds {name}", f"put the file at {cache(name)}", otherwise]
    remedy = ", or ".join(filter(None, ways))
    try:
        with urllib.request.urlopen(url, timeout=60) as response, Progress(*columns) as progress:
            size = int(response.headers.get("Content-Length") or 0) or None
            task = progress.add_task(Path(name).name, total=size)
            while piece := response.read(_PIECE):
                pieces.append(piece)
                progress.advance(task, len(piece))
    except OSError as error:
        raise DataError(f"{Path(name).name} could not be downloaded from {url} ({error}); {remedy}") from error
    content = b"".join(pieces)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(f"what {url} gives has the sha256 {found}, not {sha256}; {remedy}")
    write_atomically(cache(name), content)
    return content
