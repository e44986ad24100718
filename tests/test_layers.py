"""A room imports only those before it: the table of wings in CONTRIBUTING.md."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = """proof matrix norms routing parallel modular optim constraints nn program lowering certificates models data
train wellnormed cli papers campaigns benchmarks""".split()  # noqa: SIM905 (an order reads best as one line)
PLACES = ("src/wellnormed", "papers", "campaigns", "benchmarks")


def imports(file: Path):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):  # `from wellnormed import nn` names a room as well
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Call) and "import" in ast.unparse(node.func):  # by a name at run time
            modules = [each.value for each in node.args if isinstance(each, ast.Constant)]
        yield from {module.removeprefix("wellnormed.").split(".")[0] for module in modules if module}


def test_a_room_imports_only_those_before_it():
    files = [file for place in PLACES for file in ROOT.glob(f"{place}/**/*.py")]
    found = set()
    for file in files:
        room = file.relative_to(ROOT).as_posix().removeprefix("src/wellnormed/").split("/")[0].removesuffix(".py")
        if room in ORDER:
            found |= {(room, other) for other in imports(file) if other in ORDER and other != room}
    assert {pair for pair in found if ORDER.index(pair[0]) < ORDER.index(pair[1])} == set()
    assert ("nn", "norms") in found  # it sees imports
    assert ("papers", "cli") in found
