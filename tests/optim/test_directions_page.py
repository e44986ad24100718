"""docs/directions.md: every variant against its released rule, its label, and its bound.

A reference is the published update of one matrix, written again in plain torch: momentum, direction and decay as
released, with the exact matrix sign. What differs by choice is said on the page and beside the reference.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import wellnormed as wn
from tests.directions import CASES, OWN, lines_of, table
from wellnormed.constraints import TARGET

RATE, STEPS = 0.1, 5
SHAPES = [(6, 10), (10, 6), (8, 8)]


def drawn(shape, seed, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(shape, dtype=torch.float64, size=1.0):
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(drawn(shape, 100, dtype) / 3 * size)
    return layer


def polar(g):
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    return u @ vt


def averages(gradients, nesterov=True, kept=0.95):
    """What a release that averages hands on in every step: `m <- kept m + (1 - kept) g`, one step ahead if Nesterov."""
    m = torch.zeros_like(gradients[0])
    for g in gradients:
        m = m.lerp(g, 1 - kept)
        yield g.lerp(m, kept) if nesterov else m


def sums(gradients, nesterov=True, kept=0.95):
    """What a release that sums hands on in every step: `m <- kept m + g`, and `g + kept m` if Nesterov."""
    m = torch.zeros_like(gradients[0])
    for g in gradients:
        m = kept * m + g
        yield g + kept * m if nesterov else m


def pixels(w):
    return max(1, w.shape[0] / w.shape[1]) ** 0.5


def muon_eq(w, gradients):
    for x in sums(gradients):
        rows = (x.square().sum(1) + 1e-8).rsqrt()
        w = w * (1 - RATE * 0.1) - RATE * 0.2 * max(w.shape) ** 0.5 * polar(x * rows[:, None])
    return w


def soap_averages(shape):
    """Where the averages begin: at zero, as released, or for the longer side's null space where that has a basis.

    Rounding chooses the eigenvectors of equal eigenvalues, and squares in that basis depend on them.
    """
    rows, columns = (drawn((side, side), 50 + side) for side in shape)
    return (0 * rows, 0 * columns) if shape[0] == shape[1] else (rows @ rows.T, columns @ columns.T)


def soap_muon(w, gradients):
    """Bases are turned at every second step, so that five steps see both ways."""
    (left, right), squares, p, q = soap_averages(tuple(w.shape)), 0 * w, None, None
    for k, (g, x) in enumerate(zip(gradients, averages(gradients), strict=True)):
        if p is not None:
            turned = p.T @ x @ q
            squares = 0.9 * squares + 0.1 * turned.square()
            back = p @ (turned / (squares.sqrt() + 1e-8)) @ q.T
            x = back * (x.norm() / back.norm())
        w = w - RATE * pixels(w) * polar(x)
        left, right = left.lerp(g @ g.T, 0.1), right.lerp(g.T @ g, 0.1)
        if p is None:
            p, q = torch.linalg.eigh(left)[1].flip(1), torch.linalg.eigh(right)[1].flip(1)
        elif k % 2 == 0:
            rows, columns = (b.T.mul((a @ b).T).sum(1).argsort(descending=True) for a, b in ((left, p), (right, q)))
            squares = squares[rows][:, columns]
            p, q = torch.linalg.qr(left @ p[:, rows])[0], torch.linalg.qr(right @ q[:, columns])[0]
    return w


def spectral_sphere(w, gradients, tangent=True):
    """The release retracts before a step, so its last weight is retracted here. The constraint aims at the radius."""
    radius = TARGET * (w.shape[0] / w.shape[1]) ** 0.5
    for x in averages(gradients):
        u, s, vt = torch.linalg.svd(w, full_matrices=False)
        w, leading, x = w * (radius / s[0]), torch.outer(u[:, 0], vt[0]), x / x.norm()
        low, high = (-20.0, 20.0) if tangent else (0.0, 0.0)
        for _ in range(60 if tangent else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if (leading * polar(x + middle * leading)).sum() < 0 else (low, middle)
        w = w - RATE / TARGET * radius * polar(x + high * leading)
    return w * (radius / torch.linalg.svdvals(w)[0])


def per_head(w, gradients):
    for x in averages(gradients, nesterov=False):
        heads = x.reshape(2, -1, x.shape[1])
        u = torch.stack([polar(head) for head in heads]).reshape(x.shape) * 0.2 * max(heads.shape[1:]) ** 0.5
        w = w * (1 - RATE * 0.1) - RATE * u
    return w


def normuon(w, gradients):
    second = 0.0
    for x in averages(gradients):
        u = polar(x) * pixels(w)
        second = 0.95 * second + 0.05 * u.square().mean(-1 if w.shape[0] >= w.shape[1] else -2, keepdim=True)
        divided = u * second.clamp_min(1e-10).rsqrt()
        w = w * (1 - RATE * 0.025) - RATE * divided * (u.norm() / divided.norm())
    return w


def hyperball(w, gradients):
    radius = w.norm()
    for x in averages(gradients):
        u = polar(x)
        w = w - RATE * u * (radius / u.norm())
        w = w * (radius / w.norm())
    return w


def radial_brake(w, gradients):
    for x in averages(gradients):
        before, w = w.norm(), w - RATE * (w.shape[0] / w.shape[1]) ** 0.5 * polar(x)
        change = w.norm() - before
        w = w * ((before + (0.5 if change > 0 else 0.75) * change) / w.norm())
    return w


# float64, two ways, unless an epsilon of the release or an iteration says more
REFERENCES = {
    "MuonEq": (muon_eq, 1e-7),  # 1e-8 in a root of about 1
    "SOAP-Muon": (soap_muon, 1e-7),  # eigenvectors, and squares of few gradients in a denominator
    "Spectral sphere": (spectral_sphere, 1e-5),  # leading vectors to 1e-6, the sphere's proof to 1e-8
    "MuonSphere": (lambda w, g: spectral_sphere(w, g, tangent=False), 1e-6),
    "Per-head Muon": (per_head, 1e-9),
    "NorMuon": (normuon, 1e-9),
    "Hyperball, MuonH": (hyperball, 1e-9),
    "Radial brake": (radial_brake, 1e-9),
}


@pytest.mark.parametrize("size", [1.0, 8.0])  # where a step is long beside the weight, and where it is short
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_a_variant_is_its_released_rule(name, shape, size):
    layer, gradients = layer_of(shape, size=size), [drawn(shape, seed) for seed in range(STEPS)]
    optimizer, _ = CASES[name].optimizer(layer, RATE)
    reference, tolerance = REFERENCES[name]
    start = layer.weight.detach().clone()  # on its sphere, where a constraint has brought it
    if name == "SOAP-Muon":
        optimizer.state[layer.weight] |= dict(zip(("left", "right"), soap_averages(shape), strict=True))
    for g in gradients:
        layer.weight.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), reference(start, gradients), rtol=tolerance, atol=tolerance)
    assert (layer.weight.detach() - start).norm() > 0.01 * start.norm()  # it moved


def test_the_table_is_true():
    assert set(table()) == set(CASES)
    for name, (lines, label, gain, _) in table().items():
        case = CASES[name]
        assert label == ("keeps" if case.keeps else "loses"), name
        assert (gain == "none") == (case.gain is None), name
        if lines.split()[0].isdigit():
            count = lines_of(type(case.direction).__name__)
            assert lines.split()[0] == str(count), (name, count)


def adversarial(shape, dtype=torch.float64, far=1e30):
    """Momenta at which a bound would break first: rank one, tiny, huge, zero rows and columns, zero."""
    plain = [drawn(shape, seed, dtype) for seed in range(4)]
    rank_one = plain[0][:, :1] @ plain[1][:1]
    holes = plain[2].clone()
    holes[::2], holes[:, 1] = 0, 0
    entry = torch.zeros_like(holes)
    entry[0, 0] = 1
    uneven = plain[3] * torch.logspace(-6, 6, shape[0], dtype=dtype)[:, None]
    return [
        plain[0], rank_one, plain[1] / far, plain[2] * far, holes, torch.zeros_like(holes), entry,
        torch.ones_like(holes), uneven, rank_one / far, rank_one * far, plain[3],
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.keeps])
def test_what_keeps_the_bound_makes_no_longer_step(name, shape, dtype):
    """With the exact sign in float64, with the default products in float32, whose overshoot is part of the bound.

    In float32 to 1e15 alone, since some take squares of the entries.
    """
    layer, double = layer_of(shape, dtype), dtype == torch.float64
    case = CASES[name]
    method = "svd" if double else "auto"
    optimizer, constraints = case.optimizer(layer, RATE, method, momentum=0.0, nesterov=False, weight_decay=0.0)
    if constraints is not None:
        constraints.remove()  # what it does after the step is no part of the step
    [norm] = [a.norm for a in optimizer.assignment]
    largest = 0.0
    for momentum in adversarial(shape, dtype, 1e30 if double else 1e15):
        before = layer.weight.detach().clone()
        layer.weight.grad = momentum
        optimizer.step()
        step = float(norm.upper_bound(before - layer.weight.detach()))
        largest = max(largest, step)
        assert step <= optimizer.update_norm("weight") * (1 + (1e-9 if double else 2e-5))  # rounding of the sums
    assert largest > 0.9 * RATE


def extremes(name, shape):
    """A weight and gradients by which the norm's ball is left."""
    if name == "Radial brake":  # the leading singular value falls while the others grow, and then everything shrinks
        start, sign = torch.ones(min(shape), dtype=torch.float64), -torch.ones(min(shape), dtype=torch.float64)
        start[0], sign[0] = min(shape) - 3, 1
        weight, gradient = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        weight.diagonal().copy_(5 * start)
        gradient.diagonal().copy_(sign)
        return weight, [gradient]
    return 10 * drawn(shape, 100), adversarial(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.keeps])
