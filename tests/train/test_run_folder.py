import pytest
import torch

from wellnormed.models import load
from wellnormed.models.files import export
from wellnormed.models.gpt import GPT
from wellnormed.train import RunFolder, resume, train

from .conftest import MODEL


@pytest.fixture
def run(tiny, tmp_path):
    run = train(tiny, tmp_path / "run")
    run.results_file.unlink()  # as if it were killed just before the end
    return run


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors"])
def test_a_truncated_checkpoint_is_refused_with_the_way_back(run, name):
    newest = run.checkpoint_folders()[-1]
    truncate(newest / name)
    with pytest.raises(ValueError, match=rf"{name} .*truncated or changed.*remove .* to resume from step-00000008"):
        resume(run.path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: run.config_file.unlink(), "config.json is missing"),
        (lambda run: truncate(run.config_file), "not valid JSON"),
        (lambda run: (run.checkpoint_folders()[-1] / "meta.json").write_text("[]"), "not an object"),
        (lambda run: (run.checkpoint_folders()[-1] / "state.safetensors").unlink(), "is missing; remove"),
        (lambda run: run.metrics_file.write_text("{\n{}\n"), "line 1, is damaged"),
    ],
)
def test_a_corrupt_folder_is_refused(run, damage, message):
    damage(run)
    with pytest.raises(ValueError, match=message):
        resume(run.path)


def test_another_text_is_refused(run, text_file):
    text_file.write_text(text_file.read_text() + "More.")
    with pytest.raises(ValueError, match="was trained on a text with sha256"):
        resume(run.path)


def test_a_run_is_never_overwritten(run, tiny):
    with pytest.raises(ValueError, match="exists; continue it with"):
        train(tiny, run.path)


def test_a_missing_folder_is_refused(tmp_path):
    for read in (resume, load):
        with pytest.raises(ValueError, match="is no folder"):
            read(tmp_path / "nothing")


def test_a_checkpoint_that_was_not_finished_is_ignored(run):
    (run.checkpoints / ".step-00000099.tmp").mkdir()
    checkpoint = RunFolder(run.path).load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.step == 12


def test_export_and_load_give_the_same_function(tmp_path):
    model = GPT(MODEL, torch.Generator().manual_seed(1))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    export(model, tmp_path / "m")
    tokens = torch.arange(8)[None]
    assert torch.equal(load(tmp_path / "m")(tokens), model(tokens))
    with pytest.raises(ValueError, match="already holds"):
        export(model, tmp_path / "m")


def test_weights_of_another_model_are_refused(tmp_path):
    export(GPT(MODEL), tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    original = config.read_text()
    config.write_text(original.replace('"width": 8', '"width": 16'))
    with pytest.raises(ValueError, match=r"the config asks for .*different models"):
        load(tmp_path / "m")
    config.write_text(original.replace('"blocks": 1', '"blocks": 2'))
    with pytest.raises(ValueError, match="lacks tensor"):
        load(tmp_path / "m")
    config.write_text(original)
    truncate(tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match="truncated or no safetensors"):
        load(tmp_path / "m")
