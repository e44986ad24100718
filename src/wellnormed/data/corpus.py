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
    """Tokens to train and to validate on, with the name of their tokenizer.

    The tokenizer itself comes from `require_tokenizer`, which may need a file that this machine lacks.
    """

    name: str
    tokenizer: str
    vocabulary: int
    train: Tokens
    validation: Tokens
    note: str = ""
    """The reason for this text if it may surprise."""
    symbols: str | None = None
    """The characters that the tokens stand for, in order; None for other tokenizers."""

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, to read or write text; a `ValueError` if it is not available."""
        return tokenizer_of(self.tokenizer, self.symbols)


def load_corpus(name: str = SHAKESPEARE, source: str = "auto") -> Corpus:
    """The corpus "characters" or "shakespeare", which need no preparation, or a folder of shards by its name or path.

    "characters" has the characters of the text that `load_shakespeare` loads from `source`, "shakespeare" its bytes;
    the first 90% of them are for training. Shards without a `meta.json` are taken for GPT-2 tokens, as the speedruns
    write them. Missing or damaged data are a `ValueError`; see `load_shards`.

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
