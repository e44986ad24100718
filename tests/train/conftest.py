import hashlib
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from tests.undrawn import undrawn
from wellnormed.cli import main
from wellnormed.models import GPTConfig, PotentialConfig
from wellnormed.train import TrainConfig, evaluate, finish

MODEL = GPTConfig(length=8, width=8, heads=2, blocks=1)
POTENTIAL = PotentialConfig(length=8, token_width=4, mixing_heads=2, hidden=16, blocks=2, attention_heads=2)


@pytest.fixture(scope="session", autouse=True)
def _one_certificate_for_equal_bits():
    """The runs of this room end in few different weights; program and certificates of each are computed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "certify_model", remembered(finish.certify_model))
        patch.setattr(finish, "settled_shares", remembered(finish.settled_shares))
        patch.setattr(evaluate, "capture", remembered(evaluate.capture))
        yield


def remembered(function):
    """A function of a model that is computed once for the same bits of model, generators and tensors."""
    known = {}

    def once(model, *more):
        more = [x for x in more if x is not None]  # a default that is stated
        states = [x.get_state() if isinstance(x, torch.Generator) else x for x in more]
        tensors = [*model.state_dict().items(), *((str(x.shape), x) for x in states if isinstance(x, torch.Tensor))]
        digest = hashlib.sha256(f"{model} {[x for x in states if not isinstance(x, torch.Tensor)]}".encode())
        for name, tensor in tensors:
            digest.update(name.encode() + tensor.numpy().tobytes())
        if digest.digest() not in known:
            known[digest.digest()] = function(model, *more)
        return known[digest.digest()]

    return once


@pytest.fixture(scope="module", autouse=True)
def _without_figures(request):
    """Pictures are drawn by the tests of the report alone."""
    with nullcontext() if request.module.__name__.endswith("test_report") else undrawn():
        yield


def write_text(path):
    path.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 40)


@contextmanager
def with_runs(folder, *commands):
    """In a folder with a text, these commands are run, which all succeed; the folder is the present one within."""
    (folder / "text.txt").write_text("Speak, speak. We know't, we know't.\n" * 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in commands:
            assert main(command) == 0
        yield folder


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    write_text(path)
    return path


@pytest.fixture(params=["gpt", "potential"])
def tiny(text_file, request):
    return tiny_config(text_file, request.param)


def tiny_config(text_file, architecture):
    """A run that samples and certifies nothing, which take most of a small run's time."""
    config = TrainConfig(
        model=MODEL, steps=12, batch=2, threads=1, source=str(text_file), device="cpu", log_every=2,
        checkpoint_every=4, attack_steps=0, sample_tokens=0, precision="float32", certify="no",
    )  # fmt: skip
    return replace(config, model=POTENTIAL, lipschitz=3.0) if architecture == "potential" else config
