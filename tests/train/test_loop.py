import json
import math
import re
from dataclasses import replace
from typing import get_args
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from wellnormed._files import MANIFEST, read_json, write_json
from wellnormed.certificates import Certificate
from wellnormed.data import load_corpus
from wellnormed.models import GPT, load
from wellnormed.models.parts import sha256_of
from wellnormed.norms import spectral
from wellnormed.train import RunFolder, loop, resume, sample, train
from wellnormed.train.config import Caps, ConstraintName, TrainConfig, WaitingName
from wellnormed.train.finish import evaluated
from wellnormed.train.language import LanguageTask
from wellnormed.train.optimizer import weight_constraints, weight_roles
from wellnormed.train.ranks import Ranks
from wellnormed.train.setup import with_vocabulary


def task_of(config):
    corpus = load_corpus(config.data, config.source)
    return LanguageTask(with_vocabulary(config, corpus), corpus, Ranks(0, 1, torch.device("cpu")))


@pytest.mark.parametrize("tiny", ["potential"], indirect=True)
def test_a_run_leaves_everything(tiny, tmp_path):
    tiny = replace(tiny, certify="end", attack_steps=2, sample_tokens=20)
    run = train(tiny, tmp_path / "run")
    results = json.loads(run.results_file.read_text())
    assert results["proved_norm_over_cap"] <= 1
    assert results["lower_bound"] > 0
    assert [folder.name for folder in run.checkpoint_folders()] == ["step-00000008", "step-00000012"]
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 4, 6, 8, 10, 12]
    assert len(run.sample_file.read_text()) == 21
    assert run.report_file.read_text().count("<svg") == 6
    config, _ = run.read_config(TrainConfig)
    assert config == replace(tiny, model=load(run.path).config)
    finished = run.weights_file.read_bytes()
    assert resume(run.path).weights_file.read_bytes() == finished


def test_start_and_resume_prove_nothing_and_without_certificates_nothing_does(tiny, tmp_path):
    proofs = []
    prove = spectral.spectral_norm_upper_bound
    with mock.patch.object(spectral, "spectral_norm_upper_bound", lambda w: proofs.append(w) or prove(w)):
        run = train(tiny, tmp_path / "without")
        run.manifest_file.unlink()
        resume(run.path)
        assert not proofs
        assert "proved_norm_over_cap" not in run.results_file.read_text() + run.metrics_file.read_text()
        task_of(tiny)
        assert not proofs
        evaluated(task_of(replace(tiny, certify="end")))
        assert proofs  # as at a checkpoint


def test_nan_in_a_gradient_names_parameter_and_step_and_leaves_the_checkpoint(tiny, tmp_path, at_step):
    def poison(task):
        task.model.head.weight.register_hook(lambda gradient: gradient * float("nan"))

    message = r"step 6: .*head.weight(.|\n)*last good checkpoint is .*step-00000004"
    with at_step(5, poison), pytest.raises(ValueError, match=message):
        train(tiny, tmp_path / "run")
    assert RunFolder(tmp_path / "run").checkpoint_folders()[-1].name == "step-00000004"


def test_nan_in_the_loss_names_the_step(tiny):
    task = task_of(tiny)
    task.model.head.bias.data[0] = float("nan")
    with pytest.raises(ValueError, match=r"step 1: the loss is nan; the parameter 'head.bias'"):
        task.advance()


def test_a_norm_above_its_cap_is_an_error(tiny):
    task = task_of(tiny)
    task.model.head.weight.data.fill_(9.0)
    with pytest.raises(ValueError, match=r"'head.weight' may be"):
        task.require_caps()


