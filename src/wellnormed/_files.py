"""Small files that survive a crash and are read strictly: atomic writes, typed JSON. Free of torch."""

import dataclasses
import json
import os
import types
import typing
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that after a crash at any moment either the old or the new content is there, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object atomically, readable by people; NaN and infinity have no place in it."""
    write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read one JSON object.

    Args:
        path: The file.
        remedy: What the user can do if it is missing or damaged; ends the message.

    Raises:
        ValueError: Missing, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {remedy}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; {remedy}")
    return content


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
