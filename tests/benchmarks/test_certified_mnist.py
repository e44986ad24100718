"""The guide's page on MNIST: its figures are those of the results, and its blocks run where MNIST lies."""

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import certified_mnist

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_the_result():
    content, peer = (json.loads((ROOT / path).read_text()) for path in (certified_mnist.OUTPUT, certified_mnist.PEER))
    page = (ROOT / certified_mnist.PAGE).read_text(encoding="utf-8")
    assert page.partition(certified_mnist.HEADING)[2] == certified_mnist.section(content, peer)
    for row in content["rows"]:
        assert row["broken_inside_radius"] == 0
        assert f"certified within {row['radius']}: {row['certified']:.3f}" in page
        assert f"certified {row['certified_of_attacked']:.3f}, not broken {row['not_broken_of_attacked']:.3f}" in page


@pytest.mark.skipif(
    not list(Path(os.environ.get("WELLNORMED_DATA", "nowhere"), "mnist").glob("t10k-images-idx3-ubyte.*z")),
    reason="WELLNORMED_DATA has no MNIST",
)
def test_the_attack_stays_below_the_radii_on_mnist(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    found = certified_mnist.run(train=6000, test=300, EPOCHS=1)
    images, labels, radii = found["test_images"].double(), found["test_labels"], found["radii"]
    assert "accuracy" in capsys.readouterr().out
    assert found["right"].double().mean() > 0.3  # of ten classes, after sixty steps
    budget = radii.clamp(min=1e-9)[:, None, None, None]
    stands = found["exact"](found["attack"](images, labels, budget)).argmax(1) == labels
    assert bool(stands[radii > 0].all())
    beyond = found["exact"](found["attack"](images, labels, torch.full_like(budget, 3.0))).argmax(1) == labels
    assert beyond.double().mean() < 0.5  # an attack that breaks nothing would show nothing
