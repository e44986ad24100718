import gc
import os
import sys
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, settings

# examples are drawn by the same seeds on every machine; a slow machine is not a failure
settings.register_profile(
    "wellnormed", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("wellnormed")
gc.disable()  # while torch and the tests are imported, of which nothing ends before the process


def pytest_collection_finish() -> None:
    """What is imported by now is left out of every later collection, which else costs a sixth of the run."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 30)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tensors of tests are too small to share among threads. `OMP_NUM_THREADS` asks for another number."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_figure_stays_open():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="module")
def quick_ends():
    """Runs end without drawn figures, and equal weights are captured and certified once.

    All of it takes most of a small run's time; the train room draws, samples and certifies.
    """
    from tests.train.conftest import remembered
    from tests.undrawn import undrawn
    from wellnormed.train import evaluate, finish

    with undrawn(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "certify_model", remembered(finish.certify_model))
        patch.setattr(evaluate, "capture", remembered(evaluate.capture))
        yield


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def place(here):
    """An empty folder but for a short text: what a machine has of Shakespeare takes seconds to read."""
    (here / "text.txt").write_text("Speak, speak. We know't, we know't.\n" * 100)
    return here


@pytest.fixture
def refused(capsys):
    """`refused("train", ...)`: the one sentence of a command that refuses."""

    def sentence(*command):
        from wellnormed.cli import main

        capsys.readouterr()
        assert main(list(command)) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: ")
        assert shown.count("\n") == 1
        return shown

    return sentence


@pytest.fixture
def letters():
    """A small corpus of bytes."""
    from wellnormed.data.corpus import Corpus
    from wellnormed.data.shards import Tokens

    tokens = Tokens([torch.randint(97, 123, (2000,), generator=torch.Generator().manual_seed(0)).numpy()])
    return Corpus("letters", "bytes", 256, tokens, tokens)


@pytest.fixture
def at_step(monkeypatch):
    """`with at_step(3, act):` a task calls `act(task)` when 3 steps are done."""

    @contextmanager
    def patched(step, act):
        from wellnormed.train.language import LanguageTask

        advance = LanguageTask.advance

        def advance_after(task):
            if task.step == step:
                act(task)
            return advance(task)

        with monkeypatch.context() as patch:
            patch.setattr(LanguageTask, "advance", advance_after)
            yield

    return patched


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
