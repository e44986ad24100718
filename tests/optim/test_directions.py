"""Directions: those of other papers against their published formulas, and those of a user."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.optim import Direction, DirectionInput
from wellnormed.optim.directions import BoundedAdam, ClippedOracle, NorMuon

EXACT = wn.Spectral(method="svd")


def drawn(shape, seed, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def optimizer_for(shape, dtype=torch.float64, norm=EXACT, lr=0.1, **settings):
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    return layer, wn.optim.ConditionalGradient(
        wn.assign_norms(layer, overrides={"weight": norm}), lr, **{"momentum": 0.5, **settings}
    )


def test_normuon_acts_on_every_slice():
    layer, optimizer = optimizer_for((8, 6), norm=wn.norms.PerHead(2, EXACT), directions={"*": NorMuon(0.9)})
    layer.weight.grad = drawn((8, 6), 0)
    optimizer.step()
    assert optimizer.state[layer.weight]["second_moment"].shape == (12,)  # two heads of 4 x 6


def test_a_clip_is_the_duality_map_of_a_step():
    """Spectral Clipping, section 4: singular values of k m, capped at one unit of the norm."""
    layer, optimizer = optimizer_for((6, 10), directions={"*": ClippedOracle(0.4)}, momentum=0.0)
    weight, g = layer.weight.detach().clone(), drawn((6, 10), 1)
    layer.weight.grad = g.clone()
    optimizer.step()
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    unit = (6 / 10) ** 0.5
    assert (0.4 * s < unit).any()
    assert (0.4 * s > unit).any()
    step = u * (0.4 * s).clamp(max=unit) @ vt
    torch.testing.assert_close(layer.weight.detach(), weight - 0.1 * step, rtol=1e-5, atol=1e-5)  # a matrix function
    assert float(EXACT.upper_bound(layer.weight.detach() - weight)) <= optimizer.update_norm("weight") * (1 + 1e-5)


def test_a_clip_tends_to_the_matrix_sign_as_the_gain_grows():
    """SC section 1.1: with k at a share of unit / least singular value, the least is that share of one unit."""
    g = drawn((6, 10), 1)
    full = (6 / 10) ** 0.5 / float(torch.linalg.svdvals(g).amin())
    for share in (0.1, 0.5, 0.9, 1.0, 3.0):
        layer, optimizer = optimizer_for((6, 10), directions={"*": ClippedOracle(share * full)}, momentum=0.0)
        before = layer.weight.detach().clone()
        layer.weight.grad = g.clone()
        optimizer.step()
        distance = (before - layer.weight.detach()) / 0.1 - EXACT.dualize(g)
        # a matrix function ends within 5e-6 of the bound
        assert float(EXACT.upper_bound(distance)) == pytest.approx(max(0.0, 1 - share), abs=2e-5)


def test_parameters_that_are_no_matrices_keep_their_oracles():
    model = nn.Linear(6, 4)
    one = wn.Scion(model, lr=0.1, directions={"*": NorMuon(0.95, ClippedOracle(2.0))}, radius=1.0)
    before = model.bias.detach().clone()
    model.weight.grad, model.bias.grad = torch.ones(4, 6), torch.tensor([1.0, -2.0, 0.5, 3.0])
    one.step()
    torch.testing.assert_close(model.bias.detach(), before - 0.1 * wn.norms.BiasRMS().dualize(model.bias.grad))
    assert one.update_norm("bias") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NorMuon(1.0), r"kept=1.0 must lie in \[0, 1\)"),
        (lambda: BoundedAdam(1.0), r"BoundedAdam: kept=1.0 must lie in \[0, 1\)"),
        (lambda: NorMuon(-0.1), r"kept=-0.1 must lie in \[0, 1\)"),
        (lambda: NorMuon(0.9, Mixed()), r"inner must be a Direction that sees the momentum alone .*, got Mixed\(\)"),
        (lambda: NorMuon(0.9, Unbounded), "inner must be a Direction"),
        (lambda: ClippedOracle(0.0), "gain=0.0 must be positive and finite"),
        (lambda: ClippedOracle(float("inf")), "gain=inf must be positive and finite"),
    ],
)
def test_a_ready_direction_refuses_what_it_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Mixed(Direction):
    """Looks at everything, keeps an average of squares, and may be twice as long as the oracle's."""

    sees = ("gradient", "weight")
    keeps = ("squares",)

    def bound(self, norm):
        return 2.0 * norm.overshoot

    def __call__(self, seen: DirectionInput):
        seen.state["squares"] = 0.9 * seen.state["squares"] + 0.1 * seen.gradient.square()
        assert (seen.length, seen.step) == (0.1, seen.step)
        total = seen.momentum / (seen.state["squares"].sqrt() + 1.0) + seen.step * seen.weight
        return 2.0 * seen.norm.dualize(total)

    def __repr__(self):
        return "Mixed()"


