"""The bound of attention against a joint gradient search over weights and inputs."""

import dataclasses
import math
from decimal import Decimal
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from wellnormed.certificates import Certificate, certify, lower_bound
from wellnormed.nn import BallProjection, CausalAttention, HeadProjection, MergeHeads, Rotary

from .adversary import Net
from .attention_search import Found, Layer, largest_gain


class Attention(nn.Module):
    def __init__(self, layer: Layer, weights_3DD: Tensor) -> None:
        super().__init__()
        radii = (layer.query_radius, layer.key_radius, layer.value_radius)
        self.projections = nn.ModuleList()
        for number, (weight, radius) in enumerate(zip(weights_3DD, radii, strict=True)):
            projection = HeadProjection(layer.width, layer.heads).double()
            projection.weight.data = weight.clone()
            ball = nn.Identity() if radius == math.inf else BallProjection(radius)
            turn = Rotary(layer.width // layer.heads) if layer.rotary and number < 2 else nn.Identity()
            self.projections.append(nn.Sequential(projection, ball, turn))
        self.attend = CausalAttention(layer.heads, layer.scale)
        self.merge = MergeHeads()

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (projection(x_BTD) for projection in self.projections)
        return self.merge(self.attend(q, k, v))


@cache
def found_with(layer: Layer, steps: int = 100) -> Found:
    return largest_gain(layer, tokens=4, steps=steps)


def certified(layer: Layer, found: Found) -> Certificate:
    example = torch.zeros(1, *found.x_TD.shape, dtype=torch.float64)
    return certify(Attention(layer, found.weights_3DD), example, layer.radius)


def as_published(query: float, key: float, value: float, tau: float, radius: float) -> float:
    """LT theorem D.1 with equations 20 to 23, from norms of whole matrices, times the block's factor 1/3."""
    functional = math.sqrt(tau) * max(1.0, value * radius * max(query * radius, key * radius))
    return functional * (query + key + value) / 3


def test_no_weights_and_inputs_exceed_the_certificate() -> None:
    layer = Layer(2, width=4)
    found = largest_gain(layer, tokens=3, steps=30)
    bound = certified(layer, found).lipschitz
    assert 0.3 * bound < found.gain <= bound


def test_the_published_formula_is_exceeded_and_the_certificate_is_not() -> None:
    layer = Layer(4, width=8, per_head=False)
    found = largest_gain(layer, tokens=5, steps=100, searches=2)
    assert found.gain / 3 > 2.6 * as_published(1, 1, 1, tau=1, radius=1)
    assert found.gain <= certified(layer, found).lipschitz


def test_one_head_comes_within_five_percent_of_the_theorem() -> None:
    layer = Layer(1, width=4)
    found = found_with(layer)
    bound = certified(layer, found).lipschitz
    theorem = 1 + math.sqrt(2)  # c (sqrt(1 + t^2) + t) at c = t = 1, what norms of 1 allow
    assert 0.99 * theorem < bound <= theorem * (1 + 1e-6)  # the found weights' own product is a little smaller
    assert 0.95 * bound < found.gain <= bound


BALLS = Layer(1, 2, key_cap=1.7, value_cap=1.7, key_radius=0.5, value_radius=0.5)


@pytest.mark.parametrize("heads", [1, 2])
def test_rotary_breaks_the_theorem_but_not_the_certificate(heads: int) -> None:
    layer = Layer(heads, width=4 * heads, rotary=True)
    found = found_with(layer, steps=200 if heads == 1 else 20)
    assert found.gain <= certified(layer, found).lipschitz <= 3 * (1 + 1e-6)  # the sum form at norms of 1
    if heads == 1:
        assert found.gain > 1.01 * (1 + math.sqrt(2))  # what it would be without: the test above


def test_inactive_projections_keep_the_theorem() -> None:
    inactive = dataclasses.replace(BALLS, key_radius=1.8, value_radius=1.8)
    found = found_with(inactive, steps=2)
    without = dataclasses.replace(BALLS, key_radius=math.inf, value_radius=math.inf)
    assert certified(inactive, found).lipschitz == certified(without, found).lipschitz


@pytest.mark.parametrize(
    "layer",
    [
        Layer(2, 8, query_cap=2.0, query_radius=0.7),
        Layer(2, 8, key_cap=3.0, key_radius=0.5, radius=0.5, scale=4.0),
        Layer(1, 4, query_cap=3.0, key_cap=3.0, value_cap=3.0, query_radius=1.0, key_radius=1.0, value_radius=1.0),
    ],
)
def test_projected_heads(layer: Layer) -> None:
    found = found_with(layer, steps=50)
    certificate = certified(layer, found)
    assert 0.5 * certificate.lipschitz < found.gain <= certificate.lipschitz


def test_bounds_beyond_floating_point() -> None:
    """Without projections the bound enters attention squared at every block and passes 10^400."""
    layer = Attention(Layer(1, 2), 3e40 * torch.eye(2, dtype=torch.float64).expand(3, 2, 2))
    certificate = certify(nn.Sequential(*[layer] * 3), torch.zeros(1, 1, 2, dtype=torch.float64))
    assert certificate.lipschitz == math.inf
    assert 400 < certificate.lipschitz.log10 < math.inf
    assert certificate.lipschitz.exact > Decimal("1e400")
    assert "e+" in str(certificate)


def of_patches(share: float, scale: float) -> nn.Module:
    """Patches of an image, each in a ball; the mean of all, and a share of the mean after attention."""

    def forward(self: nn.Module, images: Tensor) -> Tensor:
        tokens = BallProjection(0.25)(self.patches(images).flatten(2).mT)
        q, k, v = (project(tokens) for project in self.project)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        return (1 - share) * tokens.mean(1) + share * attended.mean(1)

    project = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
    model = Net(forward, patches=nn.Conv2d(1, 16, 4, stride=4, bias=False), project=project)
    for weight in model.parameters():
        nn.init.orthogonal_(weight.flatten(1))
    return model


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_tokens_of_an_image_have_radii_of_their_own(scale: float) -> None:
    """Each lies in a ball of radius 1, all of them in one of radius 4, where the logits would be 16 times as large."""
    torch.manual_seed(0)
    model, image = of_patches(0.5, scale=scale).double(), torch.rand(1, 1, 16, 16, dtype=torch.float64)
    certificate = certify(model, image, box=(0, 1))
    theorem = 0.5 + 0.5 * (math.sqrt(1 + scale**2) + scale)
    assert certificate.lipschitz is not None
    assert 0.01 * certificate.lipschitz < lower_bound(model, image, box=(0, 1)).value <= certificate.lipschitz
    assert certificate.lipschitz <= theorem * (1 + 1e-6)


def test_an_image_is_one_group_where_that_bound_is_lower() -> None:
    """The mean of 16 tokens moves by at most a quarter of what all move by together, and by what each moves by."""
    torch.manual_seed(0)
    model = of_patches(1e-3, scale=1.0).double()
    certificate = certify(model, torch.rand(1, 1, 16, 16, dtype=torch.float64), box=(0, 1))
    assert certificate.lipschitz is not None
    assert 0.25 <= certificate.lipschitz < 0.3
