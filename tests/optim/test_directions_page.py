"""docs/directions.md: every variant against its released rule, its label, and what the optimizer does for all of them.

A reference is the published update of one matrix, written again in plain torch: momentum, direction and decay as
released, with the exact matrix sign. What differs by choice is said on the page and beside the reference.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

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


def aurora(w, gradients):
    for x in averages(gradients):
        tall = x if w.shape[0] >= w.shape[1] else x.mT
        if w.shape[0] == w.shape[1]:
            u = polar(x)
        else:
            d = 1 / tall.norm(dim=-1, keepdim=True)
            for k in range(2):
                u = polar(d * tall)
                if k == 0:
                    d = d * (tall.shape[1] / tall.shape[0] / u.square().sum(-1, keepdim=True)) ** 0.5
            u = u if tall is x else u.mT
        w = w * (1 - RATE * 0.025) - RATE * pixels(w) * u
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


def mucon(w, gradients):
    """The paper's formula, with the threshold 1 / 4 and the rate 4 lr."""
    for x in averages(gradients):
        u, s, vt = torch.linalg.svd(x, full_matrices=False)
        assert s[0] > 0.25 > s[-1]
        w = w - 4 * RATE * u @ (s.clamp(max=0.25)[:, None] * vt)
    return w


def muon_plus(w, gradients):
    for x in sums(gradients):
        u = polar(x)
        u = u / torch.sqrt(u.square().sum(-2, keepdim=True) + 1e-7)
        u = u / torch.sqrt(u.square().sum(-1, keepdim=True) + 1e-7)
        w = w * (1 - RATE * 0.1) - RATE * (w.shape[0] / w.shape[1]) ** 0.5 * u
    return w


def normuon_steps(w, gradients):
    second = 0.0
    for x in averages(gradients):
        u = polar(x) * pixels(w)
        second = 0.95 * second + 0.05 * u.square().mean(-1 if w.shape[0] >= w.shape[1] else -2, keepdim=True)
        divided = u * second.clamp_min(1e-10).rsqrt()
        yield divided * (u.norm() / divided.norm())


def normuon(w, gradients):
    for u in normuon_steps(w, gradients):
        w = w * (1 - RATE * 0.025) - RATE * u
    return w


def floor(w, gradients):
    for u in normuon_steps(w, gradients):
        scale = 0.35 * w.norm() / u.norm() if u.norm() / w.norm() < 0.35 else 1.0
        w = w - RATE * scale * u
    return w


def mano(w, gradients):
    for k, x in enumerate(sums(gradients, nesterov=False)):
        dim = k % 2
        unit = w / w.norm(dim=dim, keepdim=True)
        tangent = x - (x * unit).sum(dim, keepdim=True) * unit
        u = tangent / tangent.norm(dim=dim, keepdim=True)
        w = w * (1 - RATE * 0.1) - RATE * 0.2 * math.sqrt(w.shape[dim]) * u
    return w


def dynmuon(w, gradients):
    """The optimizer averages, the release sums: it is given a twentieth of the gradients."""
    for k, x in enumerate(sums([g / 20 for g in gradients])):
        p = -0.25 + 0.5 / (1 + math.exp((k / 60 - 0.04) / 0.04))
        wide = x if w.shape[0] <= w.shape[1] else x.T
        scale = wide.norm()
        e = (wide / scale) @ (wide / scale).T - torch.eye(len(wide)).to(w)
        c = torch.eye(len(wide)).to(w) + p / 2 * e + 0.5 * (p / 2) * (p / 2 - 1) * e @ e
        u = c @ polar(wide) * scale**p
        w = w * (1 - RATE * 0.025) - RATE * pixels(w) * (u if wide is x else u.T)
    return w


def relative(w, gradients):
    for x in averages(gradients):
        u = polar(x)
        w = w - RATE * u * (w.norm() / u.norm())
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


def muown(w, gradients):
    g = w.norm(dim=1, keepdim=True)
    length, turning, mean, squares = g, 0 * w, 0 * g, 0 * g
    for t, grad in enumerate(gradients, start=1):
        unit = w / g
        along = (grad * unit).sum(1, keepdim=True)
        across = g / length * (grad - unit * along)
        turning = 0.95 * turning + across
        v = unit * length - RATE * 0.2 * max(w.shape) ** 0.5 * polar(across + 0.95 * turning)
        mean, squares = 0.9 * mean + 0.1 * along, 0.95 * squares + 0.05 * along**2
        g = g - RATE * (mean / (1 - 0.9**t)) / ((squares / (1 - 0.95**t)).sqrt() + 1e-8)
        assert (g > 0).all()  # else the page says that they differ
        length = v.norm(dim=1, keepdim=True)
        w = g * v / length
    return w


