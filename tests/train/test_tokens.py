"""Settings, refusals, the command and the report of language models; many processes are tested in `tests/parallel`."""

import json
import re
import shutil
from dataclasses import asdict, replace
from typing import get_args

import numpy as np
import pytest
import torch

from wellnormed.cli import main
from wellnormed.data.shards import Tokens
from wellnormed.models.config import GPTConfig, PotentialConfig
from wellnormed.models.files import load
from wellnormed.train.checkpoint import require_torch
from wellnormed.train.config import Caps, TrainConfig
from wellnormed.train.language import LanguageTask
from wellnormed.train.presets import Size, Variant, token_preset
from wellnormed.train.ranks import Ranks
from wellnormed.train.run_folder import RunFolder, memory_explained

OPTIONS = [
    *("--steps", "6", "--batch", "4", "--model.width", "16", "--model.blocks", "1", "--model.heads", "2"),
    *("--model.length", "8", "--checkpoint-every", "3", "--validation-tokens", "300", "--attack-steps", "1"),
    *("--sample-tokens", "20", "--device", "cpu", "--model.residual-strength", "0.25", "--source", "text.txt"),
]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("variant", get_args(Variant))
@pytest.mark.parametrize("size", get_args(Size))
def test_presets_are_what_they_are_called(size, variant):
    config = token_preset(size, variant)
    model, width = config.model, config.model.width
    if isinstance(model, PotentialConfig):
        blocks = model.blocks * width * model.hidden + model.attention_blocks * 5 * width**2
        table = token_preset(size).model.width  # of a peer, whose two tables hold as many entries as the head here
        assert width == 2 * table
    else:
        blocks, table = 12 * width**2 * model.blocks, width
    stated = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    tables = 50_304 * table if size == "124m" else 0  # GPT-2's name counts its table
    assert 0.8 * stated <= blocks + tables <= 1.2 * stated
    assert asdict(config)  # what a run folder holds


def test_the_command_trains_certifies_verifies_and_reports(place, capsys):
    more = ["--certify", "checkpoints", "--every", "2", "--checkpoint-every", "6", "--attack-steps", "0"]
    assert main(["train", "nanogpt", "--name", "run", *OPTIONS, *more]) == 0
    shown = capsys.readouterr().out
    assert "spectral-normalize after every step; run folder runs/run" in shown
    assert "validation bits a byte of text" in shown
    folder = place / "runs" / "run"
    rows = metrics(folder)
    assert {"norms_over_caps", "tokens_per_second"} <= rows[-1].keys()
    assert rows[-1]["largest_entry"] <= rows[-1]["proved_largest_entry"]
    assert rows[-1]["largest_logit"] <= rows[-1]["proved_largest_logit"]
    report = (folder / "report.html").read_text()
    assert "<details><summary>Number formats of 4 and 8 bits that hold every entry:" in report
    assert "<svg>entries figure</svg>" in report
    assert main(["verify", "runs/run"]) == 0
    assert main(["sample", "runs/run", "--prompt", "To be", "--characters", "5"]) == 0
    assert "To be" in capsys.readouterr().out
    assert main(["train", "--resume", "runs/run"]) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert load(folder)(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 256)
    (folder / "model.safetensors").write_bytes(b"")
    assert main(["train", "nanogpt", "--resume", "runs/run"]) == 0
    assert RunFolder(folder).unfinished() is None


def test_tokens_train_without_an_end(place):
    """Every average is certified, and what is published is the last one, with the norms that were proved."""
    more = ["--schedule", "none", "--momentum", "0.5", "--certify", "checkpoints"]
    assert main(["train", "nanogpt", "--name", "run", *OPTIONS, *more]) == 0
    rows = metrics(place / "runs" / "run")
    proved = [row for row in rows if "log10_lipschitz" in row]
    assert [row["step"] for row in proved] == [3, 6]
    assert all(0 < row["proved_norm_over_cap"] <= 1 for row in proved)
    assert main(["verify", "runs/run"]) == 0


