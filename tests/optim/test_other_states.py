"""States of other optimizers: each loads and goes on, or is refused with a sentence, and nothing is changed."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import wellnormed as wn

OURS = {
    "Scion": wn.Scion, "SCG": lambda model: wn.Scion(model, lr=0.1, unconstrained=False), "Muon": wn.Muon,
    "the recipe muon": lambda model: wn.Muon(model, recipe="muon"), "Almond": wn.Almond,
    "sharp": lambda model: wn.optim.SpectralDescent(model, lr=0.1), "Signum": wn.optim.Signum,
    "NormalizedSGD": wn.optim.NormalizedSGD,
    "NorMuon": lambda model: wn.Scion(model, directions={"*": wn.optim.directions.NorMuon(0.9)}),
    "memory-light": lambda model: wn.Scion(model, memory="gradient"),
    "sign-only": lambda model: wn.Scion(model, recipe="sign-only"),
    "factors": lambda model: wn.Scion(model, lr_factors={"0": 0.5}),
}  # fmt: skip
OTHERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "AdamW, named": lambda model: torch.optim.AdamW(model.named_parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD, named": lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9),
}


def network(width=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, width), nn.Linear(width, 6), nn.LayerNorm(6), nn.Linear(6, 6))


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, 3]])).square().sum().backward()
        optimizer.step()


def bits(optimizer):
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("saver", [*OURS, *OTHERS])
def test_a_state_goes_on_or_is_refused_before_anything_is_changed(saver):
    model = network()
    source = (OURS | OTHERS)[saver](model)
    train(model, source)
    loaded = []
    for loader, make in OURS.items():
        model = network()
        optimizer = make(model)
        train(model, optimizer, 1)
        before = bits(optimizer)
        try:
            optimizer.load_state_dict(bits(source))
        except ValueError:
            assert repr(bits(optimizer)) == repr(before)
        else:
            loaded.append(loader)
            assert optimizer.param_groups[0]["lr"] == source.param_groups[0]["lr"]
        train(model, optimizer)
        assert all(p.isfinite().all() for p in model.parameters())
    assert (saver in loaded) == (saver in OURS)
    assert not (saver in OTHERS and loaded)


@pytest.mark.parametrize("saver", OTHERS)
def test_the_sentence_says_what_was_given(saver):
    model = network()
    source = OTHERS[saver](model)
    train(model, source)
    with pytest.raises(ValueError, match=r"optimizer of another library, whose groups have .*lr, .* and no step_rule"):
        wn.Scion(network()).load_state_dict(source.state_dict())
    state = get_optimizer_state_dict(model, source)
    other = network()
    optimizer = wn.Scion(other)
    with pytest.raises(ValueError, match="optimizer of another library"):
        set_optimizer_state_dict(other, optimizer, copy.deepcopy(state))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OURS["SCG"], r"0\.weight.* follow 'constrained' here, 'unconstrained' in the saved one"),
        (OURS["Almond"], r"0\.weight.* follow 'averaged' here, 'unconstrained' in the saved one"),
        (OURS["the recipe muon"], r"0\.weight.* follow 'adamw' here, 'unconstrained' in the saved one"),
    ],
)
def test_states_of_other_settings_are_refused_by_parameter(make, message):
    model = network()
    source = wn.Scion(model)
    train(model, source)
    with pytest.raises(ValueError, match=message):
        make(network()).load_state_dict(source.state_dict())


def test_states_of_other_sizes_and_what_is_no_state_are_refused():
    model = network(width=7)
    source = wn.Scion(model)
    train(model, source)
    optimizer = wn.Scion(network())
    with pytest.raises(ValueError, match=r"'0.weight' holds .*momentum_buffer \(5, 7\).* of a model of the same size"):
        optimizer.load_state_dict(source.state_dict())
    for bad in (None, [], {}, model.state_dict(), {"state": {}, "param_groups": 3}, {"state": {}, "param_groups": [3]}):
        with pytest.raises(ValueError, match="the state must be a dictionary of an optimizer"):
            optimizer.load_state_dict(bad)


@pytest.mark.parametrize("memory", ["buffer", "gradient"])
def test_a_state_brings_its_memory_along(memory):
    """As it brings every setting of its groups; sums of gradients and their averages are never mistaken."""
    model, other = network(), network()
    source = wn.Scion(model, lr=0.1, memory=memory)
    train(model, source)
    resumed = wn.Scion(other, lr=0.5, memory="gradient" if memory == "buffer" else "buffer")
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(bits(source))
    train(model, source)
    train(other, resumed)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_averages_of_longer_directions_are_refused():
    """A step along them would be longer than `update_norm` says; a cap that waits for it was exceeded by a fifth."""
    (model, optimizer), (_, other) = (
        (model, wn.Almond(model, overrides={"1.weight": wn.Spectral(units=units)}))
        for model, units in ((network(), "one-hot"), (network(), "rms"))
    )
    train(model, optimizer, 10)
    with pytest.raises(ValueError, match=r"'1.weight' holds an average of directions of norm .* at most"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


@pytest.mark.parametrize(
    "change", [{"step_rule": "averaged"}, {"step_rule": "adamw"}], ids=["averages of directions", "no norm"]
)
def test_a_step_rule_that_averages_something_else_is_refused_in_the_middle(change):
    """An average of gradients that was taken for one of directions made a step of 65 times its bound."""
    model = network()
    optimizer = wn.Scion(model, lr=0.1)
    optimizer.param_groups[0].update(change)
    optimizer.param_groups[0].update(step_rule="unconstrained")  # before the first step nothing is averaged
    train(model, optimizer)
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=r"was changed in the middle of training|cannot move"):
        train(model, optimizer)


def test_an_average_of_16_bits_is_no_longer_than_directions_of_32_bits():
    """Rounding lengthens the average, by less than its steps may exceed their bound here."""
    layer, other = nn.Linear(8, 8, bias=False).bfloat16(), nn.Linear(8, 8, bias=False)
    norm = wn.Spectral(method="svd")
    optimizer = wn.Almond(layer, lr=0.1, overrides={"weight": norm})
    for _ in range(60):
        layer.weight.grad = torch.eye(8, dtype=torch.bfloat16)
        optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] *= 1.01
    resumed = wn.Almond(other, lr=0.1, overrides={"weight": norm})
    resumed.load_state_dict(saved)
    average = resumed.state[other.weight]["momentum_buffer"]
    assert float(torch.linalg.matrix_norm(average.double(), 2)) <= 1 + 1e-5
