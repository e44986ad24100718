"""Tokens in the shard format of nanoGPT's speedruns: a header of 256 int32, then the tokens as uint16.

Shards are memory-mapped, so that a corpus may be larger than the memory. Pages that have been read stay in the system's
file cache, which tools show as memory of the process; the system frees them when it needs memory.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wellnormed._files import is_there, read_json
from wellnormed.data._download import places

MAGIC, VERSION, HEADER = 20240520, 1, 256
HEADER_BYTES, TOKEN_BYTES = 4 * HEADER, 2
META = "meta.json"
"""The file that the converter writes beside its shards, with the tokenizer and the counts."""
Split = Literal["train", "val"]
_PIECE = 2**24


class Tokens:
    """A sequence of tokens in one or several arrays, which may be mapped from files larger than the memory.

    Args:
        arrays: The tokens, in order.
        names: The names of the arrays in messages, such as the paths of the shards.
        vocabulary: Every token that is read must be below it; None for no check.

    Example:
        >>> tokens = Tokens([np.arange(5), np.arange(10, 15)])
        >>> tokens.windows(torch.tensor([0, 6]), 3)
        tensor([[ 0,  1,  2],
                [11, 12, 13]])
        >>> tokens.read(3, 4)
        array([ 3,  4, 10, 11])
    """

    def __init__(self, arrays: Sequence[np.ndarray], names: Sequence[str] = (), vocabulary: int | None = None) -> None:
        self.arrays = arrays
        self.names = names or [f"array {number}" for number in range(len(arrays))]
        self.vocabulary = vocabulary
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """The `length` tokens from every start on, `(N, length)` int64, also across arrays.

        A token outside the vocabulary is a `ValueError`.
        """
        windows = np.stack([self.read(start, length) for start in starts.tolist()])
        self.check(windows, starts.tolist())
        return torch.from_numpy(windows.astype(np.int64))

    def read(self, start: int, length: int) -> np.ndarray:
        """The `length` tokens from `start` on, also across arrays; they are not checked."""
        parts = []
        while length > 0:
            number, place = self._place(start)
            parts.append(self._array(number)[place : place + length])
            start, length = start + len(parts[-1]), length - len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def check(self, windows: np.ndarray, starts: Sequence[int]) -> None:
        """Refuse windows `(N, length)` from these starts on if one has a token outside the vocabulary."""
        if self.vocabulary is None or (largest := int(windows.max())) < self.vocabulary:
            return
        row, column = np.argwhere(windows >= self.vocabulary)[0].tolist()
        number, place = self._place(starts[row] + column)
        raise ValueError(
            f"{self.names[number]} has the token {windows[row, column]} at place {place}, but the vocabulary has "
            f"{self.vocabulary}: another tokenizer wrote it, or it is damaged; write the shards again, or read them "
            f"with a vocabulary of at least {largest + 1}"
        )

    def fingerprint(self) -> str:
        """A SHA-256 of all tokens and of the lengths of the arrays, which are read in parallel.

        Example:
            >>> Tokens([np.arange(9)]).fingerprint() == Tokens([np.arange(9)[::-1]]).fingerprint()
            False
        """
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(self._digest, range(len(self.arrays))))
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def _digest(self, number: int) -> str:
        """The digest of one array: of its dtype, its length and all of its tokens."""
        array = self._array(number)
        digest = hashlib.sha256(f"{array.dtype.str} {len(array)} ".encode())
        for start in range(0, len(array), _PIECE):
            digest.update(np.ascontiguousarray(self._array(number)[start : start + _PIECE]).data)
        return digest.hexdigest()

    def _array(self, number: int) -> np.ndarray:
        """An array; called before every read."""
        return self.arrays[number]

    def _place(self, start: int) -> tuple[int, int]:
        """The number of the array that holds a token, and the token's place in it."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        return number, start - int(self._ends[number]) + len(self.arrays[number])


