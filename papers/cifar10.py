"""CIFAR-10 (Krizhevsky, 2009): 50,000 images to train on and 10,000 to test, in their canonical order."""

import hashlib
import io
import tarfile
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wellnormed.data._download import DataError, download, find, places

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE = "cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
PARTS = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25", "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421", "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d", "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}  # fmt: skip
"""The checksums of the files of the official binary version."""
_SIDE, _IMAGES = 32, 10_000
_BYTES = 1 + 3 * _SIDE**2  # of an image in a binary file: its label, then its planes


class Images(NamedTuple):
    """Images and their classes."""

    pixels: Tensor  # (N, 3, 32, 32) uint8
    labels: Tensor  # (N,) int64


@cache
def load_cifar10(split: Literal["train", "test"]) -> Images:
    """One split, checked against the md5 sums of the official files.

    Looked for in `$WELLNORMED_DATA` and the user's cache: the folder `cifar10` with the official `.bin` files or with
    lossless WebP mosaics of 1,000 images each, and the official archive; else the archive is downloaded (162 MiB).
    """
    for folder in places("cifar10"):
        if all((folder / name).exists() for name in PARTS[split]):
            return _checked(split, [(folder / name).read_bytes() for name in PARTS[split]], folder)
        if (folder / "webp" / f"{split}_00.webp").exists():
            return _checked(split, _from_mosaics(folder, split), folder)
    archive = find(ARCHIVE)
    content = download(URL, ARCHIVE, SHA256) if archive is None else archive.read_bytes()
    where = archive or URL
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            members = [tar.extractfile(f"cifar-10-batches-bin/{name}") for name in PARTS[split]]
            return _checked(split, [member.read() for member in members if member is not None], where)
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(f"{where} is not CIFAR-10's archive ({error}); remove it, and it is downloaded") from error


def _from_mosaics(folder: Path, split: str) -> list[bytes]:
    """The content of the official files, from mosaics whose tiles stand row by row."""
    from PIL import Image  # which only these mosaics need; it comes with matplotlib

    labels = np.fromfile(folder / f"labels_{split}.u8", np.uint8)
    planes = []
    for path in sorted((folder / "webp").glob(f"{split}_*.webp")):
        with Image.open(path) as image:
            mosaic = np.asarray(image.convert("RGB"))
        tiles = mosaic.reshape(mosaic.shape[0] // _SIDE, _SIDE, -1, _SIDE, 3).transpose(0, 2, 4, 1, 3)
        planes.append(tiles.reshape(-1, _BYTES - 1))
    images = np.concatenate(planes)
    if len(images) != len(labels):
        raise DataError(f"{folder} has {len(images)} images and {len(labels)} labels of {split}; restore its files")
    rows = np.concatenate((labels[:, None], images), 1)
    return [part.tobytes() for part in np.split(rows, len(PARTS[split]))]


def _checked(split: str, contents: list[bytes], where: Path | str) -> Images:
    for name, content in zip(PARTS[split], contents, strict=True):
        if (found := hashlib.md5(content).hexdigest()) != MD5[name]:
            raise DataError(f"{where}: {name} has the md5 {found}, not {MD5[name]}; remove it, and it is downloaded")
    rows = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8).view(-1, _BYTES)
    return Images(rows[:, 1:].reshape(-1, 3, _SIDE, _SIDE).clone(), rows[:, 0].long())
