"""The walk: rules, refusals, what enters the bound."""

import math
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from wellnormed.certificates import UncertifiableError, certify, lower_bound
from wellnormed.models import GPT, GPTConfig
from wellnormed.nn import (
    BallProjection,
    CappedEmbedding,
    ConvexPotential,
    ConvexResidual,
    PositionMix,
    PositionMixing,
    Scale,
    ScaledGELU,
)


class Calls(nn.Module):
    """A model made of one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def random_weights(model: nn.Module, seed: int, size: float = 0.3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = size * torch.randn(parameter.shape, generator=generator)
    return model.eval()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 6),
    "scaled_gelu": lambda: nn.Sequential(nn.Linear(4, 4), ScaledGELU(3.0)),
    "ball": lambda: nn.Sequential(nn.Linear(4, 4), BallProjection(0.2), nn.Linear(4, 3)),
    "residual": lambda: ConvexResidual(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), 0.25),
    "position": lambda: PositionMix(16, 4, 0.3),
    "potential": lambda: nn.Sequential(ConvexPotential(4, 7), ConvexPotential(4, 3), nn.Linear(4, 3)),
    "mixing": lambda: nn.Sequential(PositionMixing(16, 4, 3), nn.Linear(12, 3)),
    "layer_norm": lambda: nn.Sequential(nn.LayerNorm(4, eps=0.1), nn.Linear(4, 2)),
    "rms_norm": lambda: nn.Sequential(nn.RMSNorm(4, eps=0.1), nn.Linear(4, 2)),
    "activations": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.Tanh(), nn.GELU("tanh")
    ),
    "functions": lambda: nn.Sequential(nn.Linear(4, 4), Calls(lambda x: F.gelu(x) * 3 - x / 2 + 1 - F.relu(-x))),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [0.3, 2.0])
def test_no_gain_and_no_activation_exceeds_the_bound(name: str, size: float) -> None:
    model = random_weights(LAYERS[name](), seed=1, size=size)
    certificate = certify(model, torch.randn(2, 5, 4), radius=1.5)
    found = lower_bound(model, radius=1.5, steps=40, width=4, length=4, generator=torch.Generator().manual_seed(2))
    assert 0 < found.value <= certificate.lipschitz
    output = model.double()(found.x_TD[None])
    assert output.square().mean(-1).sqrt().max() <= float(max(certificate.layers[-1].radius))


@pytest.mark.parametrize(("width", "outputs"), [(3, 7), (7, 3), (5, 5)])
def test_the_bound_of_a_matrix_is_attained(width: int, outputs: int) -> None:
    layer = random_weights(nn.Linear(width, outputs), seed=0)
    bound = certify(layer).lipschitz
    exact = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) * math.sqrt(width / outputs)
    assert exact <= bound <= exact * (1 + 1e-7)
    found = lower_bound(layer, steps=60, generator=torch.Generator().manual_seed(0))
    assert found.value == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(
    ("activation", "published"), [(nn.GELU(), 1.1289), (nn.GELU("tanh"), 1.1289), (nn.SiLU(), 1.0998)]
)
def test_slopes_are_attained_and_rounded_up(activation: nn.Module, published: float) -> None:
    z = torch.linspace(-6, 6, 2_000_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(activation(z).sum(), z)
    bound = certify(activation).lipschitz
    assert published < float(slope.abs().max()) <= bound < float(slope.abs().max()) + 1e-9
    assert bool((activation(z).abs() <= z.abs()).all())


def test_layer_norm_has_the_constant_of_its_floor_never_one() -> None:
    assert certify(nn.LayerNorm(4)).lipschitz == pytest.approx(1e5**0.5)
    assert certify(nn.RMSNorm(4, eps=1e-5)).lipschitz == pytest.approx(1e5**0.5)


@settings(max_examples=6)
@given(
    heads=st.sampled_from([1, 2, 4]),
    blocks=st.integers(1, 2),
    stream=st.sampled_from([None, 1.0]),
    ball=st.sampled_from([None, 0.5]),
    bias=st.booleans(),
    rotary=st.booleans(),
    size=st.sampled_from([0.1, 0.5]),
    seed=st.integers(0, 99),
)
def test_random_transformers(
    heads: int, blocks: int, stream: float | None, ball: float | None, bias: bool, rotary: bool, size: float, seed: int
) -> None:
    config = GPTConfig(
        vocabulary_size=7, length=8, width=8, heads=heads, blocks=blocks, stream_radius=stream,
        query_radius=ball, key_radius=ball, value_radius=ball, relative_bias=bias, biases=bias, rotary=rotary,
    )  # fmt: skip
    model = random_weights(GPT(config), seed, size)
    certificate = certify(model, torch.arange(6)[None], radius=2.0)
    found = lower_bound(model, radius=2.0, steps=25, generator=torch.Generator().manual_seed(seed))
    assert 0 < found.value <= certificate.lipschitz
    assert certificate.with_lower_bound(found.value).lower_bound == found.value


def test_what_cannot_be_bounded_is_refused_with_its_name_and_line() -> None:
    with pytest.raises(UncertifiableError, match=r"`softmax`.*test_certify.py:\d+ `return torch.softmax\(x, -1\)`"):
        certify(nn.Sequential(nn.Linear(4, 4), _Softmax()))


class _Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


class _Subclass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        z = y
        z += y
        return y + z


class _Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else 2 * x


class _Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class _TwoEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = CappedEmbedding(3, 4), CappedEmbedding(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def _overridden() -> nn.Module:
    model = nn.Linear(4, 4)
    model.forward = lambda x: 2 * x
    return model


def _not_finite() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.data[0, 0] = math.nan
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (_hooked, "hook"),
    "forward of the instance": (_overridden, "forward"),
    "parametrization": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "parametrized"),
    "subclass": (lambda: _Subclass(4, 4), "linear"),
    "dropout in training": (lambda: nn.Sequential(nn.Dropout(0.1)).train(), r"eval\(\)"),
    "batch norm": (lambda: nn.BatchNorm1d(4).eval(), "batch"),
    "in place operator": (_InPlace, "iadd"),
    "in place activation": (lambda: nn.ReLU(inplace=True), "inplace=False"),
    "in place method": (lambda: Calls(lambda x: x.relu_()), "relu_"),
    "control flow": (_Branch, "control flow"),
    "tensor outside the state dict": (_Unregistered, "state dict"),
    "random constant": (lambda: Calls(lambda x: x + torch.randn(4)), "state dict"),
    "two embeddings": (_TwoEmbeddings, "one embedding"),
    "product of two values": (lambda: Calls(lambda x: x * x), "both factors"),
    "no floor": (lambda: nn.RMSNorm(4), "eps"),
    "two outputs": (lambda: Calls(lambda x: (x, x)), "one tensor"),
    "not finite": (_not_finite, "finite"),
    "keyword outside the rule": (lambda: Calls(lambda x: torch.add(x, x, alpha=3)), "alpha"),
    "unknown module": (lambda: nn.Conv1d(4, 4, 1), "conv1d"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(UncertifiableError, match=reason):
        certify(build())


def test_control_flow_that_tracing_cannot_see_is_found_by_the_example() -> None:
    seen = []

    def changes(x: Tensor) -> Tensor:
        seen.append(x)
        return x * float(len(seen))

    with pytest.raises(UncertifiableError, match="example_input"):
        certify(Calls(changes), torch.ones(1, 2))


def test_radius_below_the_embedding_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(CappedEmbedding(3, 4))
    nn.init.constant_(model[0].weight, 2.0)
    with pytest.raises(ValueError, match=r"radius=1.0 is smaller .* 0.weight.* RMS 2.0.*pass radius=2.0"):
        certify(model)
    assert certify(model, radius=2.001).lipschitz == 1


def test_dropout_is_the_identity_in_evaluation_mode() -> None:
    assert certify(nn.Sequential(nn.Dropout(0.5)).eval()).lipschitz == 1


def test_constants_are_read_from_the_executed_layer() -> None:
    scale = Scale(3.0)
    scale.factor = -5.0
    assert certify(scale).lipschitz == 5


def test_a_lower_bound_above_the_certificate_is_an_alarm() -> None:
    with pytest.raises(ValueError, match="one is wrong"):
        certify(nn.Identity()).with_lower_bound(1.1)


def test_certificates_print_their_rows() -> None:
    text = str(certify(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert "Lipschitz bound" in text
    assert "relu" in text
    assert operator.contains(text, "domain")
