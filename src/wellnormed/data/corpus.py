"""The corpora of language models, by name: shards in a folder, or a text as characters or bytes."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wellnormed.data.shakespeare import load_shakespeare
from wellnormed.data.shards import Tokens, load_shards, read_meta
from wellnormed.data.tokenizers import GPT2_VOCABULARY, Tokenizer, tokenizer_of

CHARACTERS, SHAKESPEARE, AS_BYTES = "characters", "shakespeare", " as bytes"


class Corpus(NamedTuple):
    """Tokens to train and to validate on, and what they are.

    `tokenizer` is the name that the shards give; `token_bytes` and the tokenizer itself come from `tokenizer_of`, which
    may need a file that this machine lacks.
    """

    name: str
    tokenizer: str
    vocabulary: int
    train: Tokens
    validation: Tokens
    note: str = ""
    """Why it is this text, where that may surprise."""
    symbols: str | None = None
    """The characters that the tokens are, in order; None for other tokens."""

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, to read or write text; a `ValueError` if it cannot be had."""
        return tokenizer_of(self.tokenizer, self.symbols)


def load_corpus(name: str = SHAKESPEARE, source: str = "auto") -> Corpus:
    """The corpus "characters" or "shakespeare", which need no preparation, or the folder of shards of a name or path.

    Characters are those of the text that `load_shakespeare` finds, or of its `source`; Shakespeare's tokens are the
    bytes of that text, or of the `source` that the name of such a corpus states. 90% of them are to train on. Shards
    without a `meta.json` are taken for GPT-2's, as the speedruns write them. Data that are missing or damaged are a
    `ValueError`; see `load_shards`.

    Example:
        >>> load_corpus().vocabulary
        256
    """
    if name == CHARACTERS:
        read = load_shakespeare(source)
        split = [Tokens([part.numpy().astype("<u2")], [read.source]) for part in (read.train, read.validation)]
        return Corpus(read.source, CHARACTERS, len(read.symbols), *split, note=read.note, symbols=read.symbols)
    if name == SHAKESPEARE:
        text, tokenizer = load_shakespeare(source.removesuffix(AS_BYTES)), tokenizer_of("bytes")
        tokens = tokenizer.encode(text.text)
        cut = math.floor(0.9 * len(tokens))
        parts = (Tokens([part], [text.source]) for part in np.split(tokens, [cut]))
        return Corpus(f"{text.source}{AS_BYTES}", "bytes", tokenizer.vocabulary, *parts, note=text.note)
    train, validation = load_shards("train", name), load_shards("val", name)
    facts = read_meta(Path(train.names[0]).parent)
    vocabulary = facts.get("vocabulary", GPT2_VOCABULARY)
    train.vocabulary = validation.vocabulary = vocabulary
    return Corpus(str(name), facts.get("tokenizer", "gpt2"), vocabulary, train, validation)
