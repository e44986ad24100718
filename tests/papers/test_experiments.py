"""What every experiment keeps: cells with keys of their own, results that JSON holds, figures and verdicts."""

import json
from dataclasses import replace

import matplotlib
import pytest
import torch

from papers import (
    _airbench,
    _cifar,
    _gpt,
    _lt_transformer,
    _nanogpt,
    _shakespeare,
    _tokens,
    caps,
    five_minutes,
    lr_transfer_mlp,
    modula_gpt,
    shakespeare_best,
    stability_grid,
    watermark,
)
from papers._cifar import CifarRun
from papers._experiment import MODULES, load
from papers._grid import Settings, run_chunk
from papers._table import cell_key
from papers.reproduce import COLUMNS, markdown
from papers.shakespeare_best import ProvedRun
from wellnormed.data.characters import CharacterText
from wellnormed.data.corpus import Corpus
from wellnormed.data.shards import Tokens

TINY = {"width": 8, "blocks": 1, "length": 8, "batch": 2, "steps": 3}


def small_gpt(cell):
    """Of one seed and the smaller widths."""
    small = replace(cell, width=cell.width // 2, steps=2, batch=2, length=8)
    return small if cell.seed == 0 and cell.width < 128 else None


SMALL_ROWS = ("LipsFormer", "Modula", "ours, normalized at 8", "ours, no constraint")
SMALL = {
    "airbench94": lambda cell: (
        replace(cell, width=1 / 16, steps=2, batch=8, tested=20) if cell.seed == 0 and cell.lr in (0.05, 1.0) else None
    ),
    "batch-size": lambda cell: (
        replace(cell, width=16, steps=2, batch=cell.batch // 8, length=8)
        if (cell.seed, cell.batch) in ((0, 8), (0, 128))
        else None
    ),
    "block-mass": lambda cell: replace(cell, **TINY) if cell.seed < 2 else None,
    "caps": lambda cell: cell if isinstance(cell, caps.Curve) else replace(cell, width=8, steps=4, batch=8),
    "cifar-robustness": lambda cell: replace(cell, width=8, steps=4, batch=8, pgd_steps=2, apgd_steps=5),
    "cifar-tradeoff": [
        CifarRun(optimizer, method, 2.0, lr, 4, 8, 8, seed)
        for seed in (0, 1)
        for optimizer, method, lr in (("muon", "soft cap", 0.3), ("muon", "hammer", 0.3), ("adamw", "hammer", 0.01))
    ],
    "five-minutes": lambda cell: (
        replace(cell, seconds=0.3, blocks=1, batch=2, length=16)
        if cell.seed == 0 and cell.lr == five_minutes.RATES[cell.method]
        else None
    ),
    "grokking": lambda cell: replace(cell, prime=7, width=6, steps=10) if cell.seed < 2 else None,
    "hardcap-cost": lambda cell: replace(cell, short=cell.short // 16, rounds=1) if cell.short < 256 else None,
    "hardcap-stability": lambda cell: replace(cell, rows=8, columns=12) if cell.seed < 2 else None,
    "inflation": lambda cell: replace(cell, **TINY) if cell.seed < 2 else None,
    "lr-transfer-cnn": lambda cell: replace(cell, steps=2, batch=8, tested=20) if cell.seed == 0 else None,
    "lr-transfer-gpt": lambda cell: small_gpt(cell) if cell.width < 128 else None,
    "lr-transfer-mlp": lambda cell: replace(cell, width=cell.width // 16, steps=4, batch=8) if cell.seed < 2 else None,
    "memory": lambda cell: replace(cell, width=16, blocks=1, vocabulary=32) if cell.seed == 0 else None,
    "modula-gpt": lambda cell: replace(cell, steps=4, batch=2, length=8, width=8, blocks=1) if cell.seed < 2 else None,
    "nanogpt-table1": lambda cell: (
        replace(cell, blocks=1, length=8, steps=2, batch=2) if cell.seed == 0 and cell.row in SMALL_ROWS else None
    ),
    "rates": lambda cell: cell if cell.horizon < 100 and cell.seed == 0 else None,
    "scion-3b": lambda cell: replace(cell, width=32, blocks=1, steps=2, batch=2, length=8) if cell.seed < 2 else None,
    "sign-only": lambda cell: small_gpt(cell) if cell.width < 128 else None,
    "shakespeare-best": lambda cell: (
        replace(cell, steps=4, batch=2, length=8, **shrunk(cell)) if cell.seed == 0 else None
    ),
    "shakespeare-tradeoff": lambda cell: (
        replace(cell, steps=4, batch=2, length=8, width=8)
        if cell.seed == 0 and cell.strength in (2.0, 0.1) and cell.lr in (3.0, 0.02)
        else None
    ),
    "stability-grid": lambda cell: (
        replace(cell, width=16, steps=2, batch=2) if (cell.blocks, cell.seed) == (2, 0) else None
    ),
    "ttt": lambda cell: replace(cell, width=4, tokens=16, steps=2, batch=2) if cell.seed < 2 else None,
    "watermark": lambda cell: replace(cell, width=32, steps=4, batch=8) if cell.seed == 0 else None,
}
"""Name -> small cells, or what makes a small cell of one of the preset's, None for a cell to leave out."""
LONG = {"shakespeare-tradeoff", "shakespeare-best", "ttt"}
"""Whose cells take seconds, however small. That their rows become verdicts is seen where the page is built."""
TIMED = {"airbench94", "hardcap-cost", "five-minutes"}
"""Whose results are times."""


TEXT = CharacterText("To be, or not to be, that is the question:\n" * 20, "a line")


def shrunk(cell):
    return {"token_width": 2, "hidden": 8} if isinstance(cell, ProvedRun) else {"width": 8, "blocks": 1}


@pytest.fixture(autouse=True)
def tiny_data(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(40, 3, 32, 32, generator=generator), torch.randint(10, (40,), generator=generator)
    for module in (_airbench, _cifar):
        monkeypatch.setattr(module, "pixels_and_labels", lambda split, device: images)
    text = Tokens([torch.randint(7, (300,), generator=generator).numpy()])
    monkeypatch.setattr(_gpt, "corpus", lambda name: _gpt.Corpus(7, text, text))
    monkeypatch.setattr(_lt_transformer, "shakespeare", lambda: TEXT)
    letters = Tokens([torch.randint(97, 123, (400,), generator=generator).numpy()])
    for module in (_tokens, five_minutes, stability_grid):
        monkeypatch.setattr(module, "byte_corpus", lambda: Corpus("letters", "bytes", 256, letters, letters))
    matplotlib.use("agg")


@pytest.fixture(autouse=True)
def tiny_shakespeare(monkeypatch):
    text = CharacterText("To be, or not to be: that is the question. " * 20, "a line")
    for module in (_shakespeare, _nanogpt, modula_gpt, shakespeare_best):
        monkeypatch.setattr(module, "shakespeare", lambda: text)


def small(name):
    chosen = SMALL[name]
    cells = chosen if isinstance(chosen, list) else [c for c in map(chosen, load(name).cells("cpu")) if c is not None]
    return list(dict.fromkeys(cells))


def test_every_experiment_is_tested():
    assert SMALL.keys() == MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("preset", ["cpu", "paper"])
def test_cells_have_keys_of_their_own(name, preset):
    cells = load(name).cells(preset)
    assert len({cell_key(cell) for cell in cells}) == len(cells)
    assert all(isinstance(cell.seed, int) for cell in cells)
    if preset == "cpu":
        assert len({cell.seed for cell in cells}) >= 3


def _marked(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in sorted(names)]


@pytest.mark.parametrize("name", _marked(MODULES))
def test_rows_become_figures_and_verdicts(name, tmp_path):
    experiment, rows = load(name), []
    chunks = {}
    for number, cell in enumerate(small(name)):
        chunks.setdefault(experiment.together(cell) if experiment.together else number, []).append(cell)
    for chunk in chunks.values():
        rows += run_chunk(tuple(chunk), Settings(experiment.run, experiment.data, "a command", "cpu", 1))
    rows = json.loads(json.dumps(rows, allow_nan=False))
    assert rows
    for figure_name, figure in experiment.figures(rows).items():
        figure.savefig(tmp_path / f"{figure_name}.png")
        assert (tmp_path / f"{figure_name}.png").stat().st_size > 3000
    verdicts = experiment.verdicts(rows, "cpu")
    assert verdicts
    table = markdown(verdicts)
    assert table.count("\n") == len(verdicts) + 2
    assert all(line.count("|") >= len(COLUMNS) + 1 for line in table.splitlines())


@pytest.mark.parametrize("name", _marked(MODULES.keys() - TIMED))
def test_the_same_cell_gives_the_same_results(name):
    experiment, cell = load(name), small(name)[-1]
    first, second = (experiment.run([cell], torch.device("cpu")) for _ in range(2))
    assert first == second


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
