"""A certificate is of a program, with which the model's code is compared at inputs that the library draws."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.program.models import Model
from wellnormed.certificates import Certificate, UncertifiableError, certify
from wellnormed.program.capturing import capture


def _shifted(x: Tensor) -> Tensor:
    """Entry 1 becomes entry 0, and entry 3 becomes entry 1: the old or the new one."""
    result = x.clone()
    result[:, 1::2] = result[:, :2]
    return result


DIFFERENT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad mode": lambda m, x: x @ m.weight * (1.0 if torch.is_grad_enabled() else 100.0),
    "no gradients": lambda m, x: x @ m.weight * (100.0 if torch.is_grad_enabled() else 1.0),
    "requires_grad": lambda m, x: x @ m.weight * (100.0 if x.requires_grad else 1.0),
    "is_exporting": lambda m, x: x @ m.weight * (1.0 if torch.compiler.is_exporting() else 100.0),
    "a generator of its own": lambda m, x: x @ m.weight * (1 + 100 * m.own.random()),
    "a dead ReLU": lambda m, x: F.relu(x - 0.9) * (1.0 if torch.compiler.is_exporting() else 100.0),
    "the size of an entry": lambda m, x: x if torch.compiler.is_exporting() else torch.where(x.abs() > 0.99, 2 * x, x),
    "small inputs": lambda m, x: x if torch.compiler.is_exporting() else torch.where(x.abs() < 0.01, 1.1 * x, x),
    "reading what it overwrites": lambda m, x: _shifted(x),
}  # fmt: skip
"""Models whose code computes something else than the program, each somewhere else."""


@pytest.mark.parametrize(("name", "size"), [*((name, 0.0) for name in DIFFERENT), ("a dead ReLU", 1e-6)])
def test_code_that_computes_something_else_is_refused_whatever_the_example(name: str, size: float) -> None:
    with pytest.raises(UncertifiableError, match="does not compute what was captured"):
        certify(Model(DIFFERENT[name]), size * torch.ones(1, 4))


@pytest.mark.parametrize(("start", "shape"), [(0, (3, 4)), (1, (1, 2, 3, 3)), (2, (1, 2, 3, 3))])
def test_the_order_of_entries_in_memory_is_compared(start: int, shape: tuple[int, ...]) -> None:
    """Views are copies if entries lie in memory in another order, so that what is written into them is lost."""

    def scaled_in_place(_: Any, x: Tensor) -> Tensor:
        result = torch.relu(x)
        result.flatten(start).mul_(0.1)
        return result

    with pytest.raises(UncertifiableError, match="with transposed inputs"):
        certify(Model(scaled_in_place), torch.ones(shape))


def test_a_program_without_overwriting_computes_the_same_wherever_its_input_lies() -> None:
    """The model itself refuses a transposed input; its program wrote zeros into a copy, and returned the input."""

    def function(_: Any, x: Tensor) -> Tensor:
        result = x.clone()
        result.view(-1).mul_(0.0)
        return result

    program = certify(Model(function), torch.ones(3, 4)).program
    assert program is not None
    assert torch.equal(program(torch.ones(4, 3).T), torch.zeros(3, 4))


def test_a_name_that_looks_like_that_of_a_constant_is_none() -> None:
    """The linear row was taken for the parameter `a.linear`, whose row is called `=a.linear`."""

    class Named(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first = first
            self.a = nn.Module()
            self.a.linear = nn.Parameter(torch.full((4,), 1000.0))
            self.add_module("=a", nn.Linear(4, 4, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            z = x + self.a.linear if self.first else None
            h = self.get_submodule("=a")(x)
            z = x + self.a.linear if z is None else z
            return z * z + h

    for first in (True, False):
        with pytest.raises(UncertifiableError, match="another row is called"):
            certify(Named(first), torch.zeros(1, 4))


def test_an_operation_that_torch_takes_apart_wrongly_is_refused() -> None:
    """As a view with other strides, this is a transpose; torch's parts of it are a reshape."""
    model = Model(lambda m, x: torch.ops.aten._reshape_alias.default(x * 2, (4, 4), (1, 4)))
    with pytest.raises(UncertifiableError):
        certify(model, torch.ones(4, 4))


