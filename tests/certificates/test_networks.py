"""`certify(effort="high")`: joint bounds of networks, where they lie, and that nothing exceeds them."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from tests.proof.models import Function, small
from wellnormed.certificates import Certificate, require_same_model
from wellnormed.data._download import find
from wellnormed.lowering.semidefinite import solve
from wellnormed.proof import CheckError
from wellnormed.proof.lipsdp import MOST, Map
from wellnormed.proof.lipsdp import Function as Slopes


def mlp(*sizes: int, act=nn.ReLU, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Linear maps with a function between them."""
    torch.manual_seed(seed)
    layers = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b, bias=bias), act())]
    return nn.Sequential(*layers[:-1]).eval()


def joint_rows(certificate: Certificate) -> list:
    return [row for row in certificate.rows if row.operation == "lipsdp"]


def gain_found(model: nn.Module, inputs: int, points: int = 64) -> float:
    """The largest norm of a Jacobian at random points of several sizes, moved along the best directions."""
    model, best = copy.deepcopy(model).double(), 0.0
    for size in (0.1, 1.0, 5.0):
        x = size * torch.randn(points, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for _ in range(4):
            x = x.detach().requires_grad_()
            y = model(x)
            rows = [torch.autograd.grad(y[:, k].sum(), x, retain_graph=True)[0] for k in range(y.shape[1])]
            _, s, v = torch.linalg.svd(torch.stack(rows, 1))
            best, x = max(best, float(s.max())), x + 0.3 * v[:, 0]
    return best


@pytest.mark.parametrize(("name", "most", "product"), [("lipsdp_mnist", 24.37, 31.5), ("lipsdp_random", 36.483, 43.3)])
def test_public_nets_have_the_bounds_of_the_best_solvers(name: str, most: float, product: float) -> None:
    if (path := find(f"nets/{name}.npz")) is None:
        pytest.skip(f"{name} is not in $WELLNORMED_DATA")
    weights = np.load(path)
    weights = [torch.from_numpy(weights[f"w{i}"]) for i in range(len(weights.files))]
    model = mlp(weights[0].shape[1], *map(len, weights), bias=False).double()
    for layer, weight in zip(model[::2], weights, strict=True):
        layer.weight.data = weight.double()
    example = torch.zeros(1, weights[0].shape[1], dtype=torch.float64)
    certificate = wn.certify(model, example, effort="high")
    assert wn.certify(model, example).lipschitz > product
    assert gain_found(model, example.shape[1], 16) < certificate.lipschitz <= most


ACTIVATIONS = (
    nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.ELU, nn.Hardswish, nn.PReLU,
    lambda: nn.LeakyReLU(0.3), lambda: nn.LeakyReLU(-0.5), lambda: Function(lambda self, x: torch.sin(x)),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(ACTIVATIONS)))
def test_joint_bounds_lie_between_what_is_found_and_the_product(number: int) -> None:
    model = mlp(5, 8, 8, 4, act=ACTIVATIONS[number], seed=number)
    x = torch.zeros(1, 5)
    plain, certificate = wn.certify(model, x, math.inf), wn.certify(model, x, math.inf, effort="high")
    assert len(joint_rows(certificate)) == 1
    assert gain_found(model, 5) <= certificate.lipschitz < 0.98 * plain.lipschitz


def test_a_certificate_of_joint_bounds_is_verified_saved_and_compared(tmp_path) -> None:
    model, x = mlp(4, 6, 6, 3), torch.zeros(2, 4)
    certificate = wn.certify(model, x, effort="high")
    certificate.save(tmp_path / "certificate.json")
    read = Certificate.load(tmp_path / "certificate.json")
    for each in (certificate, read):
        assert wn.verify(each, model.state_dict()).lipschitz == certificate.lipschitz.exact
        require_same_model(each, model, x)
    assert "lipsdp" in str(certificate)
    with torch.no_grad():
        model[2].weight[0, 0] += 0.1
    with pytest.raises(CheckError, match=r"SHA-256 differs"):
        wn.verify(read, model.state_dict())
    with pytest.raises(CheckError):
        require_same_model(read, model, x)
    with pytest.raises(CheckError):
        require_same_model(certificate, mlp(4, 6, 6, 3, act=nn.Tanh), x)


def test_residuals_factors_and_tables_are_part_of_a_network() -> None:
    model, x = small("network")
    plain, certificate = wn.certify(model.eval(), x), wn.certify(model.eval(), x, effort="high")
    (row,) = joint_rows(certificate)
    assert row.inputs[1] == "input.x"
    assert len(row.constants["multipliers"]) == 3
    assert certificate.lipschitz < 0.5 * plain.lipschitz
    flat = Function(lambda self, v: self.model(v[:, None])[:, 0], model=model)
    assert gain_found(flat, 6) <= certificate.lipschitz


def test_a_network_ends_where_another_operation_or_a_second_start_begins() -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(6, 6) for name in "abcdef"}

    def forward(self, x: Tensor) -> Tensor:
        y = F.softmax(self.b(F.relu(self.a(x))), -1)
        z = y + x  # of two starts, so a start itself
        z = z + self.d(F.gelu(self.c(z)))  # the network of c and d alone
        return self.f(torch.tanh(self.e(z)))

    model = Function(forward, **layers).eval()
    certificate = wn.certify(model, torch.zeros(1, 6), effort="high")
    assert [row.name for row in joint_rows(certificate)] == [f"{each}.linear.lipsdp" for each in "bdf"]
    assert gain_found(model, 6) <= certificate.lipschitz < wn.certify(model, torch.zeros(1, 6)).lipschitz


