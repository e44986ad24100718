"""What `constrain` refuses by name, weights of 16 bits, and the two constraints that promise nothing."""

import math
import pickle

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.certificates.adversary import Net
from wellnormed import constraints as c
from wellnormed.constraints.base import held
from wellnormed.matrix import _checks


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2.0, r"'0' must have a Constraint, got 2.0; pass one, such as SoftCap\(2.0\)"),
        (wn.HardCap, r"must have a Constraint, got .*HardCap.*; pass one, such as HardCap\(2.0\)"),
        ("soft", r"'0' must have a Constraint, got 'soft'"),
        (None, r"'0' must have a Constraint, got None"),
    ],
)
def test_what_is_no_constraint_is_refused_with_what_to_write(value, message):
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=message):
        wn.constrain(wn.Scion(model, lr=0.1), {"0": value})


def test_weights_without_values_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'0.weight' is a meta tensor.*HardCap.*to_empty"):
        wn.constrain(optimizer, {"0": wn.HardCap(1.0)}, norms=model)


def test_a_norm_sphere_in_the_weights_own_norms():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5))
    optimizer = wn.Scion(model, lr=0.3)
    nn.init.ones_(model[1].bias)
    constraints = wn.constrain(optimizer, {"*": c.FixedNorm()})
    before = constraints.norms()
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
    assert constraints.norms() == pytest.approx(before, rel=1e-2)  # a spectral norm is an estimate


def test_qk_clip_is_its_published_formula():
    """Kimi K2, algorithm 1: sqrt(tau / S) for the queries and keys of a head whose S is above tau; once a record."""

    def heads(self, x):  # three, with biases
        q, k = (f(x).unflatten(-1, (3, 4)).transpose(1, 2) for f in (self.q, self.k))
        return q @ k.mT

    torch.manual_seed(0)
    model = Net(heads, q=nn.Linear(6, 12), k=nn.Linear(6, 12))
    with torch.no_grad():
        model.q.weight[:4] *= 20
    clip = c.QKClip(max_logit=3.0)
    optimizer = wn.Scion(model, lr=0.0)
    wn.constrain(optimizer, {"*": clip})
    x = torch.randn(2, 5, 6)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits = model(x)
    largest = logits.detach().amax((0, 2, 3))
    assert (largest > 3.0).any()
    assert (largest < 3.0).any()
    for part in logits:  # as from several pieces of a batch
        clip.record(part)
    logits.square().sum().backward()
    optimizer.step()
    factors = torch.where(largest > 3.0, 3.0 / largest, 1.0).sqrt().repeat_interleave(4)
    for name, p in model.named_parameters():
        expected = before[name] * (factors[:, None] if p.ndim == 2 else factors)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-7)  # float32, one product
    torch.testing.assert_close(model(x).detach().amax((0, 2, 3)), largest.clamp(max=3.0), rtol=1e-4, atol=1e-5)
    after = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # nothing was recorded since
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), after, strict=True))


