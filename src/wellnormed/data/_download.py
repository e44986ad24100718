"""Locations of data sets: the user's folder, the cache, and downloads into it with the right checksum."""

import hashlib
import http.client
import os
import urllib.request
from pathlib import Path

from wellnormed._files import is_there, write_atomically

PATIENCE = 10.0
"""The seconds that a server may take to answer, and for each part that it sends."""


class DataError(ValueError):
    """A data set is damaged, or neither on this machine nor available; the message has a remedy."""


def places(name: str) -> list[Path]:
    """The possible paths of a folder or file: in `$WELLNORMED_DATA` first, then in the user's cache."""
    own = os.environ.get("WELLNORMED_DATA")
    return ([Path(own, name)] if own else []) + [_cache(name)]


def find(name: str) -> Path | None:
    """The first of the `places` that exists; a broken link is a `ValueError`."""
    return next((path for path in places(name) if is_there(path)), None)


def _cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wellnormed", name)


def download(url: str, name: str, sha256: str) -> bytes:
    """The content of a URL, which is cached if its checksum is right; a `DataError` if it cannot be downloaded."""
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
