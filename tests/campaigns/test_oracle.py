"""The kernel against a derivation that shares no code with it, and both against a rule that is wrong."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import nn

import wellnormed as wn
from campaigns.oracle import derive
from campaigns.zoo import models
from wellnormed.certificates import UncertifiableError
from wellnormed.proof import functions

CLOSE = Decimal("1e-6")
"""The oracle rounds slopes to fewer digits (mish: 2e-7), and doubles the margins for rounding."""
RANDOM = 5
"""Random models; the campaign compares all of its own."""


def _compare(model, example, **settings):
    certificate = wn.certify(model, example, **settings)
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    again = derive(certificate, {name: tensor.detach() for name, tensor in weights.items()})
    rows = {row.name: row for row in certificate.layers}
    assert rows.keys() == again.keys()
    for name, bounds in again.items():
        for what in bounds._fields:
            ours, theirs = np.broadcast_arrays(getattr(rows[name].bounds, what), getattr(bounds, what))
            for a, b in zip(ours.flat, theirs.flat, strict=True):
                assert abs(a - b) <= CLOSE * b, (name, what, a, b)


CASES = [case for case in models() if not case[0].startswith("random") or int(case[0].split()[-1]) < RANDOM]


@pytest.mark.parametrize(("name", "model", "example", "settings"), CASES, ids=[case[0] for case in CASES])
def test_both_derive_the_same_bounds(name, model, example, settings):
    try:
        _compare(model, example, **settings)
    except UncertifiableError:
        assert "radius" in settings  # which has to hold the rows of a table, say


def test_a_slope_that_is_wrong_is_seen(monkeypatch):
    monkeypatch.setitem(functions.FUNCTIONS, "relu", ("0", "0.999", "1", "0", None))
    with pytest.raises(AssertionError, match=r"'1\.relu', 'radius'"):
        _compare(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(1, 3))
