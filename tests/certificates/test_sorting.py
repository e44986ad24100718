"""Maxima, minima and sorts of the same disjoint entries are together a contraction; of others they are not.

The first half states the bound of every way in which libraries write MaxMin, after linear maps, on vectors and images;
the second half looks for pairs that only seem to be the same, each beside a gain that was computed.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellnormed as wn
from wellnormed.program.errors import UncertifiableError
from wellnormed.proof import CheckError, check

from .adversary import Net, attack, bounds_of, search, walked


def _split(x):
    return x.split(x.shape[1] // 2, 1)


def _cat_of_halves(x):
    a, b = _split(x)
    return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


def _fours(x):
    return x.unflatten(1, (-1, 4))


def _medians_and_ranks(x):
    lines = _fours(x)
    median = torch.div(lines.median(2, keepdim=True).values, 1, rounding_mode=None)
    return torch.cat([median, *(lines.kthvalue(k, 2)[0][:, :, None] for k in (1, 3, 4))], 2).flatten(1, 2)


def _written_into(x):
    a, b = _split(x)
    result = torch.zeros_like(x)
    result[:, ::2] = torch.maximum(a, b)
    result[:, 1::2] = torch.minimum(a, b)
    return result


def _scaled_and_shifted(x):
    scale = torch.linspace(-1, 1, x.shape[1]).reshape(1, -1, *[1] * (x.ndim - 2)).to(x)
    return _cat_of_halves(x * scale + 3)


def _of_halves(function):
    return lambda x: torch.cat(function(*_split(x)), 1)


CONTRACTIONS = {
    "halves": _cat_of_halves,
    "stack of neighbours": lambda x: torch.stack(
        [torch.maximum(x[:, ::2], x[:, 1::2]), torch.minimum(x[:, ::2], x[:, 1::2])], 2
    ).flatten(1, 2),
    "view": lambda x: torch.cat(
        [(y := x.unflatten(1, (-1, 2))).amax(2, keepdim=True), y.amin(2, keepdim=True)], 2
    ).reshape(x.shape),
    "view and halves": lambda x: torch.cat([x.unflatten(1, (2, -1)).amax(1), torch.minimum(*_split(x))], 1),
    "groups of four": lambda x: _fours(x).sort(2, descending=True).values.flatten(1, 2),
    "another axis": lambda x: x.unflatten(1, (2, -1)).sort(1)[0].reshape(x.shape),
    "module": wn.nn.MaxMin(1),
    "comparison of two kinds": _of_halves(lambda a, b: [torch.where(a <= b, b, a), torch.minimum(a, b)]),
    "negated": _of_halves(lambda a, b: [torch.maximum(a, b), -torch.maximum(-a, -b)]),
    "extremes": lambda x: torch.cat(torch.aminmax(x.unflatten(1, (-1, 2)), dim=2), 1),
    "written into": _written_into,
    "leading four": lambda x: _fours(x).topk(4, 2).values.flatten(1, 2),
    "medians and ranks": _medians_and_ranks,
    "least two beside the largest two": lambda x: torch.cat(
        [_fours(x).topk(2, 2, largest=False).values, _fours(x).sort(stable=True, dim=2).values[:, :, 2:]], 2
    ).flatten(1, 2),
    "scaled and shifted": _scaled_and_shifted,
    "permuted": lambda x: _cat_of_halves(x.flip(1).roll(1, 1)),
    "divided": lambda x: _cat_of_halves(x / 3) * 3,
    "halves of a residual": lambda x: _cat_of_halves(0.5 * x + 0.5 * torch.tanh(x)),
    "positive and negative": lambda x: torch.cat([F.relu(x), F.relu(-x)], 1),
    "clamped": lambda x: torch.cat([x.clamp(min=0), x.clamp(max=0)], 1),
}  # fmt: skip
NAMES = list(CONTRACTIONS)


FIRST = {
    "raw vectors": (nn.Identity, (2, 16)), "vectors": (lambda: nn.Linear(16, 16), (2, 16)),
    "images": (lambda: nn.Conv2d(3, 16, 3, padding=1), (2, 3, 4, 4)),
    "1x1 images": (lambda: nn.Conv2d(16, 16, 1), (2, 16, 4, 4)),
}  # fmt: skip


def _first(kind):
    make, shape = FIRST[kind]
    layer = make()
    for weight in layer.parameters():
        nn.init.orthogonal_(weight) if weight.ndim > 1 else None
    return layer, torch.zeros(shape)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *(("raw vectors", NAMES[k::4]) for k in range(4)),
        ("images", NAMES[1::3]),
        *((kind, NAMES[::5]) for kind in ("vectors", "1x1 images")),
    ],
)
def test_max_and_min_of_the_same_entries_cost_nothing(kind, names):
    """The results of all functions are rows of one, those with half as many entries beside zeros."""
    torch.manual_seed(0)
    first, example = _first(kind)

    def results(s, x):
        found = [CONTRACTIONS[name](s.first(x[:1])).flatten(1) for name in names]
        return torch.cat([F.pad(each, (0, max(y.shape[1] for y in found) - each.shape[1])) for each in found])

    alone = max(bounds_of(nn.Sequential(first, nn.Flatten()), example).gain.flat)
    gains = bounds_of(Net(results, first=first), example).gain.flat
    found = {name: float(gain / alone) for name, gain in zip(names, gains, strict=True)}
    assert found == pytest.approx(dict.fromkeys(found, 1), abs=1e-9)  # the margin of a Gram matrix's rounding


@pytest.mark.parametrize("names", [NAMES[::5], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_checker_accepts_what_is_shared(names):
    torch.manual_seed(0)
    example = torch.zeros(2, 16, 4, 4)
    layers = [nn.Conv2d(16, 16, 1) for _ in names]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)

    def run(s, x):
        for layer, name in zip(s.layers, names, strict=True):
            x = layer(CONTRACTIONS[name](x)[:, :16])
        return x.flatten(1)

    model = Net(run, layers=nn.ModuleList(layers))
    certificate = wn.certify(model, example)
    wn.verify(certificate, model.state_dict())
    assert certificate.lipschitz == pytest.approx(1, rel=1e-5)  # of at most 22 proved norms


_PAIRS = (1, 4)
_ROOT = math.sqrt(2)


def _halved(parts):
    """Parts of the two halves of a vector."""
    return lambda x: parts(x[:, :2], x[:, 2:])


SEEMING = {
    "overlapping pairs": (_ROOT, lambda x: (torch.maximum(x, x.roll(1, 1)), torch.minimum(x, x.roll(1, 1)))),
    "max of one pairing, min of another": (
        _ROOT, lambda x: (torch.maximum(x[:, :2], x[:, 2:]), torch.minimum(x[:, ::2], x[:, 1::2])),
    ),
    "max twice": (_ROOT, _halved(lambda a, b: (torch.maximum(a, b), torch.maximum(a, b)))),
    "max in both orders": (_ROOT, _halved(lambda a, b: (torch.maximum(a, b), torch.maximum(b, a)))),
    "members of different scales": (3.0, _halved(lambda a, b: (torch.maximum(a, 3 * b), torch.minimum(a, 3 * b)))),
    "one scale in the max, another in the min": (
        math.sqrt(10), _halved(lambda a, b: (torch.maximum(a, 3 * b), torch.minimum(a, b))),
    ),
    "opposite signs": (_ROOT, _halved(lambda a, b: (torch.maximum(a, b), torch.minimum(-a, b)))),
    "both negated, and max twice": (_ROOT, _halved(lambda a, b: (torch.maximum(a, b), torch.minimum(-a, -b)))),
    "shifted in one of them": (_ROOT, _halved(lambda a, b: (torch.maximum(a, b), torch.minimum(a, b + 0.1)))),
    "an entry beside its maximum": (_ROOT, _halved(lambda a, b: (torch.maximum(a, b), a))),
    "an entry against itself": (_ROOT, lambda x: (torch.maximum(x, x), torch.minimum(x, x))),
    "shuffled in one of them": (_ROOT, _halved(lambda a, b: (torch.maximum(a, b), torch.minimum(a, b.flip(1))))),
    "rectified once with a shift": (_ROOT, lambda x: (F.relu(x), F.relu(0.1 - x))),
    "rectified twice": (math.sqrt(5), lambda x: (F.relu(x), F.relu(2 * x))),
    # padding is -infinity in both
    "padded windows, and their negatives": (_ROOT, lambda x: (F.max_pool1d(x, 2, 2, 1), -F.max_pool1d(-x, 2, 2, 1))),
    "padding of -inf, less of 0": (1.0, lambda x: (F.max_pool1d(x, 3, 3, 1) - F.max_pool1d(F.pad(x, (1, 1)), 3, 3),)),
    "padding of 0, less of -inf": (1.0, lambda x: (F.max_pool1d(F.pad(x, (1, 1)), 3, 3) - F.max_pool1d(x, 3, 3, 1),)),
}  # fmt: skip
"""Name -> a gain in Euclidean norms, and the parts of the result of a vector of 4 that has it."""
JUMPING = {
    "comparison of others": lambda x: torch.where(x[:, :2] > x[:, 2:], x[:, :2], x[:, 2:].flip(1)),
    "comparison with a threshold": lambda x: torch.where(x > 0.5, x, 0.0),
}


@pytest.mark.parametrize("name", SEEMING)
def test_what_only_seems_to_be_the_same_pairs_is_charged(name):
    gain, parts = SEEMING[name]
    model, example = Net(lambda _, x: torch.cat(parts(x), 1)), torch.zeros(_PAIRS)
    walk, out = walked(model, example)
    bounds = walk.ledger.proof.rows[out.name].bounds
    found = float(max(search(model, example, restarts=6, steps=8).gain.flat)) / 2
    assert found == pytest.approx(gain, rel=1e-3)  # a search that does not reach the gain would prove nothing
    assert gain <= float(max(bounds.gain.flat)) / 2 * (1 + 1e-9)  # the root of a decimal as a float


@pytest.mark.parametrize("name", JUMPING)
def test_comparisons_of_others_are_not_continuous(name):
    with pytest.raises(UncertifiableError, match="continuous"):
        walked(Net(lambda _, x: JUMPING[name](x)), torch.zeros(_PAIRS))


def test_branches_that_are_two_functions_keep_the_root_of_the_sum():
    torch.manual_seed(0)
    a, b = (nn.init.orthogonal_(torch.empty(8, 8)) for _ in range(2))
    model = Net(lambda s, x: torch.maximum(x @ s.a, 2 * x @ s.b), a=a, b=b)
    largest = max(bounds_of(model, torch.zeros(1, 8)).gain.flat)
    assert float(largest) / math.sqrt(8) == pytest.approx(math.sqrt(5), rel=1e-6)


def test_factors_that_round_to_the_same_number_are_not_the_same():
    tenth, third = 0.1, 0.3
    product = tenth * third  # rounded: the pairs below differ by its error
    model = Net(
        lambda _, x: torch.cat(
            [torch.maximum(x[:, :2] * product, x[:, 2:]), torch.minimum(x[:, :2] * tenth * third, x[:, 2:])], 1
        )
    )
    largest = max(bounds_of(model, torch.zeros(_PAIRS)).gain.flat)
    assert float(largest) / 2 == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("kind", ["raw vectors", "images", "1x1 images"])
def test_centring_is_a_projection(kind):
    first, example = _first(kind)
    dims = (2, 3) if example.ndim > 2 else 1
    flat = Net(lambda s, x: (s.first(x) - s.first(x).mean(dims, keepdim=True) + 0.3).flatten(1))
    flat.first = first
    found, alone = (max(bounds_of(each, example).gain.flat) for each in (flat, nn.Sequential(first, nn.Flatten())))
    assert found == alone


@pytest.mark.parametrize("ceil", [False, True])
def test_euclidean_pooling_is_a_contraction(ceil):
    first, example = _first("images")
    pooled = Net(lambda s, x: F.lp_pool2d(s.first(x), 2, 2, ceil_mode=ceil).flatten(1))
    pooled.first = first
    if ceil:  # a window may be cut off
        with pytest.raises(UncertifiableError, match="windows"):
            walked(pooled, example)
        return
    alone = max(bounds_of(nn.Sequential(first, nn.Flatten()), example).gain.flat)
    assert float(max(bounds_of(pooled, example).gain.flat) / alone) == pytest.approx(1, abs=1e-9)


def test_overlapping_windows_are_charged_and_other_orders_are_refused():
    image = torch.zeros(1, 1, 3, 3)
    largest = max(bounds_of(Net(lambda _, x: F.lp_pool2d(x, 2, 2, stride=1).flatten(1)), image).gain.flat)
    assert float(largest) / 3 == pytest.approx(2)  # the entry in the middle is in all four windows
    for order in (1, 3):
        with pytest.raises(UncertifiableError):
            walked(Net(lambda _, x, order=order: F.lp_pool2d(x, order, 2).flatten(1)), image)
        with pytest.raises(UncertifiableError):
            walked(Net(lambda _, x, order=order: torch.linalg.vector_norm(x, order, (1, 2, 3))[:, None]), image)


def test_tanhshrink_has_slopes_from_0_to_1_and_a_steeper_one_has_not():
    x = torch.zeros(1, 4)
    shrunk, steeper = (
        float(max(bounds_of(Net(function), x).gain.flat)) / 2
        for function in (lambda _, x: x - torch.tanh(x), lambda _, x: x - torch.tanh(3 * x))
    )
    assert shrunk == 1
    assert steeper >= 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, gate: (x - x.tanh()) * gate + x.tanh(),
        lambda x, gate: x.tanh() + gate * (x - x.tanh()),
        lambda x, gate: x * gate + x.tanh() * (1 - gate),
    ],
)
def test_a_gate_and_its_rest_are_no_more_than_1_each(function):
    model, x = Net(lambda _, x: function(x, torch.sigmoid(4 * x))), torch.zeros(1, 4)
    found = float(max(bounds_of(model, x).gain.flat)) / 2
    assert found <= 1 + 1 + (2 + 1) + 1e-9  # x, tanh x, and both largest entries (2 and 1) times the gate's slope, 1
    assert attack(model, x) <= 1


def test_a_number_for_every_channel_does_not_take_an_image_apart():
    example = torch.zeros(1, 4, 4, 4)
    model = Net(lambda _, x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)))
    found = float(max(bounds_of(model, example).gain.flat)) / 8
    # max s |dx|, and the largest |x|, 8, times a quarter of the mean's change, which is 1/4, at 16 pixels: times 4
    assert found <= 1 + 8 * 0.25 + 1e-6


def _circular(stride=1, size=3, **settings):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, size, stride, padding_mode="circular", **settings)
    return conv, torch.zeros(1, 2, 4, 6)


@pytest.mark.parametrize(
    "settings",
    [
        {"padding": 1}, {"padding": 2, "size": 5}, {"padding": 1, "stride": 2}, {"padding": (1, 0)}, {"padding": 2},
        {"padding": 1, "size": 2}, {"padding": 2, "dilation": 2},
    ],
)  # fmt: skip
def test_circular_padding_costs_nothing_where_an_image_is_wrapped_around_once(settings):
    conv, x = _circular(**settings)
    unit = torch.eye(48, dtype=torch.float64).reshape(48, 2, 4, 6)
    wide = nn.Sequential(conv).double()
    with torch.no_grad():
        truth = torch.linalg.matrix_norm((wide(unit) - wide(torch.zeros_like(unit[:1]))).flatten(1), 2).item()
    largest = float(max(bounds_of(conv.float(), x).gain.flat)) / math.sqrt(48)
    assert truth * (1 - 1e-6) <= largest  # float32 weights are exact in float64, the certificate has a slack of 1e-9
    if settings.get("padding") in (1, 2) and settings != {"padding": 2} and settings != {"padding": 1, "size": 2}:
        assert largest <= truth * (1 + 1e-6)


def test_the_checker_proves_a_circular_convolution_and_refuses_one_that_does_not_fit():
    conv, x = _circular(padding=1)
    certificate = wn.certify(conv, x)
    wn.verify(certificate, conv.state_dict())
    assert any(row.constants.get("circular") == [0, 1] for row in certificate.rows)
    for circular in ([0], [0, 2], []):
        document = certificate.document()
        (row,) = [row for row in document["rows"] if row["operation"] == "convolution"]
        row["constants"]["circular"] = circular
        with pytest.raises(CheckError):
            check(document, {name: each.detach().numpy() for name, each in conv.state_dict().items()})


def test_the_windows_of_a_euclidean_pool_are_the_same_in_its_sign_and_its_size():
    """Where they differ, the sign is 0 at x = 0 in one window and the size jumps with the entries of another."""

    def pools(x, stride):
        signs, sizes = (F.avg_pool1d(x.square(), 2, each) for each in (2, stride))
        return (signs.sign() * F.relu(sizes.abs()) * 2) ** 0.5

    image = torch.randn(1, 1, 5)
    walked(Net(lambda _, x: pools(x, 2)), image)
    with pytest.raises(UncertifiableError, match="not continuous"):
        walked(Net(lambda _, x: pools(x, 3)), image)
