"""What the documents name exists, and the documents name nothing that a reader cannot have."""

import ast
import importlib
import importlib.util
import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.lightbench import MATRICES, VECTORS
from docs.harnesses import pass_rates

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "llms.txt")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
PAPERS = {"LT": 40, "SC": 20, "MD": 25, "LMO": 28}
"""Rows at least, so that a table cannot become empty unnoticed."""


def rows(paper: str) -> list[list[str]]:
    """The cells of a paper's table in docs/papers.md."""
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {paper}: ")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert lines[0] == "| in the paper | here | test | status |"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def resolve(path: str) -> object:
    """What a dotted path below `wellnormed`, or from `papers` on, names: rooms are modules, the rest attributes."""
    first, *rest = path.removeprefix("wellnormed.").split(".")
    found: object = importlib.import_module(first if first == "papers" else f"wellnormed.{first}")
    for name in rest:
        try:
            found = getattr(found, name)
        except AttributeError:
            found = importlib.import_module(f"{found.__name__}.{name}")  # type: ignore[attr-defined]
    return found


@cache
def functions(file: str) -> set[str]:
    """Names of the test functions of a file."""
    return {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_of_a_paper_is_whole_and_names_what_exists(paper):
    found = rows(paper)
    assert len(found) >= PAPERS[paper]
    for row in found:
        assert len(row) == 4, row
        what, here, test, status = row
        assert what
        assert re.match(r"(done|partly|not yet)\b", status), row
        objects, tests = re.findall(r"`([^`]+)`", here), re.findall(r"`([^`]+)`", test)
        if status.startswith("not yet"):
            assert (here, test) == ("-", "-"), row
            continue
        assert objects, row
        assert tests, row
        for name in objects:
            assert resolve(name) is not None
        for name in tests:
            file, _, function = name.partition("::")
            assert (ROOT / file).exists(), name
            assert function in functions(file), name


def test_the_papers_have_public_links():
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    for link in ("2507.13338", "2410.21265", "2502.07529"):
        assert f"https://arxiv.org/abs/{link}" in text
    assert "https://leloykun.github.io/ponder/spectral-clipping/" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    """Code spans that look like paths, from the root, the package, its rooms or the page; and the targets of links."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    spans = re.findall(r"`([\w./-]+\.(?:py|md|json|jsonl|png|toml|txt)|(?:[\w-]+/)+)`", prose)
    made_by_a_run = {
        "certificate.json", "manifest.json", "metrics.jsonl", "report.html", "config.json", "runs/", "input.txt",
        "rows.jsonl", "table.md",
    }  # fmt: skip
    for name in spans:
        places = (ROOT, ROOT / "src" / "wellnormed", ROOT / "src", page.parent)
        if name not in made_by_a_run and not name.startswith("runs/"):
            assert any((place / name).exists() for place in places), f"{page.name} names {name}"
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]+)[^)]*\)", prose):
        made_by_sphinx = target.startswith(("api/", "auto_gallery/"))
        assert made_by_sphinx or (page.parent / target).exists(), f"{page.name} links to {target}"
        in_site = page.parent == ROOT or not target.endswith(".md") or "/" not in target
        assert in_site, f"{page.name} links to {target}, which is no page of the site"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_heading_is_two_levels_below_the_one_before(page):
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)]
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_object_that_a_page_names_exists(page):
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in re.findall(r"`(?:~?)(?:wn|wellnormed)\.([A-Za-z_][\w.]*)", prose):
        if not name.startswith("__") and "NAME" not in name:
            parts = name.rstrip(".").split(".")
            assert resolve_from_root(parts) is not None, f"{page.name} names wn.{name}"


def resolve_from_root(parts: list[str]) -> object:
    """An attribute of the root namespace, or a module below it."""
    package = importlib.import_module("wellnormed")
    found = getattr(package, parts[0]) if parts[0] in dir(package) else resolve(parts[0])
    for name in parts[1:]:
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{found.__name__}.{name}")  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_row_of_a_table_has_the_cells_of_its_header(page):
    """A bar inside a code span ends a cell, unless a backslash stands before it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    cells = [len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0 for line in lines]
    for number, (before, here) in enumerate(itertools.pairwise(cells), 2):
        assert not (before and here) or before == here, f"{page.name}:{number}: {here - 1} cells, not {before - 1}"


def test_no_file_names_what_a_reader_cannot_have():
    """Private documents, folders of a workplace, and numbers of a private list of tasks."""
    documents = r"\b(DESIGN|CORRECTIONS|REFERENCE|STYLE|CERTIFICATES|BRIEF|DATA)\.md"
    private = re.compile(documents + r"|/work/|\.\./shared|\bissue #?\d")
    for folder in ("src", "tests", "docs", "examples", "benchmarks", "results"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".json", ".rst") and "_build" not in path.parts and path != Path(__file__):
                assert not private.search(path.read_text(encoding="utf-8")), path
    for page in PAGES:
        assert not private.search(page.read_text(encoding="utf-8")), page


def script(name):
    """A file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_reproductions_is_what_its_rows_give():
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert page == script("make_reproduction").page(), "run `python docs/make_reproduction.py`"
    rows = {str(path.relative_to(ROOT)) for path in (ROOT / "results" / "reproduce").rglob("rows.jsonl")}
    page += (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert rows == set(re.findall(r"\]\(\.\./(results/reproduce/[^)]+\.jsonl)\)", page))  # none without its section


def test_the_page_of_reproductions_knows_lists_of_rows_as_the_tuples_of_cells():
    module = script("make_reproduction")
    vision = module.load("certified-vision")
    cells = [cell for cell in vision.cells("cpu") if cell.network == "wellnormed"]
    rows = [{"cell": module.cell_key(cells[0]), "config": {**vars(cells[0]), "channels": list(cells[0].channels)}}]
    assert f"channels: {list(cells[0].channels)}" not in module.not_run(vision, "cpu", rows)


def test_an_optimizer_that_lacks_a_task_has_no_result_of_its_kind():
    content = json.loads((ROOT / "results" / "lightbench.json").read_text(encoding="utf-8"))
    first, *others = pass_rates(content)[1]

    def without(*tasks):
        rows = [row for row in content["rows"] if row["optimizer"] != first[0] or row["task"] not in tasks]
        return pass_rates(content | {"rows": rows})[1]

    assert without(MATRICES[0]) == [(first[0], "-", "-", *first[3:]), *others]
    assert without(MATRICES[0], VECTORS[0]) == others


def test_the_page_of_results_is_what_its_files_give():
    module = script("make_results")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for path, table in module.WITHIN.items():
        text = path.read_text(encoding="utf-8")
        assert table() in text, "run `python -m docs.make_results`"
        assert text == module.between(text, table())
    named = set(re.findall(r"\]\(\.\./results/([^)]+\.json)\)", page))
    everywhere = {str(path.relative_to(ROOT / "results")) for path in (ROOT / "results").rglob("*.json")}
    assert named == {name for name in everywhere if not name.startswith("frontier/")}  # none without a place


def test_contributing_has_every_room_and_the_glossary_the_vocabulary():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "src" / "wellnormed").glob("*/__init__.py")}
    assert all(f"`{room}`" in text for room in rooms)
    words = re.findall(r"^## (.*)$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for word in words:  # each is linked where it occurs
        anchor = word.lower().replace(",", "").replace(" ", "-")
        assert len(words) >= 12
        assert f"glossary.md#{anchor})" in pages, word


def test_every_page_and_every_example_is_in_the_site():
    """A page that no table of contents names is not found by a reader."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {line for block in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for line in block.splitlines()}
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or page.stem in listed, page.name
    included = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for example in (ROOT / "examples").glob("*.py"):
        assert f"../examples/{example.name}" in included


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists(page):
    text = re.sub(
        r"`python [^`]*`(?=\s+at\s+(the\s+)?commits? )", "", page.read_text(encoding="utf-8")
    )  # of their time
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    source = (ROOT / "src" / "wellnormed" / "cli.py").read_text(encoding="utf-8")
    commands = {name.lower() for name in re.findall(r"^class (\w+):", source, re.MULTILINE)}
    assert {"train", "verify"} <= commands
    history = page.name in ("CHANGELOG.md", "reproduction.md", "results.md")  # commands as they were at a stated commit
    assert set(re.findall(r"(?:`|^)wellnormed (\w+)", text, re.MULTILINE)) <= commands | (
        {"reproduce"} if history else set()
    )
    for module in re.findall(r"python -m ((?:wellnormed|papers|campaigns|benchmarks)[.\w]*)", text):
        moved = module.replace("benchmarks.", "campaigns.") if history else module
        assert any(importlib.util.find_spec(each) is not None for each in (module, moved)), module
    for script in re.findall(r"python ([\w/]+\.py)", text):
        assert (ROOT / script).exists(), script


def test_the_guide_imports_from_rooms_and_not_from_their_private_files():
    """`lowering.moves` and what a room exports as a module, such as `optim.directions`, are public."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for room, file in re.findall(r"(?:from|import) wellnormed\.(\w+)\.(\w+)", text):
        exports = (ROOT / "src" / "wellnormed" / room / "__init__.py").read_text(encoding="utf-8")
        assert file == "moves" or f"import {file} as {file}\n" in exports, (room, file)


def test_the_root_holds_what_a_script_needs_and_the_guide_lists_it():
    package = importlib.import_module("wellnormed")
    assert len(package.__all__) <= 28
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "src" / "wellnormed").glob("*/__init__.py")}
    for name in package.__all__:
        assert name in rooms or f"`wn.{name}`" in reference, name
    assert rooms == set(re.findall(r"^   wellnormed\.(\w+)$", reference, re.MULTILINE))  # which lists all they export


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_fits_into_a_column(page):
    for block in re.findall(r"(?ms)^```(?:python|sh)\n(.*?)^```$", page.read_text(encoding="utf-8")):
        for line in block.splitlines():
            assert len(line) <= (120 if page.name == "directions.md" else 90), line  # whose classes count their lines