class _Shards(Tokens):
    """Tokens mapped from files. Reading beyond the end of a file that was truncated later would kill the process."""

    def _array(self, number: int) -> np.ndarray:
        array, path = self.arrays[number], self.names[number]
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            return array  # the mapping of a removed file stays valid
        if size < (expected := HEADER_BYTES + array.nbytes):
            raise ValueError(
                f"{path} had {expected:,} bytes when it was opened, and has {size:,} now: something cuts it off; "
                "download or convert it again"
            )
        return array


def load_shards(split: Split, name: str | Path = "fineweb10B") -> Tokens:
    """The shards of a folder, in order: `*_train_NUMBER.bin` or `*_val_NUMBER.bin`.

    The header and size of every file are checked at once. Tokens are checked when they are read, if the result has a
    `vocabulary`, which `load_corpus` sets. Nothing is downloaded.

    Args:
        split: "train" or "val".
        name: A folder in `$WELLNORMED_DATA` or in the user's cache, or the path of any other.

    Raises:
        ValueError: If there are no shards, and if one is missing, damaged or truncated.
    """
    folders = [*places(str(name)), Path(name)]
    for folder in folders:
        if is_there(folder) and (files := shard_files(folder, split)):
            break
    else:
        where = " or ".join(map(str, folders))
        raise ValueError(
            f"there are no {split} shards of {name} in {where}; convert a text with `wellnormed tokens` (with "
            "--validation for val shards), or download FineWeb as GPT-2 tokens with `hf download --repo-type dataset "
            "kjj0/fineweb10B-gpt2`"
        )
    stated = read_meta(folder).get("splits", {}).get(split, {}).get("shards", len(files))
    if len(files) != stated:
        raise ValueError(
            f"{folder} has {len(files)} {split} shards, but its {META} says {stated}; "
            "remove the folder, and write its shards again"
        )
    return _Shards([_shard(path) for path in files], [str(path) for path in files])


def shard_files(folder: Path, split: Split) -> list[Path]:
    """The shards of a split in a folder, in order; the name of the other split may occur before that of the split.

    Example:
        >>> shard_files(Path("nowhere"), "val")
        []
    """
    return sorted(path for path in folder.glob("*.bin") if re.fullmatch(rf".*_{split}_[^_]*\.bin", path.name))


def read_meta(folder: Path) -> dict[str, Any]:
    """The content of a folder's `meta.json`, which the converter writes; empty if there is no such file."""
    remedy = "remove the folder, and write its shards again"
    if not (folder / META).exists():
        return {}
    meta = read_json(folder / META, remedy)
    vocabulary, splits = meta.get("vocabulary", 1), meta.get("splits", {})
    for key, value, fits in (
        ("vocabulary", vocabulary, type(vocabulary) is int and 0 < vocabulary <= 2**16),
        ("tokenizer", meta.get("tokenizer"), isinstance(meta.get("tokenizer", ""), str)),
        ("splits", splits, isinstance(splits, dict) and all(isinstance(own, dict) for own in splits.values())),
    ):
        if not fits:
            raise ValueError(f"{folder / META} has {key}={value!r}, which no conversion writes; {remedy}")
    return meta


def header(count: int) -> bytes:
    """The header of a shard of so many tokens."""
    numbers = np.zeros(HEADER, "<i4")
    numbers[:3] = MAGIC, VERSION, count
    return numbers.tobytes()


def _shard(path: Path) -> np.ndarray:
    """The tokens of a file, mapped."""
    remedy = "download or convert it again"
    is_there(path)
    numbers = np.fromfile(path, "<i4", HEADER)
    if len(numbers) < HEADER or (numbers[0], numbers[1]) != (MAGIC, VERSION):
        raise ValueError(
            f"{path} must be a shard of tokens of version {VERSION}, but its header is another or damaged; {remedy}"
        )
    count, size = int(numbers[2]), path.stat().st_size
    if size != (expected := HEADER_BYTES + TOKEN_BYTES * count):
        raise ValueError(
            f"{path} has {size:,} bytes, but the {count:,} tokens that its header says are {expected:,}: it is "
            f"truncated or damaged; {remedy}"
        )
    if not count:
        return np.empty(0, "<u2")  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, "<u2", "r", offset=HEADER_BYTES))  # slices of a plain view take half the time
