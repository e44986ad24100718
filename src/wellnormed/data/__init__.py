"""Readers of data sets, one file each: local folder, user's cache, checked download, offline default."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "CharacterText": ".characters",
        "Images": ".cifar10",
        "load_cifar10": ".cifar10",
        "load_shakespeare": ".shakespeare",
    },
)