def test_a_value_that_others_read_too_is_improved_and_the_network_goes_on_through_it() -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(5, 5) for name in "abc"}

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.relu(self.a(x)))
        return self.c(F.relu(y)) + F.softmax(y, -1)

    model = Function(forward, **layers).eval()
    first, second = joint_rows(wn.certify(model, torch.zeros(1, 5), effort="high"))
    assert (first.inputs[1], second.inputs[1]) == ("input.x", "input.x")
    assert len(second.constants["multipliers"]) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_every_dtype(dtype: torch.dtype) -> None:
    model, x = mlp(4, 6, 6, 3).to(dtype), torch.zeros(1, 4, dtype=dtype)
    certificate = wn.certify(model, x, effort="high")
    assert wn.verify(certificate, model.state_dict()).lipschitz == certificate.lipschitz.exact
    assert len(joint_rows(certificate)) == 1
    assert gain_found(model, 4) <= certificate.lipschitz


@pytest.mark.parametrize("exponent", [-20, 20])
def test_weights_of_every_scale(exponent: int) -> None:
    model, x = mlp(4, 6, 6, 3, bias=False).double(), torch.zeros(1, 4, dtype=torch.float64)
    unit = wn.certify(model, x, effort="high").lipschitz
    with torch.no_grad():
        model[0].weight *= 10.0**exponent
    assert wn.certify(model, x, effort="high").lipschitz == pytest.approx(unit * 10.0**exponent, rel=1e-3)
    with torch.no_grad():
        model[4].weight *= 10.0**-exponent
    assert wn.certify(model, x, effort="high").lipschitz == pytest.approx(unit, rel=1e-3)


DEGENERATE = {
    "dead": lambda w: torch.cat([torch.zeros(3, w.shape[1]), w[3:]]),
    "of rank one": lambda w: torch.outer(w[:, 0], w[0]), "zero": torch.zeros_like,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "layer"), [("dead", 0), ("dead", 4), ("of rank one", 2), ("of rank one", 4), ("zero", 0), ("zero", 2)]
)
def test_degenerate_weights(change: str, layer: int) -> None:
    model, x = mlp(4, 6, 6, 3), torch.zeros(1, 4)
    with torch.no_grad():
        model[layer].weight.copy_(DEGENERATE[change](model[layer].weight))
    plain, certificate = wn.certify(model, x), wn.certify(model, x, effort="high")
    assert gain_found(model, 4) <= certificate.lipschitz <= plain.lipschitz
    assert certificate.lipschitz < plain.lipschitz or plain.lipschitz == 0


def test_a_product_of_matrices_has_its_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).eval()
    certificate = wn.certify(model, torch.zeros(1, 4), effort="high")
    norm = float(torch.linalg.matrix_norm((model[1].weight @ model[0].weight).detach().double(), 2))
    assert certificate.lipschitz == pytest.approx(norm, rel=1e-6)


def test_what_has_no_networks_keeps_its_certificate() -> None:
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    for model, x in (
        (convolutions, torch.zeros(1, 3, 6, 6)), (nn.Linear(3, 2), torch.zeros(1, 3)),
        (nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.zeros(1, 3)), (mlp(1, MOST, 1), torch.zeros(1, 1)),
    ):  # fmt: skip
        plain = wn.certify(model.eval(), x)
        with pytest.warns(UserWarning, match="has no effect here"):
            certificate = wn.certify(model, x, effort="high")
        assert [row.name for row in certificate.rows] == [row.name for row in plain.rows]
        assert certificate.lipschitz.exact == plain.lipschitz.exact


def test_margins_stay_those_of_the_last_map() -> None:
    model, x = mlp(4, 6, 6, 3), torch.zeros(1, 4)
    plain = wn.certify(model, x, margins=True)
    certificate = wn.certify(model, x, margins=True, effort="high")
    assert certificate.margin == plain.margin
    assert certificate.lipschitz < plain.lipschitz
    wn.verify(certificate, model.state_dict())


def test_settings_that_do_not_fit_are_refused() -> None:
    model, x = mlp(4, 6, 3), torch.zeros(1, 4)
    with pytest.raises(ValueError, match="effort='low' is not one of standard, high"):
        wn.certify(model, x, effort="low")
    optimizer = wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, {"*.weight": wn.HardCap(1.0), "*.bias": wn.ColumnCap(1.0)})
    with pytest.raises(ValueError, match="effort='high' needs the entries"):
        wn.certify(model, x, within=constraints, effort="high")


def test_the_solver_is_optimal_where_the_best_bound_is_known() -> None:
    # relu(W relu(W' x)) of an orthogonal W: nothing is lost; and of one neuron: |w v| times the largest slope
    w = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double())[0].numpy()
    chain = [Slopes(0.5, 0.5, {i: Map(w, abs(w), 1)}) for i in range(3)]
    assert solve(chain, {3: Map(w, abs(w), 1)}, 8)[1] == pytest.approx(1, rel=5e-4)
    one = np.array([[3.0]])
    assert solve([Slopes(0.4, 0.6, {0: Map(one, one, 1)})], {1: Map(one, one, 1)}, 1)[1] == pytest.approx(9, rel=5e-4)
    # of x - x with x through two neurons of slopes in [0, 1]: the difference of slopes is at most 1
    ones, pair = np.array([[1.0], [1.0]]), np.array([[1.0, -1.0]])
    function = Slopes(0.5, 0.5, {0: Map(ones, ones, 1)})
    assert solve([function], {1: Map(pair, abs(pair), 1)}, 1)[1] == pytest.approx(1, rel=1e-3)