def test_qk_clip_leaves_the_values_of_a_fused_weight():
    layer = nn.Linear(6, 18, bias=False)
    before = layer.weight.detach().clone()
    clip = c.QKClip(max_logit=1.0, fused=True, power=1.0)
    optimizer = wn.Scion(layer, lr=0.0)
    wn.constrain(optimizer, {"weight": clip})
    clip.record(torch.tensor([4.0, 0.5]).reshape(2, 1, 1))
    layer.weight.grad = torch.ones(18, 6)
    optimizer.step()
    factors = torch.tensor([0.25, 1.0]).repeat_interleave(3)
    expected = before * torch.cat([factors, factors, torch.ones(6)])[:, None]
    torch.testing.assert_close(layer.weight.detach(), expected)
    clip.record(torch.ones(4, 1, 1))
    with pytest.raises(ValueError, match="4 heads were recorded, but a weight has 18 rows"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_qk_clip_scales_a_shared_head_of_keys_by_its_largest_query_head(fused):
    """Four heads of queries, two of keys; the third query head is the largest of the second key head."""
    torch.manual_seed(0)
    sizes = {"q": 12, "k": 6, "v": 6}
    model = nn.ModuleDict({name: nn.Linear(5, rows, bias=False) for name, rows in sizes.items()})
    before = torch.cat([layer.weight.detach() for layer in model.values()])
    if fused:
        model = nn.Linear(5, 24, bias=False)
        model.weight.data.copy_(before)
    clip = c.QKClip(max_logit=1.0, fused=fused, key_heads=2 if fused else None)
    optimizer = wn.Scion(model, lr=0.0)
    wn.constrain(optimizer, {"weight": clip} if fused else {"[qk]": clip})
    clip.record(torch.tensor([0.5, 0.25, 16.0, 4.0]).reshape(4, 1, 1))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    factors = torch.tensor([1.0, 1.0, 0.25, 0.5, 1.0, 0.25, 1.0, 1.0]).repeat_interleave(3)
    torch.testing.assert_close(torch.cat([p.detach() for p in model.parameters()]), before * factors[:, None])


def test_parts_of_a_model_whose_names_are_those_of_other_weights_are_told_apart():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), *(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(2)))
    optimizer = wn.Scion(model, lr=0.1)
    first = wn.constrain(optimizer, {"*": wn.HardCap(0.5)}, norms=model[1])
    second = wn.constrain(optimizer, {"*": wn.HardCap(0.25)}, norms=model[2])
    assert first.names == second.names == ["0.weight"]
    rows = {line.split()[0]: line for line in str(optimizer).splitlines()}
    assert [cap for cap in ("HardCap 0.5", "HardCap 0.25") if cap in rows["0.weight"]] == []
    assert "HardCap 0.5 " in rows["1.0.weight"]
    assert "HardCap 0.25 " in rows["2.0.weight"]
    assert optimizer.state_dict()["param_groups"][0]["capped"].keys() == {"1.0.weight", "2.0.weight"}
    figures = wn.optim.scalars(optimizer)
    assert "norm_over_cap/0.weight" not in figures
    for parameter in model.parameters():
        parameter.grad = torch.randn(4, 4)
    optimizer.step()
    norms = [float(torch.linalg.matrix_norm(p.detach().double(), 2)) for p in model.parameters()]
    assert 0.4 < norms[1] <= 0.5
    assert 0.2 < norms[2] <= 0.25


def test_parts_of_two_models_on_one_optimizer_of_torch_are_constrained_apart():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    for model in (first, second):
        wn.constrain(optimizer, {"*": wn.HardCap(0.25)}, norms=model)
        model.weight.grad = torch.eye(4)
    optimizer.step()
    for model in (first, second):
        assert float(torch.linalg.matrix_norm(model.weight.detach().double(), 2)) <= 0.25


def test_constrain_without_anything_to_keep_is_refused():
    optimizer = wn.Scion(nn.Linear(4, 4), lr=0.1)
    with pytest.raises(ValueError, match=r"nothing says what to keep; pass \{'\*': HardCap\(1.0\)\}"):
        wn.constrain(optimizer)
    with pytest.raises(ValueError, match="move_every given without lipschitz="):
        wn.constrain(optimizer, {"*": wn.HardCap(1.0)}, move_every=10)
    with pytest.raises(ValueError, match=r"constrain: prove='no' is of type str; pass True or False"):
        wn.constrain(optimizer, {"*": wn.HardCap(1.0)}, prove="no")


