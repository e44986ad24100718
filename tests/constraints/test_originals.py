"""A cap holds the parameter that it is on; where the layer makes its weight of that parameter, this is said."""

import copy
import pickle
import re
import warnings
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import wellnormed as wn
from wellnormed.certificates import proved_caps


class Triple(nn.Module):
    def forward(self, weight):
        return 3 * weight


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Triple())


MADE = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": nn.utils.weight_norm, "spectral norm by a hook": nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal, "parametrized": parametrized,
}  # fmt: skip
MOVED_ON = {"pruned", "orthogonal", "parametrized", "spectral norm by a hook"}  # the same parameter, by another name
ours = pytest.mark.parametrize("foreign", [False, True])
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")


def begun(foreign, before=lambda layer: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    before(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if foreign else wn.Scion(model, lr=0.1)
    names = [n for n, p in model[0].named_parameters() if min(p.shape) > 1]
    return model, optimizer, lambda: wn.constrain(optimizer, {f"0.{n}": wn.HardCap(0.5) for n in names}, norms=model)


def step(model, optimizer, x=torch.ones(2, 6)):  # noqa: B008
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


@ours
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_cap_on_an_original_says_so_at_once(made, foreign):
    model, optimizer, constrain = begun(foreign, made)
    with pytest.warns(UserWarning, match=r"original.*says nothing of that weight.*remove_parametrizations") as told:
        constraints = constrain()
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "an original" in str(constraints)
    step(model, optimizer)
    assert max(constraints.proved_ratios().values()) <= 1


@ours
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_a_weight_that_is_made_of_its_parameter_later_is_named(name, copied, foreign):
    model, optimizer, constrain = begun(foreign)
    constraints = constrain()
    step(model, optimizer)
    if copied:
        model, optimizer, constraints = copy.deepcopy((model, optimizer, constraints))
    MADE[name](model[0])
    said = "0.weight is an original" if name in MOVED_ON else "0.weight is no longer in the model"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(model, optimizer)
    assert sum(re.search(said, str(w.message)) is not None for w in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)  # once is enough
    if name not in MOVED_ON:
        with pytest.warns(UserWarning, match=said):
            constraints.proved_ratios()
    assert said.removeprefix("0.weight is ") in str(constraints)


def test_an_original_that_becomes_a_weight_again_is_none():
    model, optimizer, constrain = begun(False, parametrizations.orthogonal)
    with pytest.warns(UserWarning, match="original"):
        constraints = constrain()
    parametrize.remove_parametrizations(model[0], "weight")
    step(model, optimizer)
    assert str(constraints).splitlines()[0].endswith("HardCap(cap=0.5)")


CHANGES = {
    **{name: lambda m, make=make: make(m[0]) for name, make in MADE.items()},
    "another activation": lambda m: m.__setitem__(1, nn.Sequential(Triple(), nn.ReLU())),
    "another layer": lambda m: m.__setitem__(2, nn.Linear(6, 3, bias=False)),
    "one more layer": lambda m: m.append(nn.Linear(3, 3)),
    "another table of a frozen layer": lambda m: setattr(
        m[3], "weight", nn.Parameter(torch.full((3,), 9.0), requires_grad=False)
    ),
    "another tensor": lambda m: setattr(m[0], "weight", nn.Parameter(9 * torch.eye(6))),
}
PLACES = {"another activation": "1, 1.0, 1.1", "another layer": "2, 2.weight", "one more layer": "4, 4.weight, 4.bias",
          "another table of a frozen layer": "3.weight"}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_constant_is_refused_for_another_program_before_the_step(name):
    torch.manual_seed(0)
    scale = nn.LayerNorm(3, eps=0.1, bias=False).requires_grad_(False)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False), scale)
    optimizer = wn.Scion(model, lr=0.1)
    wn.constrain(optimizer, lipschitz=20.0, example_input=torch.randn(2, 6))
    step(model, optimizer)
    CHANGES[name](model)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters in no group
        said = rf"as it was, and {PLACES.get(name, '0.weight.*')} is another one now; .*constrain again"
        with pytest.raises(ValueError, match=f"constant 20 is proved for the model {said}"):
            step(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class Packed:
    """What is configured, as by `dataclass(slots=True)`."""

    __slots__ = ("scale",)


class Shared(nn.Module):
    base = 1.0


class Counting(Shared):
    """Its plain attributes change in every call; the slope is one of them, and the function another."""

    shared = 1.0

    def __init__(self):
        super().__init__()
        self.slope, self.calls, self.bend, self.config = 0.5, 0, torch.relu, SimpleNamespace(scale=1.0)
        self.factors, self.scales, self.tensor, self.last = [1.0], {"a": {"b": 1.0}}, torch.tensor(1.0), None
        self.packed = Packed()
        self.packed.scale = 1.0

    def forward(self, x):
        self.calls += 1
        self.last = x.detach(), x.detach()
        scale = self.config.scale * self.scales["a"]["b"] * self.shared * (9.0 if self.calls > 9 else 1.0)
        return self.slope * self.factors[0] * scale * self.packed.scale * self.base * self.tensor * self.bend(x)


class Steep(Counting):
    def forward(self, x):
        return 9 * x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18, bias=False)

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


