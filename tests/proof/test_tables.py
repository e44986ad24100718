"""Laws of the kernel's tables: each number holds, and one a little less does not."""

from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from campaigns import ulps
from wellnormed.proof import Proof, Row
from wellnormed.proof.arithmetic import FORMATS
from wellnormed.proof.functions import COUPLINGS, shape_of, sizes_at

ENDS = 10.0 ** torch.linspace(-6, 5, 20_001, dtype=torch.float64)
GRID = torch.cat([-ENDS.flip(0), torch.linspace(-10, 10, 200_001, dtype=torch.float64), ENDS]).sort().values
NUMBERS: list[tuple[str, tuple[float, ...], Callable[[Tensor], Tensor]]] = [
    *((each, (), f) for each, f in ulps.FUNCTIONS.items() if each not in ("leaky_relu", "elu", "exp", "softplus")),
    ("softsign", (), F.softsign), ("tanhshrink", (), F.tanhshrink),
    *(("leaky_relu", (each,), lambda x, each=each: F.leaky_relu(x, each)) for each in (0.25, -3.0)),
    *(("elu", (a, s, i), lambda x, a=a, s=s, i=i: s * torch.where(x > 0, x, a * torch.expm1(i * x.clamp(max=0))))
        for a, s, i in ((3.0, 2.0, 1.5), (-3.0, 2.0, 1.5), (0.5, -2.0, 1.5))),
    *(("clamp", each, lambda x, each=each: x.clamp(*each)) for each in ((-3.0, 1.0), (-3.0, -1.0), (2.0, 5.0))),
    *(("exp", (each,), lambda x, each=each: x.clamp(max=each).exp()) for each in (0.0, 0.5)),
    *(("clamp_min", (each,), lambda x, each=each: x.clamp(min=each)) for each in (-3.0, 3.0)),
    *(("clamp_max", (each,), lambda x, each=each: x.clamp(max=each)) for each in (-3.0, 3.0)),
]  # fmt: skip
"""Functions that have shapes, with their settings."""


def is_least(bound: Decimal | None, values: Tensor, slack: float = 2e-5) -> None:
    """Assert that a bound holds for all values, and is no larger than it need be."""
    largest = float(values.max())
    assert bound is not None
    assert largest - 1e-9 <= float(bound) <= largest + slack


@pytest.mark.parametrize(("name", "numbers", "function"), NUMBERS, ids=[f"{n}{s}" for n, s, _ in NUMBERS])
def test_the_shape_of_a_function(name, numbers, function):
    x = GRID.clone().requires_grad_()
    y, shape = function(x), shape_of(name, *numbers)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    y, zero = y.detach().abs(), function(torch.zeros(1, dtype=torch.float64)).abs()
    if (sizes := sizes_at(name, GRID.numpy())) is not None:
        assert (y.numpy() <= sizes + 1e-15).all()
        assert (sizes <= y.numpy() + 0.3).all()
    is_least(-shape.slopes[0], -slopes)
    is_least(shape.slopes[1], slopes)
    is_least(shape.at_zero, zero)
    # where a function is not 0 at 0, a growth of 1 is simple, and may be more than is needed
    is_least(shape.growth, (y - zero)[GRID != 0] / GRID[GRID != 0].abs(), 1.0 if zero else 2e-4)
    if shape.ceiling is None:
        assert y.max() > 10
    else:
        is_least(shape.ceiling, y)


@pytest.mark.parametrize("name", COUPLINGS)
def test_sizes_and_slopes_are_coupled(name):
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    y = ulps.FUNCTIONS[name](x)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    squares, k = (y.detach().square(), (slopes / float(shape_of(name).slope)).square()), float(COUPLINGS[name])
    assert (squares[0] + squares[1] / k).max() <= 1 + 1e-12
    assert (squares[0] + squares[1] / (k * (1 - 1e-6))).max() > 1 + 1e-9


def test_the_coupling_of_the_sigmoid_is_rounded_up():
    exact = 8 * (5 * Decimal(5).sqrt() - 11)
    assert exact < COUPLINGS["sigmoid"] < exact + Decimal("1e-23")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_formats(dtype):
    name, about = str(dtype).removeprefix("torch."), torch.finfo(dtype)
    floor = about.tiny * (about.eps if name == "float16" else 1)
    expected = Decimal(about.eps / 2), Decimal(floor), Decimal(about.max), about.tiny
    assert FORMATS[name] == (*expected, "float32" if about.bits == 16 else name)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("function", ["relu", "gelu", "gelu_tanh", "silu", "mish"])
def test_functions_of_maps_with_low_biases_are_as_small_as_they_say(function: str, scale: float) -> None:
    """The map is scaled before the function, whose input is the same for all scales; inputs climb the gradient."""
    generator = torch.Generator().manual_seed(0)
    for low in (0.0, 3.0, 50.0):
        w, b, x = (torch.randn(shape, generator=generator).double() for shape in ((9, 4), (9,), (64, 4)))
        w, b = w / scale, (2 * b - low) / scale
        proof = Proof({"w": w.numpy(), "b": b.numpy()})
        of_map = [proof.claim("spectral", "w"), proof.claim("group_norm", "b")]
        proof.add(Row("x", "input", (), (1, 4), {"dtype": "float64", "radius": 0.5}, axes=(1,)))
        proof.add(Row("y", "linear", ("x",), (1, 9), {"parts": 1}, tuple(of_map), reads=((1,),), axes=(1,)))
        proof.add(Row("t", "times", ("y",), (1, 9), {"factor": scale}))
        proof.add(Row("z", "elementwise", ("t",), (1, 9), {"function": function}, reads=((1,),), axes=(1,)))
        radius, _, largest, _ = (float(each.max()) for each in proof.rows["z"].bounds)
        found, entry = 0.0, 0.0
        for _ in range(30):
            x = (F.normalize(x) * (1 - 1e-12)).requires_grad_()
            y = ulps.FUNCTIONS[function](scale * (x @ w.T + b))
            norm, most = (float(each.detach().max()) for each in (y.norm(dim=1), y.abs()))
            found, entry = max(found, norm), max(entry, most)
            x = x.detach() + torch.autograd.grad(y.square().sum(), x)[0].detach() / (y.detach().norm() + 1e-200)
        assert found <= radius <= np.linalg.norm(np.maximum(scale * b.numpy(), 0)) + 20
        assert entry <= largest
