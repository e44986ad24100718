"""Where data sets lie: the user's folder, the cache, and a download into it whose checksum is right."""

import hashlib
import http.client
import os
import urllib.request
from pathlib import Path

from wellnormed._files import is_there, write_atomically

PATIENCE = 10.0
"""Seconds until a server must have answered, and for each part of what it sends."""


class DataError(ValueError):
    """A data set is neither on this machine nor to be had, or is damaged; says what to do about it."""


def places(name: str) -> list[Path]:
    """Where the folder or file `name` may lie: in `$WELLNORMED_DATA` first, then in the user's cache."""
    own = os.environ.get("WELLNORMED_DATA")
    return ([Path(own, name)] if own else []) + [_cache(name)]


def find(name: str) -> Path | None:
    """The first of the `places` that exists; a link to nothing is a `ValueError`, and not passed over."""
    return next((path for path in places(name) if is_there(path)), None)


def _cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wellnormed", name)


def download(url: str, name: str, sha256: str) -> bytes:
    """The content behind a URL, kept in the cache once its checksum is right; a `DataError` if it cannot be had."""
    remedy = f"set WELLNORMED_DATA to a folder that holds {name}, or put the file at {_cache(name)}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise DataError(f"{Path(name).name} could not be downloaded from {url} ({why}); {remedy}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataError(f"{url} holds a file with the sha256 {digest}, not {sha256}; {remedy}")
    write_atomically(_cache(name), content)
    return content
