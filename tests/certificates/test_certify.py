"""`certify` on layers and transformers: never below what a search finds, attained where it can be, and refusals."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellnormed as wn
from wellnormed.certificates import Arithmetic, Certificate, certify, lower_bound, verify
from wellnormed.certificates.sizes import largest_rms
from wellnormed.models import GPT, GPTConfig
from wellnormed.models.gpt import FeedForward
from wellnormed.nn import (
    BallProjection,
    CappedEmbedding,
    ConvexPotential,
    ConvexResidual,
    PositionAverages,
    PositionEmbedding,
    Scale,
    ScaledGELU,
)

from .adversary import Net, random_weights

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "ball": lambda: nn.Sequential(nn.Linear(4, 4), BallProjection(0.2), ScaledGELU(3.0), nn.Linear(4, 3)),
    "residual": lambda: ConvexResidual(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), 0.25),
    "potential": lambda: nn.Sequential(ConvexPotential(4, 7), ConvexPotential(4, 3), nn.Linear(4, 3)),
    "positions": lambda: nn.Sequential(PositionEmbedding(16, 4, 0.3), PositionAverages(16, 4, 3), nn.Linear(12, 3)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4, eps=0.1), nn.Linear(4, 2), nn.RMSNorm(2, eps=0.1)),
    "activations": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.Tanh(), nn.GELU("tanh")
    ),
    "product": lambda: nn.Sequential(nn.Linear(4, 4), Net(lambda _, x: torch.add(x, x * x, alpha=3) - x / 2 + 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_gain_and_no_activation_exceeds_the_bound(name: str) -> None:
    model, example = random_weights(LAYERS[name](), 1.0), torch.zeros(4, 4)
    example = example[None] if name == "positions" else example
    certificate = certify(model, example, radius=1.5)
    found = lower_bound(certificate.program, radius=1.5, steps=6, generator=torch.Generator().manual_seed(2))
    assert 0 < found.value <= certificate.lipschitz
    output = model.double()(*found.inputs.values())
    assert output.square().mean(-1).sqrt().max() <= float(largest_rms(certificate.rows[-1], "radius"))


@pytest.mark.parametrize(("width", "outputs"), [(3, 7), (7, 3)])
def test_the_bound_of_a_matrix_is_attained(width: int, outputs: int) -> None:
    layer = random_weights(nn.Linear(width, outputs), 0.3)
    certificate = certify(layer, torch.zeros(width))
    norm = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    exact = norm * math.sqrt(width / outputs)
    assert exact <= certificate.rms_lipschitz <= exact * (1 + 1e-7)
    assert norm <= certificate.lipschitz <= norm * (1 + 1e-7)
    found = lower_bound(layer, torch.zeros(width), steps=40, generator=torch.Generator().manual_seed(0))
    assert (found.value, found.rms_value) == (pytest.approx(norm, rel=1e-4), pytest.approx(exact, rel=1e-4))
    certificate = certificate.with_lower_bound(found.value)
    assert certificate.rms_lower_bound == pytest.approx(found.rms_value, rel=1e-12)


def test_a_feed_forward_layer_attains_its_constant_which_is_above_the_published_one() -> None:
    """The published constant divides both norms by 1.1289, although the activation is divided by its slope already."""
    layer = FeedForward(GPTConfig(width=4, expansion=1, biases=False))
    with torch.no_grad():
        layer.input.weight.copy_(2 * torch.eye(4))  # norms 2 and 3
        layer.output.weight.copy_(3 * torch.eye(4))
    certificate = certify(layer, torch.zeros(1, 4), radius=1.0)
    found = lower_bound(layer, torch.zeros(1, 4), radius=1.0, generator=torch.Generator().manual_seed(0))
    assert 2 * 3 / 1.1289 < 5.99 < found.value <= certificate.lipschitz <= 2 * 3 * (1 + 1e-7)


def test_norms_have_the_constant_of_their_floor_never_one() -> None:
    assert certify(nn.LayerNorm(4), torch.zeros(4)).lipschitz == pytest.approx(1e5**0.5)
    floor = torch.finfo(torch.float32).eps  # what torch takes for eps=None
    assert certify(nn.RMSNorm(4), torch.zeros(4)).lipschitz == pytest.approx(floor**-0.5)


@pytest.mark.parametrize(
    ("heads", "settings"),
    [
        (1, {"blocks": 1, "stream_radius": None}),
        (2, {"blocks": 1, "relative_bias": False, "biases": False, "rotary": True}),
        (2, {"blocks": 2, "stream_radius": None, "relative_bias": False, "rotary": True, "residual": "plain"}),
    ],
)
def test_random_transformers(heads: int, settings: dict[str, Any]) -> None:
    config = GPTConfig(vocabulary_size=7, length=8, width=8, heads=heads, **settings)
    model = random_weights(GPT(config))
    certificate = certify(model, torch.arange(6)[None], radius=2.0)
    found = lower_bound(certificate.program, radius=2.0, steps=4, generator=torch.Generator().manual_seed(0))
    assert 0 < found.value <= certificate.lipschitz
    assert certificate.with_lower_bound(found.value).lower_bound == found.value
    assert certificate.each_sample
    assert max(map(len, certificate.attention_logits.values())) == heads


@dataclass
class Results:
    a: Any
    b: Any = None


OTHER = torch.ones(1)


def returning(kind: Callable[..., Any], beside: object = OTHER) -> nn.Module:
    """It returns its input beside something else."""
    return Net(lambda _, x: kind(a=x, b=beside))


@pytest.mark.parametrize("beside", [None, (), 0.5, object()])  # a language model returns a cache, an opaque object
def test_the_only_tensor_is_the_result(beside: object) -> None:
    for kind in (dict, Results, lambda a, b: (a, b), lambda a, b: [{"x": (a,)}, b]):
        assert certify(returning(kind, beside), torch.zeros(1, 2)).lipschitz == pytest.approx(1)


BROKEN = nn.Linear(2, 2)
nn.init.constant_(BROKEN.weight, math.nan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: certify(nn.Linear(2, 2), torch.full((1, 2), math.nan)), "example_input has entries .* not finite"),
        (lambda: lower_bound(BROKEN, torch.zeros(1, 2)), "gives NaN: weight has entries that are not finite"),
        *(
            (lambda a=a: certify(nn.Linear(2, 2), torch.zeros(1, 2), arithmetic=a), f"{name} of Arithmetic")
            for a, name in (
                *((Arithmetic(lanes=n), "lanes") for n in (0, -4, "8", 2.5, True)),
                (Arithmetic(products="fp16"), "products"),
            )
        ),
        (lambda: certify(nn.Identity(), torch.zeros(1, 2), output="T"), "output='T' is nothing .*; leave output= out"),
        (lambda: certify(returning(lambda a, b: torch.linalg.inv(a)), torch.eye(2)), "linalg_inv.default. has no"),
        (lambda: certify(nn.Identity(), torch.zeros(4, 2), output=1), "output=1 is nothing .*; leave output= out"),
        (lambda: certify(returning(dict), torch.zeros(4, 2)), r"dict of 'a' \(Tensor\), 'b' \(Tensor\); pass .*'a'"),
        (lambda: certify(returning(Results), torch.zeros(4, 2)), "Results of 'a' .*, 'b' .*; pass output='a', or"),
        (lambda: certify(returning(Results), torch.zeros(4, 2), output="c"), "output='c' is nothing .* 'c'"),
    ],
)
def test_wrong_arguments_are_said(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_domain_of_an_embedding_contains_its_table() -> None:
    model, tokens = nn.Sequential(CappedEmbedding(3, 4)), torch.zeros(1, 2, dtype=torch.long)
    nn.init.constant_(model[0].weight, 2.0)
    assert 2 <= float(certify(model, tokens).input_domain) < 2 + 1e-12
    constraints = wn.constrain(wn.Scion(model, lr=0.1), {"*": wn.ColumnCap(2.0)})
    assert certify(model, tokens, within=constraints, radius=2.0).lipschitz == pytest.approx(1, rel=1e-12)
    certificate = certify(model, tokens, radius=2.25)
    assert certificate.lipschitz == pytest.approx(1, rel=1e-12)
    assert "each sample of any batch: all float32 `0.embedding` of shape (1, 2, 4) with" in certificate.domain
    assert "with tokens of RMS <= 2.25" in certificate.domain
    assert "the rows of `0.weight` among them" in certificate.domain


@cache
def scaled() -> Certificate:
    """Dropout and a layer whose constant was changed after it was made."""
    scale = Scale(3.0)
    scale.factor = -5.0
    return certify(nn.Sequential(nn.Dropout(0.5), scale, nn.ReLU()).eval(), torch.zeros(4))


def test_constants_are_read_from_what_is_executed() -> None:
    assert scaled().lipschitz == pytest.approx(5, rel=1e-12)


def test_a_lower_bound_above_the_certificate_is_an_alarm() -> None:
    with pytest.raises(ValueError, match="one is wrong"):
        scaled().with_lower_bound(5.1)
    with pytest.raises(ValueError, match="value=LowerBound"):
        scaled().with_lower_bound(lower_bound(nn.Identity(), torch.zeros(1, 2), steps=1))  # type: ignore


def test_certificates_print_their_rows() -> None:
    text = str(scaled())
    assert all(word in text for word in ("Lipschitz bound 5", "2.relu", "domain", "vectors of RMS <= 1.0"))


def test_an_operation_of_ones_own() -> None:
    """Registered with `certificates.operation`, it is bounded and proved as any other."""

    @torch.library.custom_op("tests::shrink", mutates_args=())
    def shrink(x: Tensor) -> Tensor:
        return x.sign() * (x.abs() - 1).clamp(min=0)

    shrink.register_fake(torch.empty_like)

    @wn.certificates.operation("tests.shrink.default")
    def bound_shrink(ledger, x):
        return ledger.derive("contraction", [(x, wn.certificates.inner_axes(x))], shape=x.shape)

    certificate = certify(Net(lambda _, x: shrink(3 * x)), torch.zeros(4))
    assert certificate.lipschitz == pytest.approx(3, rel=1e-12)
    assert wn.verify(certificate, {}).rows == 4


def test_a_default_device_does_not_matter():
    """As `torch.set_default_device("cuda")`; here the device without values, where any use would fail."""
    model, example = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(3, 4)
    certificate = certify(model, example)
    with torch.device("meta"):
        assert certify(model, example).lipschitz == certificate.lipschitz
        verify(certificate, model.state_dict())


def test_a_model_elsewhere_is_refused_with_a_remedy_that_works(monkeypatch):
    model, example = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    constraints = wn.constrain(wn.Scion(model, lr=0.01), {"*": wn.HardCap(1.0)})
    with monkeypatch.context() as patched:
        elsewhere = SimpleNamespace(device=torch.device("cuda:0"), is_inference=lambda: False)
        patched.setattr(model, "named_parameters", lambda: [("weight", elsewhere)])
        with pytest.raises(ValueError, match=r"'weight' lies on cuda:0, .*; pass copy\.deepcopy\(model\)\.cpu\(\), "):
            certify(model, example)
        remedy = r"pass model\.cpu\(\) and within=constraints of .* = copy\.deepcopy\(\(model, constraints\)\), "
        with pytest.raises(ValueError, match=remedy):
            certify(model, example, within=constraints)
    copied, promises = copy.deepcopy((model, constraints))
    assert certify(copied.cpu(), example, within=promises).lipschitz == pytest.approx(1)
