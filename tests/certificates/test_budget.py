"""Caps that keep a constant: it is proved after every step, in every state, while the caps move."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellnormed as wn
from wellnormed.certificates.budget import FREE
from wellnormed.certificates.within import TOLERANCE
from wellnormed.models import GPTConfig, build
from wellnormed.norms import Sign

from .adversary import Net

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


def added(*layers):
    """`x + f(x)`, so that layers differ in what they cost."""
    return Net(lambda s, x: x + s.f(x), f=nn.Sequential(*layers))


def residual(seed=0):
    torch.manual_seed(seed)
    hidden = added(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(8, 8), hidden, nn.ReLU(), nn.Linear(8, 3))


def attending(s, tokens):
    x = s.table(tokens) + s.positions(torch.arange(tokens.shape[1], device=tokens.device))
    q, k, v = (each[:, None] for each in s.mix(x).chunk(3, -1))
    return s.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def attention(tied=False):
    """Tokens with positions, one head, and logits, which may be by the table of the tokens itself."""
    layers = {"table": nn.Embedding(12, 8), "positions": nn.Embedding(6, 8), "mix": nn.Linear(8, 24)}
    model = Net(attending, **layers, head=nn.Linear(8, 12, bias=False))
    if tied:
        model.head.weight = model.table.weight
    return model


def recurrent():
    """The last state of a sequence, whose first is zero."""
    layers = {"cell": nn.LSTM(2, 4, batch_first=True), "head": nn.Linear(4, 3)}
    return Net(lambda s, x: s.head(s.cell(x.unflatten(1, (4, 2)))[0][:, -1]), **layers)


TOKENS = torch.arange(24).reshape(4, 6) * 5 % 12


MODELS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), X, 5.0),
    "residual": (residual, X, 5.0),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(),
            nn.Linear(4, 3),
        ), X, 5.0,
    ),
    "norm layer": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)), X, 20.0),
    "attention": (attention, TOKENS, 5.0),
    "GPT": (lambda: build(GPTConfig(vocabulary_size=12, length=6, width=8, heads=2, blocks=1)), TOKENS, 20.0),
    "LSTM": (recurrent, X, 2.0),
}  # fmt: skip


def step(model, x, *optimizers):
    loss = F.cross_entropy(model(x).flatten(0, -2), TOKENS.flatten() if x is TOKENS else Y)
    for each in optimizers:
        each.zero_grad()
    loss.backward()
    for each in optimizers:
        each.step()


def asked(constant):
    """The constants that are as near to what is asked for as is said."""
    return pytest.approx(constant * (1 - TOLERANCE / 2), rel=TOLERANCE / 2)


@pytest.mark.filterwarnings("ignore:constrain. lipschitz=20.0 costs range")  # of the norm layer
@pytest.mark.parametrize("name", MODELS)
def test_the_constant_is_proved_after_every_step_while_caps_move(name):
    make, x, constant = MODELS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = wn.Scion(model, lr=0.05)
    constraints = wn.constrain(optimizer, lipschitz=constant, example_input=x, move_every=2)
    assert model.training
    before = constraints.caps()
    for _ in range(4):
        step(model, x, optimizer)
        assert all(ratio <= 1 for ratio in constraints.proved_ratios().values())
        assert float(constraints._within.constant(constraints.caps())) == asked(constant)
    always, now = wn.certify(model.eval(), x, within=constraints).lipschitz, wn.certify(model, x).lipschitz
    assert now <= always <= constant
    assert always == asked(constant)
    found = wn.lower_bound(model, x, steps=5, generator=torch.Generator().manual_seed(0))
    assert found.value <= now
    moved = [n for n, cap in constraints.caps().items() if cap != before[n]]
    assert name == "MLP" or moved  # all layers of an MLP are worth as much, whatever their caps


@pytest.mark.parametrize(
    ("unit", "other", "ratio"), [("euclidean", "rms_lipschitz", 8 / 3), ("rms", "lipschitz", 3 / 8)]
)
def test_a_constant_is_asked_for_in_either_unit_and_shown_in_both(unit, other, ratio):
    """The model maps 8 entries to 3."""
    model = residual()
    constraints = wn.constrain(wn.Scion(model), lipschitz=2.0, norm=unit, example_input=X)
    certificate = wn.certify(model, X, within=constraints)
    numbers = {"euclidean": certificate.lipschitz, "rms": certificate.rms_lipschitz}
    assert numbers[unit] == asked(2.0)
    assert getattr(certificate, other) == pytest.approx(numbers[unit] * math.sqrt(ratio))
    first, second = re.findall(r"[\d.]+", str(constraints).splitlines()[0])
    assert (float(first), float(second)) == (2.0, pytest.approx(2 * math.sqrt(ratio), rel=1e-5))
    assert float(second) > 2 * math.sqrt(ratio)


def test_caps_move_to_the_layers_that_the_loss_needs():
    """The loss wants the middle layer to be zero, so that the others get what it had."""
    torch.manual_seed(0)
    first, middle, last = (nn.Linear(8, size, bias=False) for size in (8, 8, 3))
    model = nn.Sequential(first, added(middle), last)
    optimizer = wn.Scion(model, lr=0.05)
    constraints = wn.constrain(optimizer, lipschitz=3.0, norm="rms", example_input=X, move_every=10)
    before = constraints.caps()
    for _ in range(60):
        loss = F.cross_entropy(model(X), Y) + 0.1 * middle.weight.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = constraints.caps()
    assert after["1.f.0.weight"] < 0.9 * before["1.f.0.weight"]
    assert after["2.weight"] > before["2.weight"]
    assert wn.certify(model, X, within=constraints).rms_lipschitz == asked(3.0)


def run(steps, states=None, seed=0, order=(0, 1, 2)):
    model = residual(seed)
    optimizer = wn.Scion(model, lr=0.05)
    constraints = wn.constrain(optimizer, lipschitz=5.0, example_input=X, move_every=4)
    for part in order if states else ():
        (model, optimizer, constraints)[part].load_state_dict(copy.deepcopy(states[part]))
    for _ in range(steps):
        step(model, X, optimizer)
    return model, optimizer, constraints


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_run_that_is_resumed_has_the_same_bits(order):
    whole, _, caps = run(21)
    first = [copy.deepcopy(each.state_dict()) for each in run(10)]
    resumed, _, again = run(11, first, 7, order)  # other weights at first, and so other caps
    assert again.caps() == caps.caps()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert wn.certify(resumed, X, within=again).lipschitz <= 5.0


def test_a_state_whose_caps_are_too_large_is_refused():
    state = {key: 3 * value if key.endswith(".cap") else value for key, value in run(0)[2].state_dict().items()}
    _, _, constraints = run(0)
    before = constraints.caps()
    with pytest.raises(ValueError, match="the caps of this state do not keep the constant 5"):
        constraints.load_state_dict(state)
    assert constraints.caps() == before


def test_a_copy_keeps_the_constant():
    model, optimizer, _ = run(3)
    model, optimizer = copy.deepcopy((model, optimizer))
    (constraints,) = optimizer.attached
    for _ in range(9):
        step(model, X, optimizer)
    assert wn.certify(model, X, within=constraints).lipschitz == asked(5.0)


def test_weights_of_zero_and_frozen_ones_and_caps_by_hand():
    model = residual()
    nn.init.zeros_(model[3].weight)
    model[0].requires_grad_(False)
    optimizer = wn.Scion(model, lr=0.05)
    given = {"1.f.0.weight": wn.SoftCap(0.25)}
    constraints = wn.constrain(optimizer, given, lipschitz=5.0, example_input=X, move_every=2)
    for _ in range(6):
        step(model, X, optimizer)
    assert constraints.promised()["1.f.0.weight"] == 0.25
    assert wn.certify(model, X, within=constraints).lipschitz == asked(5.0)
    with torch.no_grad():
        model[0].weight.mul_(1.0)  # written, with the same values
    step(model, X, optimizer)
    weights = model[3].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"constant 5 is not proved for the new values of 0\.weight"):
            step(model, X, optimizer)
    assert torch.equal(weights, model[3].weight)


@pytest.mark.filterwarnings("ignore:the model's .* in no group of this optimizer")
@pytest.mark.parametrize("make", [lambda m: wn.Scion(m, lr=0.5), lambda m: torch.optim.AdamW(m.parameters(), lr=0.5)])
def test_a_layer_that_is_unfrozen_is_refused_before_its_first_step(make):
    model = residual()
    model[0].requires_grad_(False)
    optimizer = make(model)
    constraints = wn.constrain(optimizer, norms=model, lipschitz=2.0, example_input=X)
    step(model, X, optimizer)
    model[0].requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    model.zero_grad()
    for make_step in (lambda: optimizer.step(lambda: model(X).sum().backward()), lambda: step(model, X, optimizer)):
        with pytest.raises(ValueError, match=r"values of 0\.weight, 0\.bias, frozen when constrain was called"):
            make_step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    model[0].requires_grad_(False)
    model[0].zero_grad()
    step(model, X, optimizer)
    assert wn.certify(model, X, within=constraints).lipschitz <= 2


def test_an_optimizer_of_another_library():
    model = residual()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    constraints = wn.constrain(optimizer, norms=model, lipschitz=5.0, example_input=X, move_every=2)
    for _ in range(6):
        step(model, X, optimizer)
        assert all(ratio <= 1 for ratio in constraints.proved_ratios().values())
    assert wn.certify(model, X, within=constraints).lipschitz == asked(5.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        optimizer.step()


def test_gradients_that_are_not_finite_leave_the_caps_as_they_are():
    model, optimizer, constraints = run(0)
    before = constraints.caps()
    for saved in constraints._saved.values():
        saved.fill_(math.nan)
    constraints._move()
    assert constraints.caps() == before
    for _ in range(4):
        step(model, X, optimizer)
    assert constraints.caps() != before


def test_under_an_average_caps_stay():
    model = residual()
    optimizer = wn.Averaged(wn.Scion(model, lr=0.05))
    constraints = wn.constrain(optimizer, lipschitz=5.0, example_input=X, move_every=2)
    before = constraints.caps()
    for _ in range(6):
        step(model, X, optimizer)
    optimizer.eval()
    assert constraints.caps() == before
    assert "caps stay" in str(constraints)
    assert all(ratio <= 1 for ratio in constraints.proved_ratios().values())
    assert wn.certify(model, X).lipschitz <= 5.0


def test_print_fits_80_columns_and_sums_to_all_of_the_constant():
    _, _, constraints = run(5)
    lines = str(constraints).splitlines()
    assert lines[0] == "Lipschitz constant at most 5 in Euclidean norms and 8.16497 from RMS to RMS"
    assert lines[1] == "after every step, for inputs of RMS at most 1.0; caps move every 4 steps"
    assert max(map(len, lines)) <= 80
    shares = [float(share) for share in re.findall(r"(\d+)% +\d+%", "\n".join(lines))]
    assert sum(shares) == pytest.approx(100, abs=4)  # each is rounded
    assert constraints.caps()["0.bias"] == FREE
    assert re.search(r"(?m)^0\.bias +free up to 1000$", str(constraints))


def test_print_says_which_parameters_have_no_part_in_the_constant():
    heads = Net(lambda s, x: (s.value(x), s.policy(x)), value=nn.Linear(8, 1), policy=nn.Linear(8, 3))
    constraints = wn.constrain(wn.Scion(heads), lipschitz=1.0, example_input=X, output=0)
    assert re.search(r"(?m)^policy\.weight +none +the constant does not depend on it$", str(constraints))
    heads.value.requires_grad_(False)
    assert not wn.constrain(wn.Scion(heads), lipschitz=10.0, example_input=X, output=0).caps()


class LowRank(nn.Linear):
    """In evaluation mode it merges what it trains into its frozen weight, as loralib's does."""

    def __init__(self):
        super().__init__(8, 3)
        self.requires_grad_(False)
        self.up, self.down, self.merged = nn.Linear(2, 3, bias=False), nn.Linear(8, 2, bias=False), False

    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.up.weight @ self.down.weight
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) + (0 if self.merged else self.up(self.down(x)))


