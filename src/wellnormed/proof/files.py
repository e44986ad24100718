"""Readers of safetensors and JSON files, which may be forged."""

import hashlib
import json
import math
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wellnormed.proof.reading import CheckError, read, require, word

_KINDS = {
    "F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "BOOL": "?",
    "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1",
}  # fmt: skip


_TEXT, _CONTENT, _NESTED = 2**26, 2**36, 2**22
"""The most bytes of JSON, of a file of tensors, and of lists and objects in JSON, which take more memory than text."""


@dataclass(frozen=True)
class Stored:
    """One tensor's dtype (as safetensors names it), shape and bytes (row-major, little-endian)."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the name of the dtype, the shape and the bytes, in hexadecimal digits."""
        head = f"{self.dtype} {','.join(map(str, self.shape))}\n".encode()
        return hashlib.sha256(head + self.content).hexdigest()

    def array(self) -> np.ndarray:
        """Return the entries, exactly, as 64-bit integers or float64."""
        entries = np.frombuffer(self.content, "<" + _KINDS[self.dtype]).reshape(self.shape)
        if self.dtype == "BF16":  # the upper half of a float32
            entries = (entries.astype("<u4") << 16).view("<f4")
        return entries.astype(np.int64 if self.dtype[0] in "IUB" and self.dtype != "BF16" else np.float64)


class _Entry(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def stored(array: Any) -> Stored:
    """Convert a NumPy array of floats, integers or booleans to a stored tensor."""
    array = np.asarray(array)
    kinds = [name for name, kind in _KINDS.items() if np.dtype(kind) == array.dtype and name != "BF16"]
    require(bool(kinds), f"dtype {array.dtype} is none that a certificate covers; give floats or integers")
    return Stored(kinds[0], array.shape, array.astype(array.dtype.newbyteorder("<")).tobytes())


def parse_json(content: bytes, what: str) -> Any:
    """Parse JSON; refuse names that stand twice, and constants that are no JSON, such as NaN."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(pairs)) == len(pairs), f"a name stands twice in {what}")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise CheckError(f"{what} has a number {constant}")

    nested = content.count(b"[") + content.count(b"{")
    require(nested <= _NESTED, f"{what} has {nested} lists and objects, more than {_NESTED}")
    try:
        return json.loads(content, object_pairs_hook=without_repeats, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckError(f"{what} is no intact JSON: {error}") from error


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Read all tensors of a file, whose header must describe every byte of it exactly once."""
    content = _read(path, _CONTENT)
    start = 8 + int.from_bytes(content[:8], "little")
    require(start <= _TEXT, f"the header of {path} has {start} bytes, more than {_TEXT}; pass a file of safetensors")
    header = parse_json(content[8:start], f"the header of {path}")
    placed = []
    for name, entry in read(dict[str, Any], header, f"the header of {path}").items():
        require(name.isprintable(), f"the name {name!r} in {path} cannot be printed")
        if name != "__metadata__":
            entry = read(_Entry, entry, f"{word(name)} in {path}")
            require(entry.dtype in _KINDS, f"{word(name)} in {path} has an unknown dtype {entry.dtype[:20]!r}")
            placed.append((entry.data_offsets, name, entry.dtype, entry.shape))
    tensors, position = {}, start
    for offsets, name, kind, shape in sorted(placed):
        end = position + math.prod(shape) * np.dtype(_KINDS[kind]).itemsize
        require(offsets == (position - start, end - start), f"{word(name)} in {path} does not lie where its shape says")
        tensors[name], position = Stored(kind, shape, content[position:end]), end
    require(position == len(content), f"{len(content) - position} bytes of {path} belong to no tensor")
    return tensors


def read_folder(folder: Path) -> tuple[Any, dict[str, Stored]]:
    """Read `certificate.json` and the tensors of all safetensors files beside it, and in the folder `original`."""
    document = parse_json(_read(folder / "certificate.json", _TEXT), str(folder / "certificate.json"))
    tensors: dict[str, Stored] = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("original/*.safetensors")]):
        for name, tensor in read_safetensors(path).items():
            name = name if path.parent == folder else f"original/{name}"
            same = tensors.setdefault(name, tensor) == tensor
            require(same, f"{word(name)} in {path} is another tensor than elsewhere")
    return document, tensors


def _read(path: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes: no pipe, which may never end, and no device."""
    try:
        status = path.stat()
        require(stat.S_ISREG(status.st_mode), f"{path} is no regular file")
        require(status.st_size <= most, f"{path} has {status.st_size} bytes, more than {most}")
        return path.read_bytes()
    except CheckError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        raise CheckError(f"{path} cannot be read: {error}") from error
