"""The download of FineWeb, against a stand-in for Hugging Face: checksums, what is there already, and every refusal."""

import hashlib
import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from wellnormed.cli import main
from wellnormed.data import fineweb
from wellnormed.data.corpus import load_corpus
from wellnormed.data.shards import load_shards

from .test_shards import write_shard

FILES = ["fineweb_val_000000.bin", *(f"fineweb_train_{number:06d}.bin" for number in (1, 2, 3))]


class Hub:
    """What is used of the package `huggingface_hub`."""

    def __init__(self, files):
        self.files = files
        self.asked = []

    def HfApi(self):
        return self

    def dataset_info(self, repository):
        assert repository == "kjj0/fineweb10B-gpt2"
        return SimpleNamespace(sha="abc")

    def get_paths_info(self, repository, paths, repo_type, revision):
        assert (repo_type, revision) == ("dataset", "abc")
        found = [(name, (self.files / name).read_bytes()) for name in paths if (self.files / name).exists()]
        return [
            SimpleNamespace(path=name, size=len(of), lfs=SimpleNamespace(sha256=hashlib.sha256(of).hexdigest()))
            for name, of in found
        ]

    def hf_hub_download(self, repository, filename, repo_type, revision, local_dir):
        self.asked.append(filename)
        if not (local_dir / filename).exists():  # as the package does, which compares no checksums
            shutil.copy(self.files / filename, local_dir / filename)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.delenv("WELLNORMED_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, name in enumerate(FILES):
        write_shard(tmp_path / "hub" / name, range(10 * number, 10 * number + 10))
    hub = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_what_is_downloaded_is_read(hub, capsys):
    assert main(["tokens", "--download", "fineweb10B", "--shards", "2"]) == 0
    assert "2 training shards and one to validate are in" in capsys.readouterr().out
    assert hub.asked == FILES[:3]
    assert load_shards("train").read(0, 20).tolist() == list(range(10, 30))
    assert load_shards("val").read(0, 10).tolist() == list(range(10))
    corpus = load_corpus("fineweb10B")
    assert (corpus.tokenizer, corpus.vocabulary) == ("gpt2", 50257)


def test_what_is_there_is_kept_if_it_has_its_checksum(hub, tmp_path):
    folder = fineweb.download_fineweb(shards=2, folder=tmp_path / "own")
    spoiled = bytearray((folder / FILES[1]).read_bytes())
    spoiled[-1] ^= 1
    (folder / FILES[1]).write_bytes(spoiled)
    hub.asked.clear()
    assert fineweb.download_fineweb(shards=3, folder=tmp_path / "own") == folder
    assert hub.asked == [FILES[1], FILES[3]]
    assert (folder / FILES[1]).read_bytes() != spoiled
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["revision"] == "abc"
    assert list(meta["sha256"]) == FILES


def test_content_with_another_checksum_is_refused_and_removed(hub, tmp_path, monkeypatch):
    def damaged(repository, filename, local_dir, **others):
        (local_dir / filename).write_bytes(b"x" * (hub.files / filename).stat().st_size)

    monkeypatch.setattr(hub, "hf_hub_download", damaged)
    with pytest.raises(ValueError, match=r"000000\.bin does not have the sha256 .* and was removed; download it again"):
        fineweb.download_fineweb(folder=tmp_path / "own", shards=1)
    assert not list((tmp_path / "own").glob("*.bin"))


@pytest.mark.parametrize("call", ["dataset_info", "hf_hub_download"])
def test_without_a_network_it_is_one_sentence(hub, monkeypatch, capsys, call):
    def offline(*arguments, **others):
        raise RuntimeError("Name or service not known\nmore")

    monkeypatch.setattr(hub, call, offline)
    assert main(["tokens", "--download", "fineweb10B", "--shards", "1"]) == 2
    shown = capsys.readouterr().err
    assert "could not be downloaded from Hugging Face (Name or service not known); run the same again" in shown
    assert shown.count("\n") == 1


def test_mistaken_downloads_are_refused(hub, tmp_path, monkeypatch):
    for options, message in (
        ({"name": "fineweb1T"}, "choose one of fineweb10B, fineweb100B"),
        ({"shards": 0}, "shards=0 must be at least 1"),
        ({"shards": 9}, r"kjj0/fineweb10B-gpt2 has no fineweb_train_000004\.bin; ask for fewer than 9 shards"),
    ):
        with pytest.raises(ValueError, match=message):
            fineweb.download_fineweb(**options)
    own = tmp_path / "own"
    own.mkdir()
    (own / "meta.json").write_text(json.dumps({"splits": {}}))
    with pytest.raises(ValueError, match="has shards of converted texts; choose another folder"):
        fineweb.download_fineweb(folder=own)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(ValueError, match=r"has room for 0\.0 GB, .* make room, or ask for fewer shards"):
        fineweb.download_fineweb(shards=1)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[hub\]'"):
        fineweb.download_fineweb()
