"""Small files that survive a crash and are read strictly: atomic writes, typed JSON. Free of torch."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
REMEDIES = {
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a file stands where there should be a folder, so choose another name",
    errno.EEXIST: "a file stands where there should be a folder, so choose another name",
}
"""Error number -> the remedy, for errors other than a lack of room or permission."""
MANIFEST = "manifest.json"
TEMPORARY = ".tmp"
"""The suffix of the names of incomplete files."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that after a crash at any moment it has either the old or the new content.

    Its folder is made if needed. An `OSError`, such as for a full disk, names the file and the reason, and leaves the
    old content.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)  # half a file would keep a full disk full
            raise
        sync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a sentence that names the file, the reason and a remedy."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        remedy = REMEDIES.get(error.errno or 0, "make room or give permission")
        raise OSError(f"{path} could not be written ({why}); {remedy}") from error


def is_there(path: Path) -> bool:
    """Whether a file or folder exists; a broken link is a `ValueError`."""
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to {os.readlink(path)}, which does not exist; repair it or remove it")
    return path.exists()


@contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """Afterwards remove the folder and its parents if they are empty and did not exist before."""
    missing = [each for each in (folder, *folder.parents) if not is_there(each)]
    try:
        yield
    finally:
        for each in missing:
            with suppress(OSError):  # it could not be made, or holds something by now
                each.rmdir()


def require_possible(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, as `writing` does, and leave the disk as it is."""
    with writing(folder), without_empty_folders(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the system supports it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_files(folder: Path, files: dict[str, bytes | str], facts: dict[str, Any]) -> None:
    """Write several files that are valid only together.

    `manifest.json`, with the facts and the checksum of every file, is written last; a folder without it does not count.
    """
    for name, content in files.items():
        write_atomically(folder / name, content)
    sums = {name: _sha256(content.encode() if isinstance(content, str) else content) for name, content in files.items()}
    write_json(folder / MANIFEST, facts | {"sha256": sums}, sealed=True)
    sync_folder(folder.parent)


def read_files(folder: Path, remedy: str, only: str | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read what `write_files` wrote: the manifest, and the content by name of all files, or of the only one.

    A file that is missing, or differs from what was written, is a `ValueError` that ends with the remedy.
    """
    manifest = read_json(folder / MANIFEST, remedy, sealed=True)
    contents = {}
    for name in manifest["sha256"] if only is None else [only]:
        contents[name] = content = read_bytes(folder / name, remedy)
        if _sha256(content) != manifest["sha256"].get(name):
            raise ValueError(
                f"{folder / name} ({len(content):,} bytes) is truncated or changed: "
                f"it does not match its checksum in {MANIFEST}; {remedy}"
            )
    return manifest, contents


def write_json(path: Path, content: dict[str, Any], sealed: bool = False) -> None:
    """Write an object atomically, readable by people; see `json_text`."""
    write_atomically(path, json_text(content, sealed, indent=2))


def json_text(content: dict[str, Any], sealed: bool = False, indent: int | None = None) -> str:
    """An object as JSON, without NaN and infinity; a sealed one states the digest of its content."""
    for name, value in _numbers(content):
        if not math.isfinite(value):
            raise ValueError(
                f"{name} must be finite, got {value}: the run has diverged; lower the learning rate (on the command "
                "line: --learning-rate)"
            )
    whole = content | {"digest": _digest(content)} if sealed else content
    return json.dumps(whole, indent=indent, allow_nan=False) + "\n"


def _numbers(content: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every float in an object, with the keys that lead to it."""
    if isinstance(content, float):
        yield name, content
    elif isinstance(content, dict | list | tuple):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _numbers(value, f"{name}.{key}" if name else str(key))


def read_bytes(path: Path, remedy: str) -> bytes:
    """The content of a file; a `ValueError` that ends with the remedy if it is missing or cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ValueError(f"{path} {why}; {remedy}") from None


def read_json(path: Path, remedy: str, sealed: bool = False) -> dict[str, Any]:
    """The object in a JSON file; see `parse_json`."""
    return parse_json(read_bytes(path, remedy), str(path), remedy, sealed)


def parse_json(text: bytes | str, where: str, remedy: str, sealed: bool = False) -> dict[str, Any]:
    """The object in a JSON text; a `ValueError` if it is not JSON, not an object, or differs from its digest.

    A text that was written with `sealed` must be read with it, so that a missing digest is noticed. Messages begin with
    `where`, the text's file or its place in one, and end with the remedy.
    """
    try:
        content = json.loads(text)
        stated = content.pop("digest", None) if isinstance(content, dict) else None
        digest = _digest(content)
    except (ValueError, RecursionError) as error:  # nested so deeply that it can be read but not written, for instance
        raise ValueError(f"{where} is not valid JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}, not an object; {remedy}")
    if stated != digest and (sealed or stated is not None):
        raise ValueError(
            f"{where} does not match its digest: it was damaged or edited, or another version wrote it; {remedy}"
        )
    return content


def _digest(content: Any) -> str:
    return _sha256(json.dumps(content, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def parse_dataclass(cls: type[T], content: Any, where: str) -> T:
    """Build a dataclass, and the dataclasses within it, from a JSON object that has exactly its keys.

    Values must have the types of the fields; an integer may replace a float, and NaN and infinity are refused. Messages
    begin with `where`, the place in the file.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected an object, found {content!r}")
    cls = _member(cls, content)
    kinds, values = typing.get_type_hints(cls), {}
    for key in sorted(content.keys() ^ kinds.keys()):
        what = "unknown" if key in content else "missing"
        raise ValueError(f"{where}: {what} key {key!r}; another version or another command wrote this file")
    for name, kind in kinds.items():
        value = content[name]
        nested = dataclasses.is_dataclass(_member(kind, value))
        if not (nested or _fits(kind, value)):
            stated = getattr(kind, "__name__", None) or kind
            raise ValueError(f"{where}: {name} must be {stated}, got {repr(value)[:60]}; write the file anew")
        values[name] = parse_dataclass(kind, value, f"{where}.{name}") if nested else value
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value has the type of a field: a plain one, a union, or a `Literal`."""
    if typing.get_origin(kind) is typing.Literal:
        return any(type(value) is type(each) and value == each for each in typing.get_args(kind))
    if members := typing.get_args(kind):
        return any(_fits(member, value) for member in members)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind


def _member(kind: Any, content: Any) -> Any:
    """The member of a union of dataclasses whose first field, a tag, fits the content; other types as they are."""
    members = [member for member in typing.get_args(kind) if dataclasses.is_dataclass(member)]
    for member in members:
        tag = dataclasses.fields(member)[0]
        if isinstance(content, dict) and content.get(tag.name) == tag.default:
            return member
    return members[0] if members else kind
