"""Caps that act after every few steps: the promise is proved after every one, and what is computed is counted."""

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.constraints.test_constraints import BEAR_ANY_STEP, HardCapByProducts
from wellnormed.constraints import EntryCap, HardCap, SoftCap, SpectralNormalize, caps
from wellnormed.constraints.step_lengths import Measured

CAP = 1.2
NORMS = {
    "exact oracle": wn.Spectral(method="svd"),  # whose step is as long as it is declared
    "overshooting": wn.Spectral("jordan-5"),
    "per head": wn.norms.PerHead(4),
    "split unevenly": wn.norms.Split((3, 5)),
}

every_cap = pytest.mark.parametrize("kind", [HardCap, SpectralNormalize, SoftCap])


@pytest.fixture
def projections(monkeypatch):
    """How often caps were due for a batch of weights, by the number of weights."""
    found = Counter()
    for kind in (HardCap, SpectralNormalize, SoftCap):

        def counted(self, weights, norm, update_norm, state, plain=kind.apply):
            found[len(weights)] += 1
            return plain(self, weights, norm, update_norm, state)

        monkeypatch.setattr(kind, "apply", counted)
    return found


def start(constraint, norm=NORMS["exact oracle"], lr=0.02, shape=(8, 8), dtype=None, count=1, **more):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(shape[1], shape[0], bias=False, dtype=dtype) for _ in range(count)))
    optimizer = wn.Scion(wn.assign_norms(model, overrides={"*": norm}), lr=lr, momentum=0.0, **more)
    return model, optimizer, wn.constrain(optimizer, {"*": constraint})


def push(model, i=0):
    """Steps that lengthen: along every singular vector, or in turn along the longest alone."""
    u, s, vh = torch.linalg.svd(torch.stack([p.detach().float() for p in model.parameters()]), full_matrices=False)
    s = s * (s == s.amax(-1, keepdim=True)) if i % 2 else torch.ones_like(s)
    for p, outward in zip(model.parameters(), (u * s[:, None, :]) @ vh, strict=True):
        p.grad = -outward.to(p.dtype)


@every_cap
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cap_is_proved_in_16_bits_where_every_step_is_followed_by_a_projection(kind, dtype, projections):
    model, optimizer, constraints = start(kind(CAP, every=8), NORMS["per head"], dtype=dtype)
    plain, its_optimizer, _ = start(kind(CAP), NORMS["per head"], dtype=dtype)
    for i in range(16):
        for own, its in ((model, optimizer), (plain, its_optimizer)):
            push(own, i)
            its.step()
        assert constraints.proved_ratios()["0.weight"] <= 1
    assert projections.total() == 32
    assert torch.equal(model[0].weight, plain[0].weight)


@every_cap
@pytest.mark.parametrize("every", [1, 2, 3, 8, 13])
def test_a_constant_rate_is_projected_once_every_so_many_steps(kind, every, projections):
    model, optimizer, _ = start(kind(2.0, every=every), lr=0.01)
    for i in range(4 * every):
        push(model)
        optimizer.step()
        assert projections.total() == i // every + 1  # the first step, and every so many after it


def test_a_rate_that_falls_is_projected_less_often_and_one_that_rises_more_often(projections):
    for name, rate in (("falls", lambda i: 0.02 * (1 - i / 200)), ("rises", lambda i: 0.02 * i / 200)):
        projections.clear()
        model, optimizer, _ = start(HardCap(2.0, every=8))
        for i in range(200):
            optimizer.param_groups[0]["lr"] = rate(i)
            push(model)
            optimizer.step()
        assert projections.total() < 25 if name == "falls" else projections.total() > 25


def test_room_is_at_most_a_tenth_of_the_cap(projections):
    model, optimizer, constraints = start(HardCap(1.0, every=1000), lr=0.02)
    lowest = 1.0
    for _ in range(60):
        push(model)
        optimizer.step()
        lowest = min(lowest, float(constraints.state_dict()["0.weight.reach"]))
    assert 0.9 <= lowest < 0.94
    assert projections.total() == 12  # four steps of at most 0.0204 fit into a tenth


