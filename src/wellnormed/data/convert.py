"""Texts into shards of tokens, in parts of bounded size, so that a stopped conversion goes on."""

import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import wellnormed
from wellnormed._files import TEMPORARY, opened_atomically, write_json, writing
from wellnormed.data.shards import HEADER_BYTES, META, TOKEN_BYTES, Split, header, read_meta, shard_files
from wellnormed.data.tokenizers import Tokenizer, TokenizerName, tokenizer_of

SHARD_TOKENS = 10**8
"""The tokens of a full shard, as in the speedruns."""
SEPARATOR = b"<|endoftext|>"
"""A line of a text file that is this alone stands between two documents."""
OPENERS = {".xz": lzma.open, ".gz": gzip.open}
TEXTS, RECORDS = ".txt", ".jsonl"
_PIECE = 2**20
"""Characters after which a document may be cut; what is encoded at a time, and a part of what a resumed run skips."""


class Piece(NamedTuple):
    """A document or a part of one."""

    text: str
    begins: bool  # whether a document begins here
    read: int  # bytes of the files that have been read up to here


def convert_texts(
    inputs: Sequence[Path],
    folder: Path,
    split: Split = "train",
    name: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    threads: int | None = None,
    tokenizer: TokenizerName = "gpt2",
) -> dict[str, Any]:
    """Write texts as tokens, in files `NAME_train_000000.bin`, ... that `load_shards` reads.

    Inputs are UTF-8: `.txt` files, in which a line `<|endoftext|>` separates documents, and `.jsonl` files, in which
    every line is an object whose `text` is a document; each may end with `.xz` or `.gz`. The end-of-text token stands
    before each document; empty documents are left out. A shard has `shard_tokens` tokens, the last one the rest;
    documents run from one shard into the next. Memory is bounded by the longest line, not by the texts.

    `meta.json` names the tokenizer and the texts, with their checksums, and how much has been written. Each shard is
    written whole or not at all. If the process is killed, or the disk is full, the same call later keeps the shards
    that are whole, goes on behind them, and ends with the same files. Only one process may write a folder.

    Args:
        inputs: The texts, in this order.
        folder: Where the shards go; made if needed.
        split: "train" or "val", for validation; both may stand in one folder.
        name: The beginning of the names of the shards; by default the folder's name.
        shard_tokens: Tokens of a full shard.
        threads: The number of threads that encode; by default all of the machine's.
        tokenizer: "gpt2" for GPT-2's byte-pair encoding, or "bytes", of which a text has about four times as many.

    Returns:
        The entries of `meta.json` for this split: `shards`, `tokens`, `documents`, `inputs`.

    Raises:
        ValueError: If there are no inputs or one is missing, of another kind, damaged, or not UTF-8 (with the place of
            its first wrong byte), if all are empty, if the folder has shards of other texts, and if the tokenizer
            cannot be had.
        OSError: If a file cannot be written, with its name and the reason, such as a full disk.
    """
    if not 1 <= shard_tokens < 2**31:
        raise ValueError(f"shard_tokens={shard_tokens} must be from 1 to {2**31 - 1}, the most that a header can say")
    if not inputs:
        raise ValueError("there are no texts to convert; name one or several files")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} must be at least 1, or None for all of the machine's")
    name = name or folder.resolve().name
    made = tokenizer_of(tokenizer)
    facts = {"name": name, "shard_tokens": shard_tokens, "piece": _PIECE, "inputs": [_facts(path) for path in inputs]}
    meta = _begin(folder, split, facts, made)
    state = meta["splits"][split]
    if state["complete"]:
        return state
    encoded = _encoded(islice(_pieces(inputs), state["pieces"], None), made, threads or os.cpu_count() or 1)
    source = _Source(encoded, state["pieces"], state["used"])
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[tokens]:,} tokens"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(split, total=sum(path.stat().st_size for path in inputs), tokens=state["tokens"])
        while len(part := source.take(shard_tokens)):
            path = _shard(folder, split, name, state["shards"])
            count = 0
            with opened_atomically(path) as file:
                _write(path, file, header(0))
                while len(part):
                    _write(path, file, part.tobytes())
                    count += len(part)
                    state["documents"] += int((part == made.end_of_text).sum())
                    progress.update(task, completed=source.read, tokens=state["tokens"] + count)
                    part = source.take(shard_tokens - count)
                with writing(path):
                    file.seek(0)  # which writes what is still held
                _write(path, file, header(count))
            state["shards"] += 1
            state["tokens"] += count
            state["pieces"], state["used"] = source.pieces, source.used
            write_json(folder / META, meta)  # after the shard, so that what it says is always there
    if not state["tokens"]:
        raise ValueError(f"there is no text in {', '.join(map(str, inputs))}; name files with text")
    state["complete"] = True
    write_json(folder / META, meta)
    return state


