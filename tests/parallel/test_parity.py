"""Many processes do what one does, and all of them the same."""

import functools

import pytest
import torch

from tests.parallel.training import CONSTRAINTS, OPTIMIZERS, measured

CASES = {name: (name, None) for name in OPTIMIZERS} | {"Scion with constraints": ("Scion", CONSTRAINTS)}
CASES["Averaged with constraints"] = ("Averaged", CONSTRAINTS)


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


LAYOUTS = [("ddp", 2, 5), ("fsdp", 2, 5)]
"""With a number of steps: more than the three that a cap waits, and with momentum of several gradients."""
MORE = [(layout, 4, 20) for layout in ("ddp", "fsdp", "hsdp", "fsdp x tp")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("layout", "world", "steps"), [*LAYOUTS, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)]
)
def test_many_processes_are_one(processes, layout, world, steps, case):
    many = processes(world).run(measured, layout, *CASES[case], steps)
    identical(many)
    compare(many, case, steps)
    assert all(report["sent"] > 0 for report in many)
