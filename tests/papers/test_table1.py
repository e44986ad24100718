"""LT's table 1: what is recorded of activations, and what is said of it."""

import re
from dataclasses import replace

import pytest
import torch

from papers._tokens import activations, token_task
from papers.nanogpt_table1 import Cell, config_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "parts"), [("NanoGPT", "blocks"), ("LipsFormer", "layers"), ("ours, normalized at 1", "layers")]
)
def test_the_stream_and_the_logits_are_recorded_as_lt_does(name, parts, letters):
    """The signed maximum and the largest RMS of what blocks and the model return, on the windows of `observe`."""
    config = config_of(Cell(name, "1m", 1, 8, 2, 4))
    config = replace(config, model=replace(config.model, width=16, heads=2), validation_tokens=100)
    task, results = token_task(config, letters, CPU), []
    task.advance()
    found = activations(task)
    assert not any(part._forward_hooks for part in task.model.modules())
    for part, module in task.model.named_modules():
        if re.fullmatch(rf"|{parts}\.\d+", part):
            module.register_forward_hook(lambda module, inputs, result: results.append(result.detach()))
    task.observe()
    assert {result.shape[-1] for result in results} == {16, 256}
    assert found["largest_of_stream"] == max(float(result.max()) for result in results)
    sizes = [float(result.norm(dim=-1).max()) / result.shape[-1] ** 0.5 for result in results]
    assert found["largest_rms_of_stream"] == pytest.approx(max(sizes))
