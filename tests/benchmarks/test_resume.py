"""The benchmarks that continue a file take up the runs of one commit only."""

import json

import pytest

from benchmarks import learning_rates, tied_tables

COMMIT = "a" * 40


@pytest.mark.parametrize(("benchmark", "key"), [(tied_tables, "runs"), (learning_rates, "rows")])
def test_a_file_of_another_commit_is_refused_before_anything_is_trained(benchmark, key, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    before = json.dumps({"commit": COMMIT, key: []})
    path.write_text(before)
    for name in ("nanogpt", "load_shakespeare"):
        monkeypatch.setattr(benchmark, name, lambda *_: type("Text", (), {"source": "none"}))
    monkeypatch.setattr("sys.argv", ["benchmark", "model.py", "--output", str(path)])
    with pytest.raises(ValueError, match=f"holds runs of commit {COMMIT}, but this is .*choose another --output"):
        benchmark.main()
    assert path.read_text() == before


def test_a_file_of_the_same_commit_is_continued(tmp_path):
    path = tmp_path / "results.json"
    assert tied_tables.finished(path, COMMIT, "runs") == []
    path.write_text(json.dumps({"commit": COMMIT, "runs": [{"seed": 0}]}))
    for commit in (COMMIT, COMMIT + "+changes"):  # the file itself may be such a change
        assert tied_tables.finished(path, commit, "runs") == [{"seed": 0}]
