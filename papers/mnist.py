"""MNIST (LeCun et al., 1998): 60,000 images to train on and 10,000 to test, in their canonical order."""

import gzip
import lzma
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from papers.cifar10 import Images
from wellnormed.data._download import DataError, find

NAMES = {"train": "train", "test": "t10k"}
"""Split -> how its files begin."""


@cache
def load_mnist(split: Literal["train", "test"]) -> Images:
    """Images `(N, 1, 28, 28)` and labels of one split, from the folder `mnist` of `$WELLNORMED_DATA` or the cache.

    It holds the four files as published (`.gz`), or as `.xz`. Other files are a `DataError`.
    """
    pixels = _numbers(f"{NAMES[split]}-images-idx3-ubyte", 16).view(-1, 1, 28, 28)
    labels = _numbers(f"{NAMES[split]}-labels-idx1-ubyte", 8).long()
    if len(pixels) != len(labels):
        raise DataError(f"MNIST's {split} split has {len(pixels)} images and {len(labels)} labels; restore its files")
    return Images(pixels, labels)


def _numbers(name: str, header: int) -> Tensor:
    """A file without its header."""
    for ending, read in ((".gz", gzip.decompress), (".xz", lzma.decompress)):
        if path := find(f"mnist/{name}{ending}"):
            return torch.frombuffer(bytearray(read(path.read_bytes())), dtype=torch.uint8)[header:]
    raise DataError(f"MNIST's {name}.gz was not found; set WELLNORMED_DATA to a folder that has it in its folder mnist")
