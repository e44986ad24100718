"""Texts become shards that hold them, whatever their size; an error or a kill leaves no folder."""

import json
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellnormed.cli import main
from wellnormed.data import convert
from wellnormed.data.shards import load_shards
from wellnormed.data.tokenizers import tokenizer_of

TEXT = "One day,\nlong ago.\n<|endoftext|>\nAnother one\n\n\n<|endoftext|>\n<|endoftext|>\nthe ënd"
DOCUMENTS = ["One day,\nlong ago.\n", "Another one\n\n\n", "the ënd"]

convert_bytes = partial(convert.convert_texts, tokenizer="bytes")


def documents(folder, split="train"):
    """What the shards hold, as texts."""
    tokens = load_shards(split, folder)
    whole = tokens.read(0, len(tokens))
    assert whole[0] == 0
    parts = np.split(whole, np.flatnonzero(whole == 0)[1:])
    return [bytes(part[1:].tolist()).decode() for part in parts]


@settings(max_examples=40)
@given(
    parts=st.lists(st.text("ab \n\r\té日", max_size=30), min_size=1, max_size=6),
    piece=st.integers(1, 40),
    shard=st.integers(1, 50),
)
def test_any_text_comes_back_from_pieces_and_shards_of_any_size(tmp_path_factory, parts, piece, shard):
    place = tmp_path_factory.mktemp("text")
    path = place / "text.txt"
    path.write_bytes("\n<|endoftext|>\n".join(parts).encode())
    expected = [*(part + "\n" for part in parts[:-1]), *([parts[-1]] if parts[-1] else [])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "PIECE", piece)
        if not expected:
            with pytest.raises(ValueError, match=r"there is no text in .*text\.txt"):
                convert_bytes({"train": [path]}, place / "shards", shard_tokens=shard)
            return
        facts = convert_bytes({"train": [path]}, place / "shards", shard_tokens=shard)["train"]
    assert documents(place / "shards") == expected
    sizes = [len(array) for array in load_shards("train", place / "shards").arrays]
    assert sizes[:-1] == [shard] * (len(sizes) - 1)
    tokens = sum(1 + len(document.encode()) for document in expected)
    assert facts == {"shards": len(sizes), "tokens": tokens, "documents": len(expected)}


def test_pieces_have_the_tokens_of_the_whole(tmp_path, monkeypatch):
    """The reason why a document may be cut: with GPT-2's own tokenizer, at every cut of a text with odd spaces."""
    try:
        encoding = tokenizer_of("gpt2")
    except ValueError as error:
        pytest.skip(str(error))
    text = (
        "It's  a\n\n\ntext,\t\n with\r\n\r\nodd   \n\n spaces.\n\x1c\n\xa0\nΩ\u2003\n日本。\n\n  12's\n!\n\n\nend \n\n"
    )
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    for piece in (1, 5, 20, 1000):
        monkeypatch.setattr(convert, "PIECE", piece)
        convert.convert_texts({"train": [path]}, tmp_path / f"by {piece}")
        tokens = load_shards("train", tmp_path / f"by {piece}")
        assert tokens.read(0, len(tokens)).tolist() == [encoding.end_of_text, *encoding.encode(text)]
        assert len(list(convert._pieces(path))) > (piece < 6)


def test_a_piece_ends_where_a_line_break_follows_a_letter(tmp_path, monkeypatch):
    """By itself, for where GPT-2's tokenizer is not at hand: no cut stands inside white space."""
    monkeypatch.setattr(convert, "PIECE", 1)
    (tmp_path / "text.txt").write_text("a\nb \n\n c\n\n\nd\n")
    assert [text for text, _ in convert._pieces(tmp_path / "text.txt")] == ["a", "\nb \n\n c", "\n\n\nd", "\n"]


def test_the_command_writes_both_splits_and_never_over_them(here, capsys, refused):
    (here / "text.txt").write_text(TEXT)
    (here / "other.txt").write_text("other")
    command = ["tokens", "text.txt", "other.txt", "my_val_x", "--validation", "other.txt", "--tokenizer", "bytes"]
    assert main(command) == 0
    assert "train: 50 tokens of 4 documents in 1 shard in my_val_x" in capsys.readouterr().out
    assert documents("my_val_x", "val") == ["other"]
    assert documents("my_val_x") == [*DOCUMENTS, "other"]
    assert json.loads((here / "my_val_x/meta.json").read_text())["tokenizer"] == "bytes"
    names = {"meta.json", "my_val_x_train_000000.bin", "my_val_x_val_000000.bin"}
    assert {path.name for path in (here / "my_val_x").iterdir()} == names
    assert "my_val_x exists; remove it, or choose another folder" in refused(*command)


KILLED = """
import os, signal, sys
from pathlib import Path
from wellnormed.data import convert
write, moments = convert.write_atomically, iter(range(int(sys.argv[1]), -1, -1))
def killed(*arguments):
    write(*arguments)
    if next(moments) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
convert.write_atomically = killed
convert.convert_texts({"train": [Path("text.txt")]}, Path("shards"), shard_tokens=20, tokenizer="bytes")
"""


def test_a_kill_leaves_no_shards_and_is_cleared_away_by_the_next_call(here):
    (here / "text.txt").write_text(TEXT)
    done = subprocess.run([sys.executable, "-c", KILLED, "1"], stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    assert not (here / "shards").exists()
    assert main(["tokens", "text.txt", "shards", "--tokenizer", "bytes"]) == 0
    assert documents("shards") == DOCUMENTS
    assert sorted(path.name for path in here.iterdir()) == ["shards", "text.txt"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(here, monkeypatch, refused):
    (here / "text.txt").write_text(TEXT)

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(convert, "write_atomically", full)
    assert "No space left on device" in refused("tokens", "text.txt", "shards", "--tokenizer", "bytes")
    assert [path.name for path in here.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("damage", [{"splits": []}, {"vocabulary": "x"}, {"vocabulary": -5}, {"tokenizer": 3}])
def test_a_meta_that_no_conversion_writes_is_refused(tmp_path, damage):
    (tmp_path / "text.txt").write_text("abc")
    convert_bytes({"train": [tmp_path / "text.txt"]}, tmp_path / "shards")
    path = tmp_path / "shards" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    (key,) = damage
    with pytest.raises(ValueError, match=rf"meta\.json has {key}=.*which no conversion writes; remove the folder"):
        load_shards("train", tmp_path / "shards")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the texts to train on and then the folder"),
        (["shards"], "name the texts to train on and then the folder"),
        (["missing.txt", "shards"], "missing.txt cannot be read (No such file or directory); name a text file"),
        (["good.txt", "good.txt"], "good.txt exists"),
        (["good.txt", "shards", "--validation", "missing.txt"], "missing.txt cannot be read"),
        (["good.txt", "latin.txt", "shards"], "latin.txt, line 10, is not UTF-8 text"),
        (["zero.txt", "shards"], "holds the byte 0, which ends documents"),
        (["empty.txt", "shards"], "there is no text in empty.txt"),
        (["good.txt", "good.txt/shards"], "could not be written"),
        (["good.txt", "new/folder/shards", "--validation", "latin.txt"], "latin.txt, line 10"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(here, refused, arguments, message):
    texts = {"good": b"good\n", "latin": b"good\n" * 9 + b"caf\xe9!\n", "zero": b"a\0b", "empty": b""}
    for name, content in texts.items():
        (here / f"{name}.txt").write_bytes(content)
    before = sorted(here.iterdir())
    assert message in refused("tokens", *arguments, "--tokenizer", "bytes")
    assert sorted(here.iterdir()) == before
