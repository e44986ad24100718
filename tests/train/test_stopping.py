"""SIGINT, SIGTERM and the clock write a checkpoint, from which a run of either kind goes on to the same bits."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.apart import ended
from tests.train.crash import OPTIONS, bits, signalled_twice
from wellnormed.cli import main
from wellnormed.train import RunFolder
from wellnormed.train.language import LanguageTask

from .conftest import with_runs

TOKENS = """
nanogpt --steps 6 --batch 4 --model.width 16 --model.blocks 1 --model.heads 2 --model.length 16 --checkpoint-every 5
--validation-tokens 500 --certify no --sample-tokens 0 --device cpu --data data
""".split()  # noqa: SIM905 (a command line reads best as one)
CHARACTERS = ["--source", "text.txt", *OPTIONS]
KINDS = {"characters": CHARACTERS, "tokens": TOKENS}
TIMED = ("peak_memory_bytes", "tokens_per_second")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, shards of it, and a finished run of each kind."""
    runs = [["train", *options, "--name", kind] for kind, options in KINDS.items()]
    shards = ["tokens", "text.txt", "data", "--validation", "text.txt", "--tokenizer", "bytes"]
    with with_runs(tmp_path_factory.mktemp("stopping"), shards, *runs) as folder:
        return folder


@pytest.fixture(params=KINDS)
def kind(request, place, monkeypatch):
    monkeypatch.chdir(place)
    return request.param


def begin(kind, name, *more):
    return main(["train", *KINDS[kind], "--name", name, *more])


def results(folder):
    """What a resumed run must repeat; its checkpoints may be of other steps."""
    rows = [{k: v for k, v in row.items() if k not in TIMED} for row in RunFolder(folder).read_metrics()]
    found = bits(folder)
    return rows, [found.get(name) for name in ("model.safetensors", "certificate.json", "sample.txt")]


@pytest.mark.parametrize(("number", "status", "step"), [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 3)])
def test_a_signal_writes_a_checkpoint_and_says_how_to_go_on(kind, number, status, step, at_step, capfd):
    name = f"{kind}-{step}-{status}"
    with at_step(step, lambda task: os.kill(os.getpid(), number)):
        before = signal.getsignal(number)
        assert begin(kind, name) == status
        assert signal.getsignal(number) is before
    shown = capfd.readouterr().err
    assert f"{number.name}: a checkpoint follows after this step" in shown
    last = f"\nstopped; the newest checkpoint is step-0000000{step + 1}; continue with `wellnormed train --resume runs/"
    assert last in shown
    with RunFolder(f"runs/{name}").metrics_file.open("a") as file:
        file.write('{"step": 39')  # what a kill within a write leaves
    assert main(["train", "--resume", f"runs/{name}"]) == 0
    assert results(f"runs/{name}") == results(f"runs/{kind}")


def test_a_signal_after_the_last_step_stops_at_once(kind, monkeypatch, capfd):
    name = f"{kind}-end"
    with monkeypatch.context() as patch:
        patch.setattr("wellnormed.train.finish.write_report", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        assert begin(kind, name) == 143
    assert "\nstopped; the newest checkpoint is step-00000006; continue" in capfd.readouterr().err
    assert main(["train", "--resume", f"runs/{name}"]) == 0
    assert results(f"runs/{name}") == results(f"runs/{kind}")


def test_the_clock_writes_checkpoints_that_change_nothing(kind, monkeypatch):
    name = f"{kind}-clock"
    saved = set()
    task = LanguageTask
    advance = task.advance

    def advance_then(self):
        saved.update(folder.name for folder in RunFolder(f"runs/{name}").checkpoint_folders())
        return advance(self)

    monkeypatch.setattr(task, "advance", advance_then)
    assert begin(kind, name, "--checkpoint-minutes", "1e-9") == 0
    assert saved == {f"step-0000000{step}" for step in range(1, 6)}
    assert results(f"runs/{name}") == results(f"runs/{kind}")


def test_a_second_signal_ends_at_once(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    status, shown = ended(signalled_twice, "train", *CHARACTERS, "--name", "twice", errors=tmp_path / "errors")
    assert status == -signal.SIGTERM
    assert re.fullmatch(r"\nSIGINT: a checkpoint follows .*; a second signal ends it at once\n", shown)
    assert not list(Path("runs/twice").glob("checkpoints/*"))
