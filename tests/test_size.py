"""Lines of code of every room, without blank lines, comments and docstrings: a room grows by hand, in its commit.

`python -m tests.test_size` writes today's numbers here.
"""

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
AT_MOST = {
    "benchmarks": 2548,
    "campaigns": 2382,
    "papers": 6278,
    "src/wellnormed": 647,
    "certificates": 5188,
    "constraints": 1103,
    "data": 608,
    "matrix": 1300,
    "models": 666,
    "modular": 383,
    "nn": 403,
    "norms": 491,
    "optim": 1848,
    "parallel": 366,
    "program": 1175,
    "proof": 1948,
    "routing": 867,
    "train": 1941,
    "tests": 25112,
}  # fmt: skip
"""Room -> its largest number. Lowered freely; the kernel, `proof`, is frozen at 1,950."""
ROOMS = ("src/wellnormed/*", "papers", "campaigns", "benchmarks", "tests")
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
    """Room -> its lines; the files beside the rooms of the library are one."""
    found: dict[str, int] = {}
    for room in sorted(path for pattern in ROOMS for path in ROOT.glob(pattern)):
        if files := [room] if room.suffix == ".py" else sorted(room.rglob("*.py")):
            name = (room.parent if room.suffix else room).relative_to(ROOT).as_posix().removeprefix("src/wellnormed/")
            found[name] = found.get(name, 0) + sum(lines_of(file.read_text(encoding="utf-8")) for file in files)
    return found


def test_no_room_has_grown_unnoticed_and_the_kernel_is_frozen():
    """In one test: to count takes seconds, and tests may run in several processes."""
    assert AT_MOST["proof"] <= 1950
    assert AT_MOST.keys() == sizes().keys()
    grown = {room: size for room, size in sizes().items() if size > AT_MOST[room]}
    assert not grown, f"raise their numbers in {Path(__file__).name}, and say why"


def test_only_lines_of_code_are_counted():
    code = ['"""A', 'docstring."""', "# a comment", "x = (", "    1)", "", "def f():", '    "Another."', "    return 1"]
    assert lines_of("\n".join(code)) == 4


def refresh() -> None:
    """Write today's numbers."""
    text = Path(__file__).read_text(encoding="utf-8")
    before, rest = text.split("AT_MOST = {\n", 1)
    after = rest.split("}  # fmt: skip", 1)[1]
    numbers = "".join(f'    "{room}": {size},\n' for room, size in sizes().items())
    Path(__file__).write_text(f"{before}AT_MOST = {{\n{numbers}}}  # fmt: skip{after}", encoding="utf-8")


if __name__ == "__main__":
    refresh()
