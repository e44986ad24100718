"""A run goes on, on another number of processes, from exactly what it left."""

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import wellnormed as wn
from tests.parallel.training import CONSTRAINTS, Training

CASES = {"Scion": CONSTRAINTS, "Muon and AdamW": None, "Almond": {"1": wn.HardCap(1.1)}, "Scion, light": None}
CASES["Averaged"] = CONSTRAINTS


def contents(training):
    weights, optimizer = get_state_dict(training.model, training.optimizer)
    constraints = {"constraints": training.constraints.state_dict()} if training.constraints else {}
    return {"weights": weights, "optimizer": optimizer, **constraints}


def save(layout, optimizer, constraints, folder):
    training = Training(layout, optimizer, constraints).run(4)  # between two projections of the cap that waits
    checkpoint.save(contents(training), checkpoint_id=folder)
    left = training.weights(), training.state()
    return left, training.run(3).weights()


def resume(layout, optimizer, constraints, folder):
    training = Training(layout, optimizer, constraints)
    state = contents(training)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        training.model, training.optimizer,
        model_state_dict=state["weights"], optim_state_dict=state["optimizer"],
    )  # fmt: skip
    if training.constraints:
        training.constraints.load_state_dict(state["constraints"])
    found = training.weights(), training.state()
    training.count = 4
    end = training.run(3).weights()
    assert training.world == 1 or training.sent_bytes() > 0  # still dealt
    return found, end


BY_TWO = [("Scion", 2, "fsdp", 2, "ddp"), ("Muon and AdamW", 2, "fsdp", 2, "ddp"), ("Scion", 2, "ddp", 2, "fsdp")]
BY_TWO += [pytest.param(name, 2, "fsdp", 2, "ddp", marks=pytest.mark.slow) for name in ("Almond", "Scion, light")]
CHANGES = [(2, "fsdp", 4, "ddp"), (2, "ddp", 4, "fsdp"), (2, "fsdp", 4, "fsdp x tp"), (4, "fsdp x tp", 2, "fsdp")]
BY_FOUR = [pytest.param(optimizer, *change, marks=pytest.mark.slow) for optimizer in CASES for change in CHANGES]


@pytest.mark.parametrize(("optimizer", "world", "first", "other", "then"), [*BY_TWO, *BY_FOUR])
def test_processes_go_on_under_another_layout_and_as_one(processes, tmp_path, optimizer, world, first, other, then):
    constraints = CASES[optimizer]
    (left, end), *_ = processes(world).run(save, first, optimizer, constraints, tmp_path)
    for found, last in [
        *processes(other).run(resume, then, optimizer, constraints, tmp_path),
        alone(optimizer, constraints, tmp_path),
    ]:
        torch.testing.assert_close(found, left, atol=0, rtol=0)
        # the mean of the gradient adds in another order, which 3 steps of 5 Newton-Schulz steps enlarge
        torch.testing.assert_close(last, end, atol=1e-9, rtol=1e-9)


def alone(optimizer, constraints, folder):
    with pytest.warns(UserWarning, match="assuming"):  # torch says that it reads in one process
        return resume("one", optimizer, constraints, folder)