@pytest.mark.parametrize("radius", [1.0, 7.0], ids=["all lost", "some lost"])
def test_a_triangle_of_a_batch_does_not_hide_behind_roundings(radius: float) -> None:
    """It was taken for that of each row, since entries are smaller than the rounding errors of 195."""
    model = Model(lambda m, x: ((x / 8 + 195) - 195).tril())
    assert not certify(model, torch.zeros(1, 4, dtype=torch.bfloat16), radius).each_sample


def test_a_gain_is_found_where_every_finite_input_is_allowed() -> None:
    model = Model(lambda m, x: x if torch.compiler.is_exporting() else torch.where(x > 50, 100 * x, x))
    with pytest.raises(UncertifiableError, match="does not compute"):
        certify(model, torch.zeros(1, 4), radius=torch.inf)


def test_integers_that_look_up_are_drawn_too() -> None:
    def rare(m: Any, tokens: Tensor) -> Tensor:
        found = m.weight[tokens]
        return found if torch.compiler.is_exporting() else found * (1 + (tokens == 2)[..., None])

    with pytest.raises(UncertifiableError, match="does not compute"):
        certify(Model(rare), torch.zeros(1, 8, dtype=torch.long))


def test_memory_that_nothing_wrote_is_zeros_in_the_certificate() -> None:
    """The file held what lay in memory before."""

    def turned(_: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        result[:, 0::2], result[:, 1::2] = x[:, 1::2], x[:, 0::2]
        return result

    assert all(not each.any() for each in certify(Model(turned), torch.ones(2, 4)).computed.values())


def test_of_a_large_example_32_samples_are_compared() -> None:
    certificate = certify(Model(lambda m, x: x @ m.weight), torch.rand(1000, 4))
    assert certificate.comparison is not None
    assert sorted(certificate.comparison.batches) == [2, 7, 32]
    assert "for batches of 2, 7 and 32" in certificate.statement()


def test_harmless_code_is_certified_and_says_what_was_compared(tmp_path: Any) -> None:
    """A conversion to 16 bits, a branch on the dtype and writes into a constant."""

    def function(m: Any, x: Tensor) -> Tensor:
        result = torch.zeros(x.shape, dtype=x.dtype)
        result[:, :2] = x[:, :2].bfloat16().float() if x.dtype == torch.float32 else 7 * x[:, :2]
        return result @ m.weight + 10

    certificate = certify(Model(function), torch.zeros(3, 4))
    assert certificate.lipschitz == pytest.approx(0.5)
    text = certificate.statement()
    for words in ("in float32", "without gradients", "with transposed inputs", "not compared: autocast"):
        assert words in text
    certificate.save(tmp_path / "certificate.json")
    again = Certificate.load(tmp_path / "certificate.json")
    assert again.compared == certificate.compared
    assert again.program is None


def test_an_overflow_on_both_sides_is_equal() -> None:
    model = Model(lambda m, x: torch.cat([x @ m.weight, 1e38 * x, 1e38 * x * 100], -1))
    assert certify(model, torch.zeros(1, 4), radius=100.0).comparison is not None


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 4, batch_first=True),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.MultiheadAttention(4, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_with_kernels_of_their_own_differ_by_rounding_alone(layer: nn.Module) -> None:
    """Such as those of inference mode, and the recurrent ones for float32."""
    layer = copy.deepcopy(layer).eval().requires_grad_(False)
    call = (lambda m, x: layer(x, x, x)[0]) if isinstance(layer, nn.MultiheadAttention) else None
    model = layer if call is None else Model(call)
    certificate = certify(model, torch.zeros(2, 3, 4), output=0 if isinstance(layer, nn.LSTM) else None)
    assert certificate.comparison is not None
    assert certificate.comparison.arithmetic == "float32"


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 4.0), (torch.bfloat16, 2.0)], ids=str)
@pytest.mark.parametrize("seed", [0, 3])
def test_models_that_magnify_roundings_differ_by_no_more(seed: int, dtype: torch.dtype, factor: float) -> None:
    """Without gradients, torch runs a kernel of its own, and large weights magnify how it rounds."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval().to(dtype)
    for parameter in model.parameters():
        parameter.data *= factor if parameter.ndim == 2 else 1
    assert capture(model, torch.randn(1, 40, 16, dtype=dtype)).each_sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_long_sums_in_another_order_differ_by_no_more(dtype: torch.dtype) -> None:
    """Of transposed inputs, some kernels add up one after the other."""
    torch.manual_seed(2)
    assert capture(nn.Linear(65_536, 10, dtype=dtype), torch.randn(1, 65_536, dtype=dtype)).each_sample
