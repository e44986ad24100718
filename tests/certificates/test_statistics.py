"""Batch norm in evaluation mode, against exact rationals."""

from fractions import Fraction
from math import isqrt

import pytest
import torch
from torch import nn

import wellnormed as wn


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_batch_norm_is_not_below_the_exact_one(seed: int) -> None:
    """Of one channel, whose factor is `weight / sqrt(variance + eps)` and whose bias is `bias - mean factor`."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(1, dtype=torch.float64).eval()
    with torch.no_grad():
        for each in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            each.copy_(torch.rand(1).double() * 3 + 0.01)
    certificate = wn.certify(norm, torch.zeros(2, 1, dtype=torch.float64))
    weight, bias, mean, variance = (
        Fraction(each.item()) for each in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )
    squared = weight**2 / (variance + Fraction(norm.eps))
    bound = Fraction(certificate.lipschitz.exact)
    assert squared <= bound**2 <= squared * (1 + Fraction(1, 10**14))
    # |factor| + |bias - mean factor|, from below to 50 digits
    root = Fraction(isqrt(int(squared * 10**100)), 10**50)
    largest = root + abs(bias - mean * root)
    radius = Fraction(max(certificate.rows[-1].bounds.radius.flat))
    assert largest - Fraction(1, 10**48) * (2 + mean) <= radius <= largest * (1 + Fraction(1, 10**13))
