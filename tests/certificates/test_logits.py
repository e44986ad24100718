"""Caps that keep logits: `constrain(largest_logit=)` finds them, and `certify(within=)` asks for no others."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellnormed as wn
from wellnormed.certificates import UncertifiableError, within
from wellnormed.norms import PerHead

from .adversary import Net


class Attention(nn.Module):
    """A pre-norm block of four heads, which notes its largest logit."""

    def __init__(self, rotary=False, fused=False, norm=nn.RMSNorm, bias=False):
        super().__init__()
        self.norm, self.num_heads, self.rotary = norm(32), 4, rotary
        if fused:
            self.qkv = nn.Linear(32, 96, bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(32, 32, bias=bias) for _ in range(3))
        angles = torch.arange(6.0)[:, None] / 10 ** torch.arange(4)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2))
        self.seen = 0.0

    def forward(self, x):
        x = self.norm(x)
        parts = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in parts)
        if self.rotary:
            halves = lambda z: torch.cat([-z[..., 4:], z[..., :4]], -1)  # noqa: E731
            q, k = (z * self.turns[0] + halves(z) * self.turns[1] for z in (q, k))
        if not torch.compiler.is_compiling() and type(q) is torch.Tensor:
            self.seen = (q @ k.mT).detach().abs().max() / math.sqrt(8)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def blocks_of(*layers):
    """Tokens, attention layers with residuals, and a head behind a norm layer."""

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.last(x))

    table, head = nn.Embedding(12, 32), nn.Linear(32, 12)
    return Net(forward, table=table, layers=nn.ModuleList(layers), last=nn.LayerNorm(32), head=head)


TOKENS = torch.arange(24).reshape(4, 6) * 5 % 12
MODELS = {
    "two layers": lambda: blocks_of(Attention(), Attention(rotary=True)),
    "fused, with biases": lambda: blocks_of(Attention(fused=True, norm=nn.LayerNorm, bias=True)),
    "no norm layer": lambda: blocks_of(Attention(norm=nn.Identity), Attention(norm=nn.Identity)),
}


@pytest.mark.parametrize(
    ("name", "of"),
    [("two layers", "Scion"), ("two layers", "AdamW"), ("fused, with biases", "AdamW"), ("no norm layer", "Scion")],
)
def test_no_logit_is_beyond_the_number_after_any_step(name, of):
    torch.manual_seed(0)
    model, normed = MODELS[name](), name != "no norm layer"
    optimizer = wn.Scion(model, lr=0.5) if of == "Scion" else torch.optim.AdamW(model.parameters(), lr=0.3)
    constraints = wn.constrain(optimizer, norms=model, largest_logit=5.0, example_input=TOKENS)
    assert all(4.99 < logit <= 5.0 for logit in constraints.logits().values())
    assert len(constraints.logits()) == len(model.layers)
    assert all(f"{row}  " in str(constraints) for row in constraints.logits())
    held = constraints.caps().keys()
    assert not {"head.weight", "last.weight"} & held
    assert ("table.weight" in held) is not normed
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
        assert all(ratio <= 1 for ratio in constraints.proved_ratios().values())
        model(TOKENS)
        assert all(layer.seen <= 5.0 for layer in model.layers)
    always = wn.certify(model, TOKENS, math.inf if normed else 1.0, within=constraints)
    assert 4.99 < always.largest_logit <= 5.0
    assert {*constraints.caps()} <= {promise.name for promise in always.promises}


def test_print_says_which_weights_are_shrunk_at_once():
    torch.manual_seed(0)
    model = MODELS["two layers"]()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    printed = {}
    for most in (1000.0, 1.0):
        constraints = wn.constrain(wn.Scion(model), largest_logit=most, example_input=TOKENS)
        printed[most] = re.search(r"(?m)^at once the caps shrink (\d+) weights", str(constraints))
        constraints.remove()
        if most == 1000.0:
            assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    shrunk = [name for name, weight in model.named_parameters() if not torch.equal(before[name], weight)]
    assert (printed[1000.0], int(printed[1.0][1])) == (None, len(shrunk))


@pytest.mark.parametrize("asked", ["largest_logit", "lipschitz"])
def test_a_search_proves_no_walk_again_for_its_own_caps(asked, monkeypatch):
    blocks, layers = blocks_of(Attention()), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model, example = (blocks, TOKENS) if asked == "largest_logit" else (layers, torch.ones(1, 3))
    again, seen = within.proved_again, []

    def counted(walk, promises):
        seen.append(promises != walk.ledger.proof.promises)
        return again(walk, promises)

    monkeypatch.setattr(within, "proved_again", counted)
    wn.constrain(wn.Scion(model), example_input=example, **{asked: 1.0})
    assert seen
    assert all(seen)


def test_the_formula_is_per_head_and_rotary_keeps_it():
    """c^2 sqrt(d_head), for tokens of RMS 1: 2.3^2 sqrt(8) = 14.96; with the norm of the whole, times four heads."""
    for rotary in (False, True):
        model = Attention(rotary)
        for norm, expected in ((PerHead(4), 14.9623), (wn.Spectral(), 4 * 14.9623)):
            norms = wn.assign_norms(model, overrides={"q.weight": norm, "k.weight": norm})
            caps = {"[qk]": wn.HardCap(2.3), "norm.weight": wn.constraints.EntryCap(1.0)}
            constraints = wn.constrain(wn.Scion(model), caps, norms=norms)
            proved = wn.certify(model, torch.zeros(1, 6, 32), within=constraints).largest_logit
            assert proved == pytest.approx(expected, rel=1e-4)


def test_heads_of_a_product_that_adds_its_bias_are_those_of_a_linear_layer():
    """GPT-2's layers of Hugging Face are such products."""
    layer, x = Attention(fused=True, bias=True), torch.randn(2, 6, 32)
    added = lambda x: torch.addmm(layer.qkv.bias, x.flatten(0, 1), layer.qkv.weight.mT).unflatten(0, x.shape[:2])  # noqa: E731
    found = [wn.certify(layer, x, radius=math.inf).attention_logits.values()]
    layer.qkv.forward = added
    found.append(wn.certify(layer, x, radius=math.inf).attention_logits.values())
    (heads,), others = map(list, found)
    assert others == [heads]
    assert len({*heads}) == 4


