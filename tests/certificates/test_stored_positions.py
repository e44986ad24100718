"""Entries added at stored positions, masks of -infinity, norms and deviations: bounds against a search, and how tight.

A case is a function, the shape of its input, the radius of the domain, and a share of the bound that a search attains.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from wellnormed.certificates import certify
from wellnormed.program.errors import UncertifiableError

from .adversary import Net, attack, attained, bounds_of, drawn, search

INF = math.inf
_TO = torch.tensor([2, 0, 2, 2, 1, 0])
_FROM = torch.tensor([0, 1, 1, 0, 2, 2])
_EVERYWHERE = _TO[:, None].expand(-1, 4)
_HIDDEN = torch.eye(3, 4).bool()
_MORE = torch.tensor([[[False, False, True, True]] * 3] * 2)
_CUT = torch.arange(24).reshape(2, 3, 4) // 4 == 1
_BIAS = torch.tensor([[0.5, -INF, 0.0, -2.0], [-INF, -INF, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
_WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 1.0, 3.0, -1e3])
_GRID = torch.randn(1, 3, 5, 2, generator=drawn(1))


def _zeros(x, *shape):
    return torch.zeros(*shape or (3, 4)).to(x)


def _reduced(x, reduce, include_self):
    return (2 * x).scatter_reduce(0, _EVERYWHERE[:4], x[_FROM[:4]] + 1, reduce, include_self=include_self)


def _sparse(x):
    return torch.sparse.mm(torch.sparse_coo_tensor(torch.stack([_TO, _FROM]), _WEIGHTS.to(x), (4, 3)), x)


def _assigned(x):
    y = 3 * x
    y[torch.tensor([2, 0])] = x[1:] * 2
    return y * x


def _segments(x, eps, shifted=True):
    """Softmax over segments, as graph attention has it."""
    most = _zeros(x).scatter_reduce(0, _EVERYWHERE, x[_FROM], "amax", include_self=False)
    weights = (x[_FROM] - most[_TO] if shifted else x[_FROM]).exp()
    return weights / (_zeros(x).index_add(0, _TO, weights) + eps)[_TO]


def _pairs(x):
    to, weights = torch.tensor([0, 0, 1, 1]), x[[0, 1, 1, 2]].exp()
    return weights / _zeros(x, 2, 4).index_add(0, to, weights)[to]


def _weights(x, dim=-1):
    return torch.softmax(3 * x, dim)


def _of_lines(x):
    """Lines of one visible entry and of four: the logarithms of these numbers do not cancel in a difference."""
    sums = x.masked_fill(_FIRST, -INF).logsumexp(-1, keepdim=True)
    return (sums[:, :1] - sums[:, 1:2]) * x


_FIRST = torch.tensor([[False, True, True, True], [False] * 4, [False] * 4])
_G, _T, _I = (3, 4), (1, 3, 4), (1, 2, 5, 5)
CASES = {
    "index_add": (lambda x: _zeros(x).index_add(0, _TO, x[_FROM]), _G, 1.0, 0.99),
    "index_add onto x": (lambda x: x.index_add(-2, _TO, x[_FROM] * _WEIGHTS[:, None].to(x), alpha=-2), _G, 1.0, 0.99),
    "index_add of a constant": (lambda x: x.index_add(0, _TO, torch.ones(6, 4).to(x)) * x, _G, 1.0, 0.5),
    "index_add at no position": (lambda x: x.index_add(0, _TO[:0], x[_TO[:0]]) * x, _G, 1.0, 0.5),
    "index_add along features": (lambda x: _zeros(x, 1, 3, 3).index_add(-1, _TO[:4], x), _T, 1.0, 0.99),
    "index_add, many": (lambda x: _zeros(x).index_add(0, _TO.repeat(20), (x[_FROM] * 2).repeat(20, 1)), _G, 1.0, 0.99),
    "index_put": (lambda x: _zeros(x).index_put((_TO,), x[_FROM], accumulate=True), _G, 1.0, 0.99),
    "assigned": (_assigned, _G, 1.0, 0.3),
    "scatter_add": (lambda x: _zeros(x).scatter_add(0, _EVERYWHERE, x[_FROM] * x[_TO]), _G, 1.0, 0.3),
    "scatter_add of a part": (lambda x: x.scatter_add(1, torch.tensor([[3, 3], [0, 3]]), x[:2, :2]), _G, 1.0, 0.9),
    **{
        f"{reduce}, {own}": (lambda x, reduce=reduce, own=own: _reduced(x, reduce, own), _G, 1.0, 0.6)
        for reduce in ("sum", "mean", "amax", "amin")
        for own in (True, False)
    },
    "sparse": (_sparse, _G, 1.0, 0.99),
    "segments": (lambda x: _segments(3 * x, 1e-16), _G, 1.0, 0.5),
    "segments of two": (lambda x: _pairs(3 * x), _G, 1.0, 0.7),
    "segments, floored": (lambda x: _segments(3 * x, 0.3), _G, 1.0, 0.3),
    "segments, not shifted": (lambda x: _segments(3 * x, 0.3, False), _G, 1.0, 0.3),
    "messages": (lambda x: _zeros(x).index_add(0, _TO, _segments(2 * x, 1e-16) * x[_TO.flip(0)]), _G, 1.0, 0.1),
    "some messages": (lambda x: _zeros(x).index_add(0, _TO[:3], (_segments(2 * x, 0.3) * x[_FROM])[:3]), _G, 1.0, 0.1),
    "pooled": (lambda x: (_weights(x, 1) * x).sum(1), _T, 1.0, 0.1),
    "pooled by one weight": (lambda x: (-2 * torch.softmax(x[..., :1] * 4, 1) * x).sum(1), _T, 1.0, 0.8),
    "pooled, masked": (lambda x: (torch.where(_HIDDEN, -INF, 3 * x).softmax(-1) * x.flip(-1)).sum(-1), _T, 1.0, 0.2),
    "pooled along another axis": (lambda x: (_weights(x) * x).sum(1), _T, 1.0, 0.4),
    "pooled twice": (lambda x: (_weights(x)[..., [0, 0, 1, 2]] * x).sum(-1), _T, 1.0, 0.2),
    "pooled in part": (lambda x: (_weights(x)[..., None] * x[..., None, :])[:, :, 1:3].sum(-2), _T, 1.0, 0.3),
    "pooled and rounded": (lambda x: (_weights(x, 1).bfloat16().to(x) * x).sum(1), _T, 1.0, 0.1),
    "fold": (lambda x: F.fold(x, (4, 3), 2, padding=1, stride=(1, 2)), (1, 8, 10), 1.0, 0.7),
    "fold, dilated": (lambda x: F.fold(x.flatten(2), (5, 4), (3, 2), dilation=(1, 2)), (1, 6, 3, 2), 1.0, 0.9),
    "grid": (lambda x: F.grid_sample(x, _GRID.to(x), align_corners=False), _I, 1.0, 0.99),
    "grid, nearest": (lambda x: F.grid_sample(x, _GRID.to(x), "nearest", "border", True), _I, 1.0, 0.99),
    "cumsum": (lambda x: x.cumsum(1), _T, 1.0, 0.99),
    "logsumexp": (lambda x: (3 * x).logsumexp(-1), _T, 2.0, 0.9),
    "logsumexp of all": (lambda x: x.logsumexp((1, -1), keepdim=True) * x, _T, 3.0, 0.3),
    "logsumexp of one": (lambda x: x[:, :1].logsumexp(1), _T, 3.0, 0.99),
    "logaddexp": (lambda x: torch.logaddexp(x, torch.tensor([3.0, -1e3, 0, 0]).to(x)), _T, 9.0, 0.9),
    "logaddexp of two": (lambda x: torch.logaddexp(x, -2 * x), _T, 9.0, 0.8),
    "std": (lambda x: x.std(-1), _T, 1.0, 0.9),
    "std of all": (lambda x: x.std()[None], _T, 1.0, 0.3),
    "std, biased": (lambda x: x.std((0, 1), correction=0, keepdim=True), _G, 1.0, 0.5),
    "var": (lambda x: x.var(-1, keepdim=True), _T, 2.0, 0.9),
    "var of all": (lambda x: x.var()[None], _T, 1.0, 0.2),
    "clamp": (lambda x: x.clamp(torch.tensor([-9.0, 0, 1, -9]).to(x), torch.tensor([9, 1, 2, -3]).to(x)), _T, 3.0, 0.4),
    "clamp, crossed": (lambda x: x.clamp(torch.tensor([-2]).to(x), torch.tensor([3, -5, -2, 9]).to(x)), _T, 9.0, 0.4),
    "hypot": (lambda x: torch.hypot(x, 2 * x + 1), _T, 1.0, 0.9),
    "root of two squares": (lambda x: torch.sqrt(x[..., 0] ** 2 + x[..., 1].square() + 1e-3), _T, 1.0, 0.9),
    "root of a sum of squares": (lambda x: ((x * x).sum((1, 2), keepdim=True) + 4).sqrt() * x, _T, 1.0, 0.3),
    "root of a sum in float64": (lambda x: (x.square().sum(1, dtype=torch.float64) + 1).sqrt(), _T, 1.0, 0.5),
    "largest and least after a bias": (
        lambda x: torch.stack([(y := x + _WEIGHTS[1:5].to(x)).amax(-1), y.amin(-1)], -1),
        _T, 99.0, 0.9,
    ),
    "root mean square": (lambda x: x.pow(2).mean(-1).sqrt(), _T, 1.0, 0.9),
    "number": (lambda x: x.sum().tanh()[None], _T, 1.0, 0.5),
    "masked softmax": (lambda x: (9 * x).masked_fill(_HIDDEN, -INF).softmax(-1), _T, 1.0, 0.9),
    "masked softmax of tokens": (lambda x: (x + _BIAS.to(x)).softmax(1), _T, 3.0, 0.5),
    "masked logsumexp": (lambda x: torch.where(_HIDDEN, -INF, x).logsumexp(-1), _T, 3.0, 0.9),
    "masked logsumexp of lines": (_of_lines, _T, 1e-3, 0.5),
    "mask of more axes": (lambda x: x.masked_fill(_MORE, -INF).softmax(-1), _G, 1.0, 0.4),
    "masked maximum": (lambda x: (x - 9).masked_fill(_HIDDEN, -INF).amax((1, 2))[:, None], _T, 1.0, 0.5),
    "masked maximum of tokens": (lambda x: torch.where(~_HIDDEN, x, -INF).max(1, keepdim=True).values, _T, 1.0, 0.5),
    "pool, cut windows": (lambda x: F.max_pool2d(x - 3, 3, 2, 1, ceil_mode=True), (1, 2, 4, 6), 1.0, 0.2),
    "pool, cut and dilated": (lambda x: F.max_pool1d(x - 3, 2, 3, 1, 2, True), (1, 2, 9), 1.0, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_search_exceeds_no_bound_and_comes_near(name):
    function, shape, radius, share = CASES[name]
    found = attack(Net(lambda _, x: function(x)), torch.randn(shape, generator=drawn()), radius, steps=15, restarts=2)
    print(name, found)
    assert found >= share


def test_a_softmax_of_segments_has_one_index():
    def mixed(x):
        weights = x.exp()
        return weights / _zeros(x, 6, 4).index_add(0, _TO, weights)[_FROM]

    with pytest.raises(UncertifiableError, match="not a softmax of segments: write exp"):
        certify(Net(lambda _, x: mixed(x)), torch.zeros(6, 4))


def test_a_softmax_of_segments_reads_whole_slices():
    """With an index of two axes, the sums are those of other entries, and a weight grows without bound."""

    def mixed(x, *index):
        weights = x.exp()
        return weights / _zeros(x, 1, 2).index_add(0, torch.tensor([0, 0]), weights)[index]

    for index in ((torch.tensor([0, 0]), torch.tensor([1, 0])), (slice(None), torch.tensor([1, 0]))):
        with pytest.raises(UncertifiableError, match="not a softmax of segments"):
            certify(Net(lambda _, x, index=index: mixed(x, *index)), torch.zeros(2, 2), radius=8.0)


@pytest.mark.parametrize(("function", "words"), [
    (lambda x: x.scatter_reduce(0, _EVERYWHERE[:3], x, "prod"), "reduces by 'prod'; only sums"),
    (lambda x: x.index_put((_TO,), x[_FROM]), "writes to one place twice"),
    (lambda x: x.new_zeros(8200).index_add(0, torch.zeros(8200).long(), x.expand(8200, 3, 4)[:, 0, 0]), "too many"),
    (lambda x: x[:, :1].std(1), "divides by 0; take it over more entries"),
    (lambda x: x.square().sqrt(), "no bounded slope near 0"),
    (lambda x: (x.square().sum(1) + -1.0).sqrt(), "it adds -1.0 below a root"),
    (lambda x: (x + _BIAS[1:2, :2].repeat(1, 2)).softmax(-1), "hides all entries of a line"),
    (lambda x: x.masked_fill(_CUT, -INF).amax(-1), "hides all entries of a line"),
    (lambda x: F.batch_norm(x, None, None, training=True), "no running statistics, so it normalises"),
    (lambda x: F.grid_sample(x[None, None], x[None, :, None, :2]), "places depend on the input"),
])  # fmt: skip
def test_refusals_name_the_reason(function, words):
    with pytest.raises(UncertifiableError, match=words):
        certify(Net(lambda _, x: function(x)), torch.ones(3, 4))


def test_the_state_of_a_gated_unit_does_not_grow():
    """It is a mixture of its last state and of a tanh; a sum of two products could grow by 1 in every step."""
    torch.manual_seed(0)
    cell = torch.nn.GRU(3, 4, batch_first=True).eval()
    model, x = Net(lambda s, x: s.cell(x)[0], cell=cell), torch.randn(1, 6, 3)
    bounds = bounds_of(model, x)
    assert max(bounds.largest.flat) == 1
    attained(bounds, search(model, x, steps=4, restarts=1))


def test_attention_has_the_smaller_of_its_two_bounds():
    """In a sample that is one group, the norm 1/2 of the softmax makes half of the rule of attention."""
    model = Net(lambda _, x: torch.softmax(x @ x.mT + 1, -1) @ x)
    assert 1 <= certify(model, torch.zeros(1, 2, 3, 4), box=(-1, 1)).lipschitz < 61.24


def test_a_mask_of_floats_is_told_to_be_of_integers():
    """Floats of every input are the certified variable; the same mask of integers is fixed, and certified."""
    model, x, mask = (
        Net(lambda _, x, mask: x.masked_fill(mask[..., None] == 0, 0.0)),
        torch.ones(1, 3, 4),
        torch.ones(1, 3),
    )
    with pytest.raises(UncertifiableError, match=r"if the input .* is a mask, pass booleans or integers"):
        certify(model, (x, mask))
    assert certify(model, (x, mask.long())).lipschitz == 1


@pytest.mark.parametrize("name", ["expand_as", "view_as", "reshape_as"])
def test_a_constant_that_takes_the_shape_of_a_value_is_a_constant(name):
    model = Net(lambda s, x: getattr(s.scale, name)(x) * x, scale=torch.tensor([[3.0, -2.0, 1.0, 0.5]]))
    assert 3 <= certify(model, torch.zeros(1, 4)).lipschitz < 3.0001
