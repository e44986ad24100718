"""Programs executed in floats, with sums in many orders, stay within the certified error of the real function."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from campaigns.rounding.executions import ORDERS, Reordered
from campaigns.ulps import FUNCTIONS, floats, share
from tests.proof.models import Function, small
from wellnormed.certificates import Arithmetic, certifying
from wellnormed.certificates.certificate import Certificate
from wellnormed.program.domain import Box, default_axes
from wellnormed.proof.functions import ERRORS


def drawn(certificate: Certificate, x: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs at the edge of the domain."""
    if not x.is_floating_point():
        return torch.randint(0, 2, x.shape, generator=generator)
    domain, noise = certificate.input_domain, torch.randn(x.shape, generator=generator, dtype=torch.float64)
    if isinstance(domain, Box):
        return (domain.low + (domain.high - domain.low) * noise.sigmoid().round()).to(x.dtype)
    noise += 3 * torch.randn((), generator=generator)  # means far from 0
    axes = certificate.inputs[0].axes
    return (noise / noise.square().mean(axes, keepdim=True).sqrt() * domain * (1 - 2.0**-7)).to(x.dtype)


def errors(certificate: Certificate, module: nn.Module, x: Tensor) -> list[float]:
    """The errors that orders of sums make, as shares of the certified one."""
    program, generator, found = certificate.program, torch.Generator().manual_seed(0), []
    assert program is not None
    assert certificate.forward_error is not None, certificate.unbounded_at
    double = program.double() if x.is_floating_point() else copy.deepcopy(module).double()

    def exact(given: Tensor) -> Tensor:
        given = given.double() if given.is_floating_point() else given
        return double(given) if not certificate.each_sample else torch.cat([double(one[None]) for one in given])

    axes = certificate.rows[-1].axes
    for _ in range(2):
        given = drawn(certificate, x, generator)
        real = exact(given)
        for order in (*ORDERS, "torch"):
            if order == "torch":
                executed = program(given)
            else:
                with Reordered(order):
                    executed = program(given)
            difference = (executed.detach().double() - real.detach()).square().sum(axes).sqrt().max()
            found.append(float(difference) / certificate.forward_error)
    return found


def norms(self: Any, x: Tensor) -> Tensor:
    return self.last(F.rms_norm(self.norm(self.first(x)), (12,), self.gain)) + F.normalize(x, dim=-1, eps=0.1)


def convex(self: Any, x: Tensor) -> Tensor:
    for layer, factor in ((self.map0, 0.1), (self.map1, 0.2)):
        x = x - factor * (layer(x).relu() @ layer.weight)
    return torch.addmm(x, self.map2(x).relu(), self.map2.weight, alpha=-0.1)


def functions(self: Any, x: Tensor) -> Tensor:
    some = [F.softplus(x), F.softplus(x, 100.0), F.softshrink(x, 0.1), F.celu(x), F.celu(x, 0.3), 1 - x.sigmoid()]
    others = [x.logsumexp(-1, True), torch.logaddexp(x, x.flip(-1)), (x - x.flip(-1)) * (5 * x).sigmoid() + x.flip(-1)]
    return torch.cat(some + others, -1)


def spelled(self: Any, x: Tensor) -> Tensor:
    return torch.cat([x * x.sigmoid(), x * (1.702 * x).sigmoid(), x * (1e-3 * x).sigmoid(), F.tanhshrink(x)], -1)


def spreads(self: Any, x: Tensor) -> Tensor:
    centred, variance = x - x.mean(-1, True), x.var(-1, keepdim=True)
    units = [centred / (x.std(-1, keepdim=True) + 1e-2), centred * (variance + 1e-2).rsqrt()]
    sizes = [(x.square().sum(-1, keepdim=True) + 1e-3).sqrt(), x.square().mean(-1, keepdim=True).sqrt()]
    sizes += [F.lp_pool1d(x[:, None], 2, 2)[:, 0], torch.hypot(x, x.flip(-1))]
    return torch.cat([*units, x.std(-1, keepdim=True), variance, *sizes], -1)