def test_trained_weights_are_not_hidden_by_merging_them():
    model = nn.Sequential(LowRank())
    optimizer = wn.Scion(model, lr=0.5)
    constraints = wn.constrain(optimizer, lipschitz=3.0, example_input=X)
    assert constraints.caps().keys() == {"0.up.weight", "0.down.weight"}
    for _ in range(4):
        step(model.train(), X, optimizer)
        assert wn.certify(model.eval(), X).lipschitz <= 3


def test_print_says_which_weights_are_shrunk_at_once():
    model = residual()
    constraints = wn.constrain(wn.Scion(model), lipschitz=0.05, example_input=X)
    outside, _, line, more, now = str(constraints).splitlines()[2:7]
    assert outside.startswith("the example lies outside of the domain: `input.input` has vectors of RMS")
    said = re.fullmatch(r"at once the caps shrink 4 weights, the most (\S+), of norm (\S+) for (\S+)", line)
    assert float(said[2]) > float(said[3]) == pytest.approx(constraints.caps()[said[1]], rel=1e-2)
    enough = float(re.fullmatch(r"\(lipschitz=(\S+) would shrink none; by the entries of its .*", more)[1])
    model = residual()
    has = float(re.fullmatch(r"caps know norms alone, the model has (\S+) now\)", now)[1])
    assert has == pytest.approx(wn.certify(model, X).lipschitz, rel=1e-2)
    assert "shrink" not in str(wn.constrain(wn.Scion(model), lipschitz=enough, example_input=X))
    assert "shrink" in str(wn.constrain(wn.Scion(model), lipschitz=0.98 * enough, example_input=X))


