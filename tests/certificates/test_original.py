"""A model and its original differ by no more than certified, and other changes than of weights are refused."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import wellnormed as wn
from tests.proof.models import Function, small
from wellnormed.certificates import Certificate, CheckError, require_same_model
from wellnormed.proof import check


def convex(self: Any, x: Tensor) -> Tensor:
    for layer in (self.first, self.second):
        x = x - 0.3 * (layer(x).relu() @ layer.weight)
    return x / self.divisor + x.mT.mean(-1)[..., None] * self.scale


def tied(self: Any, tokens: Tensor) -> Tensor:
    """A table that is also the last map, positions, and a learned bias of attention's logits."""
    x = self.table(tokens) + self.position.weight
    mixed = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], self.bias.tril() + self.hidden)
    return F.linear(mixed[:, 0], self.table.weight)


def model(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "convex":
        layers = {"first": nn.Linear(6, 12), "second": nn.Linear(6, 12)}
        return Function(convex, **layers, divisor=torch.rand(6) + 1, scale=torch.rand(6)), torch.randn(2, 6, 6)
    if name == "tied":
        layers = {"table": nn.Embedding(9, 8), "position": nn.Embedding(5, 8), "bias": torch.randn(5, 5)}
        module = Function(tied, **layers)
        module.register_buffer("hidden", torch.full((5, 5), -torch.inf).triu(1))
        return module, torch.randint(0, 9, (2, 5))
    module, x = small(name)
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.running_mean, each.running_var = torch.randn(each.num_features), torch.rand(each.num_features) + 0.5
    return module, x


def changed(module: nn.Module, size: float, relative: bool) -> nn.Module:
    """Other values of all parameters and statistics: scaled at random, or moved by a share of their size."""
    generator, module = torch.Generator().manual_seed(1), copy.deepcopy(module)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and bool(tensor.isfinite().all()):
                noise = size * torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor * (1 + noise) if relative else tensor + noise * tensor.square().mean().sqrt())
                tensor.copy_(tensor.abs() if bool((tensor > -4 * size).all()) else tensor)
    return module


def apart(a: nn.Module, b: nn.Module, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (a(x) - b(x)).double().square().sum(axes).max().sqrt()


def found(a: nn.Module, b: nn.Module, x: Tensor, certificate: Certificate, trials: int = 4, steps: int = 8) -> float:
    """The largest difference of two models that gradients find in the domain."""
    best, axes = 0.0, certificate.rows[-1].axes
    generator = torch.Generator().manual_seed(2)
    for _ in range(trials):
        if not x.is_floating_point():
            x = torch.randint(0, int(x.max()) + 1, x.shape, generator=generator)
            best = max(best, float(apart(a, b, x, axes).detach()))
            continue
        at = torch.randn(x.shape, generator=generator)
        for _ in range(steps):
            mean = at.square().mean(certificate.inputs[0].axes, keepdim=True)
            at = (at * mean.rsqrt() * (1 - 1e-6)).detach().requires_grad_()
            value = apart(a, b, at, axes)
            best = max(best, float(value.detach()))
            (gradient,) = torch.autograd.grad(value, at)
            at = at.detach() + gradient.nan_to_num() * at.norm() / (gradient.norm() + 1e-12)
    return best


LEAST = {
    "mlp": 0.2, "convex": 0.1, "moves": 0.3, "mixing": 0.2, "lstm": 0.03, "attention": 0.01,
    "convolution of tokens": 0.1, "transposed convolution": 0.1,
}  # fmt: skip
"""Name -> the least share of the certified change that is found."""
NAMES = (
    "mlp", "network", "convex", "tied", "attention", "attention with biases", "gpt", "rotary gpt", "potential gpt",
    "encoder", "lstm", "moves", "mixing", "convolutions", "transposed convolution", "convolution of tokens",
    "activations", "rounded",
)  # fmt: skip


@pytest.mark.parametrize(("name", "relative"), [*((name, i % 2 == 1) for i, name in enumerate(NAMES)), ("mlp", True)])
def test_models_differ_by_no_more_than_certified(name: str, relative: bool) -> None:
    original, x = model(name)
    original.eval()
    module = changed(original, 0.01, relative)
    certificate = wn.certify(module, x, original=original, arithmetic="real")
    assert certificate.change is not None, certificate.statement()
    share = found(module, original, x, certificate) / certificate.change
    print(f"{name} change {certificate.change:.3g} found {share:.3g}")
    assert LEAST.get(name, 1e-9) <= share <= 1
    executed = wn.certify(module, x, original=original)
    if executed.change is not None:
        assert certificate.change < executed.change
        assert executed.change >= executed.forward_error
    report = wn.verify(certificate, module.state_dict(), original.state_dict())
    assert report.change == certificate.change.exact
    if name in LEAST:
        plain = wn.certify(module, x, arithmetic="real")
        assert plain.lipschitz == certificate.lipschitz
        assert plain.change is None
        same = wn.certify(original, x, original=copy.deepcopy(original), arithmetic="real")
        assert same.change == 0


@pytest.mark.parametrize(("a", "b", "c", "d"), [(1, 1, 3, 3), (3, 3, 1, 1), (1, 2, -1, 2), (0, 1, 2, 0.5)])
def test_the_change_of_two_maps_is_taken_apart_once(a: float, b: float, c: float, d: float) -> None:
    """`d (c - a) + (d - b) a` is the difference of both products, in the ball of norm 2."""
    changed, original = (nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)) for _ in range(2))
    for module, factors in ((changed, (a, b)), (original, (c, d))):
        for layer, factor in zip(module, factors, strict=True):
            layer.weight = nn.Parameter(factor * torch.eye(4))
    certificate = wn.certify(changed, torch.zeros(1, 4), original=original, arithmetic="real")
    assert certificate.change == pytest.approx(2 * (abs(d) * abs(c - a) + abs(d - b) * abs(a)))