def test_certify_asks_for_caps_of_what_logits_depend_on_and_names_ones_that_constrain_takes():
    model = blocks_of(Attention())
    constraints = wn.constrain(wn.Scion(model), {"head.weight": wn.HardCap(1.0)})
    with pytest.raises(UncertifiableError, match="What has no promise") as error:
        wn.certify(model, TOKENS, within=constraints)
    constraints.remove()
    named = dict(re.findall(r"'([\w.]+)': wn\.constraints\.(\w+)\(1\.0\)", str(error.value)))
    assert named["table.weight"] == "ColumnCap"
    assert named.keys() == dict(model.named_parameters()).keys() - {"head.weight"}
    constraints = wn.constrain(wn.Scion(model), {"head.weight": wn.HardCap(1.0)} | {
        name: getattr(wn.constraints, kind)(1.0) for name, kind in named.items()
    })  # fmt: skip
    assert wn.certify(model, TOKENS, 2.0, within=constraints).lipschitz < 1e9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"largest_logit": 5.0, "lipschitz": 1.0}, "two searches"),
        ({"largest_logit": -1.0}, "largest_logit"),
        ({"largest_logit": 5.0, "norm": "rms", "move_every": 10}, "norm, move_every given without lipschitz=; leave"),
        ({"largest_logit": 5.0, "norms": nn.Linear(2, 2), "example_input": torch.zeros(1, 2)}, "this model has none"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, words):
    model = arguments.get("norms") or blocks_of(Attention())
    with pytest.raises(ValueError, match=words):
        wn.constrain(wn.Scion(model), **{"example_input": TOKENS} | arguments)


def test_a_number_out_of_reach_and_parameters_of_other_optimizers_are_named():
    model = blocks_of(Attention())
    with pytest.raises(ValueError, match=r"largest_logit=1e-09 is less than layers\.0"):
        wn.constrain(wn.Scion(model), largest_logit=1e-9, example_input=TOKENS)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    with pytest.raises(ValueError, match=r"depend on layers\.0\.norm\.weight, which another optimizer moves"):
        wn.constrain(matrices, norms=model, largest_logit=5.0, example_input=TOKENS)
    model.layers[0].norm.requires_grad_(False)
    assert wn.constrain(matrices, norms=model, largest_logit=5.0, example_input=TOKENS).caps()