@pytest.mark.parametrize("number", ["lipschitz", "largest_logit"])
def test_the_smallest_number_that_is_stated_can_be_asked_for(number):
    of_constant = number == "lipschitz"
    model = added(nn.Linear(4, 4, bias=False)) if of_constant else with_biases()

    def ask(most):
        example = {"example_input": torch.zeros(1, 5, 4), "accept_small_range": of_constant}
        return wn.constrain(wn.Scion(model), **{number: most}, **example)

    with pytest.raises(ValueError, match=rf"{number}=1e-06 is less than") as caught:
        ask(1e-6)
    least = float(re.search(r"(?:constant is|it has) (\d\S*\d)\. [WP]", str(caught.value))[1])
    for most in (least, 1.002 * least, 1.05 * least, 2 * least):
        ask(most)


def test_tables_that_the_domain_bounds_are_named_beside_the_constant_that_shrinks_no_other():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    nn.init.constant_(model[0].weight, 3.0)
    more = str(wn.constrain(wn.Scion(model), lipschitz=0.05, example_input=torch.zeros(1, 3, dtype=torch.long)))
    assert re.search(r"would shrink none but 0\.weight, whose rows radius= or box= bounds;", more)


def with_biases():
    """Attention whose queries have a bias that no cap makes small: it is frozen."""
    model = Net(lambda s, x: F.scaled_dot_product_attention(s.q(y := F.rms_norm(x, (4,))), s.k(y), y),
                q=nn.Linear(4, 4), k=nn.Linear(4, 4))  # fmt: skip
    for each in (model.q, model.k):
        nn.init.constant_(each.bias, 1.0).requires_grad_(False)
    return model