def net(slope: float = 0.1, eps: float = 0.5, wide: int = 5, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(4, wide, bias=bias)
    return nn.Sequential(first, nn.LeakyReLU(slope), nn.LayerNorm(wide, eps=eps), nn.Linear(wide, 3)).eval()


def attending(mask: Tensor) -> nn.Module:
    module = Function(lambda self, x: F.scaled_dot_product_attention(x, x, x, self.mask))
    module.register_buffer("mask", mask)
    return module


def picking(places: list[int]) -> nn.Module:
    module = Function(lambda self, x: x[:, self.places])
    module.register_buffer("places", torch.tensor(places))
    return module


NAN = net()
with torch.no_grad():
    NAN[0].weight[0, 0] = torch.nan
PLAIN = torch.zeros(2, 4)
REFUSED: list[tuple[str, nn.Module, Any, Tensor, str]] = [
    ("dtype", net(), net().double(), PLAIN, r"'0.bias' is torch.float32.*original= it is torch.float64.*float\(\)"),
    ("shape", net(), net(wide=6), PLAIN, r"'0.bias' is torch.float32 \(5,\), .* \(6,\); pass models of one size"),
    ("tensors", net(), net(bias=False), PLAIN, "only one of both has '0.bias'"),
    ("slope", net(), net(slope=0.2), PLAIN, r"'leaky_relu' is .*, 0.2\).*, and in the model .*, 0.1\)"),
    ("eps", net(), net(eps=0.6), PLAIN, r"'layer_norm' is .* 0.6, .*, and in the model .* 0.5, "),
    ("function", nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU()), PLAIN, r"'relu' is aten.gelu.*aten.relu.*; build"),
    ("more rows", nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU()), PLAIN, "original= must compute"),
    ("NaN", net(), NAN, PLAIN, "in original=, .*0.weight has entries that are not finite"),
    ("training", nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4), PLAIN, r"in original=, .*model\.eval\(\)"),
    ("nothing", net(), "net", PLAIN, "original= must be a module"),
    ("hidden tokens", attending(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])), attending(torch.zeros(2, 2)),
     torch.zeros(1, 2, 4), "has other values of mask, which its bound does not read"),
    ("causal", Function(lambda self, x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
     Function(lambda self, x: F.scaled_dot_product_attention(x, x, x)), torch.zeros(1, 2, 4), "must compute the same"),
    ("masks", attending(torch.tensor([[True, False], [True, True]])), attending(torch.ones(2, 2).bool()),
     torch.zeros(1, 2, 4), "has other values of mask, which its bound does not read"),
    ("positions", picking([0, 1]), picking([1, 0]), PLAIN, "must compute the same"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "original", "x", "words"), [each[1:] for each in REFUSED], ids=[n for n, *_ in REFUSED]
)
def test_what_differs_but_for_weights_is_refused(module: nn.Module, original: Any, x: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wn.certify(module, x, original=original)


def test_settings_that_know_no_entries_are_refused() -> None:
    model = nn.Linear(3, 2)
    constraints = wn.constrain(wn.Scion(model, lr=0.1), {"*": wn.HardCap(2.0), "bias": wn.ColumnCap(2.0)})
    for settings in ({"within": constraints}, {"effort": "high"}):
        with pytest.raises(ValueError, match=r"got (within|effort)= beside it"):
            wn.certify(model, torch.zeros(1, 3), original=model, **settings)
    program = wn.capture(model, torch.zeros(1, 3))
    assert wn.certify(program, original=program, arithmetic="real").change == 0
    with pytest.raises(ValueError, match="a Program if the model is one, got Linear"):
        wn.certify(program, original=model)
    for settings, words in (({}, "has no original"), ({"original": model, "radius": torch.inf}, "arithmetic='real'")):
        certificate = wn.certify(model, torch.zeros(1, 3), **settings)
        with pytest.raises(ValueError, match=f"unchanged: .*{words}"):
            certificate.unchanged(torch.zeros(1, 2))


def test_a_learned_bias_of_attention_may_change() -> None:
    original, module = (attending(torch.tensor([[0.5, -torch.inf], [0.0, each]])) for each in (0.0, 0.25))
    certificate = wn.certify(module, torch.zeros(1, 2, 4), original=original, arithmetic="real")
    assert 0 < found(module, original, torch.zeros(1, 2, 4), certificate) <= certificate.change <= 0.25 * 2 * (1 + 1e-6)


def test_a_choice_of_bounds_is_made_once() -> None:
    """A ball that is idle for the original only has the row of one that is not."""
    x, models = torch.zeros(1, 3, 4), []
    for size in (2.0, 0.5):
        models.append(nn.Sequential(nn.Linear(4, 4), wn.nn.BallProjection(1.0)))
        nn.init.zeros_(models[-1][0].bias)
        nn.init.eye_(models[-1][0].weight).data.mul_(size)
    module, original = models
    certificate = wn.certify(module, x, original=original, arithmetic="real")
    assert certificate.rows[-2].operation == "ball"
    assert found(module, original, x, certificate) <= certificate.change
    with pytest.raises(ValueError, match=r"in original=, .* its ball is not shown to leave all vectors"):
        wn.certify(original, x, original=module)


def test_predictions_that_do_not_change() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
    module = changed(original, 0.02, relative=False)
    x = F.normalize(torch.randn(4000, 8)) * 8**0.5
    shares = []
    for margins in (False, True):
        certificate = wn.certify(module, x[:1], original=original, margins=margins)
        masks = [certificate.unchanged(each(x)) for each in (module, original)]
        same = module(x).argmax(-1) == original(x).argmax(-1)
        assert not same.all()
        assert all(bool(same[mask].all()) for mask in masks)
        shares.append(float(masks[0].float().mean()))
    assert 0.1 < shares[0] < shares[1]


def test_a_certificate_is_proved_again_from_both_models(tmp_path: Path) -> None:
    original, x = model("convolutions")
    original.eval()
    original[5].eps = 0.1  # its variance may be a mean of squares less a square
    module = changed(original, 0.01, relative=True)
    module[0].weight.data = original[0].weight.data.clone()
    certificate = wn.certify(module, x, original=original)
    certificate.save(tmp_path / "certificate.json")
    (tmp_path / "original").mkdir()
    paths = tmp_path / "model.safetensors", tmp_path / "original" / "model.safetensors"
    for each, path in zip((module, original), paths, strict=True):
        save_file(each.state_dict(), path)
    loaded = Certificate.load(tmp_path / "certificate.json")
    assert loaded.change == certificate.change
    assert loaded.rms_change == pytest.approx(certificate.change / 2)  # of 4 entries
    reports = check(tmp_path), wn.verify(tmp_path / "certificate.json", *paths)
    assert [each.change for each in reports] == [certificate.change.exact] * 2
    assert "the result and that of the original differ by at most" in str(certificate)
    require_same_model(loaded, module, x, original=original)
    states = [each.state_dict() for each in (module, original)]
    save_file(another := {**states[1], "0.weight": states[1]["0.weight"] + 9}, paths[1])
    with pytest.raises(CheckError, match=r"original/0\.weight is not the certified tensor"):
        check(tmp_path)
    for weights, words in (
        ([states[0], another], r"original/0\.weight is not the certified tensor"),
        (states[:1], "pass its weights as original="),
        (states[:1] * 2, "original/.* is not the certified tensor"),
        (states[::-1], "is not the certified tensor"),
    ):
        with pytest.raises(CheckError, match=words):
            wn.verify(certificate, *weights)
    with pytest.raises(CheckError, match="is another tensor in the model than in the certificate"):
        require_same_model(loaded, module, x, original=module)
    less = [replace(row, change=row.change / 2 if row.name == "output" else row.change) for row in certificate.rows]
    with pytest.raises(CheckError, match=r"its error .* is less than what follows"):
        wn.verify(replace(certificate, rows=tuple(less)), *states)
