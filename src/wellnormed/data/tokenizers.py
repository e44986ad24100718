"""The tokenizers: GPT-2's byte-pair encoding, bytes, and the characters of a text."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from wellnormed.data import characters

TokenizerName = Literal["gpt2", "bytes", "characters"]
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Tokenizer:
    """A map from texts to tokens and back.

    Args:
        name: Its name in `meta.json`.
        vocabulary: Tokens lie below it.
        end_of_text: The token that stands before every document.
        encode: From a text to its tokens, uint16.
        decode: From tokens to text; bytes that are not UTF-8 are replaced.
        token_bytes: The number of UTF-8 bytes of every token, 0 for the end of text. It converts a loss in nats per
            token to bits per byte.
    """

    name: TokenizerName
    vocabulary: int
    end_of_text: int
    encode: Callable[[str], np.ndarray]
    decode: Callable[[list[int]], str]
    token_bytes: np.ndarray


@cache
def tokenizer_of(name: str, symbols: str | None = None) -> Tokenizer:
    """The tokenizer of that name; an unknown name, and GPT-2's if tiktoken cannot load it, are a `ValueError`.

    With "characters", tokens are positions in `symbols`; a newline, or else the first symbol, ends a text. With
    "bytes", tokens are the bytes of a text in UTF-8; the byte 0, which no text contains, ends a text.

    Example:
        >>> tokenizer_of("bytes").encode("née").tolist()
        [110, 195, 169, 101]
    """
    match name:
        case "gpt2":
            return _gpt2()
        case "bytes":
            token_bytes = np.ones(256, np.int64)
            token_bytes[0] = 0
            return Tokenizer("bytes", 256, 0, _bytes_of, lambda each: bytes(each).decode(errors="replace"), token_bytes)
        case "characters":
            assert symbols is not None
            token_bytes = np.array([len(symbol.encode()) for symbol in symbols])
            end = max(0, symbols.find("\n"))
            return Tokenizer(
                "characters", len(symbols), end, lambda text: characters.encode(text, symbols).numpy().astype("<u2"),
                lambda tokens: "".join(symbols[token] for token in tokens), token_bytes,
            )  # fmt: skip
        case _:
            raise ValueError(f"the tokenizer must be gpt2, bytes or characters, got {name!r}")


def _gpt2() -> Tokenizer:
    """GPT-2's tokenizer from tiktoken, which downloads its files once."""
    try:
        encoding = importlib.import_module("tiktoken").get_encoding("gpt2")
    except ModuleNotFoundError:
        raise ValueError(
            "GPT-2's tokenizer needs the package tiktoken: in a clone type pip install '.[tokenizer]'"
        ) from None
    except Exception as error:  # errors of tiktoken and of the library that it downloads with
        raise ValueError(
            f"tiktoken could not load GPT-2's tokenizer ({type(error).__name__}); run the same with a network once, or "
            "set TIKTOKEN_CACHE_DIR to a folder where tiktoken has kept it"
        ) from error
    token_bytes = np.array([len(encoding.decode_single_token_bytes(token)) for token in range(GPT2_VOCABULARY)])
    token_bytes[encoding.eot_token] = 0

    def encode(text: str) -> np.ndarray:
        return encoding.encode_to_numpy(text, disallowed_special=()).astype("<u2")

    def decode(tokens: list[int]) -> str:
        # a model's vocabulary is rounded up, so an untrained model may draw numbers beyond GPT-2's tokens
        return encoding.decode([token for token in tokens if token < GPT2_VOCABULARY])

    return Tokenizer("gpt2", GPT2_VOCABULARY, encoding.eot_token, encode, decode, token_bytes)


def _bytes_of(text: str) -> np.ndarray:
    content = text.encode()
    if 0 in content:
        raise ValueError("a text holds the byte 0, which ends documents here; remove it, or use the tokenizer gpt2")
    return np.frombuffer(content, np.uint8).astype("<u2")