def ordinary_gpt():
    layers = (m for _ in range(2) for m in (nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    return nn.Sequential(nn.Embedding(12, 8), added(*layers), nn.LayerNorm(8), nn.Linear(8, 12, bias=False))


def test_a_constant_with_which_the_result_can_hardly_move_is_refused_before_anything_is_changed():
    """Norm layers have steep slopes and a small range: caps that make up for the slopes leave little of the range."""
    torch.manual_seed(0)
    model = ordinary_gpt()
    optimizer, before = wn.Scion(model), copy.deepcopy(model.state_dict())
    words = r"can hardly move: .* RMS of at most 0\.0\d+, .* of what it could be.* the caps shrink .* wn\.calibrate"
    with pytest.raises(ValueError, match=words):
        wn.constrain(optimizer, lipschitz=10.0, example_input=TOKENS)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.warns(UserWarning, match="costs range") as warned:
        constraints = wn.constrain(optimizer, lipschitz=10.0, example_input=TOKENS, accept_small_range=True)
    assert warned[0].filename == __file__
    model.eval()
    certificate = wn.certify(model, TOKENS, within=constraints)
    assert certificate.lipschitz == asked(10.0)
    constraints.remove()
    wn.constrain(optimizer, lipschitz=1e30, example_input=TOKENS)  # a constant that these weights have: no word


@pytest.mark.parametrize("constant", [0.01, 1.0, 100.0])
def test_without_norm_layers_any_constant_is_taken_without_a_word(constant):
    layers = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    convolutions = nn.Sequential(nn.Unflatten(1, (2, 4, 4)), *layers).eval()
    for model, x in ((MODELS["MLP"][0](), X), (convolutions, torch.zeros(1, 32))):
        wn.constrain(wn.Scion(model), lipschitz=constant, example_input=x)


def test_caps_that_take_a_gain_which_the_constant_allows_are_refused():
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(8) for _ in range(5)]
    maps = [nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4)]
    blocks = [added(*maps[i : i + 1], norms[i], nn.ReLU(), maps[i + 1], norms[i + 1]) for i in (0, 2)]
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norms[4], nn.ReLU(), *blocks, nn.Flatten(), nn.Linear(512, 3))
    images = torch.rand(64, 1, 8, 8)
    for _ in range(30):
        model(images)
    model.eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    asked = {"lipschitz": 10.0, "example_input": images[:1], "box": (0, 1)}
    words = (
        r"can hardly move: .* gain of [\d.]+, .* allows, and 0\.\d+ within its caps.* shrink .*accept_small_range=True"
    )
    with pytest.raises(ValueError, match=words):
        wn.constrain(wn.Scion(model), **asked)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    wn.constrain(wn.Scion(model), **asked, accept_small_range=True)
    assert wn.certify(model, images[:1], box=(0, 1)).lipschitz <= 10
    wn.constrain(wn.Scion(model), **asked)  # of projected weights nothing more is taken


