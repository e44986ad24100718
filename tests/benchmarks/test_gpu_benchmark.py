"""All of the GPU benchmark but its timers, at a toy shape, on the CPU."""

import json
import time

import pytest
import torch

from benchmarks import first_on_gpu
from benchmarks.matrix import gpu


def wall_seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("shape", [(24, 40), (2, 40, 24)])
def test_signs(shape, monkeypatch):
    monkeypatch.setattr(gpu, "gram_newton_schulz", lambda x, kernels: "not installed")  # compiles, for minutes
    rate = gpu.peak(wall_seconds, "cpu", side=16, rounds=1)
    rows = list(gpu.signs(shape, wall_seconds, 1, "cpu", rate))
    json.dumps(rows, allow_nan=False)
    assert [row["contender"] for row in rows][:3] == ["torch.optim.Muon", "msign", "published gram"]
    assert len(rows) == 5
    for row in rows:
        assert gpu.line(row).startswith(row["function"])
        if "missing" not in row:
            # five steps in bfloat16; the Gram matrix squares what rounding does to small singular values
            assert row["set_error"] < (0.2 if row["contender"] == "published gram" else 0.05)
            assert row["polar_error"] < 0.4  # the set reaches 0.7 to 1.2


def test_necessary_operations():
    assert gpu.necessary_operations((2, 8, 8)) == 2 * 20 * 8**3
    assert gpu.necessary_operations((32, 8)) == 38 * 8**3  # on the Gram matrix; on the matrix itself 65


def test_without_a_device_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"needs a CUDA device.*nothing was measured"):
        gpu.main([])


def test_what_cannot_run_is_a_row():
    def fails():
        raise RuntimeError("no such instruction")

    assert gpu.runnable(fails) == "cannot run here: RuntimeError: no such instruction"
    row = {"function": "msign", "input": "2 x 2", "contender": "package", "missing": gpu.runnable(fails)}
    assert "no such instruction" in gpu.line(row)


@pytest.mark.parametrize("name", first_on_gpu.OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_steps(name, dtype, monkeypatch):
    for timer, value in {"seconds": 1.0, "peak_bytes": 2, "waits": 8, "records": "no"}.items():
        monkeypatch.setattr(first_on_gpu, timer, lambda step, value=value: (step(), value)[1])
    model = first_on_gpu.hidden_matrices(2, dtype, [(8, 8)])
    before = [p.detach().clone() for p in model.parameters()]
    found = first_on_gpu.measured(first_on_gpu.OPTIMIZERS[name][0], model, every=8)
    assert found == {"seconds": 0.125, "peak_bytes": 2, "waits": 1, "graph": "no"}
    assert not any(torch.equal(p, start) for p, start in zip(model.parameters(), before, strict=True))