class _Source:
    """Encoded pieces, of which any number of tokens can be taken; it knows where in the texts these end.

    `pieces` and `used` are the pieces that have been taken as a whole and the tokens that have been taken of the next.
    """

    def __init__(self, encoded: Iterator[tuple[np.ndarray, int]], pieces: int, used: int) -> None:
        self.pieces, self.used, self.read = pieces, used, 0
        self._encoded = encoded
        self._tokens: np.ndarray | None = None

    def take(self, most: int) -> np.ndarray:
        """Tokens from one piece, at least one, unless `most` is 0 or all are taken."""
        if self._tokens is not None and self.used == len(self._tokens):
            self.pieces, self.used, self._tokens = self.pieces + 1, 0, None
        if self._tokens is None:
            self._tokens, self.read = next(self._encoded, (None, self.read))
        if self._tokens is None:
            return np.empty(0, "<u2")
        part = self._tokens[self.used : self.used + most]
        self.used += len(part)
        return part


def _begin(folder: Path, split: Split, facts: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write `meta.json`, and return it: how far an earlier conversion of these texts came, or that nothing is done."""
    remedy = "remove the folder, or choose another one"
    meta: dict[str, Any] = {
        "tokenizer": tokenizer.name, "tokenizer_sha256": tokenizer.sha256, "vocabulary": tokenizer.vocabulary,
        "version": wellnormed.__version__, "splits": {},
    }  # fmt: skip
    meta = read_meta(folder) or meta
    if meta.get("tokenizer") != tokenizer.name:
        raise ValueError(
            f"{folder} has shards of the tokenizer {meta.get('tokenizer')}, not {tokenizer.name}; {remedy}"
        )
    earlier = meta.setdefault("splits", {}).get(split)
    files = shard_files(folder, split)
    if earlier and not files and not earlier.get("shards"):
        earlier = None  # an attempt that wrote nothing
    if earlier is None and files:
        raise ValueError(f"{folder} has {split} shards that no {META} tells of, such as {files[0].name}; {remedy}")
    if other := [key for key, value in facts.items() if earlier and earlier.get(key) != value]:
        what = {"inputs": "texts", "name": "--name", "shard_tokens": "--shard-tokens"}.get(other[0], other[0])
        raise ValueError(f"{folder} has {split} shards that were made with other {what}; {remedy}")
    if not earlier or not _are_there(folder, split, earlier):
        start = {"complete": False, "shards": 0, "tokens": 0, "documents": 0, "pieces": 0, "used": 0}
        meta["splits"][split] = facts | start
    for half_written in folder.glob(f".*_{split}_*{TEMPORARY}"):  # by a process that was killed
        half_written.unlink()
    write_json(folder / META, meta)
    return meta


def _are_there(folder: Path, split: Split, state: dict[str, Any]) -> bool:
    """Whether the shards that were written are, with the sizes that they had."""
    for number in range(state["shards"]):
        path = _shard(folder, split, state["name"], number)
        count = min(state["shard_tokens"], state["tokens"] - number * state["shard_tokens"])
        if not path.exists() or path.stat().st_size != HEADER_BYTES + TOKEN_BYTES * count:
            return False
    return True


def _shard(folder: Path, split: Split, name: str, number: int) -> Path:
    return folder / f"{name}_{split}_{number:06d}.bin"


def _write(path: Path, file: BinaryIO, content: bytes) -> None:
    """Write, so that a message names the file, and not the one that is being read."""
    with writing(path):
        file.write(content)


def _facts(path: Path) -> dict[str, Any]:
    """The name and checksum that identify a text; refuses files that are no texts."""
    kind = (path.with_suffix("") if path.suffix in OPENERS else path).suffix
    if kind not in (TEXTS, RECORDS):
        raise ValueError(f"{path} is neither {TEXTS} nor {RECORDS}, plain or with {' or '.join(OPENERS)}; convert it")
    try:
        with path.open("rb") as file:
            return {"name": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a text file") from None


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer, threads: int) -> Iterator[tuple[np.ndarray, int]]:
    """The tokens of every piece as uint16, and the bytes that had been read for it. Some pieces are encoded ahead."""

    def encode(piece: Piece) -> np.ndarray:
        tokens = tokenizer.encode(piece.text)
        return np.concatenate((np.array([tokenizer.end_of_text], "<u2"), tokens)) if piece.begins else tokens

    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[tuple[Future[np.ndarray], int]] = deque()
        for piece in pieces:
            ahead.append((pool.submit(encode, piece), piece.read))
            if len(ahead) > 2 * threads:
                future, read = ahead.popleft()
                yield future.result(), read
        for future, read in ahead:
            yield future.result(), read


def _pieces(inputs: Sequence[Path]) -> Iterator[Piece]:
    """The documents of all files, long ones in pieces whose tokens are together those of the whole.

    A document is cut before a line break that follows a character which is no space. Nothing that GPT-2's pattern
    matches runs from such a character to a line break, so that the cut changes no token.
    """
    before = 0
    for path in inputs:
        with path.open("rb") as raw:
            begins, waiting = True, ""
            for block in chain(_blocks(path, raw), (None,)):
                if block is None:
                    if waiting:
                        yield Piece(waiting, begins, before + raw.tell())
                    begins, waiting = True, ""
                    continue
                waiting += block
                if len(waiting) >= _PIECE and (place := _cut(waiting)):
                    yield Piece(waiting[:place], begins, before + raw.tell())
                    begins, waiting = False, waiting[place:]
            before += raw.tell()


def _cut(text: str) -> int:
    """The last place where a text may be cut, 0 if there is none."""
    place = text.rfind("\n")
    while place > 0 and text[place - 1].isspace():
        place = text.rfind("\n", 0, place)
    return max(0, place)


def _blocks(path: Path, raw: BinaryIO) -> Iterator[str | None]:
    """The text of a file in blocks, and None where a document ends."""
    opener = OPENERS.get(path.suffix)
    content = opener(raw) if opener else raw
    if (path.with_suffix("") if opener else path).suffix == RECORDS:
        for number, line in enumerate(_lines(path, content), 1):
            if line.strip():
                yield from (_record(path, number, line), None)
        return
    waiting, place = bytearray(), 0  # what comes directly before the line, and where the line begins
    for line in _lines(path, content):
        ends = line.strip() == SEPARATOR
        if ends or len(waiting) >= _PIECE:
            yield _decode(path, waiting, place - len(waiting))
            waiting = bytearray()
        if ends:
            yield None
        else:
            waiting += line
        place += len(line)
    yield _decode(path, waiting, place - len(waiting))


def _lines(path: Path, content: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from content
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or truncated, and cannot be read ({error}); restore it") from error


def _decode(path: Path, content: bytearray, start: int) -> str:
    """UTF-8 as text, where `start` is the place in the file, after decompression, of its first byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        place = start + error.start
        raise ValueError(
            f"{path} is not UTF-8 text: byte {place:,} is 0x{content[error.start]:02x} ({error.reason}); convert it to "
            "UTF-8"
        ) from None


def _record(path: Path, number: int, line: bytes) -> str:
    """The text in a line of a `.jsonl` file."""
    try:
        text = json.loads(line)["text"]
        text.encode()  # refuses half of a pair of surrogates, which is no text
        return text
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: not an object with a text in `text` ({error}); mend it") from None
