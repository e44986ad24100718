"""Readers of data: texts as characters or bytes, shards of tokens, and the order in which a run reads them."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "Corpus": ".corpus",
        "TokenStream": ".stream",
        "Tokens": ".shards",
        "load_corpus": ".corpus",
        "load_shakespeare": ".shakespeare",
    },
)