def test_less_than_a_model_can_have_is_refused_with_what_stands_in_the_way():
    skips = nn.Sequential(added(nn.Linear(8, 8)), nn.LayerNorm(8, elementwise_affine=False))
    with pytest.raises(ValueError, match=r"the constant is 319\.\d+\. What .* 1\.layer_norm \(normalization\) by 317"):
        wn.constrain(wn.Scion(skips), lipschitz=10.0, example_input=X)
    assert wn.constrain(wn.Scion(skips), lipschitz=400.0, example_input=X).caps()["0.f.0.weight"] > 0.01
    around = r"the constant is 1\.01\d+\. What has no cap keeps it, .* frozen weights do\. Ask for at least that"
    with pytest.raises(ValueError, match=around):
        wn.constrain(wn.Scion(skips[0]), lipschitz=0.5, example_input=X)
    assert wn.constrain(wn.Scion(skips[0]), lipschitz=1.0101, example_input=X).caps()["f.0.weight"] < 0.02
    with pytest.raises(ValueError, match=r"frozen weights do: head\.linear \(linear\) by 9\.80.* tables keep"):
        wn.constrain(wn.Scion(attention(tied=True)), lipschitz=5.0, example_input=TOKENS)
    tied = wn.constrain(wn.Scion(attention(tied=True)), lipschitz=20.0, example_input=TOKENS)
    assert tied.caps()["table.weight"] == pytest.approx(1.0)  # the radius of the domain


def refusals():
    model = residual()
    yield wn.Scion(model), {"lipschitz": 5.0, "radius": math.inf, "box": (0, 1)}, "are two domains"
    yield wn.Scion(model), {"lipschitz": -1.0, "example_input": X}, "lipschitz=-1.0 must be positive"
    yield wn.Scion(model), {"lipschitz": 5.0}, "pass example_input="
    yield wn.Scion(model), {"lipschitz": 5.0, "example_input": X, "move_every": 0.5}, "move_every=0.5 is of type float"
    yield wn.Scion(model), {"lipschitz": 5.0, "example_input": X, "every": "1"}, "every='1' .*; pass a whole number"
    yield wn.Scion(model), {"example_input": X}, "example_input given without lipschitz="
    yield wn.Scion(model), {"norm": "rms"}, "norm given without lipschitz= or largest_logit=; leave this out, or pass"
    yield wn.Scion(model), {"lipschitz": 5.0, "norm": "l2", "example_input": X}, "norm='l2' is not one of euclidean"
    yield torch.optim.SGD(model.parameters(), lr=0.1), {"lipschitz": 5.0, "example_input": X}, "pass norms=model"
    some = torch.optim.SGD(model[0].parameters(), lr=0.1)
    yield some, {"lipschitz": 5.0, "example_input": X, "norms": model}, "one optimizer, which lacks 1.f.0.weight"
    yield wn.Muon(model, recipe="muon"), {"lipschitz": 5.0, "example_input": X}, "no cap holds '0.bias'"
    broken = residual()
    nn.init.constant_(broken[0].weight, math.nan)
    yield wn.Scion(broken), {"lipschitz": 5.0, "example_input": X}, "parameter '0.weight' holds NaN .*; load other"
    batch = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    yield wn.Scion(batch), {"lipschitz": 5.0, "example_input": X}, "BatchNorm1d changes its running statistics"


