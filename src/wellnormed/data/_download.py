"""Where data sets lie, and how they come there: the user's folder, the cache, a checked download."""

import hashlib
import http.client
import os
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from wellnormed._files import is_there, write_atomically

_PIECE = 2**20
PATIENCE = 10.0
"""Seconds until a server must have answered, and for each part of what it sends."""


class DataError(ValueError):
    """A data set is neither on this machine nor to be had, or is damaged; says what to do about it."""


def places(name: str) -> list[Path]:
    """Where the folder or file `name` may lie: in `$WELLNORMED_DATA` first, then in the user's cache."""
    own = os.environ.get("WELLNORMED_DATA")
    return ([Path(own, name)] if own else []) + [cache(name)]


def find(name: str) -> Path | None:
    """The first of the `places` that there is; a link to nothing is a `ValueError`, and not passed over."""
    return next((path for path in places(name) if is_there(path)), None)


def cache(name: str) -> Path:
    """Where a download of that name is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wellnormed", name)


def download(url: str, name: str, sha256: str, otherwise: str = "") -> bytes:
    """The content behind a URL, with progress, kept in the cache once its checksum is right.

    A machine that is offline, a server that is silent for ten seconds, and a content that is another one, are a
    `ValueError`, which ends with what to do otherwise.
    """
    pieces: list[bytes] = []
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    ways = [f"set WELLNORMED_DATA to a folder that holds {name}", f"put the file at {cache(name)}", otherwise]
    remedy = ", or ".join(filter(None, ways))
    try:
        with _opened(url) as response, Progress(*columns) as progress:
            size = int(response.headers.get("Content-Length") or 0) or None
            task = progress.add_task(Path(name).name, total=size)
            while piece := response.read(_PIECE):
                pieces.append(piece)
                progress.advance(task, len(piece))
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        why = getattr(reason, "strerror", None) or str(reason) or f"no answer within {PATIENCE:g} seconds"
        raise DataError(f"{Path(name).name} could not be downloaded from {url} ({why}); {remedy}") from error
    content = b"".join(pieces)
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataError(f"what {url} gives has the sha256 {digest}, not {sha256}; {remedy}")
    write_atomically(cache(name), content)
    return content


def _opened(url: str) -> Any:
    """The response of a server, or an `OSError` if there is none within `PATIENCE` of everything together.

    A name that is looked up in vain, and every address of it that does not answer, would each take as long.
    """
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(urllib.request.urlopen(url, timeout=PATIENCE))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(PATIENCE)
