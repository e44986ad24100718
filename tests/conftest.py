import importlib.util
import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

# examples are drawn by the same seeds on every machine; a slow machine is not a failure
settings.register_profile("wellnormed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wellnormed")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_worker() -> None:
    """Two pytest workers on two cores: more threads would fight over them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def interpreted_triton():
    """The module of the Triton kernel again, interpreted on the CPU, beside the one that is imported.

    Triton reads the variable while the kernel is defined. It is gone when the tests run, and what other tests import
    stays as it is.
    """
    pytest.importorskip("triton")
    spec = importlib.util.find_spec("wellnormed.matrix._triton")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def triton_on_cpu(interpreted_triton, monkeypatch):
    """Whoever imports the module of the kernel during this test gets the interpreted one."""
    monkeypatch.setitem(sys.modules, "wellnormed.matrix._triton", interpreted_triton)
    monkeypatch.setattr("wellnormed.matrix._triton", interpreted_triton, raising=False)
    return interpreted_triton
