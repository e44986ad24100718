"""All of the GPU benchmark but its timers, at a toy shape, with the kernel under Triton's interpreter."""

import json
import time

import pytest
import torch
from benchmarks.matrix import gpu


def wall_seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("shape", [(24, 40), (2, 40, 24)])
def test_products(shape, triton_on_cpu, monkeypatch):
    monkeypatch.setattr(gpu, "_triton", triton_on_cpu)
    rate = gpu.peak(wall_seconds, "cpu", side=16, rounds=1)
    rows = list(gpu.products(shape, wall_seconds, 1, "cpu", rate))
    json.dumps(rows, allow_nan=False)
    assert [row["contender"] for row in rows] == ["cuBLAS", *gpu.cuts()] * 2
    for row in rows:
        assert gpu.line(row).startswith(row["function"])
        assert row["error"] < 2**-8  # one rounding to bfloat16
        assert row["dense_equivalent_of_peak"] == pytest.approx(2 * row["useful_of_peak"], rel=1e-2)  # three digits
    gram = rows[0]
    operations = gram["dense_equivalent_tflops"] * 1e12 * gram["seconds"]
    assert operations == pytest.approx(2 * 24**2 * 40 * (2 if len(shape) == 3 else 1), rel=1e-2)


@pytest.mark.parametrize("shape", [(24, 40), (2, 40, 24)])
def test_signs(shape, triton_on_cpu, monkeypatch):
    monkeypatch.setattr(gpu, "gram_newton_schulz", lambda x, kernels: "not installed")  # compiles, for minutes
    rows = list(gpu.signs(shape, wall_seconds, 1, "cpu"))
    json.dumps(rows, allow_nan=False)
    assert len(rows) == 1 + len(gpu.METHODS) + 2
    for row in rows:
        assert gpu.line(row).startswith(row["function"])
        if "missing" not in row:
            assert row["set_error"] < 0.05  # five steps in bfloat16
            assert row["polar_error"] < 0.4  # the set reaches 0.7 to 1.2


def test_without_a_device_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"needs a CUDA device.*nothing was measured"):
        gpu.main([])


def test_what_cannot_run_is_a_row():
    def fails():
        raise RuntimeError("no such instruction")

    assert gpu.runnable(fails) == "cannot run here: RuntimeError: no such instruction"
    row = {"function": "X^T X", "input": "2 x 2", "contender": "kernel", "missing": gpu.runnable(fails)}
    assert "no such instruction" in gpu.line(row)
