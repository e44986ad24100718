"""GPT-2's byte-pair encoding, by `tiktoken`, from a file that is on this machine or downloaded once."""

import hashlib
import importlib
import json
from functools import cache
from typing import TYPE_CHECKING

from wellnormed.data._download import download, find

if TYPE_CHECKING:
    import tiktoken  # pyrefly: ignore[missing-import]

NAME = "gpt2"
VOCABULARY = 50257
END_OF_TEXT = 50256
"""The token `<|endoftext|>`, which stands before every document."""
FILE = "gpt2_bpe/encoder.json"
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json"
SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""A text is cut into matches of it before pairs are merged: GPT-2's own pattern, in the form that tiktoken uses."""


@cache
def gpt2_tokenizer() -> "tiktoken.Encoding":
    """GPT-2's tokenizer: `encode_ordinary(text)` gives tokens from 0 to 50256, and `decode(tokens)` the text.

    It is built from `gpt2_bpe/encoder.json` in `$WELLNORMED_DATA` or in the user's cache, which is downloaded if it is
    in neither, and has the checksum that tiktoken expects. The numbers of the tokens in this file are the order in
    which pairs are merged, so that `vocab.bpe`, which holds that order, is not needed.

    A missing package `tiktoken`, a file with another checksum, and one that can be neither found nor downloaded are
    each a `ValueError`.
    """
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ModuleNotFoundError:
        raise ValueError(
            "GPT-2's tokenizer needs the package tiktoken: in a clone type pip install '.[tokenizer]'"
        ) from None
    ranks = {_bytes(token): rank for token, rank in json.loads(_content()).items()}
    special = {"<|endoftext|>": ranks.pop(b"<|endoftext|>")}
    return tiktoken.Encoding(
        NAME, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=VOCABULARY
    )


def _content() -> bytes:
    if (path := find(FILE)) is None:
        return download(URL, FILE, SHA256)
    content = path.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(
            f"{path} is not the file of GPT-2's tokenizer: its sha256 is {digest}, not {SHA256}; "
            "remove it, and it is downloaded"
        )
    return content


def _bytes(token: str) -> bytes:
    """The bytes that a token stands for; in the file each is one visible character."""
    return bytes(map(_alphabet().__getitem__, token))


@cache
def _alphabet() -> dict[str, int]:
    """The byte of every character in the file: visible ones stand for themselves, others for 256, 257, ... in order."""
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}
