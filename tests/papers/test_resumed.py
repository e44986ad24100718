"""Runs that go on from a file end as if they had never stopped."""

from types import SimpleNamespace

import pytest
import torch

from papers import _resumed, _tokens, nanogpt_table1, shakespeare_best
from papers._nanogpt import NanoGPTRun
from papers._shakespeare import LTRun
from papers.shakespeare_best import ProvedRun
from wellnormed.train.task import Task

SHAPE = {"steps": 6, "batch": 2, "length": 8, "width": 8, "blocks": 2}
CELLS = [
    LTRun("muon", "soft cap", 1.5, 1.0, residual="plain", **SHAPE),
    LTRun("muon", "weight decay", 0.1, 1.0, **SHAPE),
    LTRun("adamw", "hammer", 1.5, 0.01, **SHAPE),
    NanoGPTRun(6, 2, 8, 8, 2, 2, 0.2, 6, 0),
    ProvedRun(2, 6, 2, 8, 8, 32, 0),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_bounded(line, monkeypatch):
    """Bounds take longer than the runs."""
    monkeypatch.setattr(shakespeare_best, "bounds", lambda m: {k: v.tolist() for k, v in m.state_dict().items()})
    monkeypatch.setattr(shakespeare_best, "lower_bound", lambda *_, **__: SimpleNamespace(rms_value=1.0))


def stopped_after(steps, monkeypatch):
    """The process ends in the step after these, in the middle of it."""
    advance = Task.advance

    def stopping(task):
        loss = advance(task)
        if task.step > steps:
            raise KeyboardInterrupt
        return loss

    monkeypatch.setattr(Task, "advance", stopping)


TOKENS = nanogpt_table1.Cell("ours, normalized at 1", "1m", 1, 8, 6, 2)
"""Its tokens are read one window after the other, where the others draw theirs."""


@pytest.mark.parametrize("cell", [*CELLS, TOKENS], ids=str)
def test_a_stopped_cell_ends_with_the_numbers_of_one_that_was_not(cell, letters, tmp_path, monkeypatch):
    monkeypatch.setattr(nanogpt_table1, "corpus_of", lambda size: letters)
    monkeypatch.setattr(_tokens, "certificate_of", lambda *_: "not certified")
    run = nanogpt_table1.run if cell is TOKENS else shakespeare_best.run
    expected = run(cell, CPU, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()  # a run of less than EVERY seconds leaves nothing
    monkeypatch.setattr(_resumed, "EVERY", 0.0)
    with monkeypatch.context() as patch:
        stopped_after(4, patch)
        with pytest.raises(KeyboardInterrupt):
            run(cell, CPU, tmp_path)
    torch.manual_seed(1234)  # another process draws other numbers
    counted, advance = [], Task.advance
    monkeypatch.setattr(Task, "advance", lambda task: counted.append(task.step) or advance(task))
    found = run(cell, CPU, tmp_path)
    assert counted == [4, 5]
    assert found == expected
