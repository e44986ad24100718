"""Certified radii: what a certificate says of a prediction, against attacks, closed forms and wrong input."""

import math

import pytest
import torch
from torch import nn

import wellnormed as wn


def _classifier(standardise=False):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)]
    return nn.Sequential(nn.BatchNorm2d(3), *layers).eval() if standardise else nn.Sequential(*layers)


def test_a_linear_map_has_its_distance_to_the_nearest_tie():
    model = nn.Linear(3, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
    certificate = wn.certify(model, torch.zeros(1, 3), radius=math.inf, margins=True, arithmetic="real")
    x = torch.tensor([[0.5, 0.25, 9.0], [1.0, -1.0, 0.0]])
    radii = certificate.certified_radius(model(x))
    # what is taken off, and the slack of a claim
    assert radii[0] == pytest.approx(0.75 / math.sqrt(2), rel=3e-9)
    assert radii[1] == 0


def test_no_attack_inside_the_radius_succeeds_and_some_outside_do():
    model = _classifier().double()
    x = torch.randn(64, 3, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    certificate = wn.certify(model, x[:1], radius=10.0)
    logits = model(x)
    radii, label = certificate.certified_radius(logits), logits.argmax(1)
    assert bool((radii > 0).all())
    flipped = {}
    for factor in (1.0, 30.0):
        moved = x.clone()
        for _ in range(20):
            moved.requires_grad_()
            (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(moved), label, reduction="sum"), moved)
            change = (
                moved.detach() + gradient / gradient.flatten(1).norm(dim=1).clamp(min=1e-300)[:, None, None, None] - x
            )
            size = change.flatten(1).norm(dim=1)
            moved = x + change * (factor * radii / size)[:, None, None, None]
        flipped[factor] = int((model(moved).argmax(1) != label).sum())
    assert flipped[1.0] == 0
    assert flipped[30.0] > 0


def test_the_margin_is_used_where_it_is_less():
    model, x = _classifier(), torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    plain, with_margin = (wn.certify(model, x, margins=each, arithmetic="real") for each in (False, True))
    ratio = with_margin.certified_radius(model(x)) / plain.certified_radius(model(x))
    slope = with_margin.margin
    assert slope < math.sqrt(2) * plain.lipschitz
    torch.testing.assert_close(ratio, torch.full((4,), math.sqrt(2) * plain.lipschitz / slope).double())


def test_radii_of_a_domain_without_the_example_are_no_radii_of_its_inputs():
    with pytest.warns(UserWarning, match="`input.input` has vectors of RMS 9; pass radius= or box="):
        wn.certify(nn.Linear(3, 2), torch.full((1, 3), 9.0), margins=True)


def test_pixels_are_counted_by_the_smallest_deviation_or_by_the_model():
    inner, x = _classifier(), torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    std, mean = torch.tensor([0.2, 0.3, 0.4]), torch.tensor([0.4, 0.5, 0.6])
    whole = _classifier(standardise=True)
    whole[0].running_mean, whole[0].running_var, whole[0].eps = mean, std.square() - 1e-5, 1e-5
    standardised = (x - mean[:, None, None]) / std[:, None, None]
    certificate, of_whole = (wn.certify(each, x, arithmetic="real") for each in (inner, whole))
    outside, *others = (
        certificate.certified_radius(inner(standardised), std=s) for s in (std.tolist(), std, std.numpy())
    )
    assert all(torch.equal(outside, each) for each in others)
    within = of_whole.certified_radius(whole(x))
    torch.testing.assert_close(outside, 0.2 * certificate.certified_radius(inner(standardised)))
    assert bool((within >= outside * (1 - 1e-5)).all())  # float32 logits of two ways to standardise


def test_a_constant_model_keeps_its_class_everywhere_and_its_ties_nowhere():
    model = nn.Linear(3, 2)
    model.weight.data.zero_()
    certificate = wn.certify(model, torch.zeros(1, 3))
    assert certificate.certified_radius(torch.tensor([[1.0, 0.0], [1.0, 1.0]])).tolist() == [math.inf, 0.0]


def test_rounding_is_taken_from_the_gap_twice():
    model, x = _classifier(), torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    real, executed = (wn.certify(model, x, arithmetic=each) for each in ("real", None))
    assert real.forward_error is None
    most = 2 * math.sqrt(2) * executed.forward_error
    gap = torch.tensor([0.5, 1.0, 1.01, 3.0]) * most
    logits = torch.cat([gap[:, None], torch.zeros(4, 4)], 1)
    ratio = executed.certified_radius(logits) / real.certified_radius(logits)
    torch.testing.assert_close(ratio, (1 - most / logits[:, 0].double()).clamp(min=0), rtol=1e-5, atol=1e-6)
    assert executed.settled(logits).tolist() == [False, False, True, True]
    assert executed.settled(0.5 * logits, against="real").tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match="settled: against='all' is not one of machines, real"):
        executed.settled(logits, against="all")
    with pytest.raises(ValueError, match="certify without it"):
        real.settled(logits)


