"""The experiment on tiny networks: its grid, its file, its arithmetic and its figure."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
import torch
from benchmarks.lr_transfer import Cell

from benchmarks import lr_transfer as experiment
from wellnormed.data import CharacterText

TRAINING = experiment.Training(
    context=3, symbol_width=2, steps=4, batch=8, last_steps=2, validation_windows=32, hidden=1
)
WIDTHS, EXPONENTS = (8, 12), {"adam": (-8, -6), "scion": (-4, -2), "modular": (-3, -1)}
ALL = {
    Cell(optimizer, width, exponent, 0)
    for optimizer, exponents in EXPONENTS.items()
    for width in WIDTHS
    for exponent in exponents
}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcde \n", k=1500)))
    return path


@pytest.fixture(scope="module")
def text(text_file) -> CharacterText:
    return CharacterText(text_file.read_text(), "random")


@pytest.fixture
def run(text_file, monkeypatch, capsys):
    """Run a tiny grid; returns the summary and one printed line for each run."""

    def run(output: Path, training: experiment.Training = TRAINING, **others) -> tuple[dict, list[str]]:
        monkeypatch.setitem(experiment.PRESETS, "cpu", (training, WIDTHS, EXPONENTS))
        capsys.readouterr()
        summary = experiment.run("cpu", output, text=str(text_file), threads=torch.get_num_threads(), **others)
        return summary, capsys.readouterr().out.splitlines()

    return run


def test_grid_is_complete_and_its_provenance_is_kept(run, tmp_path):
    summary, lines = run(tmp_path)
    header, rows = experiment.read_cells(tmp_path / "cells-cpu.jsonl")
    assert len(lines) == len(rows) == summary["runs"] == 12
    assert {tuple(row[key] for key in Cell._fields) for row in rows} == ALL
    assert all(math.isfinite(row["validation_loss"]) for row in rows)
    assert header["config"]["steps"] == 4
    assert {"command", "commit", "seed", "machine"} <= header["sessions"][0].keys()
    assert json.loads((tmp_path / "summary-cpu.json").read_text()) == summary
    assert len(summary["best"]) == 2 * 3 * 2  # metrics, optimizers, widths
    assert [row["widths"] for row in summary["drift"]] == [[8, 12]] * 6


def test_finished_runs_are_skipped_and_others_are_added(run, tmp_path):
    run(tmp_path, optimizers=("adam",), widths=(8,))
    before = (tmp_path / "cells-cpu.jsonl").read_text()
    _, lines = run(tmp_path, optimizers=("adam",), widths=(8,))
    assert lines == []
    assert (tmp_path / "cells-cpu.jsonl").read_text() == before
    summary, lines = run(tmp_path, optimizers=("adam",), widths=(8,), seeds=(0, 1), exponents=(-6, -5))
    assert len(lines) == 3  # one was there
    assert summary["seed"] == [0, 1]
    assert [session["environment"]["threads"] for session in summary["sessions"]] == [torch.get_num_threads()] * 2


def test_a_run_stopped_halfway_is_continued_with_equal_numbers(run, tmp_path, monkeypatch):
    whole, _ = run(tmp_path / "whole")
    train, calls = experiment.train, []

    def dies(cell, *others):
        calls.append(cell)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return train(cell, *others)

    monkeypatch.setattr(experiment, "train", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "pieces")
    pieces, lines = run(tmp_path / "pieces")
    assert len(lines) == 12 - 5
    assert pieces["best"] == whole["best"]


def test_other_settings_are_not_mixed_in(run, tmp_path):
    run(tmp_path, optimizers=("adam",))
    with pytest.raises(ValueError, match="choose another --output"):
        run(tmp_path, replace(TRAINING, steps=5))


@pytest.mark.parametrize("optimizer", ["adam", "scion", "modular"])
def test_a_step_lowers_the_training_loss(optimizer, text):
    rates = {"adam": -6, "scion": -4, "modular": -3}
    longer = replace(TRAINING, steps=40, batch=64, last_steps=10)
    still = experiment.train(Cell(optimizer, 8, -60, 0), longer, text)
    moving = experiment.train(Cell(optimizer, 8, rates[optimizer], 0), longer, text)
    assert moving["train_loss"] < still["train_loss"]


@pytest.mark.parametrize("optimizer", ["adam", "scion", "modular"])
def test_a_diverged_run_is_kept(optimizer, run, text, tmp_path):
    row = experiment.train(Cell(optimizer, 8, 120, 0), TRAINING, text)
    assert row["validation_loss"] is None
    assert row["train_loss"] is None
    assert 1 <= row["diverged_at"] <= TRAINING.steps
    summary, _ = run(tmp_path, optimizers=(optimizer,), widths=(8,), exponents=(-6, 120))
    _, rows = experiment.read_cells(tmp_path / "cells-cpu.jsonl")
    assert summary["diverged"] == 1
    assert [row["validation_loss"] is None for row in rows] == [False, True]
    assert summary["best"][0]["log2_lr"] == -6
    _, lines = run(tmp_path, optimizers=(optimizer,), widths=(8,), exponents=(-6, 120))
    assert lines == []  # it is not tried again


def test_all_optimizers_see_the_same_batches_and_start_as_announced(text):
    widths = experiment.network(len(text.symbols), 8, TRAINING)
    drawn = [experiment.windows(text.train, 5, 3, torch.Generator().manual_seed(1)) for _ in "ab"]
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))
    inputs, targets = drawn[0]
    joined = torch.cat([inputs, targets[:, None]], 1)
    assert all(text.decode(window) in text.text for window in joined)
    for optimizer in ("scion", "modular"):
        made = experiment.optimizer_of(widths, Cell(optimizer, 8, -1, 0), 0.9)
        for assigned in made.assignment:
            assert float(assigned.norm.norm(assigned.parameter.detach())) == pytest.approx(1, abs=1e-4)


def fitted(curve: dict[int, float | None]) -> float:
    best = experiment.best_of(curve)
    assert best is not None
    return best["fitted_log2_lr"]


@pytest.mark.parametrize("optimum", [-3.4, -3.0, -2.75])
def test_the_vertex_of_a_parabola_is_found(optimum):
    curve = {e: 0.3 * (e - optimum) ** 2 + 2 for e in range(-6, 1)}
    best = experiment.best_of(curve)
    assert best is not None
    assert best["log2_lr"] == round(optimum)
    assert best["fitted_log2_lr"] == pytest.approx(optimum)
    assert not best["at_edge"]
    uneven = {e: curve[e] for e in (-6, -3, -1)}
    assert fitted(uneven) == pytest.approx(optimum)


def test_edges_ties_and_diverged_neighbours():
    best = experiment.best_of
    assert best({-2: 1.0, -1: 2.0, 0: 3.0}) == {"log2_lr": -2, "fitted_log2_lr": -2.0, "loss": 1.0, "at_edge": True}
    assert best({-2: 3.0, -1: 2.0, 0: None}) == {"log2_lr": -1, "fitted_log2_lr": -1.0, "loss": 2.0, "at_edge": False}
    assert fitted({-2: 1.0, -1: 1.0, 0: 1.0}) == -2
    assert fitted({-2: 2.0, -1: 1.0, 0: 1.0, 1: 2.0}) == pytest.approx(-0.5)
    assert best({-2: None, -1: None}) is None


def synthetic(optima: dict[int, float]) -> list[dict]:
    return [
        {
            "optimizer": "scion", "seed": 0, "width": width, "log2_lr": e, "seconds": 1.0, "diverged_at": None,
            "validation_loss": (e - optimum) ** 2 + 1, "train_loss": (e - optimum) ** 2,
        }
        for width, optimum in optima.items() for e in range(-8, 1)
    ]  # fmt: skip


def test_drift_in_factors_of_two():
    summary = experiment.summarize({}, synthetic({64: -2.25, 128: -4.0, 256: -3.5}))
    (drift,) = [row for row in summary["drift"] if row["metric"] == "validation_loss"]
    assert drift["factors_of_2"] == 2
    assert drift["fitted_factors_of_2"] == 1.75
    assert drift["fitted_narrowest_to_widest"] == -1.25
    assert drift["transferred_loss"] == (-2 + 3.5) ** 2 + 1
    assert drift["widest_loss"] == 1.25
    assert not drift["any_at_edge"]


def test_a_width_that_always_diverged_has_no_best_rate():
    rows = synthetic({64: -2.0, 128: -3.0})
    for row in rows:
        if row["width"] == 128:
            row |= {"validation_loss": None, "train_loss": None}
    summary = experiment.summarize({}, rows)
    assert {row["width"] for row in summary["best"]} == {64}
    assert summary["drift"][0]["widths"] == [64]


def test_command_line_writes_files_and_figure(text_file, tmp_path, monkeypatch):
    matplotlib.use("agg")
    monkeypatch.setitem(experiment.PRESETS, "cpu", (TRAINING, WIDTHS, EXPONENTS))
    arguments = ["lr_transfer", "run", "--output", str(tmp_path), "--text", str(text_file), "--seeds", "0", "1"]
    arguments += ["--exponents", "-5", "-3", "120", "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr("sys.argv", arguments)
    experiment.main()
    monkeypatch.setattr("sys.argv", ["lr_transfer", "draw", "--output", str(tmp_path)])
    experiment.main()
    assert (tmp_path / "validation-cpu.png").stat().st_size > 1000


def test_a_missing_or_damaged_file_says_what_to_run(tmp_path):
    with pytest.raises(ValueError, match="run `python -m benchmarks"):
        experiment.read_cells(tmp_path / "cells-cpu.jsonl")
    (tmp_path / "cells-cpu.jsonl").write_text("{}\n{")
    with pytest.raises(ValueError, match=r"is not valid JSON .*remove it"):
        experiment.read_cells(tmp_path / "cells-cpu.jsonl")
