"""Calibration and constants under `DistributedDataParallel`: every process has the same floors, caps and weights."""

import pytest
import torch

from tests.parallel import constants


@pytest.mark.parametrize("wrapped", [True, False])
def test_processes_calibrate_on_the_data_of_all(processes, wrapped):
    first, second = processes(2).run(constants.calibrated, wrapped)
    assert first == second
    floors, hit_rates, losses = constants.calibrated_alone(2)
    assert (first[0], first[1]) == (floors, hit_rates)
    assert first[2] == pytest.approx(losses)
    assert 0 < hit_rates["1"] < 1


@pytest.mark.parametrize("wraps_optimizer", [True, False])
def test_a_constant_is_kept_in_every_process(processes, wraps_optimizer):
    first, second = processes(2).run(constants.kept, wraps_optimizer)
    assert 2.99 < first[0] <= 3
    assert first[:2] == second[:2]
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
