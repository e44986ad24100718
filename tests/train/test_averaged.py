"""Runs that know no end, whose evaluated weights are averages."""

from dataclasses import replace

import pytest
import torch

import wellnormed as wn
from tests.train.conftest import tiny_config
from wellnormed.models.files import load
from wellnormed.train import RunFolder, resume, train
from wellnormed.train.stopping import Requests


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tiny, tmp_path, monkeypatch):
    config = replace(tiny, schedule="none", momentum=0.5)
    whole, stopped = train(config, tmp_path / "whole"), tmp_path / "stopped"
    steps = iter(range(1, 10))

    def stop(*_):
        if next(steps) == 9:  # after the checkpoint of step 8
            raise KeyboardInterrupt

    monkeypatch.setattr(Requests, "after_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, stopped)
    monkeypatch.undo()
    again = resume(stopped)
    weights, others = (load(run.path).state_dict() for run in (whole, again))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    rows = [[row.get("validation_loss") for row in run.read_metrics()] for run in (whole, again)]
    assert rows[0] == rows[1]
    rates = [row["learning_rate"] for row in whole.read_metrics() if row["step"] == 12]
    assert rates[0] == pytest.approx(config.learning_rate / (1 + 11 / 200) ** 0.5)
    short = train(replace(config, steps=8), tmp_path / "short")  # what it hands out does not depend on the end
    found = [next(r["validation_loss"] for r in run.read_metrics() if r["step"] == 8) for run in (whole, short)]
    assert found[0] == found[1]


def test_every_checkpoint_of_a_model_by_form_has_its_constant(text_file, tmp_path):
    """The main job in small: what a run hands out at any step is certified."""
    config = replace(
        tiny_config(text_file, "potential"), schedule="none", momentum=0.5, learning_rate=0.05, certify="checkpoints"
    )
    run = train(config, tmp_path / "run")
    proved = [row for row in run.read_metrics() if "log10_lipschitz" in row]
    assert [row["step"] for row in proved] == [4, 8, 12]
    assert all(10 ** row["log10_lipschitz"] <= config.lipschitz for row in proved)
    assert all(row["proved_norm_over_cap"] <= 1 for row in proved)
    model = load(RunFolder(run.path).path)
    certificate = wn.certificates.Certificate.load(run.certificate_file)
    wn.verify(certificate, model.state_dict())
