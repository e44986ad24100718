"""What every experiment keeps: cells with keys of their own, results that JSON holds, figures and verdicts."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import pytest
import torch

import wellnormed as wn
from papers import _airbench, _by_form, _cifar, _tokens, certified_vision, lr_transfer_mlp, stability_grid, watermark
from papers._experiment import MODULES, load
from papers._grid import Settings, run_chunk
from papers._table import Table, cell_key
from papers.reproduce import markdown
from wellnormed.data.corpus import Corpus
from wellnormed.data.shards import Tokens

TINY = {"width": 16, "blocks": 1, "length": 8, "batch": 2, "steps": 3, "tested": 20, "pgd_steps": 2, "apgd_steps": 5}
"""What makes a small cell of one of the preset's, if it has these fields."""
OF_CNN = {"width": 1 / 16, "batch": 8}
OF_CIFAR = {"width": 8, "batch": 8}
OTHERS = {
    "caps": {"width": 8, "batch": 8}, "certified-vision": {"channels": (8, 16), "depths": (0, 1), "hidden": (8,)},
    "cifar-robustness": OF_CIFAR, "cifar-tradeoff": OF_CIFAR, "grokking": {"prime": 7, "width": 6, "steps": 10},
    "hardcap-cost": {"short": 16, "rounds": 1}, "hardcap-stability": {"rows": 8, "columns": 12},
    "lr-transfer-cnn": OF_CNN, "memory": {"vocabulary": 32},
    "shakespeare-best": {"token_width": 2, "hidden": 8, "width": 8}, "watermark": {"width": 32, "batch": 8},
}  # fmt: skip
"""Experiment -> other fields of its small cells."""
LONG = {"shakespeare-tradeoff", "shakespeare-best", "nanogpt-table1"}
"""Whose cells take seconds, however small."""
TIMED = {"certified-vision", "hardcap-cost"}
"""Whose results are times."""
RESULTS = Path(__file__).parents[2] / "results" / "reproduce"


@pytest.fixture(autouse=True)
def tiny_data(monkeypatch, line):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(40, 3, 32, 32, generator=generator), torch.randint(10, (40,), generator=generator)
    for module in (_airbench, _cifar):
        monkeypatch.setattr(module, "pixels_and_labels", lambda split, device: images)
    monkeypatch.setattr(certified_vision, "pixels_and_labels", lambda data, split, device: images)
    letters = Tokens([torch.randint(97, 123, (400,), generator=generator).numpy()])
    for module in (_tokens, stability_grid):
        monkeypatch.setattr(module, "byte_corpus", lambda: Corpus("letters", "bytes", 256, letters, letters))
    monkeypatch.setattr(_by_form, "STEPS", 1)
    monkeypatch.setattr(_by_form, "TOKENS", TINY["batch"] * TINY["length"])
    matplotlib.use("agg")


def shrunk(name, cell):
    return replace(cell, **{key: value for key, value in (TINY | OTHERS.get(name, {})).items() if key in vars(cell)})


def choices(cell):
    """The kind of a cell, and its words, as opposed to its numbers."""
    words = {(key, value) for key, value in vars(cell).items() if isinstance(value, str | bool)}
    return {type(cell).__name__} | words


def small(name):
    """Small cells of an experiment that have among them every method of the preset's that can run here."""
    seen, cells = set(), []
    for cell in load(name).cells("cpu"):
        runs = all(find_spec(package) for package in certified_vision.PEERS.get(getattr(cell, "network", ""), ()))
        if runs and not choices(cell) <= seen:
            seen |= choices(cell)
            cells.append(shrunk(name, cell))
    return cells


def committed(name, preset="cpu"):
    return Table(RESULTS / f"{name}-{preset}" / "rows.jsonl").rows_of(load(name).cells(preset))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("preset", ["cpu", "paper"])
def test_cells_have_keys_of_their_own(name, preset):
    cells = load(name).cells(preset)
    assert len({cell_key(cell) for cell in cells}) == len(cells)
    assert all(isinstance(cell.seed, int) for cell in cells)
    if preset == "cpu":
        assert len({cell.seed for cell in cells}) >= 3


of_committed = pytest.mark.parametrize("path", sorted(RESULTS.glob("*-*/rows.jsonl")), ids=lambda p: p.parent.name)


@of_committed
def test_the_table_is_that_of_the_committed_rows(path):
    name, _, preset = path.parent.name.rpartition("-")
    rows = committed(name, preset)
    verdicts = load(name).verdicts(rows, preset)
    assert markdown(verdicts, rows) == (path.parent / "table.md").read_text()
    assert verdicts