def indexed(self: Any, x: Tensor) -> Tensor:
    zeros, place, start = torch.zeros(3, 2, dtype=x.dtype), torch.arange(40) ** 2 % 3, x[0, :3]
    places = place[:, None].expand(40, 2)
    sums = [zeros.index_add(0, place, x[0] * self.weight), start.index_add(0, place, x[0], alpha=0.3)]
    sums += [zeros.scatter_add(0, places, x[0]), start.scatter_reduce(0, places, x[0], "mean")]
    sums += [start.index_put((place,), x[0], accumulate=True), F.fold(x[:, :9], (2, 1), 3, padding=1).reshape(1, 2)]
    return torch.cat(sums)[None]


def resampled(self: Any, x: Tensor) -> Tensor:
    by_lines = F.interpolate(x, scale_factor=1.7, mode="bilinear")
    return torch.cat([by_lines, F.interpolate(x, by_lines.shape[2:], mode="bicubic")], 1)


def far(self: Any, x: Tensor) -> Tensor:
    """Norms of norms, and attention whose weights rounding decides."""
    x = F.layer_norm(self.first(F.layer_norm(x, (6,))), (6,))
    return F.scaled_dot_product_attention(1e3 * self.first(x), 1e3 * self.second(x), x)


FUNCTIONS_OF = {
    "functions": (functions, (2, 8)), "spelled functions": (spelled, (2, 8)), "spreads": (spreads, (2, 8)),
    "sums by index": (indexed, (1, 40, 2)), "resampled": (resampled, (2, 2, 5, 7)), "far": (far, (2, 4, 6)),
}  # fmt: skip

MADE = {
    "wide": (lambda: nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 10)), (2, 300)),
    "norms": (lambda: Function(norms, first=nn.Linear(6, 12), norm=nn.LayerNorm(12), last=nn.Linear(12, 6),
                               gain=torch.rand(12)), (2, 6)),
    "means": (lambda: Function(lambda self, x: x.mean((1, 2)) + x.sum((1, 2)) / 3), (2, 8, 6)),
    "convex": (lambda: Function(convex, **{f"map{i}": nn.Linear(6, 12) for i in range(3)}), (2, 6)),
    "cancelled": (lambda: Function(lambda s, x: (3 * x + s.far) - s.far - 3 * x, far=1e4 * torch.rand(6)), (2, 6)),
}  # fmt: skip


def model(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name in FUNCTIONS_OF:
        function, shape = FUNCTIONS_OF[name]
        layers = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6), "weight": torch.randn(40, 1)}
        return Function(function, **layers), torch.randn(shape)
    if name in MADE:
        make, shape = MADE[name]
        return make(), torch.randn(shape)
    module, x = small(name)
    for each in module.modules():
        if isinstance(each, nn.GroupNorm):
            each.eps = 0.1  # its variance may be a mean of squares less a square
    return module, x


LEAST = {"wide": 1e-3, "mlp": 5e-3, "cancelled": 0.05, "means": 1e-2, "convex": 2e-3}
"""Name -> the least share of the certified error that is found."""
NAMES = (
    "wide", "mlp", "norms", "means", "cancelled", "network", "attention", "attention with biases", "gpt", "rotary gpt",
    "encoder", "lstm", "moves", "convolutions", "transposed convolution", "convolution of tokens", "mixing", "gates",
    "activations", "rounded", "potential gpt", "convex", "gru", *FUNCTIONS_OF,
)  # fmt: skip


COMPOSED = {"gpt", "rotary gpt", "potential gpt", "encoder", "lstm", "gru", "rounded"}
"""The layers of these are in other models too, but for one that rounds to bfloat16 itself."""
CASES = [(name, dtype) for name in NAMES for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), [c for c in CASES if c[0] not in COMPOSED or c[1] == torch.float32])
def test_no_order_of_sums_exceeds_the_certified_error(name: str, dtype: torch.dtype) -> None:
    module, x = model(name)
    module, x = module.to(dtype).eval(), x.to(dtype) if x.is_floating_point() else x
    certificate = wn.certify(module, x, radius=1.0625)  # bfloat16 rounds up the rows of embeddings
    if dtype == torch.bfloat16 and certificate.forward_error is None:
        pytest.skip(f"no bound at {certificate.unbounded_at}")
    found = errors(certificate, module, x)
    assert max(found) <= 1
    assert max(found) >= LEAST.get(name, 0.0) or dtype != torch.float32
    print(f"{name} {dtype} E {certificate.forward_error:.3g} found {max(found):.3g}")


