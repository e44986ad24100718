"""Texts become shards that hold them, whatever their size, and whenever the conversion is killed."""

import gzip
import json
import lzma
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellnormed.cli import main
from wellnormed.data import _download, bpe, convert
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


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_every_kind_of_file_becomes_its_documents(tmp_path, kind, suffix):
    path = tmp_path / f"text{kind}{suffix}"
    records = "\n".join(json.dumps({"id": 1, "text": document}) for document in ["", *DOCUMENTS]) + "\n\n"
    content = (TEXT if kind == ".txt" else records).encode()
    path.write_bytes({"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix](content))
    facts = convert_bytes([path, path], tmp_path / "shards", shard_tokens=20)
    assert documents(tmp_path / "shards") == DOCUMENTS * 2
    assert facts["documents"] == 6
    assert facts["tokens"] == sum(1 + len(document.encode()) for document in DOCUMENTS) * 2
    sizes = [len(array) for array in load_shards("train", tmp_path / "shards").arrays]
    assert sizes[:-1] == [20] * (len(sizes) - 1)
    assert facts["shards"] == len(sizes)
    names = sorted(path.name for path in (tmp_path / "shards").glob("*.bin"))
    assert names[:2] == ["shards_train_000000.bin", "shards_train_000001.bin"]


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
        patch.setattr(convert, "_PIECE", piece)
        if not expected:
            with pytest.raises(ValueError, match=r"there is no text in .*text\.txt"):
                convert_bytes([path], place / "shards", shard_tokens=shard, threads=2)
            return
        convert_bytes([path], place / "shards", shard_tokens=shard, threads=2)
    assert documents(place / "shards") == expected


def test_pieces_have_the_tokens_of_the_whole(tmp_path, monkeypatch):
    """The reason why a document may be cut: with GPT-2's own tokenizer, at every cut of a text with odd spaces."""
    pytest.importorskip("tiktoken")
    if not any(path.exists() for path in _download.places(bpe.FILE)):
        pytest.skip(f"no {bpe.FILE} in $WELLNORMED_DATA or in the cache")
    text = (
        "It's  a\n\n\ntext,\t\n with\r\n\r\nodd   \n\n spaces.\n\x1c\n\xa0\nΩ\u2003\n日本。\n\n  12's\n!\n\n\nend \n\n"
    )
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    whole = [bpe.END_OF_TEXT, *bpe.gpt2_tokenizer().encode_ordinary(text)]
    for piece in (1, 5, 20, 1000):
        monkeypatch.setattr(convert, "_PIECE", piece)
        folder = tmp_path / f"by {piece}"
        convert.convert_texts([path], folder)
        tokens = load_shards("train", folder)
        assert tokens.read(0, len(tokens)).tolist() == whole
        assert json.loads((folder / "meta.json").read_text())["splits"]["train"]["pieces"] > (piece < 6)


def test_the_command_writes_both_splits_and_a_second_call_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("other.txt").write_text("other")
    command = [
        "tokens",
        "--tokenizer",
        "bytes",
        "text.txt",
        "other.txt",
        "tiny",
        "--validation",
        "other.txt",
        "--name",
        "a",
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "train: 50 tokens of 4 documents in 1 shard in tiny" in shown
    assert documents(tmp_path / "tiny", "val") == ["other"]
    assert documents(tmp_path / "tiny") == [*DOCUMENTS, "other"]
    before = contents(tmp_path / "tiny")
    monkeypatch.setattr(convert, "opened_atomically", None)  # it is not reached
    assert main(command) == 0
    assert contents(tmp_path / "tiny") == before
    meta = json.loads(before["meta.json"])
    assert (meta["tokenizer"], meta["vocabulary"]) == ("bytes", 256)
    assert [text["name"] for text in meta["splits"]["train"]["inputs"]] == ["text.txt", "other.txt"]


def test_a_lost_shard_is_written_again(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    convert_bytes([tmp_path / "text.txt"], tmp_path / "shards", shard_tokens=10)
    before = contents(tmp_path / "shards")
    (tmp_path / "shards" / "shards_train_000001.bin").write_bytes(b"half")
    convert_bytes([tmp_path / "text.txt"], tmp_path / "shards", shard_tokens=10)
    assert contents(tmp_path / "shards") == before


CRASHES = """
import os, resource, signal, sys
from pathlib import Path
from wellnormed.data import convert

place = Path({place!r})
convert._PIECE = 16

def run(moment, limit=None):
    # In a process of its own, which is killed before its write with the number `moment`; the waiting status.
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    writes = 0
    def counted(write):
        def counting(*arguments):
            nonlocal writes
            writes += 1
            if writes == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*arguments)
        return counting
    convert._write, convert.write_json = counted(convert._write), counted(convert.write_json)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # as if the disk were full
    try:
        text = [place / "text.txt"]
        convert.convert_texts(text, place / "shards", shard_tokens=40, threads=2, tokenizer="bytes")
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(3)
    os._exit(0)
"""
KILLED = """
moment = 1
while run(moment):  # each goes on where the one before was killed, and comes a little further
    moment = moment + 1 if moment < 12 else 6
print(moment)
"""
FULL = """
assert os.waitstatus_to_exitcode(run(0, limit=1090)) == 3
assert sorted(path.name for path in (place / "shards").iterdir()) == ["meta.json"]
assert os.waitstatus_to_exitcode(run(0)) == 0
"""


def crashes(place, what):
    script = CRASHES.format(place=str(place)) + what
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def long_text(tmp_path, monkeypatch):
    """A text of several shards, and what an undisturbed conversion makes of it."""
    monkeypatch.setattr(convert, "_PIECE", 16)
    text = "".join(f"word {number}\n" + "<|endoftext|>\n" * (number % 5 == 0) for number in range(60))
    (tmp_path / "text.txt").write_text(text)
    convert_bytes([tmp_path / "text.txt"], tmp_path / "whole" / "shards", shard_tokens=40)
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="it forks, and kills what it forked")
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(long_text):
    done = crashes(long_text, KILLED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 6  # some were killed
    assert contents(long_text / "shards") == contents(long_text / "whole" / "shards")


@pytest.mark.skipif(sys.platform != "linux", reason="it limits the sizes of files")
def test_a_full_disk_is_one_sentence_and_leaves_no_half_shard(long_text):
    done = crashes(long_text, FULL)
    assert done.returncode == 0, done.stderr
    assert "shards_train_000000.bin could not be written (File too large); make room" in done.stderr
    assert contents(long_text / "shards") == contents(long_text / "whole" / "shards")


def test_unfinished_shards_are_not_read(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_bytes(b"a few words\n" * 3 + b"\xff")
    monkeypatch.setattr(convert, "_PIECE", 4)
    with pytest.raises(ValueError, match="is not UTF-8"):
        convert_bytes([tmp_path / "text.txt"], tmp_path / "shards", shard_tokens=5, threads=1)
    with pytest.raises(ValueError, match=r"train shards in .* are not all written; run `wellnormed tokens` again"):
        load_shards("train", tmp_path / "shards")


def test_shards_of_another_tokenizer_are_not_mixed(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    convert_bytes([tmp_path / "text.txt"], tmp_path / "shards")
    with pytest.raises(ValueError, match="has shards of the tokenizer bytes, not other"):
        convert._begin(tmp_path / "shards", "val", {}, replace(tokenizer_of("bytes"), name="other"))


def test_a_text_with_the_byte_that_ends_texts_is_refused(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"a\0b")
    with pytest.raises(ValueError, match="holds the byte 0, which ends documents"):
        convert_bytes([tmp_path / "text.txt"], tmp_path / "shards")


def test_shards_of_other_texts_are_not_mixed(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("one")
    two.write_text("two")
    convert_bytes([one], tmp_path / "shards")
    for options, what in (
        ({"inputs": [two]}, "texts"),
        ({"inputs": [one], "shard_tokens": 7}, "--shard-tokens"),
        ({"inputs": [one], "name": "b"}, "--name"),
    ):
        with pytest.raises(ValueError, match=f"has train shards that were made with other {what}; remove the folder"):
            convert_bytes(folder=tmp_path / "shards", **options)
    (tmp_path / "shards" / "meta.json").unlink()
    with pytest.raises(ValueError, match=r"has train shards that no meta\.json tells of, such as shards_train_0"):
        convert_bytes([one], tmp_path / "shards")


def test_a_text_that_was_mended_is_converted(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        convert_bytes([text], tmp_path / "shards")
    text.write_bytes(b"abc")
    assert convert_bytes([text], tmp_path / "shards")["complete"]


@pytest.mark.parametrize("name", ["my_val_x", "my_train_data"])
def test_the_name_of_a_folder_says_nothing_of_its_splits(tmp_path, name):
    texts = {split: tmp_path / f"{split}.txt" for split in ("train", "val")}
    for split, text in texts.items():
        text.write_text(split)
    convert_bytes([texts["train"]], tmp_path / name)
    with pytest.raises(ValueError, match="there are no val shards"):
        load_shards("val", tmp_path / name)
    convert_bytes([texts["val"]], tmp_path / name, "val")
    for split in texts:
        assert documents(tmp_path / name, split) == [split]


@pytest.mark.parametrize("damage", [{"splits": []}, {"vocabulary": "x"}, {"vocabulary": -5}, {"tokenizer": 3}])
def test_a_meta_that_no_conversion_writes_is_refused(tmp_path, damage):
    text = tmp_path / "text.txt"
    text.write_text("abc")
    convert_bytes([text], tmp_path / "shards")
    path = tmp_path / "shards" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    (key,) = damage
    with pytest.raises(ValueError, match=rf"meta\.json has {key}=.*which no conversion writes; remove the folder"):
        load_shards("train", tmp_path / "shards")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.txt", b"good\n" * 9 + b"caf\xe9!\n", "byte 48 is 0xe9"),
        ("bad.txt", b"<|endoftext|>\n\xff", "byte 14 is 0xff"),
        ("bad.txt.xz", lzma.compress(b"good\n" * 9 + b"caf\xe9!\n"), "byte 48 is 0xe9"),
        ("bad.txt.xz", lzma.compress(b"good" * 99)[:-20], "damaged or truncated"),
        ("bad.txt.xz", b"no xz", "damaged or truncated"),
        ("bad.txt.gz", gzip.compress(b"good" * 99, mtime=0)[:-9], "damaged or truncated"),
        ("bad.txt.gz", b"no gz", "damaged or truncated"),
        ("bad.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "line 2: not an object with a text in `text`"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2: not"),
        ("bad.jsonl", b"[1]\n", "line 1: not"),
        ("bad.jsonl", b"{\n", "line 1: not"),
        ("bad.jsonl", b'{"text": "\\ud800"}\n', "line 1: not"),
        ("bad.jsonl", b'{"text": "\xff"}\n', "line 1: not"),
        ("bad.parquet", b"", r"neither \.txt nor \.jsonl"),
        ("bad.txt", b"\n<|endoftext|>\n"[1:], "there is no text in"),
    ],
)
def test_a_text_that_cannot_be_read_is_named_with_the_place(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(convert, "_PIECE", 8)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}|{message}.*{name}"):
        convert_bytes([path], tmp_path / "shards")
    assert not list(tmp_path.glob("shards/*.bin"))
    assert not list(tmp_path.glob("shards/.*.tmp"))


def test_mistaken_calls_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["shards"], "name the texts to train on and then the folder"),
        ([], "name the texts to train on and then the folder"),
        (["missing.txt", "shards"], "missing.txt cannot be read (No such file or directory); name a text file"),
        (["missing.txt", "shards", "--shard-tokens", "0"], "shard_tokens=0 must be from 1 to 2147483647"),
        (["text.txt", "shards", "--download", "fineweb10B"], "--download takes no texts"),
    ):
        assert main(["tokens", "--tokenizer", "bytes", *arguments]) == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert shown.count("\n") == 1
