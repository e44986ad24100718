"""LT's table 1: what is recorded of activations, and what is said of it."""

import re
from dataclasses import replace

import pytest
import torch

from papers import _by_form
from papers._tokens import activations, token_task
from papers.nanogpt_table1 import ROWS, Cell, config_of, verdicts

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


def row(name, **results):
    return {"config": {"row": name}, "results": {"validation_loss": ROWS[name].loss, "largest_entry": 1.0} | results}


def test_rows_with_lt_s_measure_are_compared_in_it_and_rows_without_are_not():
    names = ("NanoGPT", "Modula")
    lines = verdicts([row(name) for name in names], "paper")
    assert not any("as LT has it" in line.what + line.ours for line in lines)
    rows = [row(n, largest_of_stream=x, largest_rms_of_stream=20 - x) for n, x in zip(names, (9.0, 7.0), strict=True)]
    lines = {line.what: line for line in verdicts(rows, "paper")}
    assert "9 where LT reads it, RMS 11" in lines["NanoGPT"].ours
    assert lines["NanoGPT"].published.endswith("largest entry 91648, RMS 24092")
    assert lines["largest entry as LT has it: which of two rows is lower"].verdict == "reached"
    turned = lines["largest RMS as LT has it: which of two rows is lower"]
    assert (turned.verdict, turned.why) == ("not reached", "here NanoGPT is below Modula")


def test_a_peer_stands_in_the_order_of_losses_by_its_better_training():
    scion = {"kind": "NanoGPT, Scion", "rate": _by_form.rate("NanoGPT, Scion", 1), "tokens": 1, "length": 128}
    rows = [row("NanoGPT", validation_loss=1.9), row("ours, soft cap 8", validation_loss=1.8)]
    for matched, verdict in ([], "not reached"), ([{"config": scion, "results": {"validation_loss": 1.7}}], "reached"):
        (line,) = [each for each in verdicts([*rows, *matched], "paper") if each.what.startswith("validation loss")]
        assert line.verdict == verdict