CODE = {
    "slope": lambda each: setattr(each, "slope", 5.0),
    "bend": lambda each: setattr(each, "bend", torch.abs),
    "factors": lambda each: each.factors.__setitem__(0, 5.0),
    "scales": lambda each: each.scales["a"].update(b=5.0),
    "config": lambda each: setattr(each.config, "scale", 5.0),
    "tensor": lambda each: each.tensor.fill_(5.0),
    "packed": lambda each: setattr(each.packed, "scale", 5.0),
    "__class__": lambda each: setattr(each, "__class__", Steep),
    "__class__.base": lambda each: mock.patch.object(Shared, "base", 5.0).start(),
    "__class__.shared": lambda each: setattr(type(each), "shared", 5.0),
    "forward": lambda each: setattr(each, "forward", lambda x: 5 * x),
    "_forward_hooks": lambda each: each.register_forward_hook(lambda layer, inputs, result: 5 * result),
    "_forward_pre_hooks": lambda each: each.register_forward_pre_hook(lambda layer, inputs: 5 * inputs[0]),
}


@pytest.mark.parametrize("asked", ["lipschitz", "largest_logit"])
@pytest.mark.parametrize("name", CODE)
def test_a_constant_is_refused_for_other_code_before_the_step(name, asked):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), type("Own", (Counting,), {})(), Attention())
    optimizer = wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, example_input=torch.randn(2, 3, 6), **{asked: 20.0})
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            step(model, optimizer, torch.ones(2, 3, 6))
        model[1].notes = f"what changes nothing: {model[1].calls}"
        model[1].register_full_backward_hook(lambda *_: None)
    CODE[name](model[1])
    before = [p.detach().clone() for p in model.parameters()]
    said = rf"20 is proved for the model as it was, and 1\.{name.partition('.')[0]} is another one now"
    with pytest.raises(ValueError, match=said):
        step(model, optimizer, torch.ones(2, 3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    mock.patch.stopall()
    constraints.remove()
    step(model, optimizer, torch.ones(2, 3, 6))


def casting(model):
    """The model, which enters autocast itself, as trainers for mixed precision make it do."""
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


@pytest.mark.parametrize("asked", ["lipschitz", "largest_logit"])
@pytest.mark.parametrize("first", [casting, lambda model: model], ids=["before", "after"])
def test_a_constant_holds_where_the_model_enters_autocast_itself(first, asked):
    torch.manual_seed(0)
    example = torch.randn(2, 3, 6)
    model = first(nn.Sequential(nn.Linear(6, 6), Attention()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    constraints = wn.constrain(optimizer, norms=model, example_input=example, **{asked: 20.0})
    for _ in range(3):
        step(casting(model), optimizer, example)
    assert model(example).dtype == torch.bfloat16
    assert max(constraints.proved_ratios().values()) <= 1
    if asked == "lipschitz":
        assert wn.certify(model, example, within=constraints).lipschitz <= 20
    model.forward = lambda x: 2 * model[0](x)
    with pytest.raises(ValueError, match="forward is another one now"):
        step(model, optimizer, example)


class Reading(nn.Module):
    """Its factor stands where no attribute of a module shows it."""

    factor = np.ones(1, dtype=np.float32)

    def forward(self, x):
        return x * float(self.factor[0])


@pytest.mark.parametrize(
    ("layer", "change", "what"),
    [
        (Reading, lambda each: each.factor.fill(5.0), "something that it reads"),
        (Counting, lambda each: setattr(each, "calls", 10), "1.calls, 1.last"),
    ],
)
def test_what_no_step_sees_at_once_is_refused_in_rarer_steps_and_printed(layer, change, what, monkeypatch):
    monkeypatch.setattr(proved_caps, "UNSEEN", 4)
    monkeypatch.setattr(Reading, "factor", Reading.factor.copy())
    model = nn.Sequential(nn.Linear(6, 6, bias=False), layer())
    optimizer = wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, lipschitz=20.0, example_input=torch.randn(2, 6))
    step(model, optimizer)
    step(model, optimizer)
    assert "something else" not in str(constraints)
    change(model[1])
    step(model, optimizer)
    assert "computes something else now, and the constant 20 is not proved" in str(constraints)
    for _ in range(2):  # it stays refused
        with pytest.raises(ValueError, match=rf"as it was, and {what} is another one now"):
            step(model, optimizer)


class Growing(nn.Module):
    """Its table has as many rows as the longest input so far, as tables of positions often have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(2, 6), persistent=False)

    def forward(self, x):
        if len(self.table) < x.shape[-2]:
            self.table = torch.ones(x.shape[-2], 6)
        return x * self.table[: x.shape[-2]]


def test_a_table_with_smaller_entries_is_the_same_program(monkeypatch):
    monkeypatch.setattr(proved_caps, "UNSEEN", 1)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), Growing())
    optimizer = wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, lipschitz=20.0, example_input=torch.randn(1, 2, 6))
    for _ in range(2):
        model[1].table.mul_(0.9)
        step(model, optimizer, torch.ones(1, 2, 6))
        assert "something else" not in str(constraints)


def test_a_table_that_has_grown_is_refused_by_name():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), Growing())
    optimizer = wn.Scion(model, lr=0.1)
    wn.constrain(optimizer, lipschitz=20.0, example_input=torch.randn(1, 2, 6))
    with pytest.raises(ValueError, match=r"as it was, and 1\.table is another one now"):
        step(model, optimizer, torch.ones(1, 3, 6))


@pytest.mark.parametrize("kept", [lambda o, c: o, lambda o, c: c], ids=["optimizer", "constraints"])
def test_a_constant_has_copies_and_no_pickle(kept):
    model, optimizer, _ = begun(False)
    constraints = wn.constrain(optimizer, lipschitz=0.5, example_input=torch.randn(2, 6))
    with pytest.raises(ValueError, match=r"of the constant.*no pickle; save state_dict"):
        pickle.dumps(kept(optimizer, constraints))
    model, optimizer, constraints = copy.deepcopy((model, optimizer, constraints))
    step(model, optimizer)
    assert wn.certify(model, torch.randn(2, 6)).lipschitz <= 0.5
    model[0].forward = lambda x: 9 * x
    with pytest.raises(ValueError, match=r"0\.forward is another one now"):
        step(model, optimizer)


def test_a_constant_reads_what_a_layer_makes_of_its_originals():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
    parametrized(model[0])
    optimizer = wn.Scion(model, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        constraints = wn.constrain(optimizer, lipschitz=2.0, example_input=torch.randn(2, 6))
        step(model, optimizer)
        assert max(constraints.proved_ratios().values()) <= 1
    assert wn.certify(model, torch.randn(2, 6)).lipschitz <= 2.0
