"""Readers of data: texts as characters or bytes, shards of tokens, and the order in which a run reads them."""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace

if TYPE_CHECKING:
    from wellnormed.data.corpus import Corpus as Corpus
    from wellnormed.data.corpus import load_corpus as load_corpus
    from wellnormed.data.shakespeare import load_shakespeare as load_shakespeare
    from wellnormed.data.shards import Tokens as Tokens
    from wellnormed.data.stream import TokenStream as TokenStream
else:
    __getattr__, __dir__ = lazy_namespace(__name__)