class Unbounded(Direction):
    def __call__(self, seen: DirectionInput):
        return seen.momentum


class Halved(Direction):
    """The weight after the step: half of it, less the momentum times the length."""

    sees, returns = ("weight",), "weight"

    def __call__(self, seen: DirectionInput):
        return 0.5 * seen.weight - seen.length * seen.momentum


def test_a_direction_of_ones_own_sees_and_keeps_what_it_says():
    layer, optimizer = optimizer_for((6, 10), directions={"weight": Mixed()})
    weight = layer.weight.detach().clone()
    buffer, squares = torch.zeros((6, 10), dtype=torch.float64), torch.zeros((6, 10), dtype=torch.float64)
    for step in range(4):
        g = drawn((6, 10), step)
        layer.weight.grad = g.clone()
        optimizer.step()
        buffer = 0.5 * buffer + 0.5 * g
        squares = 0.9 * squares + 0.1 * g.square()
        weight = weight - 0.1 * 2.0 * EXACT.dualize(buffer / (squares.sqrt() + 1.0) + step * weight)
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-12, atol=1e-12)  # float64, two ways
    torch.testing.assert_close(optimizer.state[layer.weight]["squares"], squares)
    assert optimizer.update_norm("weight") == pytest.approx(0.2)
    assert "direction=Mixed()" in str(optimizer)
    constraints = wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)})
    for step in range(5):
        layer.weight.grad = drawn((6, 10), step)
        optimizer.step()
        assert constraints.proved_ratios()["weight"] <= 1


def test_equal_matrices_are_one_batch_and_directions_serve_by_norm():
    shapes = []

    class Counted(Direction):
        def acts_on(self, norm):
            return norm.measures == "singular values"

        def __call__(self, seen: DirectionInput):
            shapes.append(tuple(seen.momentum.shape))
            return seen.norm.dualize(seen.momentum)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = wn.Scion(model, lr=0.1, radius=1.0, directions={"*": Counted()})
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert sorted(shapes) == [(1, 3, 4), (2, 4, 4)]
    assert optimizer.update_norm("0.weight") is None
    assert optimizer.update_norm("0.bias") == pytest.approx(0.1)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("rule", ["unconstrained", "averaged", "constrained", "sharp"])
