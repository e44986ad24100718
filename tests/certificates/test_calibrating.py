"""Floors of norm layers: the model stays what it is on the data, and its constant becomes useful for all inputs."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellnormed as wn

from .adversary import Net


class Dropping(nn.LayerNorm):
    """It does more in training mode."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Clamping(nn.RMSNorm):
    """It does more to inputs that are not on the data."""

    def forward(self, x):
        return super().forward(x).clamp(-4, 4)


class Own(nn.Module):
    """As language models write it themselves."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def blocks(make):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), *(Block(make()) for _ in range(3)), make(), nn.Linear(12, 3))


def shared():
    norm = nn.LayerNorm(12)
    return blocks(lambda: norm)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def by_planes():
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), nn.LayerNorm((2, 4)), nn.Flatten(1), nn.Linear(8, 3))


def of_all_kinds():
    layers = nn.LayerNorm(12), nn.LayerNorm(12, bias=False), nn.LayerNorm(12, elementwise_affine=False), nn.RMSNorm(12)
    kinds = iter(layers)
    return blocks(lambda: next(kinds))


VECTORS = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
TOKENS = VECTORS.reshape(8, 8, 8)
MODELS = {
    "all kinds": (of_all_kinds, VECTORS, 4),
    "shared": (shared, VECTORS, 1),
    "two axes": (by_planes, VECTORS, 1),
    "torch's encoder": (encoder, TOKENS, 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_its_results_on_the_data_and_gets_a_useful_constant(name):
    make, data, count = MODELS[name]
    model = make().eval()
    parameters, keys, draws = list(model.parameters()), list(model.state_dict()), torch.get_rng_state()
    results, before, norms = model(data), wn.certify(model, data[:1]).lipschitz, str(wn.assign_norms(model))
    report = wn.calibrate(model.train(), data.split(16))
    assert str(wn.assign_norms(model)) == norms
    assert torch.equal(torch.get_rng_state(), draws)
    assert len(report.floors) == count
    assert not report.left
    assert set(report.hit_rates.values()) == {0.0}
    assert all(module.training for module in model.modules())
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    model.eval()
    # eps is gone from below the root: 1e-5 beside a mean square of at least 1e-2
    torch.testing.assert_close(model(data), results, rtol=1e-3, atol=1e-3)
    after = wn.certify(model, data[:1])
    print(f"{name}: {before:.4g} -> {after.lipschitz:.4g}")
    assert after.lipschitz < before / 20
    found = wn.lower_bound(model, data[:1], steps=10, generator=torch.Generator().manual_seed(0))
    assert found.value <= after.lipschitz
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(data), model(data))


def sizes_at(model, layer, data, centred):
    """The RMS of every vector that reaches a layer, by a hook of the test's own."""
    seen = []
    handle = layer.register_forward_hook(lambda module, inputs, result: seen.append(inputs[0].double()))
    with torch.no_grad():
        model(data)
    handle.remove()
    x = torch.cat(seen)
    return (x - centred * x.mean(-1, keepdim=True)).square().mean(-1).sqrt()


@pytest.mark.parametrize(("make", "centred"), [(lambda: nn.LayerNorm(12), True), (lambda: nn.RMSNorm(12), False)])
@pytest.mark.parametrize("slack", [1.05, 3.0, 0.8])
def test_floors_are_the_least_sizes_over_the_slack(make, centred, slack):
    model = blocks(make)
    sizes = {name: sizes_at(model, model.get_submodule(name), VECTORS, centred) for name in ("1.norm", "2.norm", "4")}
    report = wn.calibrate(model, [VECTORS], slack)
    for name, of_layer in sizes.items():
        floor = report.floors[name]
        assert floor == pytest.approx(float(of_layer.min()) / slack, rel=1e-6)  # float32 beside float64
        assert model.get_submodule(name).floor == floor
        assert report.hit_rates[name] == float((of_layer < floor).double().mean())
    assert (max(report.hit_rates.values()) > 0) == (slack < 1)


def test_padding_sets_no_floor_and_counts_as_below_it():
    data = torch.cat([VECTORS, torch.zeros(16, 8)])
    model = nn.Sequential(nn.LayerNorm(8))
    report = wn.calibrate(model, [data])
    assert report.floors == wn.calibrate(nn.Sequential(nn.LayerNorm(8)), [VECTORS]).floors
    assert report.hit_rates == {"0": 16 / 80}
    assert not model(torch.zeros(1, 8)).any()


def test_the_bound_holds_where_the_layer_of_torch_breaks_it():
    """Near a vector of equal entries: there LayerNorm stretches by 316, and its floor keeps what is proved."""
    model = nn.Sequential(nn.LayerNorm(8)).double()
    data = VECTORS.double()
    steps = data[:2, None] - data[:2, None].mean(-1, keepdim=True)
    x, y = 1 + 1e-4 * steps
    gain = lambda: ((model(x) - model(y)).norm() / (x - y).norm()).item()  # noqa: E731
    unbounded = gain()
    wn.calibrate(model, [data])
    proved = wn.certify(model, data[:1], radius=math.inf).lipschitz
    assert gain() <= proved < 5 < 250 < unbounded
    assert gain() > 0.99 * proved  # it is attained


