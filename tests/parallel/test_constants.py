"""Constants under `DistributedDataParallel`: every process has the same caps and weights."""

import pytest
import torch

from tests.parallel import constants


def test_several_processes_do_not_calibrate(processes):
    for said in processes(2).run(constants.refused):
        assert "2 processes would have floors of their own; calibrate before torch.distributed" in said


@pytest.mark.parametrize("wraps_optimizer", [True, False])
def test_a_constant_is_kept_in_every_process(processes, wraps_optimizer):
    first, second = processes(2).run(constants.kept, wraps_optimizer)
    assert 2.99 < first[0] <= 3
    assert first[:2] == second[:2]
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