def test_weights_of_any_rate_and_radius_are_one_batch_where_the_direction_allows_it(rule, same):
    sizes = []

    class Counted(Direction):
        same_at_any_rate = same
        keeps = ("calls",)

        def bound(self, norm):
            return norm.overshoot

        def __call__(self, seen: DirectionInput):
            sizes.append(len(seen.momentum))
            seen.state["calls"] = seen.state["calls"] + 1
            return seen.norm.dualize(seen.momentum)

    direction = Counted()

    def optimizer_of(layers, rates, momenta, radii):
        groups = [
            {"params": [each.weight], "lr": lr, "momentum": kept, "radius": radius, "maximize": kept == 0.5}
            for each, lr, kept, radius in zip(layers, rates, momenta, radii, strict=True)
        ]
        settings = {"overrides": {"*": EXACT}, "step_rule": rule, "directions": {"*": direction}}
        return wn.optim.ConditionalGradient(groups, lr=0.1, norms=layers, **settings)

    numbers = (0.1, 0.1, 0.02, 0.0), (0.9, 0.5, 0.0, 0.9), (1.0, 1.0, 3.0, 2.0)
    layers = nn.ModuleList(nn.Linear(5, 7, bias=False, dtype=torch.float64) for _ in range(4))
    alone = [nn.ModuleList([copy.deepcopy(each)]) for each in layers]
    optimizer = optimizer_of(layers, *numbers)
    singly = [
        optimizer_of(each, *([n] for n in own)) for each, own in zip(alone, zip(*numbers, strict=True), strict=True)
    ]
    sizes.clear()
    for step in range(3):
        for index, (layer, (other,), one) in enumerate(zip(layers, alone, singly, strict=True)):
            layer.weight.grad = drawn((7, 5), 10 * step + index)
            other.weight.grad = layer.weight.grad.clone()
            one.step()
        before = len(sizes)
        optimizer.step()
        assert sorted(sizes[before:]) == ([4] if same else [1, 1, 1, 1])
    for layer, (other,) in zip(layers, alone, strict=True):  # the same sums, in another batch
        torch.testing.assert_close(layer.weight, other.weight, rtol=1e-12, atol=1e-12)
        assert torch.equal(optimizer.state[layer.weight]["calls"], torch.full((7, 5), 3.0, dtype=torch.float64))


def test_what_normalizes_neurons_shares_a_batch_only_if_what_it_normalizes_does():
    assert NorMuon(0.9).same_at_any_rate
    assert ClippedOracle(3.0).same_at_any_rate
    assert not NorMuon(0.9, Unbounded()).same_at_any_rate


@pytest.mark.parametrize("settings", [{}, {"step_rule": "sharp"}, {"memory": "gradient"}, {"radius": 3.0}, {"lr": 0.0}])
def test_a_weight_that_is_returned_is_taken_as_it_is(settings):
    layer, optimizer = optimizer_for((6, 10), directions={"weight": Halved()}, **{"momentum": 0.0, **settings})
    g, before = drawn((6, 10), 0), layer.weight.detach().clone()
    layer.weight.grad = g.clone()
    optimizer.step()
    length = settings.get("lr", 0.1) * settings.get("radius", 1.0)
    expected = 0.5 * before - length * g if length else before  # a step of length 0 is none, as for every direction
    assert torch.equal(layer.weight.detach(), expected)
    assert optimizer.update_norm("weight") is None
    with pytest.raises(ValueError, match="SoftCap on 'weight' needs a bound on the step's norm"):
        wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)})
    constraints = wn.constrain(optimizer, {"weight": wn.HardCap(0.1)})
    layer.weight.grad = drawn((6, 10), 1)
    optimizer.step()
    assert constraints.proved_ratios()["weight"] <= 1


class Contradictory(Halved):
    def bound(self, norm):
        return 1.0


class Elsewhere(Halved):
    returns = "weights"


@pytest.mark.parametrize(
    ("direction", "settings", "message"),
    [
        (Contradictory(), {}, r"Contradictory\(\) of 'weight' returns the weight, whose step has no bound"),
        (Halved(), {"step_rule": "averaged"}, "returns the weight, and step_rule='averaged' averages directions"),
        (Halved(), {"weight_decay": 0.1}, "returns the weight, which weight_decay=0.1 does not reach"),
        (Halved(), {"step_rule": "constrained"}, "has no bound, and step_rule='constrained'"),
        (Elsewhere(), {}, r"directions\['weight'\]=Elsewhere\(\): returns='weights' must be"),
    ],
)
def test_a_direction_that_contradicts_its_settings_is_refused(direction, settings, message):
    with pytest.raises(ValueError, match=message):
        optimizer_for((4, 4), directions={"weight": direction}, **settings)
    if "weight_decay" in settings:  # set by a scheduler
        layer, optimizer = optimizer_for((4, 4), directions={"weight": direction})
        optimizer.param_groups[0]["weight_decay"], before = 0.1, layer.weight.detach().clone()
        layer.weight.grad = drawn((4, 4), 0)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert torch.equal(layer.weight, before)