def cautious_decay(w, gradients):
    for x in averages(gradients):
        u = polar(x) * (w.shape[0] / w.shape[1]) ** 0.5
        w = w - (RATE * u + RATE * 0.7 * w * (u * w >= 0))
    return w


# float64, two ways, unless an epsilon of the release or an iteration says more
REFERENCES = {
    "MuonEq": (muon_eq, 1e-7),  # 1e-8 in a root of about 1
    "Aurora": (aurora, 1e-9),
    "SOAP-Muon": (soap_muon, 1e-7),  # eigenvectors, and squares of few gradients in a denominator
    "Spectral sphere": (spectral_sphere, 1e-5),  # leading vectors to 1e-6, the sphere's proof to 1e-8
    "MuonSphere": (lambda w, g: spectral_sphere(w, g, tangent=False), 1e-6),
    "Per-head Muon": (per_head, 1e-9),
    "MuCon": (mucon, 1e-9),
    "Muon+": (muon_plus, 1e-5),  # 1e-7 in roots of at least 0.3, twice
    "NorMuon": (normuon, 1e-9),
    "Mano": (mano, 1e-9),
    "DynMuon": (dynmuon, 1e-9),
    "Relative step": (relative, 1e-9),
    "Hyperball, MuonH": (hyperball, 1e-9),
    "u/w floor": (floor, 1e-9),
    "Radial brake": (radial_brake, 1e-9),
    "Muown": (muown, 1e-9),
    "Cautious decay": (cautious_decay, 1e-9),
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
        if case.direction is not None:
            count = lines_of(type(case.direction).__name__)
            assert lines.split()[0] == str(count), (name, count)
            assert count <= (30 if name in ("Muown", "SOAP-Muon") else 12), name


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
    if name == "Cautious decay":  # [[1, 1], [1, -1]] is longest with the fourth entry as it is not
        weight, gradient = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        weight[:2, :2] = 100 * torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        gradient[:2, :2] = -1
        return weight, [gradient]
    if name == "Muown":  # all rows grow together
        return torch.ones(shape, dtype=torch.float64), [-torch.ones(shape, dtype=torch.float64)]
    return 10 * drawn(shape, 100), adversarial(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.keeps])
def test_what_loses_the_bound_leaves_the_ball(name, shape):
    case, layer = CASES[name], layer_of(shape)
    weight, gradients = extremes(name, shape)
    with torch.no_grad():
        layer.weight.copy_(weight)
    decay = {} if name == "Cautious decay" else {"weight_decay": 0.0}
    optimizer, constraints = case.optimizer(layer, RATE, momentum=0.0, nesterov=False, **decay)
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
        grown = norm.norm(after) - norm.norm(before) if decay == {} else norm.norm(after - before)
        factors.append(float(grown) / RATE)
    assert max(factors) > 1.01, factors
    if case.gain is not None:
        assert max(factors) <= case.gain(*shape) * (1 + 1e-9), factors
    if name == "Muon+":
        assert max(factors) == pytest.approx(case.gain(*shape))  # a sign of rank one attains it
    with pytest.raises(ValueError, match="bound on the step's norm"):
        wn.constrain(optimizer, {"weight": wn.SoftCap(2.0)})
    caps = wn.constrain(optimizer, {"weight": wn.HardCap(2.0)})
    for seed in range(3):
        layer.weight.grad = drawn(shape, seed)
        optimizer.step()
        assert caps.proved_ratios()["weight"] <= 1


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@pytest.mark.parametrize("method", ["gram", "products"])
@pytest.mark.parametrize("distance", [0.0, 1e-9, 1e-6, 1e-3])
def test_a_clip_is_as_accurate_at_its_threshold(distance, method, dtype, error):
    """MuCon's formulas decide a sign there. The error is the one that clips promise for every matrix."""
    u, v = (torch.linalg.qr(drawn((12, 12), seed))[0] for seed in (1, 2))
    singular = 1 + distance * torch.linspace(-1, 1, 12, dtype=torch.float64)
    matrix = (u * singular @ v.mT).to(dtype)
    u, singular, vt = torch.linalg.svd(matrix.double())
    clipped = wn.matrix.spectral_hardcap(matrix, 1.0, method).double()
    assert torch.linalg.matrix_norm(clipped - u * singular.clamp(max=1) @ vt, 2) <= error