@pytest.mark.parametrize("tiny", ["gpt"], indirect=True)  # the other has constraints of its own
@pytest.mark.parametrize("constraint", get_args(ConstraintName))  # of which two promise nothing of a matrix
def test_every_constraint_holds_after_every_step(tiny, constraint):
    caps = Caps(*[0.1] * 7) if constraint == "spectral-weight-decay" else tiny.caps
    task = task_of(replace(tiny, constraint=constraint, caps=caps, learning_rate=0.2))
    for _ in range(6):
        task.advance()
        assert task.require_caps() <= 1
    promised = sum(name.endswith("weight") for name in task.constraints.promised())
    assert (promised > 2) == (constraint not in ("spectral-weight-decay", "hammer"))
    if constraint not in get_args(WaitingName):
        with pytest.raises(ValueError, match="every=8 must be 1"):
            replace(tiny, constraint=constraint, every=8)


def test_a_learning_rate_beyond_the_constraint_is_refused_before_a_folder_exists(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"SoftCap|Orthogonal"):
        train(replace(tiny, learning_rate=5.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_matrix_has_a_constraint(tiny):
    task = task_of(tiny)
    matrices = {n for n, p in task.model.named_parameters() if p.ndim == 2 and not n.endswith(("bias_HT", "logits_HT"))}
    held = weight_constraints(task.model, tiny)
    assert matrices <= set(held)
    if isinstance(task.model, GPT):
        assert matrices == set(held) == set(weight_roles(task.model))
        assert set(weight_roles(task.model).values()) == {"embedding", *vars(tiny.caps)}


@pytest.mark.parametrize("tiny", ["potential"], indirect=True)
@pytest.mark.parametrize("lipschitz", [0.5, *(pytest.param(c, marks=pytest.mark.slow) for c in (2.0, 50.0))])
def test_a_run_has_the_constant_that_was_asked_for(tiny, lipschitz, tmp_path, capsys):
    """Of everything but the head exactly, from the caps alone; the head's norm is at most what is left."""
    tiny = replace(tiny, lipschitz=lipschitz, steps=60, learning_rate=0.1, log_every=60, checkpoint_every=60)
    run = train(replace(tiny, certify="end"), tmp_path / "run")
    model, certificate = load(run.path), Certificate.load(run.certificate_file)
    head = float(torch.linalg.matrix_norm(model.head.weight.detach().double(), 2)) * math.sqrt(8 / len(model.head.bias))
    # every weight aims 2e-5 below its norm; six of them multiply, and a Newton-Schulz step adds the square of the rate
    assert 1 - 2e-4 <= certificate.rms_lipschitz / (model.config.body_lipschitz * head) <= 1
    assert certificate.rms_lipschitz <= lipschitz
    assert head >= 0.99 * lipschitz / model.config.body_lipschitz  # what is left is spent
    said = re.search(r"at most (\S+) from RMS to RMS and (\S+) in Euclidean norms", capsys.readouterr().out)
    first, second = (float(each) for each in said.groups())
    assert first == lipschitz
    assert (
        certificate.lipschitz
        <= second
        == pytest.approx(first * certificate.lipschitz / certificate.rms_lipschitz, rel=1e-5)
    )


def test_sampling_is_seeded_and_refuses_an_empty_prompt(tiny):
    model = task_of(tiny).model
    draws = [sample(model, torch.tensor([1]), 20, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)
    assert torch.equal(sample(model, torch.tensor([1]), 3, temperature=0)[:1], torch.tensor([1]))
    with pytest.raises(ValueError, match="prompt is empty"):
        sample(model, torch.tensor([], dtype=torch.long), 3)


def test_weights_above_their_caps_in_the_last_checkpoint_are_refused(tiny, tmp_path):
    """The end said "largest proved norm / cap" of the weights that the metrics are of, and no step comes before it."""
    with mock.patch.object(loop, "finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        train(replace(tiny, certify="end"), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    (path,) = (run.checkpoint_folders()[-1] / "parts").iterdir()
    weights = {name: t * 50 if name.startswith("model.") else t for name, t in load_file(path).items()}
    save_file(weights, path)
    manifest = read_json(path.parents[1] / MANIFEST, "", sealed=True)
    write_json(path.parents[1] / MANIFEST, manifest | {"sha256": {path.name: sha256_of(path)}}, sealed=True)
    with pytest.raises(ValueError, match=r"step 12: the norm of .* times its cap"):
        resume(run.path)
    assert not run.results_file.exists()
