"""Small files that survive a crash and are read strictly: atomic writes, typed JSON. Free of torch."""

import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
MANIFEST = "manifest.json"


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that after a crash at any moment either the old or the new content is there, whole.

    Its folder is made if needed.

    Raises:
        OSError: The system refuses, because the disk is full for instance; names the file and the reason.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
    """Say in one sentence which file could not be written, and why."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"{path} could not be written ({why}); make room or give permission") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_files(folder: Path, files: dict[str, bytes | str], facts: dict[str, Any]) -> None:
    """Write several files that count together or not at all.

    `manifest.json`, with the facts and the checksum of every file, is written last; a folder without it does not count.
    """
    for name, content in files.items():
        write_atomically(folder / name, content)
    sums = {name: _sha256(content.encode() if isinstance(content, str) else content) for name, content in files.items()}
    write_json(folder / MANIFEST, facts | {"sha256": sums}, sealed=True)
    sync_folder(folder.parent)


def read_files(folder: Path, remedy: str, only: str | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read what `write_files` wrote.

    Args:
        folder: Where it was written.
        remedy: What the user can do if something is missing or damaged; ends the message.
        only: The one file to read; all of them by default.

    Returns:
        The manifest and the content of the files by name.

    Raises:
        ValueError: Manifest or file is missing, or differs from what was written.
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
    whole = content | {"digest": _digest(content)} if sealed else content
    return json.dumps(whole, indent=indent, allow_nan=False) + "\n"


def read_bytes(path: Path, remedy: str) -> bytes:
    """The content of a file.

    Raises:
        ValueError: It is missing or cannot be read; ends with the remedy.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {remedy}") from None


def read_json(path: Path, remedy: str, sealed: bool = False) -> dict[str, Any]:
    """Read one JSON object.

    Args:
        path: The file.
        remedy: What the user can do if it is missing or damaged; ends the message.
        sealed: It was written with `sealed`, so that any change is noticed.

    Raises:
        ValueError: Missing, not JSON, not an object, or changed since it was sealed.
    """
    return parse_json(read_bytes(path, remedy), str(path), remedy, sealed)


def parse_json(text: bytes | str, where: str, remedy: str, sealed: bool = False) -> dict[str, Any]:
    """The object in a JSON text; see `read_json`.

    Example:
        >>> parse_json(json_text({"steps": 3}, sealed=True), "config", "train again", sealed=True)
        {'steps': 3}
        >>> parse_json('{"steps": 4}', "config", "train again", sealed=True)
        Traceback (most recent call last):
        ValueError: config does not match its digest: it was damaged or edited, or another version wrote it; train again
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}, not an object; {remedy}")
    digest = content.pop("digest", None)
    if digest != _digest(content) and (sealed or digest is not None):
        raise ValueError(
            f"{where} does not match its digest: it was damaged or edited, or another version wrote it; {remedy}"
        )
    return content


def _digest(content: dict[str, Any]) -> str:
    return _sha256(json.dumps(content, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def nearest(name: str, options: typing.Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or the list of options if none is near."""
    options = list(options)
    close = get_close_matches(name, options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options)}"


def parse_dataclass(cls: type[T], content: Any, where: str) -> T:
    """Build a dataclass from JSON: every key known, none missing, every value of the declared type.

    Understands `int`, `float` (an integer is one), `bool`, `str`, `Literal`, `... | None` and dataclasses.

    Args:
        cls: The dataclass.
        content: What the JSON held.
        where: Place in the file, to begin messages with.

    Raises:
        ValueError: Unknown key (with the nearest known one), missing key, wrong type, or a value that the
            dataclass itself refuses.

    Example:
        >>> @dataclasses.dataclass
        ... class Size:
        ...     width: int
        >>> parse_dataclass(Size, {"width": 3}, "size")
        Size(width=3)
        >>> parse_dataclass(Size, {"widht": 3}, "size")
        Traceback (most recent call last):
        ValueError: size: unknown key 'widht'; did you mean 'width'?
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected an object, found {content!r}")
    assert dataclasses.is_dataclass(cls)
    kinds = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    for key in content:
        if key not in names:
            raise ValueError(f"{where}: unknown key {key!r}; {nearest(key, names)}")
    for name in names:
        if name not in content:
            raise ValueError(f"{where}: the key {name!r} is missing; write it, of type {_spelled(kinds[name])}")
    values = {name: _parse(kinds[name], content[name], f"{where}.{name}") for name in names}
    try:
        return typing.cast("type[T]", cls)(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _parse(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return parse_dataclass(typing.cast("type[Any]", kind), value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value in arguments and type(value) in {type(a) for a in arguments}:
            return value
        hint = nearest(value, arguments) if isinstance(value, str) else f"known: {', '.join(map(repr, arguments))}"
        raise ValueError(f"{where}: {value!r} is not allowed; {hint}")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = [a for a in arguments if a is not type(None)]
        return _parse(kind, value, where)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where}: {value!r} is a {type(value).__name__}; write a value of type {_spelled(kind)}")
    return value


def _spelled(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
