"""The convex potential of images: of constant 1 by its form, proved at an image's size, kept so by its constraint."""

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.nn import ConvexPotential2d, constraints_of


def _model(scale: float = 1.0) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(ConvexPotential2d(3, 8, 3, generator) for _ in range(2)))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(scale)
            layer.bias.abs_()
    return model


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_certificate_search_and_checker_agree(scale):
    model, images = _model(scale), torch.randn(1, 3, 6, 5)
    certificate = wn.certify(model, images)
    assert [row.operation for row in certificate.layers] == ["input", *["convex_potential"] * 2, "output"]
    found = wn.lower_bound(model, images, steps=20, generator=torch.Generator().manual_seed(0))
    assert 0.2 < found.value / certificate.lipschitz <= 1
    # square roots of sizes are rounded up in their 30th digit, and floats after that
    assert certificate.lipschitz <= 1 + 2**-52 if scale == 1 else certificate.lipschitz > 1.1
    wn.verify(certificate, model.state_dict())


def test_the_bound_of_one_layer_is_attained():
    layer = ConvexPotential2d(1, 1, 1)
    with torch.no_grad():
        layer.weight.fill_(1.5)
        layer.bias.fill_(100.0)  # every unit is active: x - 2 w^2 x
    assert wn.certify(layer, torch.randn(1, 1, 2, 2)).lipschitz == pytest.approx(2 * 1.5**2 - 1, rel=1e-8)


def test_steps_keep_the_constant():
    model, images = _model(), torch.randn(4, 3, 6, 5)
    optimizer = wn.Scion(model, lr=0.3)
    wn.constrain(optimizer, constraints_of(model))
    for _ in range(5):
        optimizer.zero_grad()
        (-model(images).square().mean()).backward()
        optimizer.step()
    assert wn.certify(model, images[:1]).lipschitz <= 1 + 2**-52


def test_other_settings_of_the_second_convolution_are_no_adjoint():
    class Crooked(ConvexPotential2d):
        def forward(self, x):
            hidden = torch.relu(nn.functional.conv2d(x, self.weight, self.bias, padding=2, dilation=2))
            return x - 2.0 * nn.functional.conv_transpose2d(hidden, self.weight, padding=1)

    with pytest.raises(wn.certificates.UncertifiableError, match="adjoint"):
        wn.certify(Crooked(3, 8), torch.randn(1, 3, 6, 5))


def test_an_even_window_is_refused():
    with pytest.raises(ValueError, match="kernel_size=2 must be odd"):
        ConvexPotential2d(3, 8, 2)
