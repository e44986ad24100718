"""The layer that learns at test time: closed forms of its inner steps, and the task's answers."""

import pytest
import torch

from papers import ttt
from papers.ttt import CAP, CHUNK, Cell, Layer, Recall
from wellnormed.matrix import overshoot, spectral_norm

CPU = torch.device("cpu")


def cell(inner: str = "inner product", step: str = "gradient", clipped: bool = False) -> Cell:
    return Cell(inner, step, clipped, width=6, tokens=CHUNK, steps=3, batch=3, seed=0)


def read(cell: Cell, length: int = 64) -> tuple[Layer, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer, the keys and values that it has read, `(B, N, C, D)`, and its state."""
    task = Recall(cell, CPU)
    keys, values, queries, _ = task.batch(length)
    _, state = task.model(keys, values, queries)
    return task.model, torch.nn.functional.normalize(task.model.keys, dim=-1)[keys], task.model.values[values], state


def test_the_gradient_of_inner_products_is_linear_attention():
    layer, keys, values, state = read(cell())
    expected = layer.log_step.exp() * values.flatten(1, 2).mT @ keys.flatten(1, 2)
    assert torch.allclose(state, expected, atol=1e-5)  # 64 products of float32 numbers below 1, in another order


def test_the_gradient_of_squared_errors_is_the_delta_rule():
    layer, keys, values, state = read(cell("squared error"), length=2 * CHUNK)
    first = layer.log_step.exp() * values[:, 0].mT @ keys[:, 0]
    error = keys[:, 1] @ first.mT - values[:, 1]
    assert torch.allclose(state, first - layer.log_step.exp() * error.mT @ keys[:, 1], atol=1e-5)  # as above


@pytest.mark.parametrize("step", ["clip", "msign"])
def test_a_step_through_a_clip_has_at_most_the_norm_of_the_step_size(step):
    layer, _, _, state = read(cell(step=step), length=CHUNK)
    largest = overshoot("polar-express-8") * (1 + 1e-4)  # msign's own; rounding is at most 1e-5
    assert spectral_norm(state).max() <= layer.log_step.exp() * largest


@pytest.mark.parametrize("inner", ["inner product", "squared error"])
@pytest.mark.parametrize("step", ["gradient", "clip", "msign"])
def test_a_clipped_state_stays_below_the_cap_and_gradients_pass_through(inner, step):
    task = Recall(cell(inner, step, clipped=True), CPU)
    with torch.no_grad():
        task.model.values *= 30
    *context, _ = task.batch(16 * CHUNK)
    assert spectral_norm(task.model(*context)[1]).max() <= CAP * (1 + 5e-6)  # the promise of the hard cap
    task.batch_loss().backward()
    for name, parameter in task.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_the_answer_is_the_last_value_of_the_key():
    keys, values, queries, answers = (part.tolist() for part in Recall(cell(), CPU).batch(4 * CHUNK))
    for sequence in range(3):
        last = {}
        for chunk_keys, chunk_values in zip(keys[sequence], values[sequence], strict=True):
            assert len(set(chunk_keys)) == CHUNK
            last.update(zip(chunk_keys, chunk_values, strict=True))
        assert answers[sequence] == [last[query] for query in queries[sequence]]


def test_a_state_that_does_not_grow_is_said_to():
    def row(clipped: bool, growth: float) -> dict:
        config = {"inner": "inner product", "step": "gradient", "clipped": clipped}
        lengths = {str(n): {"accuracy": 0.5, "norm": growth**i} for i, n in enumerate(ttt.LENGTHS)}
        return {"config": config, "results": {"lengths": lengths}}

    assert not ttt.verdicts([row(False, 2.0), row(True, 1.0)], "cpu")[0].why
    assert "hardly grows" in ttt.verdicts([row(False, 1.0), row(True, 1.0)], "cpu")[0].why
