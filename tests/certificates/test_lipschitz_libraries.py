"""Models of deel-torchlip and of orthogonium, made by their packages: certified at the product of their layers' norms.

`make test-models` installs both packages; without them the tests are skipped.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import wellnormed as wn


def _of_deel():
    lip = pytest.importorskip("deel.torchlip", reason="needs deel-torchlip, which the extra `models` installs")
    return lip, (1, 3, 8, 8)


def _images_of_deel():
    """The library's own example of a convolutional classifier, on small images."""
    lip, shape = _of_deel()
    return lip.Sequential(
        lip.SpectralConv2d(3, 8, (3, 3), padding=1, padding_mode="circular"), lip.GroupSort2(),
        lip.ScaledL2NormPool2d((2, 2)), lip.SpectralConv2d(8, 16, (3, 3), padding=1, padding_mode="circular"),
        lip.GroupSort2(), lip.ScaledL2NormPool2d((2, 2)), nn.Flatten(), lip.SpectralLinear(64, 32), lip.GroupSort2(),
        lip.FrobeniusLinear(32, 10),
    ), shape  # fmt: skip


def _centred_images_of_deel():
    """Its other layers: centring, averages, MaxMin, sorting by space and by channels."""
    lip, shape = _of_deel()
    return lip.Sequential(
        lip.SpectralConv2d(3, 8, (3, 3), padding=1, padding_mode="circular"), lip.LayerCentering(8), lip.GroupSort(4),
        lip.InvertibleDownSampling(2), lip.SpectralConv2d(32, 16, (1, 1)), lip.FullSort(), lip.ScaledAvgPool2d((2, 2)),
        lip.MaxMin(), lip.ScaledAdaptiveAvgPool2d((1, 1)), nn.Flatten(), lip.SpectralLinear(32, 16), lip.LPReLU(),
        lip.FrobeniusLinear(16, 1),
    ), shape  # fmt: skip


def _vectors_of_deel():
    lip, _ = _of_deel()
    layers = [lip.SpectralLinear(12, 32), lip.FullSort(), lip.SpectralLinear(32, 16), lip.GroupSort2()]
    return lip.Sequential(*layers, lip.SpectralLinear(16, 16), lip.MaxMin(), lip.FrobeniusLinear(32, 1)), (1, 12)


def _folded(model):
    """Orthogonium's parametrizations move their own state when they are read: the weights as they are now."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return model


def _patches_of_orthogonium():
    """A model of its factory."""
    pytest.importorskip("orthogonium", reason="needs orthogonium, which the extra `models` installs")
    from orthogonium.model_factory.models_factory import PatchBasedCNN

    return _folded(PatchBasedCNN(img_shape=(3, 8, 8), dim=8, depth=3, norm=None)), (1, 3, 8, 8)


def _residuals_of_orthogonium():
    """A stem, one residual block and a head, as its factory's residual models have them."""
    pytest.importorskip("orthogonium", reason="needs orthogonium, which the extra `models` installs")
    from orthogonium import layers
    from orthogonium.layers.residual import PrescaledAdditiveResidual

    def conv(inputs, outputs):
        return layers.AdaptiveOrthoConv2d(inputs, outputs, kernel_size=3, padding="same", padding_mode="circular")

    block = nn.Sequential(conv(8, 8), layers.BatchCentering2D(8), layers.MaxMin(), conv(8, 8))
    head = [nn.Flatten(), layers.OrthoLinear(512, 32), layers.MaxMin(axis=-1), layers.OrthoLinear(32, 10)]
    stem = [conv(3, 8), layers.MaxMin(), PrescaledAdditiveResidual(block), layers.LayerCentering2D(8)]
    return _folded(nn.Sequential(*stem, *head)), (1, 3, 8, 8)


MODELS = [
    _images_of_deel, _centred_images_of_deel, _vectors_of_deel, _patches_of_orthogonium, _residuals_of_orthogonium,
]  # fmt: skip


def _true_norm(layer, x):
    """The largest singular value of an affine layer on inputs of that shape, from its matrix in float64."""
    unit = torch.eye(x[0].numel(), dtype=torch.float64).reshape(-1, *x.shape[1:])
    return float(torch.linalg.matrix_norm((layer(unit) - layer(torch.zeros_like(unit[:1]))).flatten(1), 2))


def product_of_norms(model, x):
    """The product of the constants of a sequence of layers, and its result.

    Sorting, pooling by Euclidean norms and flattening have 1; a residual `x / (1 + |a|) + f(a x) / (1 + |a|)` has
    `(1 + |a| L) / (1 + |a|)`; whatever is affine has the norm of its matrix.
    """
    product = 1.0
    for layer in model:
        name = type(layer).__name__
        if name == "PrescaledAdditiveResidual":
            size = float(layer.alpha.abs())
            product *= (1 + size * product_of_norms(layer.fn, x)[0]) / (1 + size)
        elif name == "Sequential":
            product *= product_of_norms(layer, x)[0]
        elif name not in ("GroupSort", "GroupSort2", "FullSort", "MaxMin", "LPReLU", "ScaledL2NormPool2d", "LPPool2d"):
            product *= _true_norm(layer, x)
        x = layer(x)
    return product, x


@pytest.mark.filterwarnings("default")  # the libraries' own warnings are not ours to fix
@pytest.mark.parametrize("make", MODELS)
def test_the_certificate_is_within_one_per_cent_of_the_product_of_the_true_norms(make):
    torch.manual_seed(0)
    model, shape = make()
    with torch.no_grad():
        model.train()(torch.randn(4, *shape[1:]))  # their power iterations
    model = model.eval().requires_grad_(False)
    certificate = wn.certify(model, torch.zeros(shape), radius=math.inf)
    product = product_of_norms(model.double(), torch.zeros(shape, dtype=torch.float64))[0]
    print(f"{make.__name__}: certified {certificate.lipschitz:.6f}, product of the layers' norms {product:.6f}")
    assert product * (1 - 1e-6) <= certificate.lipschitz <= 1.01 * product  # float32 weights, recomputed in float64
