"""The experiment on tiny matrices: its laws, its files and its figures."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib
import pytest
import torch

from wellnormed.experiments import spectral_clipping as experiment
from wellnormed.experiments._header import FIELDS

TINY = replace(
    experiment.PRESETS["cpu"],
    shape=(12, 24),
    norms=(1.0, 1024.0),
    cluster_shape=(8, 12),
    distances=(1e-4, 1e-1),
    sizes=(4, 8),
    aspects=(1, 2),
    rounds=2,
)


def measured(folder: Path, **settings) -> dict[str, dict]:
    """What a run with tiny sizes writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(experiment.PRESETS, "cpu", TINY)
        experiment.run(folder=folder, threads=torch.get_num_threads(), **settings)
    return {grid: experiment.read(grid, folder=folder) for grid in settings.get("only", experiment.GRIDS)}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    return measured(tmp_path_factory.mktemp("results"))


def rows(result: dict, **where) -> list[dict]:
    found = [row for row in result["rows"] if where.items() <= row.items()]
    assert found
    return found


@pytest.mark.parametrize("method", ["gram", "svd"])
def test_exact_methods_end_at_the_cap_whatever_the_norm(results, method):
    for row in rows(results["norm"], method=method, dtype="float32"):
        assert row["error"] <= 5e-6  # the promise of the matrix functions in float32
        assert row["norm_after"] <= 1 + 5e-6


def test_nested_form_loses_the_cap_at_large_norms_and_the_block_form_does_not(results):
    at_large = {row["method"]: row for row in rows(results["norm"], norm=1024.0, dtype="float32")}
    assert at_large["nested"]["error"] > 1 > 0.1 > at_large["block"]["error"]


def test_a_cluster_below_the_cap_is_left_alone_by_the_exact_methods(results):
    for row in rows(results["distance"], method="gram", side=-1, outlier=1.0):
        assert row["error_of_all"] < 1e-13  # bit for bit; what is left is the float64 reference


def test_error_of_the_cluster_is_part_of_the_error(results):
    for row in results["distance"]["rows"]:
        assert row["error"] <= row["error_of_all"] * (1 + 1e-6)


def test_every_method_is_timed_at_every_size(results):
    for size in TINY.sizes:
        for aspect in TINY.aspects:
            timed = {row["method"] for row in rows(results["cost"], short=size, aspect=aspect) if row["seconds"] > 0}
            assert timed == {*experiment.METHODS, "gram, far", "soft cap", "one product"}


def test_what_takes_longer_than_the_limit_is_left_out_and_named(tmp_path):
    for result in measured(tmp_path, only=("norm", "cost"), limit_seconds=0.0).values():
        left_out = [row for row in result["rows"] if "left_out" in row]
        assert "block" in {row["method"] for row in left_out}
        assert all("limit 0" in row["left_out"] for row in left_out)


def test_a_seed_gives_the_same_errors():
    first, second = (list(experiment.error_against_norm(TINY, torch.Generator().manual_seed(3), "cpu")) for _ in "ab")
    assert first == second


def test_a_file_says_what_made_it(results):
    stored = results["norm"]
    assert set(FIELDS) <= stored.keys()
    assert stored["environment"]["packages"]
    assert stored["config"] == json.loads(json.dumps(asdict(TINY)))
    assert "run --preset cpu --only norm --limit-seconds 5 --seed 0" in stored["command"]


def test_the_command_line_runs_and_draws(tmp_path, monkeypatch):
    matplotlib.use("agg")
    monkeypatch.setitem(experiment.PRESETS, "cpu", TINY)
    threads = str(torch.get_num_threads())
    for arguments in (["run", "--threads", threads], ["draw"]):
        monkeypatch.setattr("sys.argv", ["spectral_clipping", *arguments, "--folder", str(tmp_path)])
        experiment.main()
    for grid in experiment.GRIDS:
        assert (tmp_path / f"{grid}-cpu.png").stat().st_size > 1000


def test_a_missing_file_says_what_to_run(tmp_path):
    with pytest.raises(ValueError, match="run `python -m wellnormed"):
        experiment.read("norm", folder=tmp_path)