class Careless(Direction):
    """Does what `mistake` says."""

    keeps = ("average",)

    def __init__(self, mistake=None):
        self.mistake = mistake

    def __call__(self, seen: DirectionInput):
        if self.mistake == "state":
            seen.state["average"] = seen.state["average"].mean(-1)
        if self.mistake == "name":
            seen.state["averege"] = seen.state["average"]
        if self.mistake == "lost":
            del seen.state["average"]
        return {"shape": seen.momentum[0], "none": None}.get(self.mistake, seen.momentum)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("shape", r"Careless\(mistake='shape'\): its result is of shape \(4, 6\) and should be of \(1, 4, 6\)"),
        ("none", r"its result is of shape None and should be of \(1, 4, 6\)"),
        ("state", r"its average is of shape \(1, 4\) and should be of \(1, 4, 6\)"),
        ("name", r"its averege is of shape \(1, 4, 6\) and should be of None"),
        ("lost", r"its average is of shape None and should be of \(1, 4, 6\)"),
    ],
)
def test_what_a_direction_gives_takes_the_place_of_what_it_saw(mistake, message):
    layer, optimizer = optimizer_for((4, 6), directions={"weight": Careless(mistake)})
    before, layer.weight.grad = layer.weight.detach().clone(), drawn((4, 6), 0)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(layer.weight, before)


@dataclass
class Thawed(Unbounded):
    share: float = 0.5


@dataclass(frozen=True)
class Listed(Unbounded):
    shares: list


def declaring(**facts):
    """Settings with a direction that says this of itself."""
    return {"directions": {"weight": type("Misspelt", (Unbounded,), facts)()}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"directions": {"*": NorMuon(0.9)}, "memory": "gradient"}, "'weight' keeps second_moment, and memory"),
        ({"directions": {"weight": Unbounded}}, r"directions\['weight'\] must be a wellnormed.optim.Direction, got"),
        ({"directions": {"wieght": Unbounded()}}, "directions: the pattern 'wieght'"),
        ({"directions": {"weight": Thawed()}}, r"Thawed\(.*cannot be hashed.*frozen=True"),
        ({"directions": {"weight": Listed([0.5])}}, r"Listed\(.*cannot be hashed.*frozen=True"),
        (declaring(sees="weight"), "sees='weight' must be a tuple of"),
        (declaring(sees=("grad",)), r"sees=\('grad',\) must be a tuple of 'gradient' and 'weight'"),
        (declaring(keeps="average"), "keeps='average' must be a tuple of names"),
        (declaring(keeps=("weight",)), r"keeps=\('weight',\) must be a tuple of names"),
        (declaring(keeps=("a", "a")), "must be a tuple of names"),
        (declaring(keeps=("momentum_buffer",)), "must be a tuple of names"),
        (declaring(same_at_any_rate="no"), "same_at_any_rate='no' must be True or False"),
    ],
)
def test_directions_that_make_no_sense_or_contradict_the_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        optimizer_for((4, 4), **settings)


