"""Stated errors at spectra that reach to the rounding of float64, against decompositions with 60 digits."""

import math

import mpmath
import pytest
import torch

from wellnormed.matrix import msign, spectral_clip, spectral_clipped_weight_decay, spectral_hardcap, spectral_relu

PROMISE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of results of norm 1: of the clip itself, or the rounding to 16 bits."""
FUNCTIONS = {
    "relu": (lambda w: spectral_relu(w, 1.0), lambda s: max(s, 1)),
    "clip": (lambda w: spectral_clip(w, 0.25, 0.5), lambda s: min(max(s, 0.25), 0.5)),
    "sign": (lambda w: msign(w, method="svd"), lambda s: 1),
    "cap": (lambda w: spectral_hardcap(w, 0.5), lambda s: min(s, 0.5)),
    "cap by products": (lambda w: spectral_hardcap(w, 0.6, "products"), lambda s: min(s, 0.6)),
    "decay": (lambda w: spectral_clipped_weight_decay(w, 0.5, 0.5), lambda s: min(s, 0.25 + s / 2)),
}
RAISED = {"relu": 1.0, "clip": 0.25, "sign": 1.0}
"""Where a least singular value ends that is raised."""


def steep(m, n, least, dtype):
    """A matrix with singular values from 1 to about `least`, whose entries have the digits of a dtype."""
    left, right = (
        torch.linalg.qr(torch.randn(k, k, dtype=torch.float64, generator=torch.Generator().manual_seed(k)))[0]
        for k in (m, n)
    )
    values = torch.logspace(0, math.log10(least), min(m, n), dtype=torch.float64)
    if dtype == torch.float64:
        return (left[:, : len(values)] * values) @ right[: len(values)]
    return (torch.logspace(0, math.log10(least), m, dtype=torch.float64)[:, None] * left[:, :n]).to(dtype)  # by rows


@pytest.mark.parametrize("dtype", PROMISE, ids=str)
def test_every_function_has_its_stated_error_down_to_the_rounding_of_float64(dtype):
    """Where a value is raised, the rounding of float64 is raised as well: an SVD knows a direction of 1e-12 to 1e-4."""
    magnified = 0.0
    with mpmath.workdps(60):
        for shape in ((4, 4), (6, 4), (5, 3)):
            for least in (1e-2, 1e-4, 1e-6) if dtype == torch.float16 else (1e-2, 1e-6, 1e-9, 1e-12, 1e-14):
                w = steep(*shape, least, dtype)
                u, s, v = mpmath.svd_r(mpmath.matrix(w.double().tolist()))
                rounding = max(shape) * 2.0**-52
                assert min(s) > 1.1 * rounding * max(s)  # none counts as zero
                for name, (function, scalar) in FUNCTIONS.items():
                    exact = u * mpmath.diag([scalar(x) for x in s]) * v
                    found = mpmath.matrix(function(w).double().tolist())
                    error = mpmath.svd_r(found - exact, compute_uv=False)[0]
                    floor = RAISED.get(name, 0.0) * rounding / min(s)
                    assert error <= PROMISE[dtype] + floor * max(s), (name, shape, least)
                    magnified = max(magnified, error / (PROMISE[dtype] + floor / 100))
    if dtype == torch.float64:
        assert magnified > 1  # the statement is no hundred times too large


def test_what_is_rounding_of_zero_stays():
    w = torch.diag(torch.tensor([1.0, 3.0 * 2.0**-52, 0.0], dtype=torch.float64))
    assert torch.equal(spectral_relu(w, 1.0), w)
    w[1, 1] = 4.0 * 2.0**-52
    assert spectral_relu(w, 1.0).diagonal().tolist() == [1.0, 1.0, 0.0]
