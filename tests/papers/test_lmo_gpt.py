"""The transformer of Norm-Constrained LMOs: what it computes, and what its optimizers do in one step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from papers import _gpt, _lmo_tokens, batch_size, lr_transfer_gpt, scion_3b, sign_only
from papers._gpt import FINEWEB, GPT, RADII, GPTRun, GPTTask, rate_factor
from wellnormed.data.characters import CharacterText
from wellnormed.data.shards import header
from wellnormed.norms import Sign

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
RUN = GPTRun("SCG", 16, 2, 0.25, 4, 2, 0, length=8, head_width=8)


@pytest.fixture(autouse=True)
def small_text(monkeypatch):
    letters = torch.randint(7, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    text = CharacterText("".join("abcdefg"[letter] for letter in letters), "letters")
    monkeypatch.setattr(_gpt, "shakespeare", lambda: text)


def step(run):
    """Every weight before and after the first step."""
    task = GPTTask(run, CPU)
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    task.advance()
    return before, dict(task.model.named_parameters()), task


def test_no_logit_depends_on_later_tokens():
    task = GPTTask(RUN, CPU)
    tokens = torch.randint(7, (1, 8), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 7
    with torch.no_grad():
        first, second = task.model(tokens), task.model(other)
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.allclose(first[:, 5:], second[:, 5:])


def test_the_124_million_parameters_of_the_paper():
    with torch.device("meta"):
        model = GPT(50304, GPTRun("Adam with warm-up", 768, 12, 0.1, seed=0, **FINEWEB))
    assert sum(p.numel() for p in model.parameters()) == 12 * 12 * 768**2 + 50304 * 768  # 123.6 million, head shared


def test_a_step_of_muon_is_a_tenth_of_adams():
    lr = 0.01
    before, after, task = step(replace(RUN, method="Muon", lr=lr, width=32))
    moved = {name: (after[name] - before[name]).detach() for name in before}
    for name, change in moved.items():
        if name.startswith("layers"):  # queries, keys and values have no gradient while the output projection is 0
            rms = float(change.square().mean().sqrt())
            # Jordan's five steps bring singular values that are not tiny into [0.68, 1.21]; the rest only lower the RMS
            assert rms <= 0.1 * lr * 1.21, name
            if name.endswith(("output.weight", "down.weight")):
                assert rms >= 0.02 * lr, name
    assert float(moved["head.weight"].abs().max()) == pytest.approx(lr, rel=1e-3)  # Adam's first step
    assert {group["step_rule"] for group in task.optimizer.param_groups} == {"unconstrained", "adamw"}


def test_one_table_is_embedding_and_head_with_the_norm_and_the_radius_of_the_head():
    task = GPTTask(replace(RUN, shared=True), CPU)
    assert task.model.embedding is None
    norms = {each.name: each.norm for each in task.optimizer.assignment}
    assert norms["head.weight"] == Sign(normalized=True)
    names = {p: name for name, p in task.model.named_parameters()}
    radii = {names[p]: group["radius"] for group in task.optimizer.param_groups for p in group["params"]}
    assert radii.pop("head.weight") == RADII["head"]
    assert set(radii.values()) == {RADII["layers"]}


def test_any_method_may_have_a_warm_up_and_adam_none():
    runs = [replace(RUN, method=method, steps=100) for method in ("SCG", "Adam with warm-up")]
    assert [rate_factor(run, 0) for run in runs] == [1.0, 0.2]
    assert [rate_factor(replace(run, warm_up=0.1), 0) for run in runs] == [0.1, 0.1]
    assert [rate_factor(replace(run, warm_up=0.0), 0) for run in runs] == [1.0, 1.0]


def test_steps_of_signs_shrink_with_the_inputs_except_the_embeddings():
    before, after, _ = step(replace(RUN, method="Sign", lr=0.5))
    for name, weight in after.items():
        radius = RADII[name.partition(".")[0]]
        inputs = 1 if name.startswith("embedding") else weight.shape[1]
        moved = (weight - before[name]).abs().max()
        assert float(before[name].abs().max()) == pytest.approx(radius / inputs)
        assert float(moved.detach()) == pytest.approx(0.5 * radius / inputs, rel=1e-4), name
    before, after, _ = step(replace(RUN, method="Signum", lr=0.5))
    for name in ("layers.0.down.weight", "head.weight"):
        moved = (after[name] - before[name]).abs().max()
        assert float(moved.detach()) == pytest.approx(0.5 * RADII[name.partition(".")[0]], rel=1e-4)


def test_scion_starts_as_muon_does_and_scg_stays_in_its_balls_once_it_is_there():
    tasks = [GPTTask(replace(RUN, lr=1.0, method=name), CPU) for name in ("SCG", "uSCG", "Muon", "Adam with warm-up")]
    starts = [[p.detach().clone() for p in task.model.parameters()] for task in tasks]
    for start in starts[1:]:
        assert all(map(torch.equal, starts[0], start))
    assigned = list(tasks[0].optimizer.assignment)
    assert {a.radius for a in assigned} == {1.0, 3.0, 10.0}
    assert isinstance(assigned[0].norm, Sign)
    for _ in range(4):  # the first step, of rate 1, forgets the start
        tasks[0].advance()
        assert all(float(a.norm.norm(a.parameter.detach())) <= a.radius for a in assigned)


def test_rates_stay_on_fineweb_before_they_fall_and_weights_are_shared():
    run = replace(RUN, text="fineweb", steps=5100)
    assert rate_factor(run, 3650) == 1.0
    assert rate_factor(run, 4375) == pytest.approx(0.5)
    assert not any(name.startswith("embedding") for name, _ in GPT(7, run).named_parameters())
    assert [rate_factor(replace(RUN, steps=10), step) for step in (0, 5)] == [1.0, 0.5]


def test_adam_alone_has_a_warm_up_over_a_twentieth_of_the_steps():
    runs = [replace(RUN, method=m, text="fineweb", steps=5100) for m in ("Adam with warm-up", "Muon")]
    adam, muon = ([rate_factor(run, step) for step in (0, 127, 254, 255, 3650)] for run in runs)
    assert adam == pytest.approx([1 / 255, 128 / 255, 1, 1, 1])
    assert muon == [1.0] * 5
    short = replace(RUN, method="Adam with warm-up", steps=64)  # where rates fall from the first step on
    assert [rate_factor(short, step) for step in (0, 1, 2, 32)] == pytest.approx([1 / 3, 2 / 3, 62 / 64, 0.5])


@pytest.mark.parametrize("length", [1, 8, 13, 29])
def test_windows_to_validate_on_are_spread_from_the_first_to_the_last_character(length, monkeypatch):
    task, seen = GPTTask(replace(RUN, length=length), CPU), []
    monkeypatch.setattr(task, "loss_of", lambda tokens, starts: seen.append((tokens, starts)) or torch.zeros(()))
    task.validation_loss()
    ((tokens, starts),) = seen
    assert tokens is task.text.validation
    assert starts[0] == 0
    assert len(starts) == len(tokens) // length
    if len(starts) > 1:
        assert starts[-1] == len(tokens) - (length + 1)  # the last character is the last target
        assert starts.diff().max() - starts.diff().min() <= 1


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """FineWeb of a few random tokens."""
    monkeypatch.setenv("WELLNORMED_DATA", str(tmp_path))
    (tmp_path / _lmo_tokens.DATA).mkdir()
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 400), ("val", 60)):  # evaluating takes most of the time of these runs
        content = torch.randint(50257, (count,), generator=generator).numpy().astype("<u2").tobytes()
        (tmp_path / _lmo_tokens.DATA / f"few_{split}_000000.bin").write_bytes(header(count) + content)


def tiny(cell, steps):
    return replace(cell, width=cell.head_width, blocks=1, steps=steps, batch=2, length=8)


SLOW = [pytest.param(module, marks=pytest.mark.slow) for module in (batch_size, lr_transfer_gpt, scion_3b)]


@pytest.mark.parametrize("experiment", [*SLOW, sign_only])
def test_cells_of_the_paper_start(experiment, tokens, tmp_path, quick_ends):
    cells = {cell.method: cell for cell in experiment.cells("paper")}
    for number, cell in enumerate(cells.values()):
        folder = [tmp_path / f"cell-{number}"] * experiment.EXPERIMENT.keeps
        assert experiment.run(tiny(cell, 1), CPU, *folder)["loss"] is not None


def test_tokens_are_the_same_for_every_batch():
    for preset in ("cpu", "paper"):
        tokens = [cell.batch * cell.steps * cell.length for cell in batch_size.cells(preset)]
        assert max(tokens) - min(tokens) <= 0.002 * max(tokens)  # 5,100 is no multiple of 8
