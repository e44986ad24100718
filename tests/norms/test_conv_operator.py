"""The operator norm of a convolution against the dense matrix made of its action on every pixel."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import wellnormed as wn
from wellnormed.norms import ConvOperator, SpectralConv

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1-D": (nn.Conv1d(2, 3, 3), (7,)),
    "1-D, same": (nn.Conv1d(2, 3, 4, padding="same"), (7,)),
    "1-D, circular": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (7,)),
    "1-D, circular, same, even kernel": (nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"), (7,)),
    "1-D, circular, stride that divides": (
        nn.Conv1d(2, 3, 3, stride=2, padding=1, padding_mode="circular"),
        (8,),
    ),
    "1-D, circular, stride that does not": (
        nn.Conv1d(2, 3, 3, stride=2, padding=1, padding_mode="circular"),
        (7,),
    ),
    "1-D, stride above the kernel": (nn.Conv1d(2, 3, 2, stride=4), (9,)),
    "1-D, much padding": (nn.Conv1d(2, 3, 3, padding=5), (4,)),
    "1-D, one pixel": (nn.Conv1d(2, 3, 3, padding=1), (1,)),
    "2-D, valid": (nn.Conv2d(2, 3, 3, padding="valid"), (5, 4)),
    "2-D, padded": (nn.Conv2d(3, 2, 3, padding=1), (5, 4)),
    "2-D, one channel": (nn.Conv2d(1, 1, 3, padding=1), (5, 6)),
    "2-D, strided": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (6, 5)),
    "2-D, strides of two kinds": (nn.Conv2d(2, 3, (3, 1), stride=(1, 3), padding=(1, 0)), (5, 7)),
    "2-D, dilated": (nn.Conv2d(2, 2, 2, dilation=(2, 3)), (5, 6)),
    "2-D, dilated, strided": (nn.Conv2d(2, 2, 2, stride=2, dilation=3, padding=1), (5, 6)),
    "2-D, groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 4)),
    "2-D, depthwise": (nn.Conv2d(3, 3, 3, padding=1, groups=3, stride=2), (5, 5)),
    "2-D, circular, dilated": (nn.Conv2d(2, 2, 3, padding=2, dilation=2, padding_mode="circular"), (5, 6)),
    "2-D, circular, kernel over all": (nn.Conv2d(2, 2, 5, padding=2, padding_mode="circular"), (3, 4)),
    "2-D, 1x1, strided": (nn.Conv2d(3, 2, 1, stride=2), (4, 4)),
    "2-D, patches": (nn.Conv2d(2, 5, 2, stride=2), (4, 6)),
    "3-D": (nn.Conv3d(1, 2, 2, padding=1), (2, 3, 2)),
    "transposed 1-D": (nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1, output_padding=1), (4,)),
    "transposed 2-D, groups": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (3, 2)),
    "transposed 2-D, dilated": (nn.ConvTranspose2d(2, 3, 2, dilation=2, padding=1), (4, 3)),
}
every_layer = pytest.mark.parametrize(("layer", "size"), LAYERS.values(), ids=LAYERS.keys())
EXACT = (  # no pixel is lost on the torus: the bound is the norm
    "1-D, circular",
    "1-D, circular, same, even kernel",
    "1-D, circular, stride that divides",
    "2-D, circular, dilated",
    "2-D, circular, kernel over all",
    "2-D, 1x1, strided",
)


def dense_norm(layer: nn.Module, size: tuple[int, ...]) -> float:
    layer = layer.double()
    shape = (layer.in_channels, *size)
    with torch.no_grad():
        zero = layer(torch.zeros(1, *shape, dtype=torch.float64))  # the bias
        outputs = layer(torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)) - zero
    return float(torch.linalg.matrix_norm(outputs.flatten(1), 2))


def kernel(layer: nn.Module, seed: int = 0) -> Tensor:
    weight = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    layer.double().weight.data.copy_(weight)
    return weight


@every_layer
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_norm_and_bound_against_the_dense_matrix(layer, size, request):
    weight = kernel(layer)
    norm = ConvOperator.of(layer, size)
    truth, measured, bound = dense_norm(layer, size), float(norm.norm(weight)), float(norm.upper_bound(weight))
    assert measured == pytest.approx(truth, rel=1e-10)  # every operator here has fewer dimensions than Lanczos steps
    assert truth * (1 - 1e-13) <= bound
    assert bound <= truth * (
        1 + 1e-8 if request.node.callspec.id in EXACT else 2.1
    )  # at worst one pixel that sees one tap


@given(
    n=st.integers(1, 8),
    k=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 4),
    dilation=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_the_bound_holds_for_any_geometry(n, k, stride, padding, dilation, seed):
    assume(n + 2 * padding > dilation * (k - 1))
    layer = nn.Conv1d(2, 2, k, stride, padding, dilation)
    weight = kernel(layer, seed)
    norm = ConvOperator.of(layer, (n,))
    truth = dense_norm(layer, (n,))
    assert truth * (1 - 1e-13) <= float(norm.upper_bound(weight))
    assert float(norm.norm(weight)) == pytest.approx(truth, rel=1e-10)


@every_layer
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(layer, size, scale):
    weight = kernel(layer)
    norm = ConvOperator.of(layer, size)
    assert float(norm.norm(weight * scale)) == pytest.approx(float(norm.norm(weight)) * scale, rel=1e-9)
    assert float(norm.upper_bound(weight * scale)) == pytest.approx(float(norm.upper_bound(weight)) * scale, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_stays_above_the_norm_in_narrow_dtypes(dtype):
    for seed in range(5):
        weight = kernel(LAYERS["1-D, circular"][0], seed).to(dtype)
        norm = ConvOperator((7,), padding=1, padding_mode="circular")
        assert norm.norm(weight).dtype == dtype
        assert float(norm.norm(weight)) <= float(norm.upper_bound(weight))


def test_the_bound_is_tight_on_large_images():
    weight = kernel(LAYERS["1-D, same"][0])
    ratios = [
        float(n.upper_bound(weight) / n.norm(weight)) for n in (ConvOperator((s,), padding="same") for s in (4, 45))
    ]
    assert ratios[1] < ratios[0]
    assert ratios[1] < 1.01


def test_folded_frequencies_tighten_a_strided_bound():
    """A kernel as wide as its stride cuts the image into patches: the norm is that of the kernel as a matrix."""
    layer, size = LAYERS["2-D, patches"]
    weight = kernel(layer)
    flat = float(torch.linalg.matrix_norm(weight.flatten(1), 2))
    assert dense_norm(layer, size) == pytest.approx(flat)
    assert float(ConvOperator.of(layer, size).upper_bound(weight)) < flat * 1.3
    assert float(ConvOperator(size).upper_bound(weight)) > flat * 1.3  # without the stride


def test_many_pixels_are_measured_from_below():
    norm = ConvOperator((24, 24), padding=1)
    weight = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    assert 0.98 < float(norm.norm(weight) / norm.upper_bound(weight)) <= 1


@given(seed=st.integers(0, 2**20), mode=st.sampled_from(["positions", "patches"]), groups=st.sampled_from([1, 2]))
def test_the_norms_with_an_oracle_bound_the_operator(seed, mode, groups):
    weight = torch.randn(6, 4 // groups, 3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    operator = ConvOperator((4, 3), padding=1, groups=groups)
    bounding = SpectralConv(mode=mode, groups=groups)
    assert float(operator.norm(weight)) * math.sqrt(4 / 6) <= float(bounding.upper_bound(weight))
    assert float(SpectralConv(groups=groups).norm(weight)) <= float(bounding.norm(weight)) * (1 + 1e-12)


@given(seed=st.integers(0, 2**20))
def test_the_norm_by_positions_bounds_the_largest_rms_of_a_pixel(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2, 3, 3, generator=generator, dtype=torch.float64)
    image = torch.randn(1, 2, 6, 6, generator=generator, dtype=torch.float64)
    image /= image.square().mean(1, keepdim=True).sqrt().amax()
    pixels = nn.functional.conv2d(image, weight, padding=1, stride=2).square().mean(1).sqrt()
    assert float(pixels.amax()) <= float(SpectralConv().upper_bound(weight))


def test_a_batch_and_a_start():
    norm = ConvOperator((5,), padding=1)
    batch = torch.randn(2, 3, 4, 2, 3, generator=torch.Generator().manual_seed(0))
    for function in (norm.norm, norm.upper_bound):
        alone = torch.stack([function(w) for w in batch.flatten(0, 1)])
        torch.testing.assert_close(function(batch), alone.reshape(2, 3))
    weight = norm.initialize_(nn.Parameter(torch.empty(4, 2, 3)), torch.Generator().manual_seed(0))
    assert float(norm.norm(weight)) == pytest.approx(1, rel=1e-5)
    assert norm.upper_bound(torch.zeros(4, 2, 3)) == norm.norm(torch.zeros(4, 2, 3)) == 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ConvOperator((4,)).dualize(torch.ones(1, 1, 3)), "has no dualize.*SpectralConv"),
        (lambda: ConvOperator((4,)).dual_norm(torch.ones(1, 1, 3)), "has no dual_norm.*SpectralConv"),
        (lambda: ConvOperator(()), "input_size"),
        (lambda: ConvOperator((4,), stride=0), "stride=0 must be 1 or more"),
        (lambda: ConvOperator((4, 4), padding=(1,)), "one for each of the 2"),
        (lambda: ConvOperator((4,), padding_mode="reflect"), "'zeros' or 'circular'"),
        (lambda: ConvOperator((4,)).norm(torch.ones(1, 1, 5)), "reaches over 5 pixels"),
        (lambda: ConvOperator((4,), groups=2).upper_bound(torch.ones(3, 1, 2)), "groups=2 does not divide"),
        (lambda: ConvOperator((4,)).norm(torch.full((1, 1, 2), float("nan"))), "NaN or infinity"),
        (lambda: ConvOperator((4,)).upper_bound(torch.full((1, 1, 2), float("inf"))), "NaN or infinity"),
        (
            lambda: ConvOperator((4,), padding=2, padding_mode="circular").norm(torch.ones(1, 1, 3)),
            "repeats outputs",
        ),
        (lambda: ConvOperator.of(nn.Linear(2, 2), (4,)), "no convolution"),
        (lambda: ConvOperator.of(nn.Conv1d(1, 1, 3, padding=1, padding_mode="reflect"), (4,)), "other paddings"),
        (
            lambda: wn.assign_norms(nn.Conv1d(1, 1, 3), overrides={"weight": ConvOperator((4,))}),
            "has no oracle to step by|no oracle",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()
