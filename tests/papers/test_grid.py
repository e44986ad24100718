"""Cells are run once, whatever happens; rows survive kills, damage and full disks."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from rich.console import Console

from papers import _experiment, _grid, reproduce
from papers.__main__ import main
from papers._experiment import load
from papers._grid import chosen, missing
from papers._table import Table, cell_key

from . import toy

ROOT = Path(__file__).parents[2]
SQUARES = {value: value**2 for value in (1, 2, toy.FAILS, 4, toy.DIES, 6)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(_experiment.MODULES, "toy", "tests.papers.toy")
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    return tmp_path / "results"


@pytest.fixture
def inline(monkeypatch):
    """Cells are run in this process: what is tested is not the processes, each of which imports torch."""
    monkeypatch.setattr(
        _grid,
        "_outcomes",
        lambda chunks, settings, jobs: ((chunk, _grid._outcome(chunk, settings)) for chunk in chunks),
    )


def run(folder, jobs=2, **settings):
    console = Console(file=io.StringIO(), width=200)
    failed = reproduce.reproduce("toy", folder=folder, jobs=jobs, console=console, **settings)
    return failed, console.file.getvalue()


def squares(folder, preset="cpu"):
    rows, problems = Table(folder / f"toy-{preset}" / "rows.jsonl").read()
    assert not problems
    return {row["config"]["value"]: row["results"]["square"] for row in rows.values()}


def executed(folder):
    return sorted(map(int, (folder.parent / "log").read_text().split()))


def test_every_cell_is_run_once_and_drawn(inline, folder):
    failed, text = run(folder)
    assert failed == 0
    assert squares(folder) == SQUARES
    assert "6 of 6 cells" in text
    assert plt.imread(folder / "toy-cpu" / "squares.png").std() > 0.01  # a picture, and not an empty one
    assert r"| largest \| square | 9801 | 9801 |" in (folder / "toy-cpu" / "table.md").read_text()
    row = json.loads((folder / "toy-cpu" / "rows.jsonl").read_text().splitlines()[0])
    assert {"command", "commit", "seed", "machine", "config", "results", "seconds"} <= row.keys()
    assert row["command"] == "python -m papers toy --preset cpu"
    run(folder)
    assert executed(folder) == sorted(SQUARES)


def test_what_fails_is_named_and_the_rest_goes_on(folder, monkeypatch, capfd, request):
    monkeypatch.setenv("TOY_TROUBLE", "1")
    failed, text = run(folder)
    assert failed == 2
    assert squares(folder) == {value: square for value, square in SQUARES.items() if value not in (13, 99)}
    printed = text + capfd.readouterr().out
    assert "Number(value=13, seed=0): thirteen is refused" in printed
    assert "the process of Number(value=99, seed=0) was killed by signal 9" in printed
    assert "2 failed: the same command runs them again" in printed
    monkeypatch.delenv("TOY_TROUBLE")
    request.getfixturevalue("inline")
    assert run(folder, jobs=1)[0] == 0
    assert squares(folder) == SQUARES


def test_data_that_cannot_be_had_ends_the_experiment_with_one_sentence(inline, folder, monkeypatch, capsys):
    monkeypatch.setenv("TOY_TROUBLE", "no data")
    assert main(["toy", "--folder", str(folder)]) == 2
    assert capsys.readouterr().err == "error: numbers.tar.gz could not be downloaded; put it there\n"
    assert squares(folder) == {1: 1, 2: 4}
    assert executed(folder) == [1, 2, toy.FAILS]
    monkeypatch.delenv("TOY_TROUBLE")
    assert run(folder)[0] == 0
    assert squares(folder) == SQUARES


def test_rows_of_other_data_are_not_put_beside_each_other(inline, folder, monkeypatch, capsys):
    monkeypatch.setattr(toy, "EXPERIMENT", toy.OF_DATA)
    run(folder)
    table = folder / "toy-cpu" / "rows.jsonl"
    lines = table.read_text().splitlines(keepends=True)
    assert {json.loads(line)["data"] for line in lines} == {"whole numbers"}
    monkeypatch.setenv("TOY_DATA", "halves")
    assert run(folder)[0] == 0  # nothing is missing, so nothing is read
    table.write_text("".join(lines[:-1]))
    assert main(["toy", "--folder", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "has rows of whole numbers, and what is found on this machine is halves" in error
    assert "set WELLNORMED_DATA" in error
    assert "--folder" in error
    assert table.read_text() == "".join(lines[:-1])
    assert len(executed(folder)) == len(SQUARES)
    monkeypatch.delenv("TOY_DATA")
    assert run(folder)[0] == 0
    assert squares(folder) == SQUARES


def test_cells_may_be_run_together(inline, folder, monkeypatch):
    monkeypatch.setattr(toy, "EXPERIMENT", toy.TOGETHER)
    assert {len(chunk) for chunk in missing(toy.TOGETHER, toy.TOGETHER.cells("cpu"), {})} == {2, 4}
    assert run(folder, jobs=1)[0] == 0
    assert squares(folder) == SQUARES


def test_a_row_that_a_later_one_of_its_cell_replaces_does_not_count_and_is_removed(inline, folder):
    run(folder)
    table = Table(folder / "toy-cpu" / "rows.jsonl")
    lines = table.path.read_text().splitlines(keepends=True)
    table.path.write_text("".join([*lines, lines[0]]))
    assert squares(folder) == SQUARES
    assert table.repair() == []
    assert sorted(table.path.read_text().splitlines(keepends=True)) == sorted(lines)
    assert run(folder)[0] == 0
    assert executed(folder) == sorted(SQUARES)


def test_a_dry_run_says_how_long_such_cells_took_and_runs_none(inline, folder, capsys):
    def plan(*words):
        assert main(["toy", "--dry-run", "--folder", str(folder), *words]) == 0
        return capsys.readouterr().out.splitlines()

    assert plan() == ["toy, preset cpu: 6 of 6 cells would run"]  # no row tells how long
    run(folder, only=["value=1,2"])
    capsys.readouterr()
    table = folder / "toy-cpu" / "rows.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    table.unlink()
    for seed, (row, seconds) in enumerate(zip(rows, (60.0, 240.0), strict=True), 1):
        content = {key: value for key, value in row.items() if key != "digest"}
        config = {"value": 1, "seed": seed}
        Table(table).append(content | {"config": config, "cell": cell_key(toy.Number(**config)), "seconds": seconds})
    threads, machine = rows[0]["environment"]["threads"], rows[0]["machine"]
    assert plan() == [
        "toy, preset cpu: 6 of 6 cells would run",
        f"one process would take 2.5 min for 1 of 6 cells, by rows of {machine}, {threads} of them in use",
    ]
    assert plan("--only", "value=2,4") == ["toy, preset cpu: 2 of 2 cells would run"]
    assert executed(folder) == [1, 2]


def wait_until_gone(group):
    """Workers end when their parent has, whatever they are at."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the workers outlive their parent")


