"""Radii grown around inputs: against attacks, closed forms, the global radius, extreme numbers and wrong input."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellnormed as wn
from wellnormed.certificates import around
from wellnormed.certificates.around import Around
from wellnormed.certificates.zonotope import BENT, CURVES, along, line


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + torch.tanh(self.inner(F.gelu(x))))


class Exponential(nn.Module):
    def forward(self, x):
        return x.exp()


class MaxMin(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


class Transformer(nn.Module):
    """One block on 4 tokens; `spelled` writes attention, RMS norm and a gate out in single operations."""

    def __init__(self, spelled=False):
        super().__init__()
        self.spelled = spelled
        self.embed, self.qkv, self.out, self.head = (nn.Linear(*s) for s in ((6, 8), (8, 24), (8, 8), (8, 3)))
        self.norm = nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        x = self.embed(x)
        batch, tokens, width = x.shape
        if self.spelled:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
            q, k, v = self.qkv(x).chunk(3, -1)
            mask = torch.triu(torch.full((tokens, tokens), -math.inf), 1)
            mixed = torch.softmax(q @ k.transpose(-1, -2) / 3 + mask, -1) @ v
            return self.head((x + self.out(mixed) * torch.sigmoid(mixed)).mean(1))
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, tokens, width))
        return self.head((x + self.feed(self.norm(x))).mean(1))


def _mlp(activation, widths=(12, 20, 20, 4)):
    layers = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), activation)]
    return nn.Sequential(*layers[:-1])


def _images(*layers):
    return nn.Sequential(*layers).eval(), (3, 8, 8)


ACTIVATIONS = {
    "relu": nn.ReLU(), "tanh": nn.Tanh(), "sigmoid": nn.Sigmoid(), "gelu": nn.GELU(), "gelu by tanh": nn.GELU("tanh"),
    "leaky": nn.LeakyReLU(0.2), "silu": nn.SiLU(), "elu": nn.ELU(), "selu": nn.SELU(), "mish": nn.Mish(),
    "hardtanh": nn.Hardtanh(), "hardswish": nn.Hardswish(), "prelu": nn.PReLU(), "softsign": nn.Softsign(),
    "log of sigmoid": nn.LogSigmoid(), "exponential": Exponential(),
}  # fmt: skip
MODELS = {
    **{name: lambda f=f: (_mlp(copy.deepcopy(f)), (12,)) for name, f in ACTIVATIONS.items()},
    "residual": lambda: (Residual(), (12,)),
    "maxima": lambda: (nn.Sequential(nn.Linear(12, 20), MaxMin(), nn.Linear(20, 4)), (12,)),
    "convolutions": lambda: _images(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 6, 3, stride=2),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    ),
    "max pooling": lambda: _images(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    ),
    "group norm": lambda: _images(
        nn.Conv2d(3, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)
    ),
    "attention": lambda: (Transformer(), (4, 6)),
    "attention in single operations": lambda: (Transformer(spelled=True), (4, 6)),
}  # fmt: skip
WITHOUT_CONSTANT = ("exponential",)


def _made(name, count=6):
    torch.manual_seed(sum(map(ord, name)))
    model, shape = MODELS[name]()
    for parameter in model.parameters():
        parameter.data *= 1.7
    x = torch.randn(count, *shape)
    model = model.double().eval()
    return model, x.double(), model(x.double()).argmax(1)


def _length(x):
    """The Euclidean norm of every vector, or of every image."""
    return torch.linalg.vector_norm(x, dim=(1, 2, 3) if x.ndim > 3 else -1, keepdim=True).clamp(min=1e-300)


def _least_lead(model, x, labels, radii, steps=40):
    """The least lead of the label that gradient steps find within the radii, from the input and from their rim."""
    budget, least = along(radii, x), torch.full((len(x),), math.inf, dtype=torch.float64)
    for start in (0.0, 1.0):
        change = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        change = start * budget * change / _length(change)
        for step in range(steps):
            change.requires_grad_()
            logits = model(x + change)
            lead = logits.gather(1, labels[:, None])[:, 0] - logits.scatter(1, labels[:, None], -math.inf).amax(1)
            (slope,) = torch.autograd.grad(lead.sum(), change)
            least = torch.minimum(least, lead.detach())
            change = change.detach() - slope / _length(slope) * budget * (0.5 if 2 * step < steps else 0.1)
            change = change * (budget / _length(change)).clamp(max=1)
    return least


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:certified_radius.*local radii alone")
def test_no_attack_succeeds_inside_and_the_radius_is_no_smaller_than_the_global_one(name):
    model, x, labels = _made(name)
    radii = wn.certified_radius(model, x, labels)
    assert radii.dtype == torch.float64
    assert bool((radii > 0).all())
    assert bool((_least_lead(model, x, labels, radii) > 0).all())
    if name != "sigmoid":  # whose class is the same everywhere
        assert bool((_least_lead(model, x, labels, 40 * radii) < 0).any())
    if name in WITHOUT_CONSTANT:
        return
    least = wn.certify(model, x[:1], radius=math.inf).certified_radius(model(x))
    assert bool((radii >= least * (1 - 1e-9)).all())
    assert float((radii / least).median()) > 1.02


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("radius", [0.0, 1e-3, 0.3])
def test_results_lie_in_their_zonotope(name, radius):
    """At random points of the ball and its rim, every logit lies where the zonotope says."""
    model, x, _ = _made(name, count=2)
    bounds = Around(wn.capture(model, x[:1]))
    found = bounds.result(x[:, None], torch.full((2,), radius, dtype=torch.float64))
    extent = bounds.ball.extent(found)
    generator = torch.Generator().manual_seed(2)
    for share in (0.0, 0.5, 1.0, 1.0, 1.0):
        change = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        logits = model(x + share * radius * change / _length(change))
        assert bool(((logits[:, None] - found.centre).abs() <= extent).all())
    if radius == 0:
        assert bool((extent < 1e-4).all())  # the allowance for rounding, whose factors are products of norms


@pytest.mark.parametrize("name", ["relu", "tanh", "convolutions", "attention"])
def test_a_radius_is_that_of_the_input_alone(name):
    """What is kept between balls holds for all of them; a batch of 1 has the shape of what all share."""
    model, x, labels = _made(name, count=3)
    together = wn.certified_radius(model, x, labels)
    alone = torch.cat([wn.certified_radius(model, x[n : n + 1], labels[n : n + 1]) for n in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)  # products of other shapes round otherwise


def test_a_linear_map_has_its_distance_to_the_nearest_tie():
    torch.manual_seed(0)
    model, x = nn.Linear(12, 5).double(), torch.randn(8, 12, dtype=torch.float64)
    logits = model(x)
    label = logits.argmax(1)
    between = (model.weight[label][:, None] - model.weight[None]).norm(dim=-1)
    exact = ((logits.gather(1, label[:, None]) - logits) / between).nan_to_num(math.inf).amin(1).detach()
    radii = wn.certified_radius(model, x, label)
    assert bool((radii <= exact).all())
    torch.testing.assert_close(radii, exact, rtol=3e-9, atol=0)


def test_units_that_stay_on_or_off_leave_the_distance_to_the_nearest_tie():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    for layer in (model[0], model[2]):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    x = torch.tensor([[2.0, 1.0], [2.0, -5.0], [1.0, 1.0], [1.0, 3.0]])
    radii = wn.certified_radius(model, x, torch.tensor([0, 0, 0, 0]))
    assert radii.tolist() == pytest.approx([math.sqrt(0.5), 2.0, 0.0, 0.0], rel=1e-8)  # the last two: a tie, wrong
    assert radii[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scales_of_inputs_and_weights_change_nothing_but_the_unit(scale):
    model, x, labels = _made("relu")
    for layer in model[::2]:
        layer.bias.data.zero_()
    plain = wn.certified_radius(model, x, labels := model(x).argmax(1))
    torch.testing.assert_close(wn.certified_radius(model, x * scale, labels) / scale, plain, rtol=1e-6, atol=0)
    model[0].weight.data *= scale
    torch.testing.assert_close(wn.certified_radius(model, x, labels), plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_computed_in_float64(dtype):
    model, x, labels = _made("relu")
    model, x = model.to(dtype), x.to(dtype)
    radii = wn.certified_radius(model, x, labels)
    exact = wn.certified_radius(model.double(), x.double(), labels)
    torch.testing.assert_close(radii, exact, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [*CURVES, "leaky_relu", "elu"])
def test_a_function_lies_between_its_lines(name):
    """On intervals that are points, touch kinks, are narrow or huge."""
    own = {
        "reciprocal": lambda t: 1 / t, "hardtanh": F.hardtanh, "clamp": lambda t: t.clamp(-0.5, 2), "elu": F.elu,
        "clamp_min": lambda t: t.clamp(min=0.3), "clamp_max": lambda t: t.clamp(max=0.3), "relu6": F.relu6,
        "log_sigmoid": F.logsigmoid, "silu": F.silu, "mish": F.mish, "gelu": F.gelu, "hardswish": F.hardswish,
        "hardsigmoid": F.hardsigmoid, "softshrink": F.softshrink, "selu": F.selu,
        "leaky_relu": lambda t: F.leaky_relu(t, 0.2),
    }  # fmt: skip
    function, curve = own.get(name) or getattr(torch, name), CURVES.get(name, BENT)
    ends = [-300.0, -30.0, -6.0, -3.0, -1.0, -0.5, -1e-9, 0.0, 1e-9, 0.3, 0.5, 1.0, 3.0, 6.0, 300.0]
    if name in ("rsqrt", "reciprocal", "log", "sqrt"):
        ends = [1e-12, 1e-3, 0.5, 1.0, 1.0 + 1e-9, 40.0, 1e6]
    low, high = torch.tensor([(a, b) for a in ends for b in ends if a <= b], dtype=torch.float64).unbind(1)

    def slope(t):
        return torch.func.vmap(torch.func.grad(function))(t)

    found = line(low, high, (function(low), function(high)), (slope(low), slope(high)), curve)
    points = low + torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None] * (high - low)
    points = torch.cat([points.minimum(high), torch.zeros(1, len(low)).double().maximum(low).minimum(high)])
    away = (function(points) - (found.slope * points + found.shift)).abs()
    usable = found.shift.isfinite() & found.noise.isfinite()
    assert bool((away <= found.noise + found.rest)[:, usable].all())
    assert int(usable.sum()) > 0.9 * len(low) or name == "exp"
    narrow = usable & (high - low <= 1e-9)
    assert bool((found.noise[narrow] <= 1e-9 * (1 + slope(low)[narrow].abs())).all())


def test_relu_has_no_noise_where_it_is_not_switched():
    low, high = torch.tensor([0.0, 1.0, -2.0, -1.0, -1.0]).double(), torch.tensor([1.0, 1.0, 0.0, -1.0, 3.0]).double()
    found = line(low, high, (low.relu(), high.relu()), ((low > 0).double(), (high > 0).double()), BENT)
    assert found.noise.tolist() == [0.0, 0.0, 0.0, 0.0, 0.375]
    assert found.slope.tolist()[-1] == 0.75


def test_a_network_that_is_flat_around_an_input():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    nn.init.ones_(model[0].weight)
    nn.init.constant_(model[0].bias, -10.0)
    label = model(torch.zeros(1, 2).double()).argmax(1)
    (radius,) = wn.certified_radius(model, torch.zeros(1, 2).double(), label).tolist()
    assert radius >= 10 / math.sqrt(2) * 0.98


def test_a_constant_model_keeps_its_class_everywhere():
    model = nn.Linear(3, 2)
    model.weight.data.zero_()
    model.bias.data = torch.tensor([1.0, 0.0])
    assert wn.certified_radius(model, torch.ones(2, 3), torch.tensor([0, 1])).tolist() == [math.inf, 0.0]


def test_inputs_in_a_box_have_the_constant_of_the_box():
    model, x, labels = _made("attention in single operations")
    x = x.clamp(-1, 1)
    radii = wn.certified_radius(model, x, labels := model(x).argmax(1), box=(-1, 1))
    assert bool((radii >= wn.certify(model, x[:1], box=(-1, 1)).certified_radius(model(x)) * (1 - 1e-9)).all())
    with pytest.raises(ValueError, match="out of the box"):
        wn.certified_radius(model, x, labels, box=(-0.5, 0.5))


class Sorting(nn.Module):
    def forward(self, x):
        return x.sort(-1).values


def test_a_model_without_local_bounds_has_its_global_radii_and_says_so():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), Sorting(), nn.Linear(8, 3)).double(), torch.randn(4, 6).double()
    label = model(x).argmax(1)
    with pytest.warns(UserWarning, match=r"aten.sort.* radii of the global constant"):
        radii = wn.certified_radius(model, x, label)
    known = wn.certify(model, x[:1], radius=math.inf, margins=True).certified_radius(model(x))
    torch.testing.assert_close(radii, known, rtol=1e-8, atol=0)


def test_a_model_that_is_too_large_has_its_global_radii_and_says_so(monkeypatch):
    monkeypatch.setattr(around, "MOST", 200)
    model, x, labels = _made("relu")
    with pytest.warns(UserWarning, match=r"more than 200 entries.* radii of the global constant"):
        radii = wn.certified_radius(model, x, labels)
    known = wn.certify(model, x[:1], radius=math.inf, margins=True).certified_radius(model(x))
    torch.testing.assert_close(radii, known, rtol=1e-8, atol=0)


def test_a_model_with_neither_bound_is_refused():
    model = nn.Sequential(nn.Linear(6, 8), Exponential(), Sorting())
    with pytest.raises(wn.certificates.UncertifiableError, match=r"sort.*no constant"):
        wn.certified_radius(model, torch.randn(4, 6), torch.zeros(4, dtype=torch.long))


def test_active_dropout_is_refused():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    with pytest.raises(wn.certificates.UncertifiableError, match=r"model.eval\(\)"):
        wn.certified_radius(model, torch.randn(4, 6), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": torch.tensor([0, 4])}, "labels from 0 to 4"),
        ({"labels": torch.tensor([-1, 0])}, "labels from -1"),
        ({"labels": torch.tensor([0])}, r"shape \(2,\)"),
        ({"labels": torch.tensor([0.0, 1.0])}, "integers"),
        ({"labels": [0, 1]}, "labels must be a tensor"),
        ({"inputs": torch.zeros(2, 12, dtype=torch.long)}, "floats"),
        ({"inputs": torch.full((2, 12), math.nan)}, "not finite"),
        ({"inputs": torch.zeros(0, 12)}, "floats of shape"),
        ({"model": nn.Linear}, "pass the model itself"),
        ({"model": nn.Sequential(nn.Linear(12, 4), nn.Unflatten(1, (2, 2)))}, "vector of at least 2"),
    ],
)
def test_what_is_refused(change, says):
    given = {"model": nn.Linear(12, 4), "inputs": torch.zeros(2, 12), "labels": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=says):
        wn.certified_radius(**given)