@pytest.mark.parametrize("function", [F.hardsigmoid, F.hardswish])
def test_kernels_with_constants_of_float32_are_counted_in_float64(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[2.0, 1.0]], dtype=torch.float64)  # some kernels multiply by a sixth, rounded to float32
    certificate = wn.certify(Function(lambda self, x: function(x)), x, radius=2.0)
    short = (x + 3).clamp(0, 6) * float(torch.tensor(1 / 6)) * (1 if function is F.hardsigmoid else x)
    assert 1e-9 < (short - function(x)).norm() <= certificate.forward_error


EDGE = torch.tensor([1.0, 2.0**-4])
"""`1 + 2^-8` is its product with itself, which bfloat16 rounds to 1."""


def edges(name: str) -> tuple[Callable[[Any, Tensor], Tensor], Tensor]:
    """A function of a worst kind, with the input at which it errs most."""
    torch.manual_seed(0)
    one, image, ones = 1 + 2.0**-7, torch.rand(2, 1, 12, 12).bfloat16(), torch.ones(1, 1, 9, 9).bfloat16()
    square = torch.tensor([[[1.4, 1.0], [1.0, 1.3]]])
    return {
        "a bias added to what is stored": (
            lambda s, x: F.linear(x.mT, EDGE[None].bfloat16(), torch.full((1,), one).bfloat16()),
            torch.stack([EDGE, torch.zeros(2)], 1)[None].bfloat16(),
        ),
        "sums stored after each addend": (lambda s, x: F.conv_transpose2d(x, ones), image),
        "sums of volumes": (lambda s, x: F.adaptive_avg_pool3d(x, 2), torch.full((2, 1, 8, 8, 8), 1 / 3).half()),
        "a written constant": (lambda s, x: torch.cat([x, x.clone().fill_(0.1)], 1), EDGE[None].bfloat16()),
        "scaled queries below the least number": (
            lambda s, x: F.scaled_dot_product_attention(
                x, x * 2.0**126 * 2.0**125, x * 2.0**125, scale=2.0**-3
            ),
            square * 2.0**-125,
        ),
        "logits that overflow before their scale": (
            lambda s, x: torch.softmax((x @ x.flip(-1).mT) * 2.0**-14, -1) @ x, torch.full((1, 2, 64), 40.0).half()
        ),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "a bias added to what is stored", "sums stored after each addend", "sums of volumes", "a written constant",
        "scaled queries below the least number", "logits that overflow before their scale",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:TF32")
def test_kernels_that_round_most_stay_within_the_certified_error(name: str) -> None:
    function, x = edges(name)
    module, axes = Function(function), tuple(default_axes(x.shape))
    largest = float(x.double().square().mean(axes).sqrt().max())
    certificate = wn.certify(module, x / 64 if name.endswith("scale") else x, radius=largest * (1 + 1e-9))
    if certificate.forward_error is None:
        assert name not in ("a bias added to what is stored", "sums stored after each addend", "a written constant")
        return
    torch.set_flush_denormal(name.endswith("least number"))
    with torch.backends.mkldnn.flags(enabled=False):
        executed = module(x).double()
    torch.set_flush_denormal(False)
    assert certificate.program is not None
    real = certificate.program.double()(x[:1].double() if certificate.each_sample else x.double())
    found = (executed[: len(real)] - real).square().sum(certificate.rows[-1].axes).sqrt().max()
    print(f"{name}: found {found:.3g}, certified {certificate.forward_error:.3g}")
    assert found <= certificate.forward_error


def test_a_stated_arithmetic_changes_the_error_and_is_in_the_file(tmp_path: Any, monkeypatch: Any) -> None:
    module, x = model("wide")
    with monkeypatch.context() as every_machine:  # some add all addends to one of them, and then keep no two lanes
        every_machine.setattr(certifying, "require_lanes", lambda *_: None)
        any_order, lanes, cut = (
            wn.certify(module, x, arithmetic=each) for each in (None, Arithmetic(lanes=2), Arithmetic(products="tf32"))
        )
    assert lanes.forward_error < any_order.forward_error < cut.forward_error / 10
    for certificate in (lanes, cut):
        certificate.save(tmp_path / "c.json")
        assert str(certificate.execution) in str(wn.verify(tmp_path / "c.json", module.state_dict()))
    with pytest.raises(ValueError, match="this machine adds to one of them"):
        wn.certify(module, x, arithmetic=Arithmetic(lanes=300))
    with pytest.raises(ValueError, match="addends of sub would meet"):  # by the second of its two products
        wn.certify(wn.nn.ConvexPotential(2, 400), x[:, :2], arithmetic=Arithmetic(lanes=400))
    with pytest.raises(ValueError, match="must be an Arithmetic"):
        wn.certify(module, x, arithmetic="float32")  # type: ignore[arg-type]


def test_errors_within_caps_hold_for_other_weights() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 4)), torch.randn(3, 20)
    constraints = wn.constrain(wn.Scion(module, lr=0.1), {"*": wn.HardCap(2.0), "*bias": wn.ColumnCap(2.0)})
    certificate = wn.certify(module, x, within=constraints)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(100 * torch.randn(parameter.shape))
    constraints.project_()
    now = wn.certify(module, x)
    assert now.forward_error < certificate.forward_error < 4 * now.forward_error


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.pow(4), lambda x: F.gelu(x).half().pow(4), lambda x: x * x.mean(-1, True).square(),
        lambda x: F.grid_sample(x[:, None, :, None].expand(-1, -1, -1, 2), torch.zeros(2, 2, 2, 2)),
    ],
)  # fmt: skip
def test_what_has_no_rule_is_named(function: Callable[[Tensor], Tensor]) -> None:
    certificate = wn.certify(Function(lambda self, x: function(x)), torch.randn(2, 6))
    row = next((row for row in certificate.rows if row.name == certificate.unbounded_at), None)
    assert (certificate.forward_error is None) == (row is not None)
    assert row is None or f"no bound of rounding: {row.name}, {row.operation}" in str(certificate)


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (lambda x: x * 1e-46, 1e37), (lambda x: x / 1e39, 1e37), (lambda x: x / 2e38, 1e38),
        (lambda x: x * torch.tensor(1e-42, dtype=torch.float64), 1e37), (lambda x: F.leaky_relu(-x, 1e-46), 1e37),
        (lambda x: torch.add(x, x, alpha=1e-46), 1e37), (lambda x: F.layer_norm(x, (4,), eps=1e39), 1e18),
        (lambda x: x.half() * torch.tensor(1e-8), 6e4),
        (lambda x: (x := x.half()) / (x.pow(2).mean(-1, True) + 6e4).sqrt(), 125),
        (lambda x: (x := x.half()) / (x.norm(dim=-1, keepdim=True) + 65500), 125),
        (lambda x: (x.half().square().sum(-1, True) + 6e4).sqrt(), 60),
        (lambda x: torch.addmm(x, x, 1e30 * torch.eye(4), alpha=1e-30), 1e-12), (lambda x: F.avg_pool1d(x, 3), 1.5e38),
        (lambda x: (x := x.half()) / (700 * x.norm(dim=-1, keepdim=True) + 70), 60),
    ],
)  # fmt: skip
def test_numbers_that_a_dtype_does_not_round_by_its_unit_have_no_bound(
    function: Callable[[Tensor], Tensor], size: float
) -> None:
    certificate = wn.certify(Function(lambda self, x: function(x)), torch.ones(1, 4), radius=size)
    assert certificate.forward_error is None
    assert wn.verify(certificate, {}).forward_error is None


def test_scales_of_logits_that_lose_what_they_give_back_have_no_bound() -> None:
    def scaled(*factors: float) -> Certificate:
        def attention(self: Any, x: Tensor) -> Tensor:
            logits = x @ x.mT
            for factor in factors:
                logits = logits * factor
            return logits.softmax(-1) @ x

        return wn.certify(Function(attention), torch.randn(1, 5, 4), radius=3.0)

    assert scaled(1e-30, 1e-15, 1e30, 1e15).forward_error is None
    assert scaled(0.5, 0.5).forward_error is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_err_no_more_than_the_kernel_allows(name: str, dtype: torch.dtype) -> None:
    for x in floats(dtype, 2**20 - 3):
        assert share(name, x) <= 1
    assert {*FUNCTIONS, "clamp", "clamp_min", "clamp_max", "softsign", "tanhshrink"} == {*ERRORS, "softplus"}
