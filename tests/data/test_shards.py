"""Tokens in shards: what was written is read, in any window, and what does not fit is refused in one sentence."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellnormed.data.shards import HEADER, MAGIC, VERSION, Tokens, load_shards
from wellnormed.data.tokenizers import tokenizer_of


def write_shard(path, tokens, magic=MAGIC, version=VERSION, claimed=None):
    header = np.zeros(HEADER, np.int32)
    header[:3] = magic, version, len(tokens) if claimed is None else claimed
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
    assert len(load_shards("train", folder)) == 30  # also by its path


@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5), data=st.data())
def test_reading_runs_through_the_ends_of_files(lengths, data):
    whole = np.arange(sum(lengths))
    tokens = Tokens(np.split(whole, np.cumsum(lengths)[:-1]))
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    length = data.draw(st.integers(1, max(1, len(whole) - start)))
    if len(whole):
        assert np.array_equal(tokens.read(start, length), whole[start : start + length])


def test_what_is_missing_is_one_sentence(folder):
    with pytest.raises(ValueError, match=r"no train shards of fineweb10B in .*kjj0/fineweb10B-gpt2"):
        load_shards("train")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: write_shard(path, range(10), magic=1), "must be a shard of tokens of version 1"),
        (lambda path: write_shard(path, range(10), version=2), "must be a shard of tokens of version 1"),
        (lambda path: path.write_bytes(b"short"), "must be a shard of tokens"),
        (lambda path: path.write_bytes(b""), "must be a shard of tokens"),
        (lambda path: write_shard(path, range(10), claimed=11), "1,044 bytes, but the 11 tokens .* are 1,046"),
        (lambda path: write_shard(path, range(10), claimed=-1), "1,044 bytes, but the -1 tokens"),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "1,042 bytes, but the 10 tokens .* truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "1,045 bytes, but the 10 tokens .* damaged"),
    ],
    ids=["magic", "version", "short", "empty", "count", "negative", "truncated", "odd"],
)
def test_a_damaged_shard_is_refused_before_anything_is_read(folder, damage, message):
    write_shard(folder / "fineweb_train_000001.bin", range(10))
    path = folder / "fineweb_train_000002.bin"
    write_shard(path, range(10))
    damage(path)
    with pytest.raises(ValueError, match=rf"000002\.bin.* {message}.*; download or convert it again"):
        load_shards("train")


def test_a_shard_that_is_cut_off_while_it_is_mapped_is_named(folder):
    """Reading what is gone would end the process by a signal, without a word."""
    for number in (1, 2):
        write_shard(folder / f"fineweb_train_{number:06}.bin", range(10 * number, 10 * number + 10))
    tokens = load_shards("train", folder)
    removed, cut = (Path(name) for name in tokens.names)
    os.truncate(cut, cut.stat().st_size - 2)
    for read in (lambda: tokens.windows(torch.tensor([0, 10]), 2), lambda: tokens.read(5, 10), tokens.fingerprint):
        with pytest.raises(ValueError, match=f"{cut.name} had 1,044 bytes when it was opened, and has 1,042 now"):
            read()
    removed.unlink()
    assert tokens.windows(torch.tensor([3]), 2).tolist() == [[13, 14]]  # what is mapped of it stays


@pytest.mark.parametrize("place", [0, 1, 49_999, 77_777, 99_999])
def test_one_changed_token_is_another_text(place):
    """Also between those that a sample would take."""
    array = np.random.default_rng(0).integers(0, 256, 100_000).astype("<u2")
    changed = array.copy()
    changed[place] ^= 1
    assert Tokens([changed]).fingerprint() != Tokens([array]).fingerprint() == Tokens([array.copy()]).fingerprint()
    assert Tokens([array[:5], array[5:]]).fingerprint() != Tokens([array]).fingerprint()


def test_a_link_to_nothing_is_named_and_not_passed_over(folder):
    folder.mkdir()
    (folder / "gone").symlink_to(folder / "nowhere")
    with pytest.raises(ValueError, match=r"gone is a link to .*nowhere, which does not exist"):
        load_shards("train", folder / "gone")
    (folder / "fineweb_train_000001.bin").symlink_to(folder / "nowhere")
    with pytest.raises(ValueError, match=r"000001\.bin is a link to .*nowhere, which does not exist"):
        load_shards("train", folder)


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(folder):
    write_shard(folder / "fineweb_train_000001.bin", range(10))
    write_shard(folder / "fineweb_train_000002.bin", [1, 2, 3, 65, 4, 70])
    tokens = load_shards("train")
    tokens.vocabulary = 65
    assert tokens.windows(torch.tensor([0, 5]), 4).max() == 8
    with pytest.raises(ValueError, match=r"000002\.bin has the token 65 at place 3, but .* has 65: .* at least 71"):
        tokens.windows(torch.tensor([0, 12]), 4)
    tokens.vocabulary = 71
    assert tokens.windows(torch.tensor([12]), 4).max() == 70


@pytest.mark.parametrize("package", [None, "broken"])
def test_where_gpt2_s_tokenizer_cannot_be_had_one_sentence_says_what_to_do(monkeypatch, package):
    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "tiktoken", package and SimpleNamespace(get_encoding=offline))
    message = (
        r"could not load .* \(ConnectionError\); .*TIKTOKEN_CACHE_DIR" if package else r"pip install '\.\[tokenizer\]'"
    )
    with pytest.raises(ValueError, match=message):
        tokenizer_of.__wrapped__("gpt2")