def behind(first=0.0):
    """Attention between two parameters that no default recipe knows; logits depend on the first, if it is not 0."""
    held = {"first": nn.Parameter(torch.full((1, 32), first), requires_grad=first > 0)}
    held |= {"layer": Attention(norm=nn.Identity), "last": nn.Parameter(torch.randn(32, 2) / 32)}
    return Net(lambda s, x: s.layer(F.rms_norm(x, (32,)) + s.first) @ s.last, **held)


@pytest.mark.parametrize("number", ["largest_logit", "lipschitz"])
@pytest.mark.parametrize("own", [True, False])
def test_norms_that_no_recipe_knows_are_those_that_were_given(own, number):
    model, x = behind(), torch.randn(2, 6, 32)
    with pytest.raises(ValueError, match=r"assign_norms\(model, \.\.\.\), which constrain takes as norms="):
        wn.constrain(torch.optim.SGD(model.parameters(), lr=1.0), norms=model, **{number: 1e5}, example_input=x)
    overrides = {"last": wn.Spectral(input_axis=0) if number == "lipschitz" else None}
    sgd, assignment = torch.optim.SGD(model.parameters(), lr=1.0), wn.assign_norms(model, overrides=overrides)
    optimizer, norms = (wn.Scion(model, overrides=overrides), None) if own else (sgd, assignment)
    constraints = wn.constrain(optimizer, norms=norms, **{number: 1e5}, example_input=x)
    assert ("last" in constraints.caps()) is (number == "lipschitz")
    assert "layer.q.weight" in constraints.caps()


def test_a_parameter_without_a_norm_is_named_where_the_number_depends_on_it():
    model, x = behind(1.0), torch.randn(2, 6, 32)
    optimizer = wn.Scion(model, overrides={"first": None, "last": None})
    with pytest.raises(ValueError, match="parameters without a norm may have any entries"):
        wn.constrain(optimizer, largest_logit=5.0, example_input=x)
    with pytest.raises(ValueError, match=r"no cap holds 'first', .* norms=assign_norms\(model, overrides="):
        wn.constrain(optimizer, lipschitz=1e9, example_input=x)
    with pytest.raises(UncertifiableError, match="the bound needs entries of first"):
        wn.certify(model, x, within=wn.constrain(optimizer, {"layer": wn.HardCap(1.0)}))


class Soft(Attention):
    """Logits below 7 by tanh, written out, behind a norm layer of gain `1 + w`, and a token of its own in front."""

    def __init__(self):
        super().__init__()
        self.norm, self.gain = nn.RMSNorm(32, elementwise_affine=False), nn.Parameter(torch.zeros(32))
        self.first = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x):
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x = self.norm(x) * (1 + self.gain)
        q, k, v = (each(x).unflatten(-1, (4, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        logits = 7 * torch.tanh(q @ k.mT / math.sqrt(8) / 7)
        if not torch.compiler.is_compiling() and type(q) is torch.Tensor:
            self.seen = logits.detach().abs().max()
        future = torch.ones(7, 7).triu(1) * torch.finfo(x.dtype).min
        return ((logits + future).softmax(-1) @ v).transpose(1, 2).flatten(2)[:, 1:]


def test_a_soft_cap_has_a_largest_logit_that_caps_lower():
    """Of a class token, a gain `1 + w` and logits behind tanh, all of which weights within caps are known by norms."""
    torch.manual_seed(0)
    model = blocks_of(Soft())
    wide = wn.certify(model, TOKENS)
    assert wide.largest_logit <= 7
    assert wn.verify(wide, model.state_dict()).attention_logits
    optimizer = wn.Scion(model, lr=0.5)
    constraints = wn.constrain(optimizer, largest_logit=3.0, example_input=TOKENS)
    assert all(2.99 < logit <= 3.0 for logit in constraints.logits().values())
    held = constraints.caps().keys()
    assert {"layers.0.q.weight", "layers.0.k.weight", "layers.0.gain"} <= held
    assert not {"layers.0.v.weight", "layers.0.first", "head.weight"} & held
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
        model(TOKENS)
        assert model.layers[0].seen <= 3.0
    always = wn.certify(model, TOKENS, math.inf, within=constraints)
    assert always.largest_logit <= 3.0
    assert wn.verify(always, model.state_dict()).attention_logits
