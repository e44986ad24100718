"""Runs of language models that only papers need, and their command."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import torch

from papers.__main__ import main
from papers.training import PEERS, PaperConfig, PaperTask, PaperVariant, paper_preset
from tests.train.test_tokens import OPTIONS
from wellnormed import cli
from wellnormed.models.config import GPTConfig
from wellnormed.models.files import load
from wellnormed.train.config import Caps
from wellnormed.train.presets import Size, Variant, token_preset
from wellnormed.train.ranks import Ranks
from wellnormed.train.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("quick_ends")


def small() -> PaperConfig:
    start = paper_preset("1m")
    assert isinstance(start.model, GPTConfig)
    model = replace(start.model, width=16, blocks=1, heads=2, length=16, vocabulary_size=256)
    return replace(start, model=model, batch=4, validation_tokens=100)


def task_of(config, corpus, device="cpu"):
    return PaperTask(config, corpus, Ranks(0, 1, torch.device(device)))


@pytest.mark.parametrize("variant", get_args(Variant))
@pytest.mark.parametrize("size", get_args(Size))
def test_the_presets_are_the_command_s_own(size, variant):
    own = vars(paper_preset(size, variant))
    assert own.pop("float8") == "no"
    assert own == vars(token_preset(size, variant))


def test_lipsformer_trains_by_the_settings_of_its_paper():
    config = paper_preset("124m", "lipsformer")
    assert (config.optimizer, config.schedule, config.weight_decay) == ("muon", "cosine", 0.1)
    assert (config.adamw_rate, config.adamw_average, config.constraint) == (1e-3, 0.999, "none")
    assert set(get_args(PaperVariant)) == {*get_args(Variant), *PEERS}


@pytest.mark.slow  # the peers themselves, their certificates and folders are tested beside the other models
@pytest.mark.parametrize(
    ("variant", "option", "value"),
    [("lipsformer", "drop_path", 0.2), ("speedrun", "value_tables", 1), ("modula", "output_factor", 0.5)],
)
def test_the_command_trains_a_peer_and_knows_it_afterwards(place, capsys, variant, option, value):
    options = [option for option in OPTIONS if option not in ("--model.residual-strength", "0.25")]
    command = ["train", "--variant", variant, "--name", "run", *options, "--learning-rate", "0.01"]
    assert main([*command, f"--model.{option.replace('_', '-')}", str(value)]) == 0
    results = json.loads((place / "runs/run/results.json").read_text())
    assert results["log10_lipschitz"] > 0
    assert main(["verify", "runs/run"]) == 0
    assert "verified" in capsys.readouterr().out
    (place / "runs/run/model.safetensors").write_bytes(b"")
    assert main(["train", "--resume", "runs/run"]) == 0
    assert RunFolder("runs/run").unfinished() is None
    assert getattr(load("runs/run").config, option) == value
    assert cli.main(["train", "--resume", "runs/run"]) == 2
    assert "unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variant", "nanogpt", "--float8", "emulated"], "float8=emulated must be `no` without a model `gpt`"),
        (["--constraint", "none", "--float8", "emulated"], "float8=emulated must be `no` without a model `gpt`"),
        (["--float8", "scaled_mm", "--device", "cpu"], "--float8 scaled_mm: product='scaled_mm' needs a CUDA device"),
        (["--variant", "lipsformer", "--model.drop-path", "1"], "model.drop_path=1.0 must lie in [0, 1)"),
        (["--name", "x", "--resume", "y"], "--resume continues with the run's own config"),
    ],
)
def test_refusals(place, capsys, options, message):
    assert main(["train", *options]) == 2
    assert message in capsys.readouterr().err
    assert not (place / "runs").exists()


@pytest.mark.slow
def test_8_bit_layers_are_said(place, capsys):
    options = [*OPTIONS, "--float8", "emulated", "--caps.value", "2", "--certify", "no"]
    assert main(["train", "--name", "run", *options]) == 0
    assert "8-bit floats in layers.0" in " ".join(capsys.readouterr().out.split())


def test_float8_is_for_layers_that_stay_in_its_range_with_any_weights_within_the_caps(letters):
    config = replace(small(), float8="emulated", caps=Caps(*[2.0] * 7))
    task = task_of(config, letters)
    layers = {name.removesuffix(".weight") for name, _ in task.model.named_parameters() if name.startswith("layers.")}
    assert set(task.float8) == layers
    exact = task_of(replace(config, float8="no"), letters)
    assert task.backward() == pytest.approx(exact.backward(), rel=2**-3)  # E4M3 keeps 4 bits
    for parameter in task.model.parameters():
        parameter.data.normal_().mul_(1e9)  # the constraints bring weights that another hand has moved back to the caps
    task.optimizer.step()
    assert max(task.constraints.proved_ratios().values()) <= 1
    assert task.advance() > 0  # of the largest weights that the caps allow, no entry leaves the range
    with torch.no_grad():
        task.model.layers[1].block.input.weight.mul_(1e9)
    with pytest.raises(ValueError, match=r"layers\.1\.block\.input.* does not hold, which ends at 448"):
        task.batch_loss()


@pytest.mark.slow
def test_float8_leaves_layers_whose_range_is_not_proved_and_refuses_if_none_is(letters):
    start = replace(small(), float8="emulated")
    caps = replace(Caps(*[2.0] * 7), value=1e4)
    task = task_of(replace(start, caps=caps), letters)
    assert "layers.0.block.query.0" in task.float8
    assert "layers.0.block.value" not in task.float8
    assert "layers.0.block.output" not in task.float8
    assert "layers.1.block.input" not in task.float8
    caps = Caps(*[1e4] * 7)
    with pytest.raises(ValueError, match=r"no layer is proved .*layers.0.block.query.0 comes first and reaches 1e\+04"):
        task_of(replace(start, caps=caps), letters)


@pytest.mark.gpu
@pytest.mark.parametrize("float8", ["emulated", "scaled_mm"])
def test_a_run_on_a_gpu(letters, float8):
    if float8 == "scaled_mm" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("it has no products of 8-bit floats")
    task = task_of(
        replace(small(), float8=float8, caps=Caps(*[2.0] * 7), learning_rate=0.01, device="cuda"), letters, "cuda:0"
    )
    assert task.float8
    losses = [task.advance() for _ in range(10)]
    assert losses[-1] < losses[0]