def started(folder):
    """A process that runs the experiment's 100 cells, two at a time; those behind the sixth take minutes."""
    script = (
        "from pathlib import Path; from papers import _experiment, _grid, reproduce\n"
        "if __name__ == '__main__':\n"
        "    _experiment.MODULES['toy'] = 'tests.papers.toy'\n"
        f"    reproduce.reproduce('toy', 'paper', folder=Path({str(folder)!r}), jobs=2)\n"
    )
    path = folder.parent / "script.py"
    path.write_text(script)
    environment = {**os.environ, "TOY_PAUSE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    return subprocess.Popen([sys.executable, path], env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.slow
def test_a_kill_loses_no_finished_cell_and_ends_workers_in_the_middle_of_one(folder, request):
    process = started(folder)
    rows = folder / "toy-paper" / "rows.jsonl"
    while not rows.exists() or rows.read_bytes().count(b"\n") < 6:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_gone(process.pid)
    before = squares(folder, "paper")
    assert len(before) == 6
    (folder.parent / "log").unlink()
    request.getfixturevalue("inline")
    assert run(folder, jobs=1, preset="paper")[0] == 0
    assert squares(folder, "paper") == {value: value**2 for value in range(100)}
    assert executed(folder) == sorted(set(range(100)) - set(before))


@pytest.mark.parametrize("where", ["truncated", "changed", "no JSON"])
def test_a_damaged_row_is_named_and_run_again(inline, folder, where):
    run(folder)
    path = folder / "toy-cpu" / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    spoilt = {"truncated": lines[2][:40], "changed": lines[2].replace("square", "sqware"), "no JSON": "?\n"}[where]
    path.write_text("".join([*lines[:2], spoilt] if where == "truncated" else [*lines[:2], spoilt, *lines[3:]]))
    failed, text = run(folder)
    assert failed == 0
    assert "line 3" in text
    assert "its cell is run again" in text
    assert squares(folder) == SQUARES


def test_every_truncation_leaves_whole_rows(tmp_path):
    table = Table(tmp_path / "rows.jsonl")
    for number in range(3):
        table.append({"cell": str(number), "x": number})
    content = table.path.read_bytes()
    for length in range(len(content)):
        table.path.write_bytes(content[:length])
        kept, _ = table.read()
        table.append({"cell": "new", "x": 9})
        rows, _ = table.read()
        assert rows == {**kept, "new": {"cell": "new", "x": 9}}
        assert set(kept) <= {"0", "1", "2"}
        assert len(kept) >= content[:length].count(b"\n")


def test_a_full_disk_leaves_the_table_as_it_was(tmp_path, monkeypatch):
    table = Table(tmp_path / "rows.jsonl")
    table.append({"cell": "a"})
    before = table.path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"rows.jsonl could not be written \(No space left on device\)"):
        table.append({"cell": "b"})
    assert table.path.read_bytes() == before


