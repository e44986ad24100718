"""A language model trains on many processes as on one, goes on after any of them died, and says what is wrong."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parallel.token_runs import metrics, refused, resume, run
from wellnormed._files import MANIFEST
from wellnormed.data.convert import convert_texts
from wellnormed.models.files import load, read_tensors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Shards of bytes in which words follow one another in a way that can be learned."""
    place = tmp_path_factory.mktemp("data")
    draws = np.random.default_rng(0).integers(0, 8, 6000)
    words = ["one ", "two ", "three ", "four\n", "five, ", "six. ", "seven ", "eight "]
    (place / "text.txt").write_text("".join(words[draw] for draw in draws))
    (place / "other.txt").write_text("".join(words[draw] for draw in draws[::-1][:400]))
    texts = {"train": [place / "text.txt"], "val": [place / "other.txt"]}
    convert_texts(texts, place / "shards", "bytes", shard_tokens=9000)
    return place / "shards"


def losses(folder):
    return [row["loss"] for row in metrics(folder)]


def weights(run_folder):
    return read_tensors((run_folder / "model.safetensors").read_bytes(), "weights")


@pytest.fixture(scope="module")
def whole(processes, tmp_path_factory, data):
    """From a number of processes and changes of the config, the folder of an undisturbed run; each is made once."""
    known = {}

    def get(world, **changes):
        key = (world, *sorted(changes.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("runs") / "whole"
            if world == 1:
                run(data, folder, changes)
            else:
                processes(world).run(run, data, folder, changes)
            known[key] = folder
        return known[key]

    return get


def assert_same_bits(folder, other):
    assert losses(folder) == losses(other)
    torch.testing.assert_close(weights(folder), weights(other), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("world", "steps", "changes"),
    [(2, 12, {"parallel": "fsdp"})]
    + [
        pytest.param(4, steps, {"parallel": "fsdp"} | changes, marks=pytest.mark.slow)
        for steps, changes in (
            (12, {"variant": "potential"}), (50, {"parallel": "ddp"}), (50, {}), (50, {"recompute": True})
        )
    ],
)  # fmt: skip
def test_many_processes_train_as_one_does(whole, world, steps, changes):
    # as many windows for each of the ranks, one at a time
    model = {"variant": changes["variant"]} if "variant" in changes else {}
    changes = {"micro_batch": 1, "sample_tokens": 5, **changes}
    alone, together = whole(1, steps=steps, **model), whole(world, steps=steps, **changes)
    one, many = metrics(alone), metrics(together)
    assert [row["step"] for row in many] == list(range(1, steps + 1))
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)  # as asked for 50 steps
    assert one[-1]["loss"] < one[0]["loss"] - 1
    for row, other in zip(one, many, strict=True):
        assert max(other["norms_over_caps"].values()) <= 1
        if "validation_loss" in row:
            assert other["validation_loss"] == pytest.approx(row["validation_loss"], rel=1e-5)
            assert other["validation_accuracy"] == pytest.approx(row["validation_accuracy"], abs=3 / 400)
            assert other["bits_per_byte"] == pytest.approx(other["validation_loss"] / np.log(2))  # a token is a byte


@pytest.mark.parametrize(
    ("first", "parallel", "then"),
    [
        (2, "fsdp", (2, 1)),
        pytest.param(2, "ddp", (2, 1), marks=pytest.mark.slow),
        pytest.param(4, "fsdp", (4, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_stopped_goes_on_bit_for_bit_and_on_other_numbers_of_ranks(
    processes, tmp_path, data, whole, first, parallel, then
):
    stopped, finished = tmp_path / "stopped", whole(first, parallel=parallel)
    kind, message = processes(first).run(refused, data, stopped, "interrupted", {"parallel": parallel})[0]
    assert (kind, str(stopped) in message) == ("KeyboardInterrupt", True)
    assert len(metrics(stopped)) == 10
    for world in then:
        folder = tmp_path / f"on {world}"
        shutil.copytree(stopped, folder)
        if world == 1:
            resume(folder)
        else:
            processes(world).run(resume, folder)
        assert [row["step"] for row in metrics(folder)] == list(range(1, 13))
        if world == first:
            assert_same_bits(folder, finished)
        else:
            np.testing.assert_allclose(losses(folder), losses(finished), rtol=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_newest_checkpoint_of_many_ranks_is_loaded_while_the_end_is_missing(whole, tmp_path, parallel):
    finished = whole(2, parallel=parallel)
    shutil.copytree(finished, tmp_path / "unfinished")
    for name in (MANIFEST, "model.safetensors"):  # what is written last
        (tmp_path / "unfinished" / name).unlink()
    unfinished = load(tmp_path / "unfinished").state_dict()
    torch.testing.assert_close(unfinished, load(finished).state_dict(), atol=0, rtol=0)


# the signal reaches the loop before anything that depends on how weights are cut
@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_all_in_the_same_step_with_a_checkpoint(processes, tmp_path, data, whole, parallel):
    found = processes(2).run(refused, data, tmp_path / "stopped", "signalled", {"parallel": parallel})
    assert len(set(found)) == 1
    assert found[0][0] == "Stopped"
    assert "the newest checkpoint is step-0000000" in found[0][1]
    assert len(metrics(tmp_path / "stopped")) in (6, 7)  # what the others know of it only from the next step on
    processes(2).run(resume, tmp_path / "stopped")
    assert_same_bits(tmp_path / "stopped", whole(2, parallel=parallel))


@pytest.mark.parametrize(
    ("trouble", "parallel", "kind", "message", "left"),
    [
        pytest.param(
            *("not_finite", "fsdp", "ValueError", "step 6: the loss is nan; .*checkpoint is .*step-00000004", 4),
            marks=pytest.mark.slow,
        ),
        ("drifted", "ddp", "ValueError", "rank 1 has another weight in step 8 than rank 0: embedding.weight is", 4),
        ("disk_full", "fsdp", "OSError", "rank 1: .*step-00000008 could not be written .*No space left", 4),
        ("another_rate", "fsdp", "ValueError", "rank 1 has another config than rank 0: learning_rate is 0.5 inst", 0),
        pytest.param(
            *("another_disk", "ddp", "ValueError", "rank 1: .*config.json is missing.*on a disk that all ranks see", 0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("another_shard", "ddp", "ValueError"),
            *(r"rank 1 has another set of data .*: tokens of the training shards", 0),
            marks=pytest.mark.slow,
        ),
        ("gradient_not_finite", "adamw", "ValueError", "step 6: a gradient holds NaN or infinity. No weight was", 4),
    ],
)
def test_trouble_on_one_rank_is_one_sentence_on_all(processes, tmp_path, data, trouble, parallel, kind, message, left):
    changes = {"adamw": {"parallel": "fsdp", "optimizer": "adamw", "constraint": "none"}}.get(
        parallel, {"parallel": parallel}
    )
    found = processes(2).run(refused, data, tmp_path / "run", trouble, changes)
    assert len(set(found)) == 1
    assert found[0][0] == kind
    assert re.search(message, found[0][1])
    saved = sorted((tmp_path / "run").glob(f"checkpoints/*/{MANIFEST}"))
    assert [path.parent.name for path in saved][-1:] == ([f"step-{left:08d}"] if left else [])
    if trouble == "disk_full":  # a checkpoint is the same whatever came after it
        processes(2).run(resume, tmp_path / "run")
        assert len(metrics(tmp_path / "run")) == 12


def token(shard):
    """A token of the last windows that are read, so of one rank alone, becomes one that the vocabulary lacks."""
    content = bytearray(shard.read_bytes())
    content[1024 + 2 * 350 + 1] = 200
    shard.write_bytes(content)


@pytest.mark.parametrize(
    ("split", "damage", "message"),
    [
        ("train", lambda path: path.write_bytes(path.read_bytes()[:-2]), "truncated or damaged; download or convert"),
        ("train", lambda path: path.unlink(), r"but its meta\.json says"),
        ("val", token, r"_val_000000\.bin has the token \d+ at place 350, but the vocabulary has"),
    ],
)
def test_damaged_shards_stop_all_ranks_before_a_folder_exists(processes, tmp_path, data, split, damage, message):
    shutil.copytree(data, tmp_path / "shards")
    damage(sorted((tmp_path / "shards").glob(f"*_{split}_*.bin"))[-1])
    found = processes(2).run(refused, tmp_path / "shards", tmp_path / "run")
    assert len(set(found)) == 1
    assert found[0][0] == "ValueError"
    assert re.search(message, found[0][1])
    assert not (tmp_path / "run").exists()


COMMAND = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "localhost:0"),
]
OPTIONS = [
    *("nanogpt", "--steps", "60", "--batch", "8", "--model.width", "16", "--model.blocks", "2", "--model.heads", "2"),
    *("--model.length", "16", "--checkpoint-every", "10", "--validation-tokens", "400", "--certify", "no"),
    *("--attack-steps", "0", "--data"),
]


def start(folder, *arguments, script=("-m", "wellnormed.cli")):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, *script, "train", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def at_step_20(process, folder):
    """The process ids of the ranks, once their second checkpoint is there."""
    while not list(folder.glob(f"checkpoints/step-00000020/{MANIFEST}")):
        assert process.poll() is None
        time.sleep(0.01)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    return [int(each) for each in children.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it signals a process of a group")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_whoever_gets_a_signal_torchrun_goes_on_to_the_same_bits(tmp_path, data, parallel):
    options = [*OPTIONS, str(data), "--parallel", parallel]
    whole = start(tmp_path, *options, "--name", "whole")
    assert "Error" not in whole.communicate()[1]
    rows = metrics(tmp_path / "runs/whole")
    for number, whose in (("KILL", "rank"), ("TERM", "rank"), ("TERM", "torchrun"), ("INT", "torchrun")):
        name = f"{number}-{whose}"
        process = start(tmp_path, *options, "--name", name)
        folder = tmp_path / "runs" / name
        ranks = at_step_20(process, folder)
        os.kill(ranks[-1] if whose == "rank" else process.pid, getattr(signal, f"SIG{number}"))
        _, shown = process.communicate()
        assert process.returncode != 0
        assert len(metrics(folder)) < len(rows)
        if number != "KILL":
            last = re.findall(r"stopped; the newest checkpoint is step-\d+([1-9]); continue with `(.*)`", shown)
            assert last, shown  # once, and not one of the regular ones, which end with 0
            assert last[0][1] == f"torchrun --nproc-per-node 2 -m wellnormed.cli train --resume runs/{name}"
        resumed = start(tmp_path, "--resume", f"runs/{name}")
        assert "Error" not in resumed.communicate()[1]
        assert resumed.returncode == 0
        assert [row["loss"] for row in metrics(folder)] == [row["loss"] for row in rows]
        torch.testing.assert_close(weights(folder), weights(tmp_path / "runs/whole"), atol=0, rtol=0)


IMPATIENT = """
import sys
from datetime import timedelta
from wellnormed.cli import main
from wellnormed.train import ranks
assert ranks.PATIENCE <= timedelta(minutes=10)
ranks.PATIENCE = timedelta(seconds=8)
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it stops a process of a group")
def test_a_rank_that_hangs_is_noticed_and_named_as_such(tmp_path, data):
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    process = start(tmp_path, *OPTIONS, str(data), "--name", "hung", script=["impatient.py"])
    ranks = at_step_20(process, tmp_path / "runs/hung")
    os.kill(ranks[-1], signal.SIGSTOP)
    _, shown = process.communicate()
    assert process.returncode != 0
    assert "error: another rank has ended or does not answer (" in shown
    assert "continue with `torchrun --nproc-per-node 2 -m wellnormed.cli train --resume runs/hung`" in shown
