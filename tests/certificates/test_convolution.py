"""Convolutions against their exact operators: never below, and how far above on average."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wellnormed.lowering.ledger import Stored
from wellnormed.lowering.moves import pick
from wellnormed.lowering.operations.convolution import convolution, transposed_convolution
from wellnormed.program.domain import default_axes
from wellnormed.program.errors import UncertifiableError

from .adversary import Net, attack, begin, bounds_of, groups_of, largest_gain_of_matrix, search

_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_ADJOINTS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _settings(number, transposed):
    """Drawn by number: dimension, channels, groups, kernel, stride, dilation, padding, pixels."""
    generator = torch.Generator().manual_seed(number)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    count = draw(1, 3)
    groups = draw(1, 2)
    inputs, outputs = groups * draw(1, 2), groups * draw(1, 2)
    kernel = [draw(1, 3 if count < 3 else 2) for _ in range(count)]
    stride = [draw(1, 3) for _ in range(count)]
    dilation = [draw(1, 2) for _ in range(count)]
    padding = [draw(0, 2) for _ in range(count)]
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    low = [max(1, r + 1 - 2 * p) if not transposed else 2 for r, p in zip(reach, padding, strict=True)]
    if transposed:
        padding = [min(p, r // 2) for p, r in zip(padding, reach, strict=True)]
    pixels = [draw(n, n + (3 if count < 3 else 1)) for n in low]
    shape = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    weight = torch.randn(*shape, *kernel, generator=generator)
    extra = [min(draw(0, 1), max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    return count, groups, inputs, weight, stride, dilation, padding, pixels, extra


def _operator(function, shape):
    """The matrix of a linear function of one sample."""
    return function(torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)).flatten(1).mT


def _ratio(number, transposed):
    count, groups, inputs, weight, stride, dilation, padding, pixels, extra = _settings(number, transposed)
    # an image is one group when it has four axes or more; a third axis is of tokens' features
    ledger, x = begin((1, inputs, *pixels))
    arguments = (stride, padding, extra, groups, dilation) if transposed else (stride, padding, dilation, groups)
    bound = transposed_convolution if transposed else convolution
    result = bound(ledger, x, Stored("w", weight), None, *arguments)
    function = (_ADJOINTS if transposed else _FUNCTIONS)[count]
    matrix = _operator(lambda t: function(t, weight.double(), None, *arguments), (inputs, *pixels))
    assert math.prod(result.shape) == len(matrix)
    everything = tuple(range(1, count + 2))
    proved = ledger.bounds(result, everything).gain
    assert proved.size == 1
    groups_in = groups_of((1, inputs, *pixels), default_axes((1, inputs, *pixels)))
    exact = largest_gain_of_matrix(matrix, groups_in)
    assert exact * (1 - 1e-9) <= float(proved.item())
    return float(proved.item()) / exact if exact else 1.0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("start", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_bound_is_below_the_operator(start, transposed):
    ratios = [_ratio(start + number, transposed) for number in range(400 if start else 30)]
    mean = sum(ratios) / len(ratios)
    print(f"transposed={transposed}: ratio {mean:.3f} on average, {max(ratios):.3f} at most")
    # of images of a few pixels, where the torus is twice as large as the image
    assert mean < 2


@pytest.mark.parametrize("padding", ["same", 1, pytest.param("valid", marks=pytest.mark.slow)])
def test_named_padding(padding):
    weight = torch.randn(2, 2, 4, 2, generator=torch.Generator().manual_seed(0))
    model = Net(lambda s, x: F.conv2d(x, s.w, padding=padding), w=weight)
    assert attack(model, torch.randn(1, 2, 6, 6), steps=5, restarts=1) > 0.5


def _over_tokens(taps):
    kernel = torch.tensor(taps)[None, None]
    return Net(lambda s, x: F.conv1d(x.mT, s.kernel, padding=len(taps) - 1).mT, kernel=kernel)


@pytest.mark.parametrize("taps", [[1.0, 1.0, -1.0], [1.0, -2.0], [0.5, 0.0, 0.0, -3.0]])
def test_the_norm_over_tokens_is_the_sum_of_taps(taps):
    model = _over_tokens(taps)
    proved = float(max(bounds_of(model, torch.ones(1, 4, 1)).gain.flat))
    found = float(search(model, torch.ones(1, 4, 1), steps=10, restarts=1).gain.max())
    assert found == pytest.approx(sum(map(abs, taps)), rel=1e-6)
    assert found <= proved <= found * (1 + 1e-6)


@pytest.mark.parametrize(("stride", "dilation", "groups"), [*itertools.product([1, 2], [1, 2], [1, 2])])
def test_over_tokens_with_channels(stride, dilation, groups):
    layer = nn.Conv1d(4, 2, 3, stride, 2, dilation, groups).requires_grad_(False)
    layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(groups)))
    ledger, x = begin((1, 6, 4))
    weight, bias, turned = Stored("w", layer.weight), Stored("b", layer.bias), pick(ledger, x, lambda t: t.mT)
    result = pick(ledger, convolution(ledger, turned, weight, bias, stride, 2, dilation, groups), lambda t: t.mT)
    matrix = _operator(lambda t: F.conv1d(t.mT, layer.weight.double(), None, stride, 2, dilation, groups).mT, (6, 4))
    exact = max(largest_gain_of_matrix(matrix[rows], groups_of((6, 4), (1,))) for rows in groups_of(result.shape, (2,)))
    proved = float(max(ledger.bounds(result, [-1]).gain.flat))
    assert exact * (1 - 1e-9) <= proved < 2 * exact


@pytest.mark.parametrize("transposed", [False, True])
def test_bias_in_the_radius(transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(2, 3, 2, stride=1, bias=True).requires_grad_(False)
    layer.bias.fill_(5.0)
    attack(layer, torch.randn(1, 2, 3, 3), steps=5, restarts=1)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_kernel_that_depends_on_the_input_is_refused(transposed):
    function = F.conv_transpose1d if transposed else F.conv1d
    model = Net(lambda s, x: function(x, x.sum(0, keepdim=True)[..., :2]))
    with pytest.raises(UncertifiableError, match="kernel"):
        bounds_of(model, torch.randn(1, 1, 4))
