"""The memory that cells need, before any is started: what is measured on fakes is what tensors really take."""

import io
import os
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from papers import _gpt, _lt_transformer, _memory, _nanogpt, _shakespeare, modula_gpt
from papers._experiment import MODULES, Experiment, load
from papers._grid import missing
from papers._memory import dry_run, largest, measure, memory_of
from wellnormed.data import corpus
from wellnormed.data.characters import CharacterText
from wellnormed.train.task import Task, fit

from .test_experiments import tiny_data, tiny_shakespeare  # noqa: F401 (fixtures)
from .toy import Number

LONG = CharacterText("To be, or not to be: that is the question. " * 500, "a line")
"""Long enough for windows of the papers' sizes."""
GB = 1e9
LIMITS = {"cpu": 25 * GB, "gpu": 80 * GB}
"""What a cell may need: the memory of a usual machine, or of the largest usual GPU."""
LARGE = {"batch-size", "lr-transfer-gpt", "nanogpt-table1", "scion-3b"}
"""Whose cells are for a GPU."""
WIDTH, BATCH = 64, 32


class Line(Task[nn.Linear]):
    """Least squares."""

    def __init__(self, rows, dtype=torch.float32):
        model = nn.Linear(WIDTH, rows, bias=False, dtype=dtype)
        self.dtype = dtype
        super().__init__(model, torch.optim.AdamW(model.parameters()), None, 5, torch.Generator().manual_seed(0))

    def batch_loss(self):
        return self.model(torch.randn(BATCH, WIDTH, generator=self.generator, dtype=self.dtype)).square().mean()


def experiment(run, **settings):
    return Experiment("toy", "no paper", "", lambda preset: [Number(WIDTH)], run, dict, lambda *_: [], **settings)


def test_parameters_gradients_state_and_activations_are_counted():
    steps = []

    def run(cells, device):
        task = Line(cells[0].value)
        fit(task, lambda task, _: steps.append(task.step))

    memory = measure(experiment(run), [Number(WIDTH)])
    weight = 4 * WIDTH * WIDTH
    assert (memory.parameters, memory.gradients) == (weight, weight)
    assert 2 * weight <= memory.state < 2 * weight + 16  # both of Adam's averages, and the number of its step
    batch = 4 * BATCH * WIDTH
    assert memory.rest >= 2 * batch  # its input and its output live until the backward pass
    assert memory.rest <= 3 * weight + 5 * batch  # what a step of AdamW makes on the way, at most
    assert steps == [1]  # the second step ends the run
    half = measure(experiment(lambda cells, _: fit(Line(WIDTH, torch.float64))), [Number(WIDTH)])
    assert half.parameters == 2 * weight


def test_nothing_of_the_size_of_a_cell_is_really_allocated():
    huge = measure(experiment(lambda *_: fit(Line(2**40))), [Number(0)])
    assert huge.parameters == 2**48


def test_values_that_are_asked_of_fakes_are_those_of_zeros():
    seen = []

    def run(cells, device):
        x = torch.randn(300, 300)
        seen.append((float(x.sum()), bool(x.isfinite().all()), bool((x > 1).any()), int((x != 0).sum())))
        assert bool(x.sum().isfinite().all())  # of one number, too: a loop may wait for it
        seen.append((tuple(x[x[0] > 0].shape), x.numpy().shape, torch.arange(3).tolist()))

    measure(experiment(run), [Number(0)])
    assert seen == [(0.0, True, False, 0), ((300, 300), (300, 300), [0, 1, 2])]


def test_errors_of_a_run_are_raised_and_its_data_are_restored(monkeypatch):
    monkeypatch.setenv("WELLNORMED_DATA", "nowhere")

    def run(cells, device):
        assert os.environ["WELLNORMED_DATA"] != "nowhere"
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        measure(experiment(run), [Number(0)])
    assert os.environ["WELLNORMED_DATA"] == "nowhere"


def test_only_cells_that_another_exceeds_in_all_sizes_are_left_out():
    cells = [SimpleNamespace(width=width, batch=batch) for width, batch in ((1, 5), (2, 5), (3, 4), (1, 1))]
    one = [(cell,) for cell in cells]
    assert largest(one) == [one[1], one[2]]
    assert largest([(Number(5),), (Number(1), Number(1, 1))]) == [(Number(5),), (Number(1), Number(1, 1))]
    seeds = [(Number(5, seed),) for seed in range(3)]
    assert largest(seeds) == seeds[:1]
    for name in MODULES:
        chunks = missing(load(name), load(name).cells("paper"), ())
        assert {type(cell) for chunk in largest(chunks) for cell in chunk} == {
            type(c) for chunk in chunks for c in chunk
        }


def test_too_little_memory_is_refused_with_what_to_do(monkeypatch):
    toy = experiment(lambda *_: fit(Line(WIDTH)))
    console = Console(file=io.StringIO(), width=300)
    need = measure(toy, [Number(WIDTH)]).peak
    monkeypatch.setattr(_memory, "memory_of", lambda device: 2 * need)
    dry_run(toy, toy.cells("cpu"), "cpu", 2, console)
    assert "optimizer's state 0.0 MB" in console.file.getvalue()
    with pytest.raises(ValueError, match=r"3 of them at the same time .* fewer --jobs, or --only"):
        dry_run(toy, toy.cells("cpu"), "cpu", 3, console)
    assert memory_of("cpu") > 2**28


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_the_largest_cells_of_the_paper_start_and_fit(name, monkeypatch):
    for module in (_gpt, _lt_transformer, _nanogpt, _shakespeare, modula_gpt):
        monkeypatch.setattr(module, "shakespeare", lambda: LONG)
    monkeypatch.setattr(corpus, "load_shakespeare", lambda source: LONG)
    experiment = load(name)
    for chunk in largest(missing(experiment, experiment.cells("paper"), ())):
        memory = measure(experiment, chunk)
        assert memory.peak <= LIMITS["gpu" if name in LARGE else "cpu"], chunk[0]
