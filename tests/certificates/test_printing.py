"""What a certificate says first, and why a bound is large."""

import copy
import math
import pickle
import re
from decimal import Decimal

import pytest
import torch
from torch import nn

import wellnormed as wn
from wellnormed.certificates.printing import factors
from wellnormed.certificates.sizes import Bound

from .adversary import Net


def block():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, norm_first=True).eval()


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (nn.Linear(4, 2), torch.rand(2, 4), "An input moved by d in l2 moves the result by at most {l2} d."),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
            torch.rand(2, 1, 4, 4),
            "An image moved by d in l2 moves the result by at most {l2} d.",
        ),
        (
            nn.Linear(4, 2),
            torch.rand(2, 5, 4),
            "A sample whose tokens each move by at most d in l2 has a result whose tokens each move by at most {l2} d.",
        ),
    ],
)
def test_a_certificate_begins_with_its_sentence(model, example, says):
    certificate = wn.certify(model, example)
    first, second = str(certificate).splitlines()[:2]
    before, after = says.split("{l2}")
    numbers = [first.removeprefix(before).removesuffix(after), *re.findall(r"(?<= )-?[\d.]+", second)]
    l2, rms = certificate.lipschitz, certificate.rms_lipschitz
    for said, bound in zip(numbers, (l2, l2, l2.log10, rms), strict=True):
        assert 0 <= float(said) - bound <= 1e-3 * abs(bound) + 1e-4  # five digits, rounded up
    assert repr(certificate) == str(certificate)
    assert repr(certificate.program).startswith("Program of each sample of a batch: ")
    assert len(repr(wn.lower_bound(certificate.program, steps=2))) < 80


@pytest.mark.parametrize(
    ("domain", "size", "has"),
    [
        ({}, 1.0, ""), ({}, 3.0, "vectors of RMS 3"), ({"radius": 3.0}, 3.0, ""), ({"radius": math.inf}, 3.0, ""),
        ({"box": (0, 1)}, 1.0, ""), ({"box": (0, 1)}, 3.0, "entries from 0 to 3"),
    ],
)  # fmt: skip
def test_an_example_outside_of_the_domain_is_said(domain, size, has):
    x = torch.tensor([[0.0, 0.0], [size, size]])
    certificate = wn.certify(nn.Linear(2, 3), (x,), **domain)
    for text in (str(certificate), certificate.statement()):
        said = re.findall(r"the example lies outside of the domain: `input.input` has (.*); pass radius= or box=", text)
        assert said == [has] * bool(has)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_bound_beyond_the_floats_keeps_its_digits_in_copies(copied):
    bound = copied(Bound(Decimal("1.5e400")))
    assert (bound, bound.exact) == (math.inf, Decimal("1.5e400"))
    assert 400.17609 < bound.log10 < 400.17610


@pytest.mark.parametrize(
    ("function", "example", "says"),
    [
        (lambda x: x + x[:1], torch.rand(4, 3), "A batch whose vectors each move by at most d in l2 has a result"),
        (lambda x: x + x[:1], torch.rand(2, 1, 3, 3), "A batch whose whole samples each move by at most d in l2 has"),
        (lambda x: torch.cat([x, x], 1).reshape(-1, 3), torch.rand(4, 3), "A sample whose vectors each move by"),
    ],
)
def test_several_vectors_are_not_said_to_move_as_one(function, example, says):
    """All entries of the result together move by more than this multiple of the change of all entries of the input."""
    model = Net(lambda _, x: function(x))
    certificate = wn.certify(model, example, radius=1.0)
    jacobian = torch.autograd.functional.jacobian(model, example).reshape(-1, example.numel())
    assert torch.linalg.matrix_norm(jacobian, 2) > 1.1 * certificate.lipschitz
    assert str(certificate).startswith(says)


def test_a_bound_that_is_large_by_its_normalization_layers_says_so():
    model = nn.Sequential(block(), block())
    text = str(wn.certify(model, torch.randn(1, 5, 16), radius=1.0))
    said = re.search(r"why it is large: normalization makes about 10\^([\d.]+) in 4 rows, .*says why not", text)
    assert said is not None
    assert float(said[1]) == pytest.approx(4 * 2.5, abs=0.1)  # each 1 / sqrt(1e-5)
    assert "why it is large" not in str(wn.certify(nn.Linear(2, 2), torch.rand(1, 2)))


@pytest.mark.parametrize("residual", [False, True])
def test_a_bound_that_is_large_without_them_says_by_which_kinds_of_operations(residual):
    def deep(self, x):
        for layer in self.layers:
            x = (x + layer(x) if residual else layer(x)).relu()
        return x

    model = Net(deep, layers=nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(20)))
    for weight in model.parameters():
        weight.data = 2.0 * torch.eye(4)
    text = str(wn.certify(model, torch.randn(1, 4), radius=1.0))
    expected = r"large: linear makes about 10\^6\.0 in 20 rows"
    expected += r", add makes about 10\^3\.5 in 20 rows" * residual  # the factors are 2 and 3 / 2
    expected += r"\. The layers' norms multiply: .* wn\.constrain; certify\(effort='high'\) .*may prove less"
    assert re.search(expected, text), text


@pytest.mark.parametrize("bent", [nn.ReLU(), nn.Tanh(), wn.nn.MaxMin()], ids=repr)
def test_maxmin_is_named_where_all_activations_are_relu(bent):
    model = nn.Sequential(nn.Linear(4, 8), bent, nn.Linear(8, 2))
    constraints = wn.constrain(wn.Scion(model, lr=0.1), lipschitz=2.0, example_input=torch.zeros(1, 4))
    constraints.remove()
    model[0].weight.data *= 1e5
    certificate = wn.certify(model, torch.zeros(1, 4))
    assert "why it is large" in str(certificate)
    for text in map(str, (constraints, certificate)):
        assert ("under caps wn.nn.MaxMin reaches more" in text) == isinstance(bent, nn.ReLU)


def test_joint_bounds_are_named_where_they_may_serve_and_are_not_used():
    def residual(self, x):
        for inner, outer in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + outer(inner(x).relu())
        return x

    torch.manual_seed(0)
    model = Net(residual, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(24)))
    certificate = wn.certify(model, torch.zeros(1, 8))
    joint = wn.certify(certificate.program, effort="high")
    assert joint.lipschitz < certificate.lipschitz / 5
    assert "effort='high'" in str(certificate)
    assert "effort='high'" not in str(joint)


def test_a_number_that_scales_a_branch_is_no_factor_of_the_layer_that_follows():
    """Of `0.9 x + 0.1 x` the parts count 0.9 and 0.1; as 2 in all, the identity behind them would make 1/2 of it."""
    inner, last = (nn.Linear(4, 4, bias=False) for _ in range(2))
    for layer in (inner, last):
        nn.init.eye_(layer.weight)
    model = Net(lambda s, x: s.last(0.9 * x + s.inner(x) / 10), inner=inner, last=last)
    found = {row.name: factor for row, factor in factors(wn.certify(model, torch.rand(1, 4)).rows)}
    assert found["last.linear"] == pytest.approx(0, abs=1e-6)
