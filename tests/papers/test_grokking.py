"""The networks of modular arithmetic: each of a stack is on its own, and what is said of them is theirs."""

from dataclasses import replace

import pytest
import torch

from papers import grokking
from papers._modular_arithmetic import SLOPE, Cell, ModularArithmetic

CELL = Cell("sum", "hard-cap", prime=7, width=6, cap=2.0, lr=0.1, steps=5, seed=0)


def trained(*seeds: int, **settings) -> ModularArithmetic:
    task = ModularArithmetic([replace(CELL, seed=seed, **settings) for seed in seeds], torch.device("cpu"))
    grokking.fit(task)
    return task


def test_all_weights_are_bfloat16_and_no_matrix_exceeds_its_cap():
    task = trained(0, 1, lr=1.0)
    assert {parameter.dtype for parameter in task.model.parameters()} == {torch.bfloat16}
    assert max(task.lipschitz()) <= SLOPE * 2.0**2 * (1 + 1e-6)  # two caps of 2; rounding of the product


def test_networks_of_a_stack_do_not_know_of_each_other():
    """Their losses are summed, their steps are taken matrix by matrix, and each has draws of its own."""
    alone, both = trained(1), trained(0, 1)
    for name in ("up", "down"):
        ours, theirs = getattr(alone.model, name)[0], getattr(both.model, name)[1]
        assert torch.allclose(ours.float(), theirs.float(), atol=0.05)  # bfloat16 in another order; of two seeds: 0.7


@pytest.mark.parametrize(("operation", "result"), [("sum", 4), ("product", 2)])
def test_pairs_have_their_results_and_are_seen_or_tested(operation, result):
    task = ModularArithmetic([replace(CELL, operation=operation)], torch.device("cpu"))
    parts = [torch.stack(part)[:, 0].T.tolist() for part in (task.train, task.test)]
    assert len(parts[0]) == int(0.4 * 49)
    found = {(a, b): c for part in parts for a, b, c in part}
    assert len(found) == 49
    assert found[5, 6] == result  # 11 and 30 modulo 7


def row(projection: str, at: int | None, bound: float, accuracy: float = 0.97, setting=None) -> dict:
    """A seed that has an accuracy of .5, and from a step on another one."""
    curve = [accuracy if at is not None and 5 * index + 5 >= at else 0.5 for index in range(4)]
    results = {"lipschitz": bound, "steps": 20, "accuracy": curve}
    lr, cap = setting or grokking.SETTINGS[projection]
    config = {"operation": "sum", "projection": projection, "lr": lr, "cap": cap, "steps": 20}
    return {"config": config, "results": results}


@pytest.mark.parametrize(("step", "verdict"), [(5, "reached"), (20, "not reached")])
def test_who_groks_last_is_judged_at_every_accuracy(step, verdict):
    rows = [row(name, {"none": 15, "stiefel": None}.get(name, step), 1.0) for name in grokking.SETTINGS]
    (found,) = [found for found in grokking.verdicts(rows, "paper") if "who groks last" in found.what]
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("accuracy", "verdict", "why"), [(0.92, "same shape", "the other answer at 0.9"), (0.5, "same shape", "")]
)
def test_a_claim_that_another_accuracy_would_answer_otherwise_says_so(accuracy, verdict, why):
    (found,) = grokking.verdicts([row("none", 10, 1e5, accuracy)], "cpu")
    assert found.verdict == verdict
    assert why in found.why
    assert bool(why) == ("other answer" in found.why)


@pytest.mark.parametrize(
    ("steps", "bounds", "verdicts"),
    [
        ((15, 10), (4, 9), ["reached", "reached"]),
        ((10, 15), (4, 9), ["reached", "not reached"]),
        ((15, 10), (9, 4), ["not reached", "reached"]),
        ((10, 10), (4, 9), ["reached", "measured"]),
    ],
)
def test_decays_are_compared_at_one_rate_and_cap(steps, bounds, verdicts):
    rows = [row(name, step, bound, setting=grokking.COMPARED)
            for name, step, bound in zip(grokking.DECAYS, steps, bounds, strict=True)]  # fmt: skip
    rows.append(row(grokking.DECAYS[1], 5, 100.0))  # with a rate and cap of its own, which must not count
    found = [found for found in grokking.verdicts(rows, "paper") if "0.5 against 0.1" in found.what]
    assert [each.verdict for each in found] == verdicts
    assert [each.ours for each in found] == [f"{bounds[0]} against {bounds[1]}", f"{steps[0]} against {steps[1]}"]