@every_cap
def test_a_wait_of_one_step_is_no_wait(kind):
    model, optimizer, constraints = start(kind(CAP, every=1), NORMS["overshooting"])
    push(model)
    optimizer.step()
    assert constraints.state_dict() == {}
    assert repr(kind(CAP, every=1)) == f"{kind.__name__}(cap=1.2)"
    assert repr(kind(CAP, every=8)) == f"{kind.__name__}(cap=1.2, every=8)"


def test_a_weight_without_a_gradient_counts_no_step():
    model, optimizer, constraints = start(HardCap(CAP, every=8), count=2)
    for i in range(4):
        push(model)
        if i:
            model[0].weight.grad = None
        optimizer.step()
    reach = {name: float(value) for name, value in constraints.state_dict().items()}
    assert reach["0.weight.reach"] < reach["1.weight.reach"] <= CAP


@pytest.mark.parametrize(
    ("every", "message"),
    [(0, "every=0 must be positive"), (-3, "1 is every"), (2.5, "whole number"), (True, "bool")],
)
def test_a_wait_that_is_no_number_of_steps_is_refused(every, message):
    with pytest.raises(ValueError, match=message):
        HardCap(1.0, every=every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BEAR_ANY_STEP)
@pytest.mark.parametrize("norm", ["exact oracle", "per head"])
def test_weights_with_other_caps_are_one_batch_and_end_as_each_alone_would(kind, norm, dtype, monkeypatch):
    model, optimizer, constraints = start(kind(CAP), NORMS[norm], dtype=dtype, count=3)
    constraints.remove()
    alone = copy.deepcopy((model, optimizer))
    caps_of = {f"{i}.weight": kind(cap) for i, cap in enumerate((0.5, 0.7, 0.6))}
    one_by_one = [wn.constrain(alone[1], {name: cap}) for name, cap in caps_of.items()]
    together, plain = wn.constrain(optimizer, caps_of), kind._projected
    sizes = []
    monkeypatch.setattr(kind, "_projected", lambda caps, w, *given: sizes.append(len(w)) or plain(caps, w, *given))
    for own, its in ((model, optimizer), alone):
        push(own)
        its.step()
    assert sizes == [3, 1, 1, 1]
    ratios = together.proved_ratios()
    for (name, p), q, single in zip(model.named_parameters(), alone[0].parameters(), one_by_one, strict=True):
        assert ratios[name] <= 1
        assert ratios[name] == pytest.approx(single.proved_ratios()[name], abs=1e-5 if dtype == torch.float32 else 1e-2)
        torch.testing.assert_close(p, q)


def test_caps_of_lengths_and_of_entries_wait():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    optimizer = wn.Scion(model, lr=0.01, momentum=0.0)
    constraints = wn.constrain(optimizer, {"0": wn.ColumnCap(1.0, every=4), "1.weight": EntryCap(1.0, every=4)})
    reaches = [constraints.state_dict()]
    for _ in range(9):
        for p in model.parameters():
            p.grad = -torch.ones_like(p)
        optimizer.step()
        assert max(constraints.proved_ratios().values()) <= 1
        reaches.append(constraints.state_dict())
    for key in ("0.weight.reach", "1.weight.reach"):  # falls where the cap acts
        assert [i for i in range(9) if reaches[i + 1][key] < reaches[i][key]] == [0, 4, 8]


@pytest.mark.parametrize("kind", BEAR_ANY_STEP)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("norm", ["exact oracle", "per head"])
def test_only_weights_that_are_not_proved_to_be_within_are_written(kind, every, norm, monkeypatch):
    model, optimizer, constraints = start(kind(CAP, every=every), NORMS[norm], lr=1e-3, count=3)
    projected, plain = [], kind._projected
    monkeypatch.setattr(kind, "_projected", lambda caps, w, *given: projected.append(len(w)) or plain(caps, w, *given))
    with torch.no_grad():
        for p, share in zip(model.parameters(), (0.5, 1.0, 0.9), strict=True):
            p.mul_(share * CAP / NORMS[norm].norm(p))
    constraints.project_()
    push(model)
    twin = copy.deepcopy((model, optimizer))
    twin[1].attached.clear()
    for one in (optimizer, twin[1]):
        for p, q in zip(model.parameters(), twin[0].parameters(), strict=True):
            q.grad = p.grad.clone()
        one.step()
    assert projected == ([] if kind is HardCap and every > 1 else [1])  # a power of the Gram matrix shows it
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), twin[0].parameters(), strict=True)]
    assert same == [True, False, True]
    assert max(constraints.proved_ratios().values()) <= 1


