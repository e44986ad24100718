from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from wellnormed.constraints import ClippedWeightDecay, Hammer
from wellnormed.data import load_corpus
from wellnormed.models.files import load
from wellnormed.train import RunFolder, optimizer, resume, train
from wellnormed.train.checkpoint import load_parts, save_parts
from wellnormed.train.language import LanguageTask
from wellnormed.train.ranks import Ranks
from wellnormed.train.setup import with_vocabulary

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("tiny", ["gpt"], indirect=True)  # the other has constraints of its own
@pytest.mark.parametrize("constraint", [Hammer, lambda cap: ClippedWeightDecay(cap, 0.5)], ids=["vectors", "bounds"])
def test_what_a_constraint_remembers_survives_a_checkpoint(constraint, tiny, tmp_path, monkeypatch):
    """The other runs have constraints without memory; with these a lost state changes bits."""
    monkeypatch.setitem(optimizer.CONSTRAINTS, tiny.constraint, constraint)
    config = replace(tiny, learning_rate=0.5)
    corpus = load_corpus(config.data, config.source)

    def begin():
        return LanguageTask(with_vocabulary(config, corpus), corpus, ALONE)

    whole, folder = begin(), tmp_path / "step-00000004"
    for _ in range(4):
        whole.advance()
    save_parts(folder, *whole.state(), b"", ALONE)
    resumed = begin()
    resumed.restore_state(lambda tensors: load_parts(folder, tensors, {"step": 4}, "", ALONE)[0])
    for _ in range(4):
        assert whole.advance() == resumed.advance()
    (ours, facts), (theirs, other) = whole.state(), resumed.state()
    assert facts == other
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(name.startswith("constraints.") for name in ours)
    for other, message in (("constraints.more", "no place there"), (next(iter(ours)), r"the shape \[.*\] there and")):
        with pytest.raises(ValueError, match=rf"is of another model or optimizer: '{other}' has {message}"):
            load_parts(folder, ours | {other: torch.zeros(5)}, {}, "", ALONE)


SCHEDULES = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=12),
    "in sequence": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: (step + 1) / 4), CosineAnnealingLR(optimizer, 8)], [4]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("tiny", ["gpt"], indirect=True)
def test_a_schedule_of_the_user_s_own_moves_the_rates_and_goes_on(schedule, tiny, tmp_path, at_step):
    tiny = replace(tiny, certify="no")
    train(tiny, tmp_path / "whole", schedule=schedule)
    with at_step(7, Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path / "killed", schedule=schedule)
    with pytest.raises(ValueError, match=r"the run has the schedule .*, not LambdaLR; .*resume\(folder, schedule="):
        resume(tmp_path / "killed")
    resume(tmp_path / "killed", schedule=schedule)
    one, other = (load(tmp_path / name).state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    weight = torch.nn.Parameter(torch.zeros(1))
    expected = schedule(torch.optim.SGD([weight], lr=tiny.learning_rate))
    rates = []
    for _ in range(tiny.steps):
        rates.append(expected.get_last_lr()[0])
        expected.optimizer.step()
        expected.step()
    rows = RunFolder(tmp_path / "whole").read_metrics()
    assert [row["learning_rate"] for row in rows] == [rates[row["step"] - 1] for row in rows]


@pytest.mark.parametrize("schedule", [torch.optim.lr_scheduler.ReduceLROnPlateau, lambda optimizer: None])
def test_what_counts_no_steps_is_no_schedule(schedule, tiny, tmp_path):
    with pytest.raises(ValueError, match=r"schedule returned a (ReduceLROnPlateau|NoneType); return a scheduler"):
        train(tiny, tmp_path / "run", schedule=schedule)
