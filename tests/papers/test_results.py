"""Every committed result says which run made it."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from papers import frontier
from papers._experiment import MODULES
from papers.frontier import CONSTANTS, CURVES, GRID, figure_of, over_seeds
from papers.frontier import run as run_points
from papers.header import FIELDS, Stored, header, write_result
from wellnormed.models import PotentialConfig
from wellnormed.train import TrainConfig

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "results").rglob("*.json*"))
EVALUATION = {"log10_lipschitz": 1.0, "lower_bound": 5.0, "validation_loss": 1.7}


def test_every_result_says_commit_seed_machine_and_command():
    assert {f"{name}-cpu" for name in MODULES} <= {path.parent.name for path in RESULTS}
    rooms = ("papers", "campaigns", "benchmarks", "docs", "src")
    scripts = {path.stem for room in rooms for path in (ROOT / room).rglob("*.py")}
    for path in RESULTS:
        with path.open(encoding="utf-8") as file:  # of a table, its first row
            content = json.loads(file.readline() if path.suffix == ".jsonl" else file.read())
        for run in [content, *content.get("sessions", [])]:
            assert set(FIELDS) <= run.keys(), path
            assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", run["commit"]), path
            assert re.search(r"\d+ (cores|threads)|GPU|H100|H200|A100", run["machine"]), path
            seeds = run["seed"] if isinstance(run["seed"], list) else [run["seed"]]
            assert seeds, path
            assert all(isinstance(seed, int) for seed in seeds), path
            if named := re.search(r"(?:reproduce|-m papers) ([\w-]+) --preset (cpu|paper)$", run["command"]):
                assert named[1] in MODULES, path
            elif "script" in run:  # the commit at which a script stands that is here no more
                assert re.fullmatch("[0-9a-f]{40}", run["script"]), path
            else:  # a script, which may lie in another room today than at the commit of the run
                script = re.search(r"-m [\w.]*?(\w+)(?: |$)|(\w+)\.py", run["command"])
                assert script is not None, path
                assert (script[1] or script[2]) in scripts, path


def test_no_result_names_a_host_or_a_person():
    for path in RESULTS:
        assert not re.search(r"(?i)hostname|username|/home/|/root/|/Users/", path.read_text(encoding="utf-8")), path


def test_a_header_names_its_run_and_no_file_is_written_without_one(tmp_path):
    run = header("make it", seed=3)
    assert run["command"] == "make it"
    assert run["seed"] == 3
    write_result(tmp_path / "new" / "result.json", {**run, "rows": [{"a": 1}, {"a": 2}]})
    assert json.loads((tmp_path / "new" / "result.json").read_text())["rows"] == [{"a": 1}, {"a": 2}]
    assert '\n  {"a": 1},\n' in (tmp_path / "new" / "result.json").read_text()
    with pytest.raises(ValueError, match="lacks commit, machine"):
        write_result(tmp_path / "bare.json", {"command": "make it", "seed": 0})


def test_a_script_goes_on_with_the_rows_that_it_has(tmp_path, capsys):
    for seed in (3, 1):
        stored = Stored(tmp_path / "result.json", "make it", steps=5)
        assert not stored.has(seed=seed)
        stored.add({"seed": seed, "loss": 0.5})
        assert stored.has(seed=seed, loss=0.5)
    content = json.loads(stored.path.read_text())
    assert (content["seed"], content["steps"]) == ([1, 3], 5)
    assert content["rows"] == [{"seed": 3, "loss": 0.5}, {"seed": 1, "loss": 0.5}]
    assert capsys.readouterr().out.count("loss") == 2


def test_the_frontier_averages_seeds_and_names_its_axes():
    losses = {0: 1.5, 1: 1.6, 2: 1.9}
    points = [
        {"point": name, "results": EVALUATION | {"validation_loss": losses[config.seed]}}
        for name, config in GRID.items()
    ]
    (axes,) = figure_of(points, {"a peer": 1.25}).axes
    assert "certified Lipschitz constant" in axes.get_xlabel()
    assert "nats per character" in axes.get_ylabel()
    labels = [text.get_text() for text in axes.texts]
    assert "better" in labels
    assert any("1.250" in label for label in labels)
    assert {label for label, _ in CURVES.values()} <= {line.get_label() for line in axes.get_lines()}
    rows = over_seeds(points, "attention")
    assert len(rows) == len(CONSTANTS)
    assert {(round(row["mean"], 4), row["least"], row["largest"]) for row in rows} == {(1.6667, 1.5, 1.9)}


def test_the_frontier_leaves_finished_points_alone(tmp_path):
    (tmp_path / "positions-2-seed-0.json").write_text("{}")
    run_points(only=("positions-2-seed-0",), folder=tmp_path)
    assert (tmp_path / "positions-2-seed-0.json").read_text() == "{}"
    with pytest.raises(ValueError, match="no point attention-4 in the grid; the points are positions-2-seed-0"):
        run_points(only=("attention-4",), folder=tmp_path)


@pytest.mark.usefixtures("quick_ends")
@pytest.mark.slow
def test_a_killed_point_of_the_frontier_goes_on_where_it_stopped(tmp_path, monkeypatch, at_step):
    (tmp_path / "text.txt").write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 40)
    model = PotentialConfig(length=8, token_width=4, mixing_heads=2, hidden=16, blocks=1)
    point = TrainConfig(
        model, lipschitz=3.0, steps=12, batch=2, source=str(tmp_path / "text.txt"), checkpoint_every=4, attack_steps=2
    )
    monkeypatch.setattr(frontier, "GRID", {"whole": point, "killed": point})
    monkeypatch.setattr(frontier, "RUNS", tmp_path / "runs")
    with at_step(6, Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        run_points(only=("killed",), folder=tmp_path)
    assert not (tmp_path / "killed.json").exists()
    run_points(folder=tmp_path)
    whole, resumed = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in ("whole", "killed"))
    assert whole == resumed
    assert 1 < whole["loss_as_published"] < 5
    assert not list((tmp_path / "runs").iterdir())