class Counting(Direction):
    """Keeps numbers of other kinds than the weight's."""

    keeps = ("count", "fine")

    def start(self, name, weight, norm):
        return torch.zeros((), dtype=torch.int64) if name == "count" else torch.zeros_like(weight, dtype=torch.float64)

    def __call__(self, seen: DirectionInput):
        seen.state["count"] = seen.state["count"] + 1
        seen.state["fine"] = seen.state["fine"] + seen.momentum.double() / 3
        return seen.norm.dualize(seen.state["fine"]) / seen.state["count"].reshape(-1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_comes_back_from_a_state_dict_as_it_was(dtype):
    layer, optimizer = optimizer_for((4, 6), dtype, directions={"weight": Counting()})
    other, twin = optimizer_for((4, 6), dtype, directions={"weight": Counting()})
    for seed in range(3):
        layer.weight.grad = drawn((4, 6), seed).to(dtype)
        optimizer.step()
    other.load_state_dict(layer.state_dict())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key in ("count", "fine"):
        kept, loaded = (o.state[p.weight][key] for o, p in ((optimizer, layer), (twin, other)))
        assert loaded.dtype == kept.dtype
        assert torch.equal(loaded, kept)
        assert loaded.data_ptr() != kept.data_ptr()
    for model, one in ((layer, optimizer), (other, twin)):
        model.weight.grad = drawn((4, 6), 3).to(dtype)
        one.step()
    assert torch.equal(layer.weight, other.weight)
    layer.to(torch.float64)  # a cast of the model, with its remedy
    optimizer.load_state_dict(optimizer.state_dict())
    layer.weight.grad = drawn((4, 6), 4)
    optimizer.step()
    assert optimizer.state[layer.weight]["count"] == 5


@pytest.mark.parametrize("direction", [NorMuon(), ClippedOracle(100.0)], ids=repr)
def test_rows_without_gradients_and_large_gains_stay_finite_in_float16(direction):
    """The least square that NorMuon divides by is 0 in float16, and a hundred times a gradient of 700 is infinite."""
    layer = torch.nn.Linear(8, 8, bias=False).half()
    optimizer = wn.Scion(layer, lr=0.02, momentum=0.0, directions={"weight": direction})
    before = layer.weight.detach().clone()
    layer.weight.grad = 700 * torch.randn(8, 8).half()
    layer.weight.grad[0] = 0
    optimizer.step()
    assert layer.weight.isfinite().all()
    assert not torch.equal(layer.weight, before)


OF_VECTORS = {
    "bias": (wn.norms.BiasRMS(), (6,), 1.0),
    "gain": (wn.norms.Gain(), (6,), 1.0),
    "table": (wn.ColNorm(0), (5, 4), 1.0),
    "head": (wn.Sign(normalized=True), (5, 4), 1 / 4),
    "whole": (wn.norms.Euclidean(2), (5, 4), 20**-0.5),
}


@pytest.mark.parametrize("case", OF_VECTORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_bounded_adam_is_adam_within_the_ball(case, dtype):
    norm, shape, most = OF_VECTORS[case]
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = wn.Scion(
        [parameter], lr=0.5, momentum=0.5, directions={"*": BoundedAdam(0.75)},
        norms=wn.routing.Assignment((wn.routing.AssignedParameter("0", parameter, norm, ""),)),
    )  # fmt: skip
    momentum, squares, weight = 0.0, 0.0, 0.0
    for seed in range(5):
        g = drawn(shape, seed, dtype) * 1e-3
        parameter.grad = g.clone()
        before = parameter.detach().double()
        optimizer.step()
        momentum = 0.5 * momentum + 0.5 * g.double()
        squares = 0.75 * squares + 0.25 * g.double().square()
        weight = weight - 0.5 * most * (momentum / (squares.sqrt() + 1e-8)).clamp(-1, 1)
        step = float(norm.norm(parameter.detach().double() - before))
        assert step <= optimizer.update_norm("0") * (1 + (1e-12 if dtype == torch.float64 else 1e-2))
    tolerance = 1e-12 if dtype == torch.float64 else 5e-3  # roundings of five steps
    torch.testing.assert_close(parameter.detach().double(), weight, rtol=tolerance, atol=tolerance)


def test_bounded_adam_shrinks_in_noise_and_leaves_matrices_alone():
    layer = nn.Linear(4, 4)
    optimizer = wn.Scion(layer, lr=1.0, radius=1.0, directions={"*": BoundedAdam()})
    assert optimizer.update_norm("weight") == wn.Scion(layer, lr=1.0, radius=1.0).update_norm("weight")
    for seed in range(200):
        layer.weight.grad = torch.zeros(4, 4)
        layer.bias.grad = drawn((4,), seed, torch.float32)
        before = layer.bias.detach().clone()
        optimizer.step()
    assert (layer.bias.detach() - before).abs().max() < 0.9  # an oracle moves every entry by 1
    held = wn.constrain(optimizer, {"bias": wn.ColumnCap(2.0)})
    layer.bias.grad = torch.ones(4)
    optimizer.step()
    assert held.proved_ratios()["bias"] <= 1
