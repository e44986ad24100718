"""The reader of CIFAR-10, on files that the test writes."""

import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from papers import cifar10

COUNT = 8  # images of a part


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The content of the six official files, if they had fewer images."""
    monkeypatch.setenv("WELLNORMED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    contents = {name: generator.integers(0, 256, (COUNT, 3073), np.uint8) for name in cifar10.MD5}
    for content in contents.values():
        content[:, 0] %= 10
    sums = {name: hashlib.md5(content.tobytes()).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(cifar10, "MD5", sums)
    cifar10.load_cifar10.cache_clear()
    yield contents
    cifar10.load_cifar10.cache_clear()


def archive(parts):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in parts.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = content.nbytes
            tar.addfile(info, io.BytesIO(content.tobytes()))
    return stream.getvalue()


def write_binary(folder, parts):
    folder.mkdir(parents=True)
    for name, content in parts.items():
        (folder / name).write_bytes(content.tobytes())


def check(parts):
    for split, names in cifar10.PARTS.items():
        rows = np.concatenate([parts[name] for name in names])
        pixels, labels = cifar10.load_cifar10(split)
        assert pixels.dtype == torch.uint8
        assert torch.equal(pixels, torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)))
        assert labels.tolist() == rows[:, 0].tolist()


@pytest.mark.parametrize("place", ["data", "cache/wellnormed"])
def test_official_files(parts, tmp_path, place):
    write_binary(tmp_path / place / "cifar10", parts)
    check(parts)


def test_mosaics(parts, tmp_path):
    folder = tmp_path / "data" / "cifar10"
    (folder / "webp").mkdir(parents=True)
    for split, names in cifar10.PARTS.items():
        rows = np.concatenate([parts[name] for name in names])
        rows[:, 0].tofile(folder / f"labels_{split}.u8")
        for number, images in enumerate(np.split(rows[:, 1:], len(rows) // 4)):  # two rows of two images
            tiles = images.reshape(2, 2, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 64, 3)
            Image.fromarray(tiles).save(folder / "webp" / f"{split}_{number:02d}.webp", lossless=True)
    check(parts)
    np.zeros(3, np.uint8).tofile(folder / "labels_test.u8")
    cifar10.load_cifar10.cache_clear()
    with pytest.raises(ValueError, match="8 images and 3 labels of test"):
        cifar10.load_cifar10("test")


def test_the_archive_is_downloaded_once_and_checked(parts, tmp_path, monkeypatch):
    content = archive(parts)
    source = tmp_path / "remote.tar.gz"
    source.write_bytes(content)
    monkeypatch.setattr(cifar10, "URL", source.as_uri())
    with pytest.raises(ValueError, match="with the sha256"):
        cifar10.load_cifar10("test")
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(content).hexdigest())
    check(parts)
    source.unlink()
    cifar10.load_cifar10.cache_clear()
    check(parts)


def test_no_connection_is_explained(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "URL", (tmp_path / "nothing").as_uri())
    with pytest.raises(ValueError, match=r"could not be downloaded .*set WELLNORMED_DATA to a folder that holds cifar"):
        cifar10.load_cifar10("train")


def test_another_content_is_refused(parts, tmp_path):
    write_binary(tmp_path / "data" / "cifar10", parts)
    (tmp_path / "data" / "cifar10" / "test_batch.bin").write_bytes(b"x" * 3073)
    with pytest.raises(ValueError, match=r"test_batch.bin has the md5"):
        cifar10.load_cifar10("test")
    (tmp_path / "data" / cifar10.ARCHIVE).write_bytes(b"no archive")
    (tmp_path / "data" / "cifar10" / "test_batch.bin").unlink()
    with pytest.raises(ValueError, match=r"is not CIFAR-10's archive"):
        cifar10.load_cifar10("test")
