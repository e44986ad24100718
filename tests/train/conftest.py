import pytest

from wellnormed.models import GPTConfig
from wellnormed.train import TrainConfig

MODEL = GPTConfig(length=8, width=8, heads=2, blocks=1)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 40)
    return path


@pytest.fixture
def tiny(text_file):
    return TrainConfig(
        model=MODEL, steps=12, batch=2, threads=1, source=str(text_file), device="cpu", log_every=2,
        checkpoint_every=4, attack_steps=2, sample_characters=20,
    )  # fmt: skip
