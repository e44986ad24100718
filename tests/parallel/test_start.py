"""The start of a run whose weights are cut: the same on any number of processes, and no process ever has it whole."""

from dataclasses import replace

import pytest

from tests.parallel.starts import gathered, start, with_a_buffer
from wellnormed.models import GPTConfig, NanoGPTConfig, PotentialConfig

MODELS = {
    "gpt": GPTConfig(width=16, heads=2, blocks=2, length=9),  # 9 and 65 rows leave a process fewer, or none
    "potential": PotentialConfig(token_width=4, mixing_heads=3, hidden=20, blocks=2, length=9),
    "nanogpt": NanoGPTConfig(vocabulary_size=65, width=16, heads=2, blocks=6, length=9),
}


@pytest.mark.parametrize(
    ("name", "entries"),
    [("gpt", 200), ("potential", 2**20), ("potential", 200), ("nanogpt", 200)]
    + [pytest.param(name, 2**20, marks=pytest.mark.slow) for name in ("gpt", "nanogpt")],
)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_two_and_four_processes_start_with_the_same_bits(processes, world, name, entries):
    """With weights that every process draws, and with large ones that their owners draw."""
    digests, _ = start(MODELS[name], entries)
    for found, _ in processes(world).run(start, MODELS[name], entries):
        assert found == digests
    assert start(MODELS[name], entries, seed=6)[0] != digests


@pytest.mark.parametrize("entries", [pytest.param(2**20, marks=pytest.mark.slow), 2**11])
def test_no_process_has_the_model_while_it_starts(processes, entries):
    """A half is its own, and the rest is for one weight at a time: float64 copies of it and what its SVD needs."""
    model = replace(MODELS["gpt"], width=32, blocks=8)
    peaks = [peak for _, peak in processes(2).run(start, model, entries)]
    assert 0.5 <= max(peaks) < 0.85
    assert start(model, entries)[1] >= 1  # it sees what one process makes


@pytest.mark.parametrize("name", ["gpt", "potential"])
def test_no_process_assembles_a_weight_to_begin(processes, name, tmp_path):
    (tmp_path / "text.txt").write_text("Speak, speak. We know't, we know't.\n" * 60)
    assert max(processes(2).run(gathered, MODELS[name], str(tmp_path / "text.txt"))) <= 1  # sums of squares


def test_a_buffer_that_nobody_would_fill_is_refused(processes):
    assert with_a_buffer(MODELS["gpt"]) is None  # one process makes the whole model
    for said in processes(2).run(with_a_buffer, MODELS["gpt"]):
        assert said.startswith("Buffered has the buffer 'table', which `starts` does not fill")
