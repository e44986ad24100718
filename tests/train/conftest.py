import hashlib
from dataclasses import replace

import pytest

from wellnormed.models import GPTConfig, PotentialConfig
from wellnormed.train import TrainConfig, finish, report

MODEL = GPTConfig(length=8, width=8, heads=2, blocks=1)
POTENTIAL = PotentialConfig(length=8, token_width=4, mixing_heads=2, hidden=16, blocks=2, attention_heads=2)


@pytest.fixture(scope="session", autouse=True)
def _one_certificate_for_equal_bits():
    """The runs of this room end in few different weights; the certificates of each are computed once."""
    known, certify = {}, finish.certify_model

    def remembered(model, attack_steps, generator, *more):
        digest = hashlib.sha256(f"{model} {attack_steps} {more}".encode() + generator.get_state().numpy().tobytes())
        for name, tensor in model.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        if digest.digest() not in known:
            known[digest.digest()] = certify(model, attack_steps, generator, *more)
        return known[digest.digest()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "certify_model", remembered)
        yield


@pytest.fixture(scope="module")
def without_figures():
    """Reports without pictures, which take most of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in vars(report) if name.endswith("_figure")]:
            patch.setattr(report, name, lambda *content: None)
        patch.setattr(report, "_svg", lambda figure: "<svg/>")
        yield


def write_text(path):
    path.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 40)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    write_text(path)
    return path


@pytest.fixture(params=["gpt", "potential"])
def tiny(text_file, request):
    return tiny_config(text_file, request.param)


def tiny_config(text_file, architecture):
    config = TrainConfig(
        model=MODEL, steps=12, batch=2, threads=1, source=str(text_file), device="cpu", log_every=2,
        checkpoint_every=4, attack_steps=2, sample_tokens=20, precision="float32",
    )  # fmt: skip
    return replace(config, model=POTENTIAL, lipschitz=3.0) if architecture == "potential" else config
