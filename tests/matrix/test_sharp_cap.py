"""Sharp caps: singular values follow the formula, and end at or below the cap."""

import pytest
import torch

from wellnormed.matrix import msign, spectral_hardcap
from wellnormed.matrix.sharp_cap import power_for, sharp_cap

from .conftest import normal


@pytest.mark.parametrize("most", [1.004, 1.03, 1.06, 1.12, 1.26])
@pytest.mark.parametrize("shape", [(64, 64), (3, 100, 20), (2, 3, 8, 40), (1, 30)])
def test_values_follow_the_formula_and_end_below_the_cap(most, shape):
    m, upper = power_for(min(shape[-2:]), most), 0.7
    s = torch.linspace(0.1, most, min(shape[-2:]), dtype=torch.float64).expand(*shape[:-2], -1)
    u, _, vh = torch.linalg.svd(normal(*shape, dtype=torch.float64), full_matrices=False)
    w = (u * (upper * s)[..., None, :] @ vh).float()
    found = torch.linalg.svdvals(sharp_cap(w, upper, m).double()) / upper
    expected = s * (1 - (m / (m + 1)) ** m / (m + 1) * s**m)
    torch.testing.assert_close(found, expected.sort(descending=True).values, rtol=0, atol=5e-6)
    assert found.max() <= 1 + 1e-5
    assert (s.clamp(max=1) - expected).max() <= (0.0905 if m == 8 else 0.0505)


def test_what_is_below_comes_back_and_what_is_far_above_is_capped():
    w = msign(normal(3, 24, 24), method="svd")
    scales = torch.tensor([0.8, 1.1, 3.0])[:, None, None]
    assert torch.equal(sharp_cap(0.8 * w, 1.0, 16), 0.8 * w)
    torch.testing.assert_close(sharp_cap(scales * w, 1.0, 16), spectral_hardcap(scales * w, 1.0))
    assert not power_for(128, 1.01)
    assert not power_for(8, 1.3)