def test_distances_of_rows_bound_what_rounding_does_to_a_gap():
    model, x = _classifier(), torch.rand(4, 3, 2, 2)
    plain, with_margin = (wn.certify(model, x, margins=each) for each in (False, True))
    logits = torch.tensor([[1.0, 0, 0, 0, 0]]) * (2 * math.sqrt(2) * plain.forward_error)
    assert [bool(each.settled(0.99 * logits)) for each in (plain, with_margin)] == [False, True]


def test_a_radius_is_refused_where_a_sum_may_overflow():
    certificate = wn.certify(nn.Linear(3, 2), torch.zeros(1, 3), radius=math.inf)
    assert certificate.forward_error is None
    assert "no bound of rounding: linear, linear" in str(certificate)
    for call in (certificate.certified_radius, certificate.settled):
        with pytest.raises(ValueError, match="arithmetic='real'"):
            call(torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logits": torch.zeros(2, 4)}, "5 entries"), ({"logits": torch.zeros(())}, "5 entries"),
        ({"logits": torch.zeros(2, 5, dtype=torch.long)}, "floats"),
        ({"logits": [0.0, 1.0, 0.0, 0.0, 0.0]}, "must be a tensor, got list"),
        ({"logits": torch.tensor([[0.0, 1.0, math.nan, 0.0, 0.0]])}, "not finite"),
        ({"logits": torch.zeros(2, 5, dtype=torch.bfloat16)}, "rounded after the program"), ({"std": 0.0}, "std"),
        ({"std": []}, "std"), ({"std": torch.tensor([0.2, -0.1])}, "std"), ({"std": "a"}, "std"),
        ({"std": [0.1, math.nan]}, "std"),
    ],
)  # fmt: skip
def test_what_is_refused(change, says):
    for arithmetic in (None, "real"):
        certificate = wn.certify(_classifier(), torch.zeros(1, 3, 2, 2), arithmetic=arithmetic)
        with pytest.raises(ValueError, match=says):
            certificate.certified_radius(**{"logits": torch.zeros(2, 5)} | change)


def test_classes_of_pixels_lie_along_an_axis_that_is_stated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1))
    x = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    certificate, logits = wn.certify(model, x, original=model, box=(-50, 50)), model(x).detach()
    for call in (certificate.settled, certificate.certified_radius, certificate.unchanged):
        found = call(logits, dim=1)
        assert found.shape == (64, 6, 6)
        assert torch.equal(found, call(logits, dim=-3))
        assert torch.equal(found[:2], call(logits[:2], dim=1))
        for dim, says in ((None, r"axes \(1, 2, 3\), .* pass dim="), (0, "dim=0"), (4, "dim=4")):
            with pytest.raises(ValueError, match=says):
                call(logits, dim=dim)
        with pytest.raises(ValueError, match="axis -3 has the 5 entries"):
            call(logits.movedim(1, -1), dim=1)
    gap = logits.double().topk(2, dim=1).values
    settled = gap[:, 0] - gap[:, 1] > 2 * math.sqrt(2) * certificate.forward_error
    assert torch.equal(certificate.settled(logits, dim=1), settled)
    assert 0 < settled.float().mean() < 1


def test_margins_are_of_the_last_axis_alone():
    model, x = nn.Linear(3, 2), torch.rand(4, 5, 6, 3, generator=torch.Generator().manual_seed(1))
    plain, with_margin = (wn.certify(model, x, margins=each, arithmetic="real") for each in (False, True))
    radii = [[each.certified_radius(model(x), dim=dim) for each in (plain, with_margin)] for dim in (-1, -2)]
    assert bool((radii[0][0] < radii[0][1]).all())
    assert torch.equal(*radii[1])