def test_the_command_lists_and_refuses(inline, folder, capsys, monkeypatch):
    run(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(reproduce, "cost", lambda *_, **__: "1,846.2 min for 31 of 60 cells")
    assert main(["--list", "--folder", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = " ".join(lines)
    assert max(map(len, lines)) <= 80
    assert all(text in printed for text in ["toy", "6/6", "0/100", "verdicts", *_experiment.MODULES])
    assert "…" not in printed
    assert main(["tyo", "--folder", str(folder)]) == 2
    assert "did you mean toy" in capsys.readouterr().err
    assert main([]) == 2
    assert "--list" in capsys.readouterr().err
    for device in ("cuda:7", "gpu"):  # found before any cell begins
        assert main(["toy", "--device", device, "--folder", str(folder)]) == 2
        assert f"'{device}'" in capsys.readouterr().err
    assert main(["toy", "--jobs", "0", "--folder", str(folder)]) == 2


def test_cells_are_chosen_and_listed_by_their_fields(inline, folder, capsys):
    assert main(["toy", "--only", "value=1,4", "seed=0", "--folder", str(folder)]) == 0
    assert squares(folder) == {1: 1, 4: 16}
    assert main(["toy", "--list", "--folder", str(folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("fin", "miss"))]
    assert [line[-1] for line in lines if line[0] == "finished"] == ["value=1", "value=4"]
    assert len(lines) == 6
    for condition, named in (("value=3", "value=3"), ("velue=1", "velue=1")):
        assert main(["toy", "--only", condition, "--folder", str(folder)]) == 2
        assert f"--only {named} leaves no cell; a cell is value=1, seed=0, for instance" in capsys.readouterr().err


def test_words_with_commas_are_chosen_whole():
    cells = load("nanogpt-table1").cells("cpu")
    kept = chosen(cells, ["kind=by form, proved 100", "tokens=16"])
    assert [(cell.kind, cell.tokens) for cell in kept] == [("by form, proved 100", 16)]


def test_cells_may_be_jobs_of_a_cluster(folder, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("TOY_TROUBLE", "1")
    failed, _ = run(folder, cluster="local")
    assert failed == 2
    assert squares(folder) == {value: square for value, square in SQUARES.items() if value not in (13, 99)}


def test_a_cluster_without_the_package_is_refused(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[cluster\]'"):
        run(folder, cluster="slurm")
