"""Run the Python blocks of README.md and docs/*.md, and compare what they print with the page.

The blocks of a page run in order and share their names. A block of kind `text` directly below a Python block is what
that block prints. `python docs/run_examples.py` writes what they print now into the pages; the tests only compare.
"""

import argparse
import contextlib
import io
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "parallel.md": "tests/parallel/test_docs.py, with two processes",
}
"""Pages whose blocks something else runs."""
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ELSEWHERE),
]
TOLERANCE = 0.02
"""Relative, of printed numbers: rounding differs among processors, and some examples train for a few steps."""

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


@dataclass(frozen=True)
class Block:
    """One Python block, what the page says that it prints (None if nothing), and what it printed."""

    match: re.Match[str]
    expected: str | None
    printed: str


def code_of(page: Path) -> list[str]:
    """The Python blocks of a page, in order."""
    return [match["code"] for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def run(page: Path, names: dict[str, Any] | None = None) -> Iterator[Block]:
    """Run the blocks of a page, in a folder of their own; `names` receives what they define."""
    names = {} if names is None else names
    names["__name__"] = "__main__"
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # pages may import `papers`, which is not installed
    text = page.read_text(encoding="utf-8")
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for match in _BLOCK.finditer(text):
                out = io.StringIO()
                line = text[: match.start("code")].count("\n")
                code = compile("\n" * line + match["code"], str(page), "exec")
                with contextlib.redirect_stdout(out):
                    exec(code, names)
                yield Block(match, match["output"], out.getvalue())
        finally:
            os.chdir(before)


def same(expected: str, printed: str) -> bool:
    """Whether two outputs agree: words exactly, numbers with decimals within `TOLERANCE`, white space not at all.

    Example:
        >>> same("bound 1.00  of 3", "bound 1.001 of 3"), same("bound 1.00 of 3", "bound 1.001 of 4")
        (True, False)
    """
    if _words(expected) != _words(printed):
        return False
    pairs = zip(_NUMBER.findall(expected), _NUMBER.findall(printed), strict=True)
    return all(_close(a, b) for a, b in pairs)


def _words(text: str) -> list[str]:
    return _NUMBER.sub("#", text).split()


def _close(a: str, b: str) -> bool:
    if "." not in a + b:
        return a == b
    x, y = float(a.replace(",", "")), float(b.replace(",", ""))
    return math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=1e-6)


def rewritten(page: Path, names: dict[str, Any] | None = None) -> str:
    """The page with what its blocks print now; `names` receives what they define."""
    text = page.read_text(encoding="utf-8")
    for block in reversed(list(run(page, names))):
        if block.expected is not None and not same(block.expected, block.printed):
            start, end = block.match.span("output")
            text = text[:start] + "".join(f"{line.rstrip()}\n" for line in block.printed.splitlines()) + text[end:]
    return text


def differences(page: Path) -> list[str]:
    """One message for each block that does not print what its page says."""
    return [
        f"{page.name} says:\n{block.expected}\nits example prints:\n{block.printed}\n"
        "(`python docs/run_examples.py` writes the new output)"
        for block in run(page)
        if block.expected is not None and not same(block.expected, block.printed)
    ]


def main() -> None:
    """Write new outputs into all pages, or only compare those that `--check` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="+", type=Path, metavar="PAGE")
    options = parser.parse_args()
    if options.check:
        found = [message for page in options.check for message in differences(page.resolve())]
        if found:
            raise SystemExit("\n".join(found))
        return
    for path in PAGES:
        path.write_text(rewritten(path), encoding="utf-8")


if __name__ == "__main__":
    main()
