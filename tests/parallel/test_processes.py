"""The tests' own tool: what fails in one process is shown, soon."""

import time

import pytest
import torch.distributed as dist


def fail_in_one():
    if dist.get_rank() == 1:
        raise RuntimeError("only here")
    dist.barrier()


def rank_of():
    return dist.get_rank()


def test_a_failure_in_one_process_shows_its_traceback_and_ends_all(processes):
    start = time.monotonic()
    group = processes(2)
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*fail_in_one.*RuntimeError: only here"):
        group.run(fail_in_one)
    assert time.monotonic() - start < 30
    assert not group.alive
    assert processes(2).run(rank_of) == [0, 1]  # new ones
