"""Batch norm in evaluation mode, against exact rationals."""

from fractions import Fraction
from math import isqrt

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

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


@pytest.mark.parametrize(
    ("first", "image"),
    [
        (nn.Conv2d(3, 5, 3, padding=1), (1, 3, 6, 6)),
        (nn.Conv2d(4, 6, 3, 2, groups=2, bias=False), (1, 4, 7, 7)),
        (nn.Conv2d(3, 4, 1), (1, 3, 5, 5)),
        (nn.Conv1d(2, 4, 3, dilation=2, padding="same"), (1, 2, 9)),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    ],
    ids=["padded", "strided groups", "one tap", "dilated", "volumes"],
)
def test_a_batch_norm_after_a_convolution_is_bounded_as_both_fused(first: nn.Module, image: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(image)](first.out_channels)
    for each in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(each)
    nn.init.uniform_(norm.running_var, 0.1, 4)
    model = nn.Sequential(first, norm).eval().double()
    certificate = wn.certify(model, torch.zeros(image).double())
    fused = wn.certify(fuse_conv_bn_eval(*model), torch.zeros(image).double())
    assert certificate.lipschitz == pytest.approx(fused.lipschitz, rel=1e-6)
    ours, theirs = (each.rows[-1].bounds.radius.max() for each in (certificate, fused))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    assert fused.forward_error < certificate.forward_error < 99 * fused.forward_error
    wn.verify(certificate, model.state_dict())
    changed = {name: each + 1e-3 if name == "0.weight" else each for name, each in model.state_dict().items()}
    with pytest.raises(wn.certificates.CheckError, match=r"0\.weight is not the certified tensor"):
        wn.verify(certificate, changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("first", [[nn.Conv2d(3, 3, 3)], []], ids=["convolution", "alone"])
def test_overwriting_results_of_batch_norm_changes_no_bound(dtype: torch.dtype, first: list[nn.Module]) -> None:
    norm = nn.BatchNorm2d(3)
    nn.init.normal_(norm.weight)
    models = [nn.Sequential(*first, norm, nn.ReLU(inplace)).eval().to(dtype) for inplace in (False, True)]
    each = [wn.certify(model, torch.zeros(1, 3, 4, 4).to(dtype)) for model in models]
    assert each[0].lipschitz == each[1].lipschitz
    assert each[0].forward_error == each[1].forward_error


def test_patches_before_a_batch_norm_are_bounded_apart() -> None:
    patches = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.BatchNorm2d(4)).eval()
    assert "convolution" not in {row.operation for row in wn.certify(patches, torch.zeros(1, 3, 6, 6)).rows}
