"""Tokens in shards: what was written is read, in any window, and a file that is none is refused."""

import numpy as np
import pytest
import torch

from wellnormed.data.shards import HEADER, MAGIC, VERSION, Tokens, load_shards


def write_shard(path, tokens, magic=MAGIC, claimed=None):
    header = np.zeros(HEADER, np.int32)
    header[:3] = magic, VERSION, len(tokens) if claimed is None else claimed
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens, np.uint16).tobytes())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WELLNORMED_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "fineweb10B"


def test_tokens_come_back_in_the_order_of_the_files(folder):
    write_shard(folder / "fineweb_train_000002.bin", range(50_000, 50_020))
    write_shard(folder / "fineweb_train_000001.bin", range(10))
    write_shard(folder / "fineweb_val_000000.bin", [7, 8])
    tokens = load_shards("train")
    assert len(tokens) == 30
    assert len(load_shards("val")) == 2
    assert tokens.windows(torch.tensor([0, 7, 10, 27]), 3).tolist() == [
        [0, 1, 2], [7, 8, 9], [50_000, 50_001, 50_002], [50_017, 50_018, 50_019],
    ]  # fmt: skip


def test_no_window_runs_from_one_file_into_the_next():
    tokens = Tokens([np.arange(5), np.arange(100, 104)])
    for start in range(len(tokens)):
        (window,) = tokens.windows(torch.tensor([start]), 4)
        assert torch.equal(window - window[0], torch.arange(4)), start


def test_what_is_missing_or_damaged_is_one_sentence(folder):
    with pytest.raises(ValueError, match=r"no train shards of fineweb10B in .*kjj0/fineweb10B-gpt2"):
        load_shards("train")
    path = folder / "fineweb_train_000001.bin"
    write_shard(path, range(10), magic=1)
    with pytest.raises(ValueError, match=r"000001\.bin is no shard of tokens"):
        load_shards("train")
    write_shard(path, range(10), claimed=11)
    with pytest.raises(ValueError, match="holds 10 tokens where its header says 11"):
        load_shards("train")
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="no shard"):
        load_shards("train")
