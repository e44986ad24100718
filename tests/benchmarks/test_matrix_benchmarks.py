"""The matrix benchmarks run at tiny size, with a complete row for everything that is compared."""

import json
import math

import pytest
import torch

from benchmarks.matrix import accuracy, comparisons, inputs, operations, peers, record, reference, speed
from wellnormed.matrix import REGISTRY, msign


@pytest.fixture(scope="module")
def results():
    groups = [
        comparisons.caps((8, 24)),
        comparisons.signs((2, 8, 24)),
        comparisons.orthonormal((6, 9)),
        comparisons.unit_norm((9, 6)),
    ]
    return {
        "speed": {"rows": [row for group in groups for row in speed.measure(group, rounds=1, seconds=1.0)]},
        "accuracy": accuracy.run(inputs.suite(small=(12, 40), large=())),
        "operations": {"side": 16, "rows": operations.run(side=16, layer=((16, 16), (16, 32), (32, 16)))},
    }


def test_every_row_is_complete(results):
    for row in results["speed"]["rows"]:
        assert row["ours_seconds"] > 0
        assert row["peer_missing"] or row["ratio"] == row["ours_seconds"] / row["peer_seconds"]
    json.dumps(results, allow_nan=False)


def test_default_methods_are_measured_on_the_whole_suite(results):
    cases = len(inputs.suite(small=(12, 40), large=()))
    held = {row["function"]: row for row in results["accuracy"]["summary"] if row["dtype"] == "float32"}
    for name in ("spectral_hardcap", "spectral_clip", "spectral_relu", "spectral_normalize"):
        rows = [r for r in results["accuracy"]["summary"] if r["function"] == name and r["method"] == "auto"]
        assert {row["dtype"]: row["cases"] for row in rows} == {"float32": cases, "bfloat16": cases}
    assert {"msign polar-express-8", "msign exact", "soft_cap", "spectral_clipped_weight_decay"} <= set(held)


def test_a_missing_package_is_a_row(monkeypatch):
    monkeypatch.setattr(peers, "package", lambda name: None)
    group = comparisons.unit_norm((6, 4))
    rows = speed.measure(group, rounds=1, seconds=1.0)
    assert any(row["peer_missing"] == peers.MISSING and row["ratio"] is None for row in rows)
    assert all(peers.MISSING in speed.line(row) for row in rows if row["peer_missing"])
    assert isinstance(peers.gram_newton_schulz(), str)


def test_the_reference_notices_what_is_wrong():
    w = inputs.gaussian(10, 30, norm=3.0)
    exact = reference.Reference(w)
    cap = exact.apply(lambda s: s.clamp_max(1.0))
    assert exact.error(cap, lambda s: s.clamp_max(1.0)) < 1e-14
    assert exact.error(cap * 1.001, lambda s: s.clamp_max(1.0)) == pytest.approx(1e-3 / 3, rel=1e-6)
    assert reference.spectral_norm(w * float("nan")) == math.inf
    for name in ("polar-express-8", "jordan-5"):  # float64: rounding times the slope at zero
        value = msign(w, name)
        assert exact.error(value, lambda s, n=name: reference.polynomial(REGISTRY[n], s), 1.0) < 1e-11


def test_suite_matrices_are_what_their_names_say():
    cases = {case.name: case.make(16, 48) for case in inputs.suite(small=(16, 48), large=())}
    assert torch.linalg.matrix_rank(cases["rank an eighth"]) == 2
    assert torch.equal(cases["rank an eighth"].bfloat16().double(), cases["rank an eighth"])  # exact in every dtype
    assert torch.linalg.matrix_norm(cases["largest 1000 x cap"], 2).item() == pytest.approx(1000)
    assert torch.linalg.svdvals(cases["flat"]).numpy() == pytest.approx(3.0)
    assert torch.linalg.matrix_norm(cases["scale 1e30"], 2).item() == pytest.approx(3e30)


def test_operations_are_those_of_the_paper():
    # SC section 5, in per cent: the reading T m / B and the formulas beside it
    for row, printed in zip(operations.PAPER, operations.PRINTED, strict=True):
        assert 100 * operations.paper_overhead(row, 5, 768) == pytest.approx(printed, abs=0.006)
    counted = {row["function"]: row["over_n3"] for row in operations.run(side=64, layer=((64, 64),))}
    for name in ("spectral_hardcap, nested", "spectral_relu, nested"):
        assert counted[name] == operations.PAPER[name.split(",")[0]](6)  # the paper's code runs six steps
    assert counted["msign, jordan-5"] == operations.PAPER["msign"](5)


def test_alternation_stops_what_used_up_its_time():
    calls = []
    times, values = record.alternate({"a": lambda: calls.append(1)}, rounds=5, seconds=-1.0)
    assert len(calls) == 2  # so short that it is called again to be timed
    assert len(times["a"]) == 1  # counted although it would have been the warm-up
    assert values == {"a": None}
    times, _ = record.alternate({"a": lambda: 1, "b": lambda: 2}, rounds=3, seconds=60.0)
    assert [len(found) for found in times.values()] == [3, 3]