def test_what_loses_the_bound_leaves_the_ball(name, shape):
    case, layer = CASES[name], layer_of(shape)
    weight, gradients = extremes(name, shape)
    with torch.no_grad():
        layer.weight.copy_(weight)
    optimizer, constraints = case.optimizer(layer, RATE, momentum=0.0, nesterov=False, weight_decay=0.0)
    if constraints is not None:
        constraints.remove()
    [norm] = [a.norm for a in optimizer.assignment]
    assert optimizer.update_norm("weight") is None
    factors = []
    for momentum in gradients:
        before = layer.weight.detach().clone()
        layer.weight.grad = momentum.clone()
        optimizer.step()
        after = layer.weight.detach()
        factors.append(float(norm.norm(after - before)) / RATE)
    assert max(factors) > 1.01, factors
    if case.gain is not None:
        assert max(factors) <= case.gain(*shape) * (1 + 1e-9), factors
    with pytest.raises(ValueError, match="bound on the step's norm"):
        wn.constrain(optimizer, {"weight": wn.SoftCap(2.0)})
    caps = wn.constrain(optimizer, {"weight": wn.HardCap(2.0)})
    for seed in range(3):
        layer.weight.grad = drawn(shape, seed)
        optimizer.step()
        assert caps.proved_ratios()["weight"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_compiled_step_is_the_step(name):
    """Among them are those that branch on the step's number, keep tensors, see the weight, return it, or decompose."""
    layers = [layer_of((8, 8)) for _ in range(2)]
    one, other = (replace(CASES[name], constraint=None).optimizer(layer, RATE)[0].step for layer in layers)
    other = torch.compile(other, backend="aot_eager")
    for seed in range(3):
        for layer, step in zip(layers, (one, other), strict=True):
            layer.weight.grad = drawn((8, 8), seed)
            step()
    torch.testing.assert_close(*(layer.weight for layer in layers), rtol=1e-6, atol=1e-6)  # rounded otherwise