@pytest.mark.slow
@of_committed
def test_the_figures_are_those_of_the_committed_rows(path):
    name, _, preset = path.parent.name.rpartition("-")
    figures = load(name).figures(committed(name, preset))
    assert {f"{figure}.png" for figure in figures} == {drawn.name for drawn in path.parent.glob("*.png")}
    for figure in figures.values():
        assert all(axes.has_data() for axes in figure.axes)
        figure.draw_without_rendering()  # where labels that do not fit, and missing letters, become warnings


def test_every_preset_of_a_paper_says_in_what_it_differs_from_the_publication():
    silent = {name for name in MODULES if "paper" not in load(name).differs}
    assert not silent


def _marked(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in sorted(names)]


@pytest.mark.parametrize("name", _marked(MODULES))
def test_every_method_gives_results_as_they_are_in_the_committed_rows(name, tmp_path):
    experiment, cells = load(name), small(name)
    kept = tmp_path if experiment.keeps else None
    fields = [row["results"].keys() for row in committed(name)]  # of which later rows may have more
    for cell in cells:
        chunk = [cell]
        if experiment.together and experiment.together(cell) == experiment.together(replace(cell, seed=cell.seed + 1)):
            chunk.append(replace(cell, seed=cell.seed + 1))
        together = experiment.together is not None
        settings = Settings(experiment.run, together, experiment.data, "a command", "cpu", 1, kept)
        rows = json.loads(json.dumps(run_chunk(tuple(chunk), settings), allow_nan=False))
        assert all(any(known <= row["results"].keys() for known in fields) for row in rows)
    if name not in TIMED:  # the last cells give the same results again
        again = json.loads(json.dumps(run_chunk(tuple(chunk), settings)))
        assert [row["results"] for row in again] == [row["results"] for row in rows]


def test_the_caps_of_the_released_code_are_judged_and_this_package_s_are_measured():
    experiment = load("cifar-tradeoff")
    cells = [cell for cell in experiment.cells("paper") if cell.method.startswith("soft cap")]
    assert [cell.released for cell in cells] == [False, False, True, True, True]
    device = torch.device("cpu")
    rows = [{"config": vars(cell), "results": experiment.run(shrunk("cifar-tradeoff", cell), device)} for cell in cells]
    found = [(line.published, line.runs, line.verdict) for line in experiment.verdicts(rows, "paper")]
    # the three seeds that begin and go on as in LT's code replace the run that does not
    assert found == [("-", 1, "measured"), ("1.185, 0.588, 115.3 (log)", 3, "not reached")]


def test_the_letter_is_drawn_and_erased_only_in_part():
    mask = watermark.letter(64)
    assert 0.05 < mask.float().mean() < 0.4
    task, drawn = watermark.task_of(small("watermark")[0], torch.device("cpu"))
    hidden = list(task.model.parameters())[1]
    assert not hidden[drawn].any()
    assert hidden[~drawn].all()


def test_stable_rank():
    assert lr_transfer_mlp.stable_rank(torch.eye(5)) == pytest.approx(5.0)
    assert lr_transfer_mlp.stable_rank(torch.ones(4, 3)) == pytest.approx(1.0)
    assert lr_transfer_mlp.stable_rank(torch.zeros(2, 2)) == 0.0


@pytest.mark.parametrize(("batch", "size"), [(256, 64), (8, 8)])
def test_updates_of_muon_have_the_rank_of_the_gradient_and_first_ones_of_adam_have_not(batch, size):
    """LT 3.1 says that they always have a high stable rank: not where a batch has fewer vectors than the matrix."""
    generator = torch.Generator().manual_seed(0)
    shared, own, inputs = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((64, 1), (64, batch), (batch, 64))
    )
    gradient = (3 * shared + own) @ inputs.abs()  # one direction stands out, as it does in networks that are trained
    assert lr_transfer_mlp.stable_rank(gradient) < 1.5
    assert lr_transfer_mlp.stable_rank(wn.Spectral(method="svd").dualize(gradient)) == pytest.approx(size, rel=1e-6)
    assert lr_transfer_mlp.stable_rank(gradient.sign()) < 1.5  # Adam's first step


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:Data has no positive values")  # of axes on which nothing is drawn yet
@pytest.mark.slow
def test_a_table_that_has_only_begun_is_drawn(name):
    experiment, rows = load(name), committed(name)
    for part in (rows[:1], rows[-1:]):
        assert all(figure.axes for figure in experiment.figures(part).values())
        experiment.verdicts(part, "cpu")