@pytest.mark.slow
def test_a_peer_trains_and_is_certified_at_the_length_of_its_embeddings(place):
    options = [option for option in OPTIONS if option not in ("--model.residual-strength", "0.25")]
    command = ["train", "nanogpt", "--variant", "nanogpt", "--name", "run", *options, "--learning-rate", "0.01"]
    assert main([*command, "--optimizer", "adamw"]) == 0
    results = json.loads((place / "runs/run/results.json").read_text())
    assert results["log10_lipschitz"] > 0
    assert metrics(place / "runs/run")[-1]["loss"] < 5.6
    assert main(["verify", "runs/run"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variant", "nanogpt", "--constraint", "hard-cap"], "constraint=hard-cap must be `none` for models other"),
        (["--variant", "potential", "--constraint", "hard-cap"], "hard-cap must be left out for a `potential`"),
        (["--variant", "potential", "--caps.query", "2"], "caps=.* must be left out for a `potential` model"),
        (["--model.heads", "3"], "model.heads=3 must divide the model's width, 128"),
        (["--micro-batch", "99"], "micro_batch=99 must be at most the batch"),
        (["--model.vocabulary-size", "100"], "model.vocabulary_size=100 cannot be chosen, for the data has 256 tokens"),
        (["--variant", "nanogpt", "--caps.query", "2"], "caps=.* must be left out for models other than `gpt`"),
        (["--validation-tokens", "100"], "validation_tokens=100 must be at least one window and its target, 129"),
        (["--cooldown", "0"], r"cooldown=0.0 must lie in \(0, 1\]"),
        (["--momentum", "1"], r"momentum=1.0 must lie in \[0, 1\)"),
        (["--data", "nowhere"], "there are no train shards of nowhere"),
        (["--model.length", "1000", "--validation-tokens", "3000"], "fewer than a window of 1000 and its"),
        (["--resume", "x", "--steps", "3"], "--resume continues with the run's own config"),
        (["--resume", "x"], "x does not exist; pass a run folder"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_folder(place, refused, options, message):
    source = [] if "--resume" in options else ["--source", "text.txt"]
    assert re.search(message, refused("train", "nanogpt", *source, *options))
    assert not (place / "runs").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_caps_hold_with_every_optimizer(letters, optimizer):
    config = replace(small(), optimizer=optimizer, learning_rate=0.3, caps=Caps(*[1.0] * 7))
    task = task_of(config, letters)
    for _ in range(3):
        task.advance()
        assert task.require_caps() <= 1


def test_a_damaged_validation_token_is_found_before_the_first_step(letters):
    damaged = np.zeros(300, dtype=np.uint16)
    damaged[50] = 300
    with pytest.raises(ValueError, match=r"val\.bin has the token 300 at place 50"):
        task_of(small(), letters._replace(validation=Tokens([damaged], ["val.bin"], 256)))


def test_what_is_seen_does_not_depend_on_the_parts_of_a_batch(letters):
    whole, parts = (task_of(replace(small(), micro_batch=size), letters).observe() for size in (None, 1))
    assert {"head", "input of head"} <= whole.keys()
    assert whole == pytest.approx(parts, rel=1e-5)  # products of other sizes round in another order


def test_what_belongs_to_another_run_is_refused(place, refused):
    """A checkpoint with another config, name or metrics, and other data of the same size."""
    assert main(["tokens", "text.txt", "data", "--validation", "text.txt", "--tokenizer", "bytes"]) == 0
    options = [*OPTIONS, "--data", "data", "--certify", "no", "--sample-tokens", "0"]
    for name, rate in (("run", "0.1"), ("other", "0.01")):
        assert main(["train", "nanogpt", "--name", name, *options, "--learning-rate", rate]) == 0
    (place / "runs/run/manifest.json").unlink()  # as if it were killed at its end

    def after(damage):
        shutil.rmtree(place / "runs/copy", ignore_errors=True)
        shutil.copytree(place / "runs/run", place / "runs/copy")
        damage(place / "runs/copy/checkpoints")
        return refused("train", "--resume", "runs/copy")

    def replaced(folder):
        shutil.rmtree(folder / "step-00000006")
        shutil.copytree(place / "runs/other/checkpoints/step-00000006", folder / "step-00000006")

    assert "step-00000006 is of another run: its config_sha256 is" in after(replaced)
    shown = after(lambda folder: (folder / "step-00000006").rename(folder / "step-00000099"))
    assert "step-00000099 is of another run: its step is 6 instead of 99" in shown

    def flipped(folder):
        path = folder / "step-00000006/metrics.jsonl"
        path.write_bytes(path.read_bytes().replace(b"loss", b"lass", 1))

    assert re.search(r"metrics\.jsonl is truncated or changed.*remove .* go on from step-00000003", after(flipped))
    shard = place / "data/data_train_000000.bin"
    shard.write_bytes(shard.read_bytes().replace(b"k\0n\0o\0w\0", b"s\0h\0o\0w\0"))
    assert "was trained on other tokens: the digest of data was" in after(lambda folder: None)


def test_a_full_memory_is_one_sentence():
    with pytest.raises(ValueError, match=r"the memory is full \(no more\).*--micro-batch"), memory_explained():
        raise torch.OutOfMemoryError("no more")


@pytest.mark.parametrize("options", [["--model.width", "10000000000000000000000"], ["--model.width", "2147483632"]])
@pytest.mark.parametrize("which", [[], ["nanogpt"]])
def test_a_model_that_no_machine_holds_is_one_sentence(place, refused, which, options):
    shown = refused("train", *(which or ["--preset", "caps"]), "--source", "text.txt", *options)
    assert re.match(r"error: (model\.width=\d+ must be below 2147483648 |the memory is full \()", shown), shown
    assert not (place / "runs").exists()


def test_schedules_begin_at_one_and_end_near_zero():
    for schedule in ("cooldown", "cosine", "linear"):
        config = TrainConfig(steps=100, schedule=schedule, momentum_start=0.85)
        factors = [config.rate_factor(step) for step in range(100)]
        assert factors == sorted(factors, reverse=True)
        assert (factors[0], factors[-1] < 0.03) == (1.0, True)
    assert config.momentum_at(0) == 0.85
    assert config.momentum_at(150) == pytest.approx(0.9)
    assert config.momentum_at(10**6) == 0.95
    assert TrainConfig().momentum_at(0) == 0.95


def test_parts_of_a_batch_have_the_gradient_of_the_whole(letters):
    config = replace(small(), precision="float32")
    whole, parts = (task_of(replace(config, micro_batch=micro), letters) for micro in (None, 1))
    assert parts.backward() == pytest.approx(whole.backward(), rel=1e-6)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-7, rtol=1e-4)


def test_bfloat16_and_recomputing_change_products_and_memory_alone(letters):
    exact = task_of(small(), letters).backward()
    assert task_of(replace(small(), recompute=True), letters).backward() == exact
    rounded = task_of(replace(small(), precision="bfloat16"), letters)
    assert rounded.backward() == pytest.approx(exact, rel=2**-7)  # bfloat16 keeps 8 bits
    assert all(p.dtype == torch.float32 for p in rounded.model.parameters())


@pytest.mark.slow  # compiling takes longer than training
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
@pytest.mark.filterwarnings("default")  # torch's compiler warns of torch's own code
@pytest.mark.parametrize("changes", [{}, {"recompute": True}, {"precision": "bfloat16"}])
def test_compiled_blocks_train_as_they_do_uncompiled(letters, changes):
    from torch._dynamo.utils import counters  # which imports the compiler

    eager, compiled = (task_of(replace(small(), compile=chosen, **changes), letters) for chosen in (False, True))
    digits = 2**-7 if "precision" in changes else 1e-5  # bfloat16 keeps 8 bits; sums in another order
    torch._dynamo.reset()
    counters.clear()
    for _ in range(3):
        assert compiled.advance() == pytest.approx(eager.advance(), rel=digits)
    assert counters["stats"]["unique_graphs"] > 0
    assert max(compiled.constraints.proved_ratios().values()) <= 1
    assert compiled.evaluate()["validation_loss"] == pytest.approx(eager.evaluate()["validation_loss"], rel=digits)
    assert compiled.observe() == pytest.approx(eager.observe(), rel=0.05)  # the largest of many, after three steps


def test_shards_are_evaluated_as_the_text_that_they_are_parts_of(letters):
    (text,) = letters.validation.arrays
    parts = letters._replace(validation=Tokens([text[:1001], text[1001:1005], text[1005:]]))
    one, several = (task_of(small(), corpus).evaluate() for corpus in (letters, parts))
    assert one == several


def test_checkpoints_evaluate_windows_spread_over_the_whole_split(letters, monkeypatch):
    config = replace(small(), validation_tokens=None)
    task = task_of(replace(config, model=replace(config.model, length=8)), letters)
    read, starts, length = task.corpus.validation.read, [], task.config.model.length
    monkeypatch.setattr(task.corpus.validation, "read", lambda start, size: starts.append(start) or read(start, size))
    task.evaluate()
    windows = (len(letters.validation) - 1) // length
    assert windows > 128
    assert starts == [number * windows // 128 * length for number in range(128)]
    starts.clear()
    task.evaluate(last=True)
    assert starts[:windows] == list(range(0, windows * length, length))


def test_only_many_ranks_need_a_torch_that_writes_their_checkpoints(place, monkeypatch):
    for name in ("HuggingFaceStorageWriter", "HuggingFaceStorageReader"):
        monkeypatch.delattr(torch.distributed.checkpoint, name)
    with pytest.raises(ValueError, match="cannot write checkpoints of many ranks as safetensors"):
        require_torch(2)
    assert main(["train", "nanogpt", "--name", "run", *OPTIONS, "--certify", "no", "--sample-tokens", "0"]) == 0
    (place / "runs/run/manifest.json").unlink()
    assert load(place / "runs/run").config.width == 16  # of the newest checkpoint
    assert main(["train", "--resume", "runs/run"]) == 0


@pytest.mark.gpu
def test_a_run_on_a_gpu(letters):
    config = replace(small(), model=replace(small().model, blocks=1), caps=Caps(*[2.0] * 7), learning_rate=0.01)
    task = LanguageTask(replace(config, device="cuda"), letters, Ranks(0, 1, torch.device("cuda", 0)))
    losses = [task.advance() for _ in range(10)]
    assert losses[-1] < losses[0]
    assert task.evaluate()["validation_loss"] < losses[0]


def small() -> TrainConfig:
    start = token_preset("1m")
    assert isinstance(start.model, GPTConfig)
    model = replace(start.model, width=16, blocks=2, heads=2, length=16, vocabulary_size=256)
    return replace(start, model=model, batch=4, validation_tokens=100)


def task_of(config, corpus):
    return LanguageTask(config, corpus, Ranks(0, 1, torch.device("cpu")))