def changed(change):
    layer = nn.LayerNorm(4)
    change(layer)
    return layer


LEFT = {
    "dropout": (lambda: Dropping(4), "is of the class Dropping, which may do more than nn.LayerNorm"),
    "clamp": (lambda: Clamping(4), "is of the class Clamping"),
    "written out": (lambda: Own(4), "is of the class Own"),
    "groups": (lambda: nn.GroupNorm(1, 5), "is of the class GroupNorm"),
    "weight of two tensors": (
        lambda: nn.utils.parametrizations.weight_norm(nn.RMSNorm(4), dim=None), "is of the class ParametrizedRMSNorm",
    ),
    "hook": (lambda: changed(lambda m: m.register_forward_hook(lambda *given: 2 * given[-1])), "has hooks, or a `for"),
    "forward of the object": (lambda: changed(lambda m: setattr(m, "forward", lambda x: 2 * x)), "has hooks, or a"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_layer_that_may_do_more_than_a_norm_is_named_and_left(name):
    make, why = LEFT[name]
    layer = make()
    model = nn.Sequential(layer, nn.LayerNorm(4))
    report = wn.calibrate(model, [torch.randn(3, 5, 4)])
    assert model[0] is layer
    assert report.floors.keys() == {"1"}
    (said,) = report.left.values()
    assert said.startswith(why)
    assert said in " ".join(str(report).split())


def test_what_gets_no_floor_is_named_with_its_reason():
    layers = {name: nn.LayerNorm(4) for name in ("norm", "unused", "zeros")}
    layers |= {"batch": nn.BatchNorm2d(3), "steps": nn.Identity()}
    model = Net(lambda s, x: s.norm(s.batch(x)) + s.steps(s.zeros(0 * x)), **layers)
    model.steps.steps = 0.5  # no eps
    statistics = model.batch.running_mean.clone()
    report = wn.calibrate(model, [torch.randn(5, 3, 4, 4)])
    assert report.left == {"unused": "is not reached", "zeros": "gets only vectors near 0"}
    assert [name for name, m in model.named_modules() if isinstance(m, wn.nn.FlooredNorm)] == ["norm"]
    assert torch.equal(model.batch.running_mean, statistics)
    assert model.batch.training


def test_balls_of_the_model_get_their_radii():
    """The second ball's is that of a model in which the first does not act."""
    model = nn.Sequential(nn.Linear(8, 8), wn.nn.BallProjection(1e-3), nn.Linear(8, 8), wn.nn.BallProjection(1e-3))
    x = model[0](VECTORS).detach()
    report = wn.calibrate(model, [VECTORS], 2.0)
    for name, of_layer in {"1": x, "3": model[2](x).detach()}.items():
        largest = float(of_layer.square().mean(-1).sqrt().max())
        assert report.radii[name] == model.get_submodule(name).radius == pytest.approx(2 * largest, rel=1e-6)
    assert set(report.hit_rates.values()) == {0.0}
    assert "radius" in str(report)
    halved = wn.calibrate(model, [VECTORS], 0.5)
    assert all(0 < rate < 1 for rate in halved.hit_rates.values())


def test_it_may_be_done_again_and_a_failure_changes_nothing():
    model = blocks(lambda: nn.LayerNorm(12))
    floors = wn.calibrate(model, [VECTORS]).floors
    again = wn.calibrate(model, [VECTORS])
    assert again.floors == pytest.approx(floors, rel=1e-3)  # eps is no longer added below the roots
    kinds, ball = [type(module) for module in model.modules()], wn.nn.BallProjection(0.5)
    model.append(ball)
    with pytest.raises(ValueError, match="shapes cannot be multiplied"):
        wn.calibrate(model, [VECTORS, VECTORS[:, :3]])
    assert [type(module) for module in model.modules()] == [*kinds, wn.nn.BallProjection]
    assert ball.radius == 0.5
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_formats_keep_theirs(dtype):
    model, data = blocks(lambda: nn.RMSNorm(12)).to(dtype), VECTORS.to(dtype)
    results = model(data)
    report = wn.calibrate(model, [data])
    assert len(report.floors) == 4
    assert model(data).dtype == dtype
    torch.testing.assert_close(model(data), results)


def test_a_constant_leaves_more_to_the_weights_after_calibrating():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12, bias=False), nn.LayerNorm(12, bias=False), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(12, 3, bias=False))
    optimizer = wn.Scion(model, lr=0.05)
    with pytest.raises(ValueError, match=r"1.layer_norm .* by 317.*wn\.calibrate\(model, data\)"):
        wn.constrain(optimizer, lipschitz=1e-5, example_input=VECTORS)
    with pytest.warns(UserWarning, match="costs range"):
        small = wn.constrain(optimizer, lipschitz=4.0, example_input=VECTORS, accept_small_range=True)
    small.remove()
    wn.calibrate(model, VECTORS.split(16))
    constraints = wn.constrain(optimizer, lipschitz=4.0, example_input=VECTORS, move_every=5)
    assert constraints.caps()["3.weight"] > 2.5 * small.caps()["3.weight"]
    for _ in range(3):
        F.cross_entropy(model(VECTORS), torch.arange(64) % 3).backward()
        optimizer.step()
    assert wn.certify(model, VECTORS).lipschitz <= wn.certify(model, VECTORS, within=constraints).lipschitz <= 4