@pytest.mark.parametrize("kind", [HardCap, SpectralNormalize])
def test_steps_without_a_bound_are_measured(kind, projections):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    constraints = wn.constrain(optimizer, {"*": kind(CAP, every=8)}, norms=wn.assign_norms(model))
    for i in range(80):
        push(model[0], i)
        push(model[1], i)
        optimizer.step()
        assert max(constraints.proved_ratios().values()) <= 1
    assert 2 * 10 <= sum(size * times for size, times in projections.items()) <= 80


@pytest.mark.parametrize(
    ("entries", "step", "known"),
    [(24, 0.03, True), (4 * 10**7, 0.001234, True), (24, 1e-23, True), (24, 1e30, False), (24, math.nan, False)],
)
def test_a_measured_step_is_never_shorter_than_it_was(entries, step, known):
    layer = nn.Linear(entries, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    constraints = wn.constrain(optimizer, {"*": HardCap(1.0, every=8)}, norms=layer, prove=False)
    with torch.no_grad():
        layer.weight.zero_()
        measured = Measured(constraints._constrained)
        layer.weight += step
    true = step * entries  # in units of a row of norm 1, whose entries are 1 / entries
    found = measured.seen()["weight"]
    assert true <= found <= 1.1 * true + 1e-6 if known else found is None


def test_a_decay_is_not_credited_to_a_weight_below_the_cap():
    """It takes its share of the weight, which below the cap is less than that share of the cap."""
    model, optimizer, constraints = start(SoftCap(CAP, every=2), lr=0.25)
    for _ in range(100):
        push(model)
        optimizer.step()
        optimizer.param_groups[0].update(lr=0.02, weight_decay=0.75)  # from now on
        assert constraints.proved_ratios()["0.weight"] <= 1


@every_cap
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cap_of_weights_that_are_cast_waits_no_longer_than_their_dtype_allows(kind, dtype):
    model, optimizer, constraints = start(kind(CAP, every=8))
    for i in range(24):
        if i == 9:
            model.to(dtype)
            optimizer.load_state_dict(optimizer.state_dict())
        push(model)
        optimizer.step()
        assert constraints.proved_ratios()["0.weight"] <= 1


@pytest.mark.parametrize("every", [1, 2, 8])
def test_each_step_that_is_accepted_is_borne(every):
    longest = SoftCap(CAP, every=every).longest_step
    for share in (0.1, 0.16, 0.2, 0.24, 0.26, 0.5, 0.99, 0.9999):
        model, optimizer, constraints = start(SoftCap(CAP, every=every), lr=share * longest)
        for _ in range(2 * every):
            push(model)
            optimizer.step()
            assert constraints.proved_ratios()["0.weight"] <= 1


def test_a_recorded_hard_cap_knows_no_step(monkeypatch):
    """A replay of its graph may make a longer one, so that products measure how far a weight is above the cap."""
    given, plain = [], HardCapByProducts._function
    function = staticmethod(lambda *a, **known: given.append(known) or plain(*a, **known))
    monkeypatch.setattr(HardCapByProducts, "_function", function)
    model, optimizer, _ = start(HardCapByProducts(CAP))
    for recorded in (False, True):
        monkeypatch.setattr(caps, "recording", lambda device, answer=recorded: answer)
        with torch.no_grad():
            model[0].weight.mul_(1.2 / NORMS["exact oracle"].norm(model[0].weight))
        push(model)
        optimizer.step()
    assert ["most" in known for known in given] == [True, False]
