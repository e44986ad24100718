"""Radii around images: the result says what its script promises, and the attack finds what there is to find."""

import json
from pathlib import Path

import torch
from torch import nn

import wellnormed as wn
from benchmarks import local_radii

ROOT = Path(__file__).resolve().parents[2]


def test_the_result_keeps_its_promises():
    rows = json.loads((ROOT / local_radii.OUTPUT).read_text())["rows"]
    assert rows[0]["median_ratio"] > 5
    for row in rows:
        assert row["broken"]["1.0"] == 0
        assert row["median_local"] > row["median_global"]
    assert max(row["broken"]["2.0"] for row in rows) > 0.1  # an attack that breaks nothing would show nothing


def test_the_attack_reaches_the_exact_radius_of_a_linear_map_and_no_less():
    """Of two classes: among several it may end beside one that is not the nearest."""
    torch.manual_seed(0)
    model, x = nn.Linear(12, 2).double(), torch.randn(8, 12, dtype=torch.float64)
    labels = model(x).argmax(1)
    radii = wn.certified_radius(model, x, labels)
    assert not bool(local_radii.broken(model, x, labels, radii).any())
    assert bool(local_radii.broken(model, x, labels, 1.01 * radii).all())