def keyed(name):
    """A module's name for a row of the table."""
    return name.replace(" ", "_").replace("/", "_")


class Every(nn.Module):
    """Two matrices for every direction of the page; square, so that no average has a null space."""

    def __init__(self, names=tuple(OWN), count=2, first=0):
        super().__init__()
        for name in names:
            layers = [layer_of((8, 8)) for _ in range(count)]
            for i, layer in enumerate(layers, start=first):
                nn.init.orthogonal_(layer.weight, generator=torch.Generator().manual_seed(i))
            self.add_module(keyed(name), nn.ModuleList(layers))

    def draw(self, step, first=0):
        for layers in self.children():
            for i, layer in enumerate(layers, start=first):
                layer.weight.grad = drawn((8, 8), 10 * step + i)


def optimizer_of(model, names=tuple(OWN), **settings):
    directions = {keyed(name): OWN[name].direction for name in names}
    norms = wn.assign_norms(model, overrides={keyed(name): wn.Spectral(units=OWN[name].units) for name in names})
    return wn.optim.ConditionalGradient(norms, RATE, directions=directions, **settings)


def train(model, optimizer, steps, first=0, step=None):
    for number in range(first, first + steps):
        model.draw(number)
        (step or optimizer.step)()


def same(one, other, tolerance=0.0):
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def test_equal_matrices_are_one_batch_and_each_moves_as_alone(monkeypatch):
    seen = set()
    for kind in {type(case.direction) for case in OWN.values()}:
        call = kind.__call__
        monkeypatch.setattr(
            kind, "__call__", lambda self, told, call=call: seen.add((self, told.momentum.shape)) or call(self, told)
        )
    model = Every()
    train(model, optimizer_of(model), 3)
    assert seen == {(case.direction, (2, 8, 8)) for case in OWN.values()}
    for i in range(2):
        single = Every(count=1, first=i)
        optimizer = optimizer_of(single)
        for step in range(3):
            single.draw(step, first=i)
            optimizer.step()
        for name, layers in single.named_children():
            # products of one matrix and of two may round apart, and bisections and eigenvectors enlarge that
            torch.testing.assert_close(
                layers[0].weight, model.get_submodule(name)[i].weight, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: n + m
            )


def test_a_copy_and_a_state_dict_go_on_alike():
    model, loaded = Every(), Every()
    optimizer, resumed = optimizer_of(model), optimizer_of(loaded)
    train(model, optimizer, 3)
    kept = {key for case in OWN.values() for key in case.direction.keeps}
    assert kept <= {key for state in optimizer.state.values() for key in state}
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    loaded.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    distributed = Every()
    by_name = optimizer_of(distributed)
    distributed.load_state_dict(model.state_dict())
    set_optimizer_state_dict(distributed, by_name, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))  # of DCP
    for other, one in ((model, optimizer), (copied, copied_optimizer), (loaded, resumed), (distributed, by_name)):
        train(other, one, 2, first=3)
        same(other, model, 1e-12)  # where tensors lie in memory may change the order of a sum


def test_printing_names_every_direction():
    printed = str(optimizer_of(Every()))
    for case in OWN.values():
        assert f"direction={case.direction!r}" in printed
    assert "SoapMuon(kept=0.9, every=2)" in printed
    assert "MuonEq()" in printed


@pytest.mark.parametrize(
    "names", [("SOAP-Muon", "u/w floor", "Mano", "DynMuon", "Muown"), pytest.param(tuple(OWN), marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_a_compiled_step_is_the_step(names):
    """At first those that branch on the step's number, keep tensors, see the weight, return it, or decompose."""
    one, other = Every(names, count=1), Every(names, count=1)
    first, second = optimizer_of(one, names), optimizer_of(other, names)
    train(one, first, 3)
    train(other, second, 3, step=torch.compile(second.step, backend="aot_eager"))
    same(one, other, 1e-6)  # operations are rounded otherwise


@pytest.mark.parametrize("name", OWN)
def test_memory_in_the_gradients_is_served_or_refused_by_name(name):
    direction, model = OWN[name].direction, Every([name])
    if direction.keeps or "gradient" in direction.sees:
        reason = f"keeps {direction.keeps[0]}" if direction.keeps else "sees the gradient"
        with pytest.raises(ValueError, match=rf"{type(direction).__name__}.*weight' {reason}.*use memory='buffer'"):
            optimizer_of(model, [name], memory="gradient")
        return
    optimizer, before = optimizer_of(model, [name], memory="gradient"), copy.deepcopy(model)
    train(model, optimizer, 2)
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert all(not state for state in optimizer.state.values())
