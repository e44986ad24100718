import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wellnormed._files import parse_json, read_json, write_json
from wellnormed.models import export, load
from wellnormed.models.files import config_sha256
from wellnormed.models.gpt import GPT
from wellnormed.train import RunFolder, resume, setup, train
from wellnormed.train.config import TrainConfig

from .conftest import MODEL, tiny_config, write_text

TEXT = "text.txt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a text and a finished run."""
    folder = tmp_path_factory.mktemp("whole")
    write_text(folder / TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(tiny_config(TEXT, "potential"), "run")
    return folder


@pytest.fixture
def run(whole, tmp_path, monkeypatch):
    """A copy of the run, as if it were killed just before its end; its text is in the working directory."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "run")
    run.manifest_file.unlink()
    return run


def test_json_that_is_no_object_is_refused(run):
    (run.checkpoint_folders()[-1] / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="not an object"):
        resume(run.path)


def test_another_text_is_refused(run):
    with Path(TEXT).open("a") as file:
        file.write("More.")
    with pytest.raises(ValueError, match=r"was trained on other tokens: the tokens of .* now; restore them"):
        resume(run.path)


def test_a_checkpoint_that_was_not_finished_is_ignored(run):
    (run.checkpoints / ".step-00000099.tmp").mkdir()
    assert RunFolder(run.path).checkpoint_folders()[-1].name == "step-00000012"
    assert resume(run.path).unfinished() is None


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model with a random head, and the folder that it was exported to."""
    model = GPT(MODEL, torch.Generator().manual_seed(1))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    return model, export(model, tmp_path_factory.mktemp("exported") / "m", certificate=False, onnx=False)


def test_export_and_load_give_the_same_function(exported):
    model, folder = exported
    tokens = torch.arange(8)[None]
    assert torch.equal(load(folder)(tokens), model(tokens))
    with pytest.raises(ValueError, match="is not empty"):
        export(model, folder)


def test_weights_of_another_model_are_refused(exported, tmp_path):
    path = Path(shutil.copytree(exported[1], tmp_path / "m")) / "config.json"
    config, place = read_json(path, "", sealed=True), path.with_name("manifest.json")
    manifest = read_json(place, "", sealed=True)
    for change, message in (
        ({"width": 16}, "the config asks for .*different models"),
        ({"blocks": 2}, "lacks tensor"),
        ({"blocks": 10**12}, "blocks=1000000000000 does not fit"),
        ({"width": 10**12}, "width=1000000000000 does not fit"),
        ({"heads": 0}, "heads=0|sizes of its config"),
        ({"length": "8"}, "length must be int, got '8'"),
        ({"rotary": 0}, "rotary must be bool, got 0"),
        ({"stream_radius": "1"}, "stream_radius must be .*, got '1'"),
        ({"attention_scale": 10**400}, "attention_scale must be float, got 1000"),
    ):
        changed = config | {"model": config["model"] | change}
        write_json(path, changed, sealed=True)
        write_json(place, manifest | {"config_sha256": config_sha256(changed)}, sealed=True)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "m")


def test_a_damaged_row_of_metrics_is_named(run):
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"step": 2', '"step": 3')
    run.metrics_file.write_text("".join(lines) + '{"step": 13')  # the last is what a kill within a write leaves
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2, does not match its digest.*--resume"):
        run.read_metrics()


@pytest.mark.parametrize("tiny", ["potential"], indirect=True)
@pytest.mark.parametrize("native", [False, True])
def test_the_threads_and_the_precision_of_a_run_are_recorded_in_its_config(tiny, tmp_path, monkeypatch, native):
    monkeypatch.setattr(setup, "multiplies_bfloat16", lambda device: native)
    run = train(replace(tiny, threads=None, precision="auto", steps=1, certify="no"), tmp_path / "run")
    config = run.read_config(TrainConfig)[0]
    assert config.threads == torch.get_num_threads()
    assert config.precision == ("bfloat16" if native else "float32")


def test_json_nested_to_any_depth_is_read_or_refused_in_one_sentence():
    """What can just be read may be too deep to be written, as its digest needs."""
    outcomes = []
    for depth in range(1, sys.getrecursionlimit() + 50):
        try:
            parse_json('{"a":' * depth + "1" + "}" * depth, "deep.json", "train again")
            outcomes.append("read")
        except ValueError as error:
            outcomes.append(str(error))
    refused = [outcome for outcome in outcomes if outcome != "read"]
    assert 50 < len(refused) < len(outcomes)
    assert all(re.fullmatch(r"deep.json is not valid JSON \(.*\); train again", message) for message in refused)
