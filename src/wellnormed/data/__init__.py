"""Readers of data sets, one file each: local folder, user's cache, checked download, offline default."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "CharacterText": ".characters",
        "Corpus": ".corpus",
        "TokenStream": ".stream",
        "Tokens": ".shards",
        "convert_texts": ".convert",
        "download_fineweb": ".fineweb",
        "gpt2_tokenizer": ".bpe",
        "load_corpus": ".corpus",
        "load_shakespeare": ".shakespeare",
        "load_shards": ".shards",
        "tokenizer_of": ".tokenizers",
    },
)