def test_a_refusal_after_calibrating_does_not_name_it_as_the_remedy():
    model = nn.Sequential(nn.Linear(8, 12).requires_grad_(False), nn.LayerNorm(12), nn.Linear(12, 3))
    wn.calibrate(model, VECTORS, slack=10.0)
    with pytest.raises(ValueError, match=r"can hardly move((?!calibrate).)*$"):
        wn.constrain(wn.Scion(model), lipschitz=0.1, example_input=VECTORS)


ONE = nn.Sequential(nn.LayerNorm(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Sequential(nn.Linear(2, 2)), [torch.zeros(1, 2)]), r"no LayerNorm.*\(no module has an eps\).*FlooredNorm"),
        ((nn.Sequential(nn.GroupNorm(1, 2)), [torch.zeros(1, 2, 3)]), r"\(0 is of the class GroupNorm"),
        ((nn.LayerNorm(2), [torch.ones(1, 2)]), r"itself a LayerNorm; pass nn.Sequential\(model\)"),
        ((ONE, []), "data is empty"),
        ((ONE, 3), "data is of type int; pass a tensor, or batches"),
        ((ONE, torch.zeros(1, 3)), r"with a batch of data .*; pass inputs of its shape"),
        ((ONE, [[0.0, 1.0]]), r"with a batch of data"),
        ((nn.Sequential(nn.RMSNorm(2)), np.ones((1, 2))), r"with a batch of data"),
        ((ONE, [torch.full((1, 2), math.nan)]), "0 gets vectors that are not finite"),
        ((ONE, [(torch.zeros(1, 2), torch.zeros(1))]), r"with a batch of data .*x for x, _ in loader"),
        ((nn.LayerNorm(2), [torch.zeros(1, 2)], 0.0), "slack=0.0 must be positive"),
        ((nn.LayerNorm(2), [torch.zeros(1, 2)], True), "slack=True is of type bool"),
        ((nn.LayerNorm, [torch.zeros(1, 2)]), "calibrate: model is the class LayerNorm"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        wn.calibrate(*arguments)


def test_a_tensor_is_one_batch_and_so_is_a_dictionary():
    data = 1 + torch.rand(3, 2, 2)
    calls = data, [data], {"input": data}
    found = [wn.calibrate(nn.Sequential(nn.RMSNorm(2)), batches).floors for batches in calls]
    assert found[0] == found[1] == found[2]


def test_a_layer_that_is_called_from_a_list_is_refused():
    """It was replaced where it was not called, and its floor printed."""
    norms = [nn.LayerNorm(8), nn.LayerNorm(8)]
    model = Net(lambda s, x: norms[1](s.b(norms[0](s.a(x)))), a=nn.Linear(8, 8), b=nn.Linear(8, 8), first=norms[0])
    with pytest.raises(ValueError, match=r"calibrate: first would have a floor in vain.* nn\.ModuleList"):
        wn.calibrate(model, torch.randn(4, 8))
    assert model.first is norms[0]
    assert not norms[0]._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_leaves_out_padded_tokens_as_before():
    """Without gradients it packs the others, and calls no fused layer."""
    torch.manual_seed(0)
    data = {"src": torch.randn(4, 5, 8), "src_key_padding_mask": torch.arange(5) > torch.tensor([[1], [2], [3], [4]])}
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    with torch.no_grad():
        before = model(**data)
        assert list(wn.calibrate(model, data).floors) == [f"layers.{n}.norm{k}" for n in (0, 1) for k in (1, 2)]
        assert torch.backends.mha.get_fastpath_enabled()
        torch.testing.assert_close(model(**data), before, atol=1e-4, rtol=0)
    with pytest.raises(wn.certificates.UncertifiableError, match=r"padding, unless .* enable_nested_tensor=False"):
        wn.certify(model, data)
    model.enable_nested_tensor = model.use_nested_tensor = False
    assert wn.certify(model, data).lipschitz < 1e5


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_that_has_run_gets_the_same_floors(in_place):
    """Compiled code passes by hooks, and knows the layers as they were."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)), torch.randn(4, 64, 8)
    plain, small = copy.deepcopy(model), 1e-3 * data[0]
    if in_place:
        model.compile(backend="eager")
    compiled = model if in_place else torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled.eval()(small)
        compiled.train()(small)
    floors = wn.calibrate(compiled, data).floors
    assert list(floors.values()) == list(wn.calibrate(plain, data).floors.values())
    with torch.no_grad():
        for training in (True, False):
            torch.testing.assert_close(compiled.train(training)(small), plain(small))
        assert (compiled(small) - before).abs().max() > 1e-2  # the floor acts