def test_wrong_arguments_are_named():
    for optimizer, settings, message in refusals():
        with pytest.raises(ValueError, match=message):
            wn.constrain(optimizer, **settings)
        assert not getattr(optimizer, "attached", [])


def test_entries_in_a_box_and_norms_of_entries():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3))
    norms = wn.assign_norms(model, overrides={"2.weight": Sign()})
    optimizer = wn.Scion(norms, lr=0.05)
    settings = {"example_input": X.sigmoid(), "box": (0, 1)}
    constraints = wn.constrain(optimizer, norms=model, lipschitz=5.0, move_every=2, **settings)
    for _ in range(4):
        step(model, X, optimizer)
    assert wn.certify(model, X.sigmoid(), box=(0, 1), within=constraints).lipschitz == asked(5.0)


def test_a_learned_slope_is_bounded_by_its_cap_of_the_moment():
    """A row has the slope as a constant, so that it is no row for another cap."""
    model = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 4))
    constraints = wn.constrain(wn.Scion(model, lr=0.1), lipschitz=3.0, example_input=X)
    assert 2.99 < wn.certify(model, X, within=constraints).lipschitz <= 3
    slope = constraints._within.elasticities({**constraints.caps(), "1.weight": 5.0}, ["1.weight"])
    assert slope["1.weight"] == pytest.approx(1, rel=0.01)


def normalized(function):
    """A batch norm whose statistics have other names."""
    return Net(function, average=torch.zeros(8), running_var=torch.ones(8))


def test_statistics_that_training_does_not_change_are_no_obstacle():
    frozen = normalized(lambda s, x: (x - s.average) * s.running_var.rsqrt())
    model = nn.Sequential(nn.Linear(8, 8), frozen, nn.BatchNorm1d(8).eval(), nn.Linear(8, 3))
    optimizer = wn.Scion(model, lr=0.02)
    wn.constrain(optimizer, lipschitz=5.0, example_input=X)
    step(model, X, optimizer)


@pytest.mark.parametrize("own", [True, False])
def test_running_statistics_that_would_change_are_refused_before_the_step(own):
    """torch does not count what a batch norm writes into them."""
    mine = normalized(lambda s, x: F.batch_norm(x, s.average, s.running_var, training=s.training))
    layer, name = (mine, "Net") if own else (nn.BatchNorm1d(8), "BatchNorm1d")
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 3)).eval()
    optimizer = wn.Scion(model, lr=0.02)
    wn.constrain(optimizer, lipschitz=5.0, example_input=X)
    step(model, X, optimizer)
    model.train()
    with pytest.raises(ValueError, match=f"{name} changes its running statistics while it trains"):
        step(model, X, optimizer)
    model.eval()
    with pytest.raises(ValueError, match=r"not proved for the new values of 1\..*, 1\.running_var"):
        step(model, X, optimizer)


def test_a_model_that_is_cast_is_refused():
    """The eps of an RMSNorm is that of its dtype by default: the constant of float64 was 39 times the one asked for."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wn.constrain(optimizer, norms=model, lipschitz=4000.0, example_input=X)
    model.double()
    with pytest.raises(ValueError, match=r"and the dtype of 0\.weight, the dtype of .* is another one now"):
        step(model, X.double(), optimizer)
