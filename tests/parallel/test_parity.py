"""Many processes do what one does, and all of them the same."""

import functools

import pytest
import torch

from tests.parallel.training import CONSTRAINTS, OPTIMIZERS, measured

STEPS = 8
"""More than the three that a cap waits, and with momentum of several gradients; the slow tests take 20."""
CASES = {name: (name, None) for name in OPTIMIZERS} | {"Scion with constraints": ("Scion", CONSTRAINTS)}
every_case = pytest.mark.parametrize("case", CASES)


@functools.cache
def alone(case, steps):
    return measured("one", *CASES[case], steps)


def compare(many, case, steps):
    """To 1e-6 in float64: the mean of the gradient adds in another order, and five Newton-Schulz steps enlarge that."""
    one = alone(case, steps)
    for report in many:
        for kind in one.keys() - {"sent"}:
            torch.testing.assert_close(signed(report[kind]), signed(one[kind]), atol=1e-6, rtol=1e-6)


def signed(values):
    """A singular vector is one up to its sign, which the library for it chooses."""
    return {key: v * v.sum(-1, keepdim=True).sign() if key.endswith("vector") else v for key, v in values.items()}


def identical(many):
    for report in many[1:]:
        for kind in many[0].keys() - {"sent"}:
            torch.testing.assert_close(report[kind], many[0][kind], atol=0, rtol=0)


FOUR = ["Muon and AdamW", "Scion, light", "Scion with constraints"]


@pytest.mark.parametrize(
    ("layout", "world", "case"),
    [("ddp", 2, case) for case in CASES]
    + [("fsdp", 2, case) for case in CASES]
    + [("fsdp", 4, "Scion with constraints")]
    + [("fsdp x tp", 4, case) for case in FOUR],
)
def test_many_processes_are_one(processes, layout, world, case):
    many = processes(world).run(measured, layout, *CASES[case], STEPS)
    identical(many)
    compare(many, case, STEPS)
    assert all(report["sent"] > 0 for report in many)


@pytest.mark.slow
@every_case
@pytest.mark.parametrize(("layout", "world"), [("ddp", 4), ("fsdp", 4), ("hsdp", 4), ("fsdp x tp", 4)])
def test_other_numbers_of_processes_are_one(processes, layout, world, case):
    many = processes(world).run(measured, layout, *CASES[case], 20)
    identical(many)
    compare(many, case, 20)
