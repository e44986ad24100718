"""Three sums of lines of code: of the library, of its tests, and of the laboratory.

Blank lines, comments and docstrings count nothing. A commit that raises a sum says in its body what for.
"""

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
AT_MOST = {"src": 20_534, "tests": 24_562, "laboratory": 12_100}
"""What is counted -> its largest number of lines."""
FOLDERS = {"src": ("src",), "tests": ("tests",), "laboratory": ("papers", "campaigns", "benchmarks")}
SPACE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(text: str) -> int:
    """The lines on which some token of code stands."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for each in tokens if each.type not in SPACE for n in range(each.start[0], each.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@cache
def sizes() -> dict[str, int]:
    """What is counted -> its lines today."""
    files = {name: [f for each in folders for f in (ROOT / each).rglob("*.py")] for name, folders in FOLDERS.items()}
    return {name: sum(lines_of(file.read_text(encoding="utf-8")) for file in each) for name, each in files.items()}


def test_no_sum_has_grown_unnoticed():
    """In one test: to count takes seconds, and tests may run in several processes."""
    grown = {name: size for name, size in sizes().items() if size > AT_MOST[name]}
    assert not grown, f"lower something, or raise the sum in {Path(__file__).name} and say in the commit what for"


def test_only_lines_of_code_are_counted():
    code = ['"""A', 'docstring."""', "# a comment", "x = (", "    1)", "", "def f():", '    "Another."', "    return 1"]
    assert lines_of("\n".join(code)) == 4
