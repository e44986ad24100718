"""Small runs of language models, and what may go wrong in them: what the tests run in every process."""

import contextlib
import json
import os
import signal
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from tests.undrawn import undrawn
from wellnormed.data.shards import Tokens
from wellnormed.models.config import GPTConfig
from wellnormed.train import loop
from wellnormed.train.config import TrainConfig
from wellnormed.train.language import LanguageTask
from wellnormed.train.presets import token_preset

QUIET = Console(quiet=True)


def config(data, *, variant="lipschitz", **changes) -> TrainConfig:
    """Two blocks of width 16 on windows of 16 tokens, with every weight kept below its cap."""
    start = token_preset("1m", variant)
    if isinstance(start.model, GPTConfig):
        model = replace(start.model, width=16, blocks=2, heads=2, length=16, residual_strength=0.25)
    else:
        model = replace(start.model, token_width=4, mixing_heads=4, blocks=2, hidden=32, attention_heads=2, length=16)
    # at a rate at which rounding does not grow from step to step; the preset's is for a model that is larger
    small = {
        "learning_rate": 0.05, "head_rate": 0.1, "steps": 12, "batch": 8, "checkpoint_every": 4, "log_every": 1,
        "validation_tokens": 400, "sample_tokens": 0, "device": "cpu", "precision": "float32",
    }  # fmt: skip
    return replace(start, model=model, data=str(data), attack_steps=0, certify="no", **(small | changes))


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@undrawn()
def run(data, folder, changes=()):
    loop.train(config(data, **dict(changes)), folder, QUIET)


@undrawn()
def resume(folder):
    loop.resume(folder, QUIET)


def refused(data, folder, trouble="nothing", changes=()):
    """The error of a run in which something goes wrong on the last rank, on each rank."""
    try:
        with globals()[trouble]():
            loop.train(config(data, **dict(changes)), place(folder), QUIET)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return None


def _last():
    return dist.get_rank() == dist.get_world_size() - 1


def place(folder):
    """Where a rank sees the run folder."""
    return folder


nothing = contextlib.nullcontext


def interrupted():
    """The run stops on all ranks after ten steps, two behind a checkpoint."""
    advance = LanguageTask.advance

    def stopping(task):
        if task.step == 10:
            raise KeyboardInterrupt
        return advance(task)

    return mock.patch.object(LanguageTask, "advance", stopping)


def in_the_sixth_step(trouble):
    """What happens to the last rank then: from its task and its loss, the loss."""
    loss = LanguageTask._loss

    def troubled(task, windows):
        found = loss(task, windows)
        return trouble(task, found) if task.step == 5 and _last() else found

    return mock.patch.object(LanguageTask, "_loss", troubled)


def not_finite():
    """A loss of one rank is no number in the sixth step."""
    return in_the_sixth_step(lambda _, loss: loss * float("nan"))


def signalled():
    """The last rank alone gets a signal in the sixth step."""
    return in_the_sixth_step(lambda _, loss: os.kill(os.getpid(), signal.SIGTERM) or loss)


def drifted():
    """A weight of one rank changes by one bit in the sixth step."""

    def flip(task, loss):
        task.model.embedding.weight.detach().view(torch.int32)[0, 0] ^= 1
        return loss

    return in_the_sixth_step(flip)


def disk_full(saved="00000008"):
    """The second checkpoint cannot be written by one rank."""
    write = HuggingFaceStorageWriter.write_data

    def broken(writer, plan, planner):
        if saved in str(writer.path) and _last():
            raise OSError(28, "No space left on device")
        return write(writer, plan, planner)

    return mock.patch.object(HuggingFaceStorageWriter, "write_data", broken)


def another_rate():
    """One rank was started with another learning rate."""
    own = config
    changed = {"config": lambda *a, **k: replace(own(*a, **k), learning_rate=0.5)} if _last() else {}
    return mock.patch.dict(globals(), changed)


def another_disk():
    """One rank sees another folder under the name of the run's."""
    return mock.patch.dict(globals(), {"place": lambda folder: folder.with_name("another")} if _last() else {})


def another_shard():
    """One rank has fewer shards."""
    own = loop.load_corpus

    def fewer(*names):
        corpus = own(*names)
        return corpus._replace(train=Tokens(corpus.train.arrays[:-1]))

    return mock.patch.object(loop, "load_corpus", fewer) if _last() else contextlib.nullcontext()


def gradient_not_finite():
    """A gradient of one rank is no number in the sixth step, and its loss is one."""
    return in_the_sixth_step(lambda task, loss: loss + (task.model.embedding.weight.sum() * 0).sqrt())