def test_print_lists_what_is_not_constrained_and_why():
    model = nn.ModuleDict({
        "embedding": nn.Embedding(5, 4), "first": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "last": nn.Linear(4, 4),
        "adam": nn.Linear(4, 4, bias=False), "other": nn.Linear(4, 4, bias=False), "rest": nn.Linear(4, 4, bias=False),
    })  # fmt: skip
    model["last"].requires_grad_(False)
    optimizer = wn.Scion(model, lr=0.1, overrides={"adam": None})
    wn.constrain(optimizer, {"other": wn.HardCap(3.0)})
    text = str(wn.constrain(optimizer, {"first": wn.HardCap(2.0), "[aen]*": c.Sphere(1.0)}))
    assert "adam.weight       not constrained: AdamW moves it, and it has no norm to bound" in text
    assert "other.weight      not constrained: an earlier `constrain` holds it" in text
    first = wn.Scion(model, lr=0.1, overrides={"adam": None})
    text = str(wn.constrain(first, {"[!or]*": wn.HardCap(2.0)}))
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines()}
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert found["first.weight"] == "HardCap(cap=2.0)"
    assert found["first.bias"] == "not constrained: HardCap does not act on BiasRMS(); ColumnCap does"
    assert found["embedding.weight"].startswith("not constrained: HardCap does not act on ColNorm(")
    assert found["embedding.weight"].endswith("; ColumnCap does")
    assert found["norm.weight"] == "not constrained: HardCap does not act on Gain(); EntryCap does"
    assert found["adam.weight"] == "not constrained: AdamW moves it, and it has no norm to bound"
    assert found["other.weight"] == found["rest.weight"] == "not constrained: no pattern names it"
    assert found["last.weight"] == found["last.bias"] == "not constrained: it is frozen"
    copied = pickle.loads(pickle.dumps(first))
    assert [str(own) for own in copied.attached] == [text]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "constraint",
    [c.HardCap(1.0), c.SpectralNormalize(1.0), c.Orthogonal(1.0), c.ClippedWeightDecay(0.8, 0.25)],
    ids=repr,
)
def test_one_proof_of_a_batch_of_16_bit_weights_suffices_at_the_cap(constraint, dtype, monkeypatch):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(4))
    optimizer = wn.Scion(model, lr=0.02)
    constraints = wn.constrain(optimizer, {"*": constraint})
    proofs, within = [], wn.Spectral.within
    monkeypatch.setattr(wn.Spectral, "within", lambda own, *given: proofs.append(given) or within(own, *given))
    for _ in range(10):
        for p in model.parameters():
            p.grad = -p.detach()
        optimizer.step()
    assert sum(given[0].dtype == dtype for given in proofs) == 10  # others come before the work, in float32
    assert max(constraints.proved_ratios().values()) <= 1


def test_16_bit_weights_below_a_cap_do_not_decay():
    """Rounding lengthens a weight at its cap; what makes up for it may not shorten the other singular values."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.cat([torch.full((32,), 1.0), torch.full((32,), 0.25)])))
    optimizer = wn.Scion(layer, lr=0.02)
    wn.constrain(optimizer, {"*": wn.HardCap(1.0)})
    for _ in range(50):
        layer.weight.grad = torch.diag(-(layer.weight.detach().diagonal() > 0.5).to(torch.bfloat16))
        optimizer.step()
    assert torch.linalg.svdvals(layer.weight.detach().float())[32:].median() > 0.24


def test_numbers_that_are_not_finite_are_found_by_the_proof_of_16_bit_weights(monkeypatch):
    """As on an accelerator, where no other check looks at them."""
    monkeypatch.setattr(_checks, "unread", lambda x: True)
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="do weights hold NaN"):
            held(torch.full((1, 4, 4), wrong), wn.Spectral(), 1.0, torch.bfloat16)


@pytest.mark.parametrize(
    "settings",
    [
        {"unconstrained": False},
        {"weight_decay": 1.0},
        {"recipe": "muon", "overrides": {"*": None}, "adamw": wn.optim.AdamWSettings(lr=1e-3, weight_decay=1.0)},
    ],
)
def test_a_decay_that_rounding_loses_is_warned_of_by_name(settings):
    layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = wn.Scion(layer, lr=1e-3, **settings)
    message = "takes 0.001 of a weight in a step, which is less than half a rounding of bfloat16: .* nothing in weight"
    with pytest.warns(UserWarning, match=message) as told:
        optimizer.step()
    assert told[0].filename == __file__
    optimizer.step()  # once is enough


def test_a_constraint_of_one_s_own_that_cannot_share_a_batch_is_refused():
    class Ball(wn.HardCap):
        __hash__ = None

    with pytest.raises(ValueError, match="cannot be hashed, which batches of equal ones need"):
        wn.constrain(wn.Scion(nn.Linear(4, 4, bias=False), lr=0.1), {"weight": Ball(1.0)})
