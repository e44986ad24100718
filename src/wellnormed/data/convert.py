"""Convert texts to a folder of shards of tokens, which appears as a whole or not at all."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import rich.progress

from wellnormed._files import require_possible, without_empty_folders, write_atomically, write_json, writing
from wellnormed._version import VERSION
from wellnormed.data.shards import META, Split, header
from wellnormed.data.tokenizers import Tokenizer, TokenizerName, tokenizer_of

SHARD_TOKENS = 10**8
"""The tokens of a full shard, as in the speedruns."""
SEPARATOR = b"<|endoftext|>"
"""A line with this content alone separates two documents."""
PIECE = 2**20
"""The characters after which a document may be cut, so that memory holds one piece and one shard of any text."""


def convert_texts(
    texts: Mapping[Split, Sequence[Path]],
    folder: Path,
    tokenizer: TokenizerName = "gpt2",
    shard_tokens: int = SHARD_TOKENS,
) -> dict[Split, dict[str, int]]:
    """Write UTF-8 texts as tokens into a new folder: files `FOLDER_train_000000.bin`, ... that `load_shards` reads.

    A line `<|endoftext|>` separates documents. The end-of-text token stands before each; empty ones are left out. A
    shard has `shard_tokens` tokens, the last one the rest; documents run from one shard into the next. `meta.json`
    names the tokenizer.

    Files are written to a temporary folder beside it, which is renamed when it is complete. An error leaves nothing;
    the next call for that folder removes the leftovers of a killed process.

    Args:
        texts: The texts of the splits "train" and "val", in their order.
        folder: The folder of the shards, which must not exist yet.
        tokenizer: "gpt2" for GPT-2's byte-pair encoding, or "bytes", which gives about four times as many tokens.
        shard_tokens: Tokens of a full shard.

    Returns:
        For each split its numbers of `shards`, `tokens` and `documents`.

    Raises:
        ValueError: If the folder exists, if a text is missing or not UTF-8 (with its first wrong line), if a split has
            no text, and if the tokenizer cannot be had.
        OSError: If a file cannot be written, with its name and the reason, such as a full disk.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; remove it, or choose another folder for the shards")
    require_possible(folder)
    made = tokenizer_of(tokenizer)
    temporary = folder.resolve().with_name(f".{folder.resolve().name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # leftovers of a killed process
    with without_empty_folders(temporary.parent):
        try:
            facts: dict[Split, dict[str, int]] = {}
            for split, inputs in texts.items():
                documents = chain.from_iterable(_encoded(path, made) for path in inputs)
                facts[split] = _write(documents, temporary / f"{folder.resolve().name}_{split}", made, shard_tokens)
                if not facts[split]["tokens"]:
                    raise ValueError(f"there is no text in {', '.join(map(str, inputs))}; name files with text")
            version: dict[str, Any] = {"version": VERSION}
            about = version | {"tokenizer": made.name, "vocabulary": made.vocabulary, "splits": facts}
            write_json(temporary / META, about)
            with writing(folder):
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return facts


def _write(parts: Iterable[np.ndarray], start: Path, tokenizer: Tokenizer, shard_tokens: int) -> dict[str, int]:
    """Write tokens into shards whose paths begin with `start`; return the numbers of shards, tokens and documents."""
    tokens = documents = shards = 0
    for shard in _in_shards(parts, shard_tokens):
        write_atomically(start.with_name(f"{start.name}_{shards:06d}.bin"), header(len(shard)) + shard.tobytes())
        shards, tokens = shards + 1, tokens + len(shard)
        documents += int((shard == tokenizer.end_of_text).sum())
    return {"shards": shards, "tokens": tokens, "documents": documents}


def _in_shards(parts: Iterable[np.ndarray], shard_tokens: int) -> Iterator[np.ndarray]:
    """The same tokens in arrays of length `shard_tokens`, of which the last may be shorter."""
    waiting, size = [np.empty(0, "<u2")], 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        while size >= shard_tokens:
            tokens = np.concatenate(waiting)
            yield tokens[:shard_tokens]
            waiting, size = [tokens[shard_tokens:]], size - shard_tokens
    if size:
        yield np.concatenate(waiting)


def _encoded(path: Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    for text, begins in _pieces(path):
        if begins:
            yield np.array([tokenizer.end_of_text], "<u2")
        yield tokenizer.encode(text)


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """The documents of a text, and whether each piece begins a document; long documents come in several pieces.

    A document is cut between a character that is not a space and a line break. No match of GPT-2's pattern contains
    both, so the cut changes no token.
    """
    waiting, begins = "", True
    for line in _lines(path):
        if line is None:
            if waiting:
                yield waiting, begins
            waiting, begins = "", True
            continue
        waiting += line
        if len(waiting) >= PIECE and waiting.endswith("\n") and waiting[-2:-1].strip():
            yield waiting[:-1], begins
            waiting, begins = "\n", False
    if waiting:
        yield waiting, begins


def _lines(path: Path) -> Iterator[str | None]:
    """The lines of a text, and None between two documents."""
    try:
        file = rich.progress.open(path, "rb", description=path.name)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a text file") from None
    with file as content:
        for number, line in enumerate(content, 1):
            try:
                yield None if line.strip() == SEPARATOR else line.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}, is not UTF-8 text ({error}); convert it to UTF-8") from None
