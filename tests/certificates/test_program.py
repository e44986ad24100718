"""A certificate is of a program, with which the model's code is compared at inputs that the library draws."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from wellnormed.certificates import Certificate, UncertifiableError, certify
from wellnormed.propagation import capture as capturing
from wellnormed.propagation import inner_axes, operation


class Model(nn.Module):
    """A function of the input, and a layer whose gain is 0.5."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(0.5 * torch.eye(4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.own = random.Random(0)
        self.numpy = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


_CALLS = [0]


def _count(m: Any, x: Tensor) -> Tensor:
    _CALLS[0] += 1
    return x @ m.weight * (1.0 + 100 * (_CALLS[0] > 3))


def _hidden(m: Any, x: Tensor) -> Tensor:
    """A gain that only shows beside a bias of a million."""
    return x @ m.weight * (1 if torch.compiler.is_exporting() else 1.01) + 1e6


def _constant(m: Any, x: Tensor) -> Tensor:
    """The same operations with another constant, behind a ReLU that is dead at small inputs."""
    return F.relu(x - 0.9) * (1.0 if torch.compiler.is_exporting() else 100.0)


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
    "NumPy's generator": lambda m, x: x @ m.weight * (1 + 100 * m.numpy.random()),
    "a global counter": _count,
    "is_contiguous": lambda m, x: x @ m.weight * (1.0 if x.is_contiguous() else 100.0),
    "storage_offset": lambda m, x: x @ m.weight * (1.0 if x.storage_offset() == 0 else 100.0),
    "stride": lambda m, x: x @ m.weight * (1.0 if x.stride(-1) == 1 else 100.0),
    "is_leaf": lambda m, x: x @ m.weight * (1.0 if x.is_leaf else 100.0),
    "_version": lambda m, x: x @ m.weight * (1.0 if x._version == 0 else 100.0),
    "inference mode": lambda m, x: x @ m.weight * (100.0 if torch.is_inference_mode_enabled() else 1.0),
    "a bias that hides it": _hidden,
    "a dead ReLU": _constant,
    "the size of an entry": lambda m, x: x if torch.compiler.is_exporting() else torch.where(x.abs() > 0.99, 2 * x, x),
    "small inputs": lambda m, x: x if torch.compiler.is_exporting() else torch.where(x.abs() < 0.01, 1.001 * x, x),
    "reading what it overwrites": lambda m, x: _shifted(x),
}  # fmt: skip
"""Models whose code computes something else than the program, each somewhere else."""


@pytest.mark.parametrize("example", [torch.zeros(1, 4), 1e-6 * torch.ones(1, 4)], ids=["zeros", "tiny"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_code_that_computes_something_else_is_refused_whatever_the_example(name: str, example: Tensor) -> None:
    _CALLS[0] = 0
    with pytest.raises(UncertifiableError, match=r"does not compute what was captured|changes its attributes"):
        certify(Model(DIFFERENT[name]), example)


ORDERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "a matrix": (lambda m, x: _scaled_in_place(x, lambda y: y.reshape(-1)), (3, 4)),
    "an image": (lambda m, x: _scaled_in_place(x, lambda y: y.flatten(1)), (1, 2, 3, 3)),
    "rows of an image": (lambda m, x: _scaled_in_place(x, lambda y: y.flatten(2)), (1, 2, 3, 3)),
    "channels last": (
        lambda m, x: x * (9.0 if x.is_contiguous(memory_format=torch.channels_last) else 1.0),
        (1, 2, 3, 3),
    ),
    "channels last of a volume": (
        lambda m, x: x * (9.0 if x.is_contiguous(memory_format=torch.channels_last_3d) else 1.0),
        (1, 2, 3, 3, 3),
    ),
}
"""Models that scale a view in place, which is a copy if entries lie in memory in another order; or that ask for it."""


def _scaled_in_place(x: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    result = torch.relu(x)
    view(result).mul_(0.1)
    return result


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_entries_in_memory_is_compared(name: str) -> None:
    function, shape = ORDERS[name]
    with pytest.raises(UncertifiableError, match=r"does not compute what was captured with (transposed|channels)"):
        certify(Model(function), torch.ones(shape))


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


def test_a_gain_is_found_where_every_finite_input_is_allowed() -> None:
    model = Model(lambda m, x: x if torch.compiler.is_exporting() else torch.where(x > 50, 100 * x, x))
    with pytest.raises(UncertifiableError, match="does not compute"):
        certify(model, torch.zeros(1, 4), radius=torch.inf)


def test_integers_that_look_up_are_drawn_too() -> None:
    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 4)
            self.table.weight.data.clamp_(-0.9, 0.9)

        def forward(self, tokens: Tensor) -> Tensor:
            found = self.table(tokens)
            return found if torch.compiler.is_exporting() else found * (1 + (tokens == 2)[..., None])

    with pytest.raises(UncertifiableError, match="does not compute"):
        certify(Rare(), torch.zeros(1, 8, dtype=torch.long))


BATCH: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "a count of samples": (lambda m, x: x * (1 + torch.arange(x.shape[0]) // 2)[:, None], False),
    "a triangle of the batch": (lambda m, x: torch.triu(torch.ones(x.shape[0], x.shape[0]), 2) @ x, False),
    "a polynomial": (lambda m, x: x * ((x.shape[0] - 1) * (x.shape[0] - 2)), False),
    "a product with a float": (lambda m, x: x * (100.0 if x.shape[0] * 0.004 > 1 else 1.0), False),
    "a float": (lambda m, x: x * (100.0 if x.shape[0] > 250.5 else 1.0), False),
    "a power": (lambda m, x: x * (100.0 if x.shape[0] ** 0.5 > 15 else 1.0), False),
    "a comparison": (lambda m, x: x * (100.0 if x.shape[0] > 1000 else 1.0), False),
    "a remainder": (lambda m, x: x * (100.0 if x.shape[0] % 11 == 10 else 1.0), False),
    "a single sample": (lambda m, x: x * (100.0 if x.shape[0] == 1 else 1.0), False),
    "seven samples": (lambda m, x: x * (100.0 if x.shape[0] == 7 else 1.0), False),
    "samples added up": (lambda m, x: x + torch.ones(x.shape[0]).sum(), False),
    "a place in the batch": (
        lambda m, x: x * torch.cat([torch.zeros(x.shape[0]), torch.ones(x.shape[0])])[::2, None],
        False,
    ),
    "a constant turned around": (
        lambda m, x: x * torch.tensor([1.0, 100.0]).expand(x.shape[0], 2).reshape(2, x.shape[0])[0][:, None],
        False,
    ),
    "the last but eight": (
        lambda m, x: torch.cat([x, 100 * x])[x.shape[0] - 8 if x.shape[0] > 8 else 0 :][: x.shape[0]],
        False,
    ),
    "samples side by side": (lambda m, x: torch.cat([x, 9 * x]).view(x.shape[0], 2, 4).sum(1), False),
    "every other of the interleaved": (
        lambda m, x: x.T.reshape(4 * x.shape[0])[::2].view(x.shape[0], 2) * torch.tensor([1.0, 9.0]),
        False,
    ),
    "interleaved samples": (lambda m, x: x.T.reshape(4 * x.shape[0]).view(x.shape[0], 4) * m.bias.exp(), False),
    "a roll by twelve": (lambda m, x: 2 * x - x.roll(12, 0), False),
    "a roll of all entries": (lambda m, x: 2 * x - x.reshape(-1).roll(48).view_as(x), False),
    "half a turn of samples": (lambda m, x: x - torch.fft.fftshift(torch.fft.fftshift(x, dim=0), dim=0), False),
    "padding of features alone": (lambda m, x: F.pad(x, (1, 1, 0, 0)), True),
    "a triangle of samples": (lambda m, x: x + x.tril(-5), False),
    "both ends of a constant": (lambda m, x: x * _with_ends(x.new_full((x.shape[0], 1), 10.0)), False),
    "a constant made of nothing": (lambda m, x: x * (1 + 9 * (torch.empty_like(x).fill_(1.0).cumsum(0) > 8)), False),
    "the first and the last sample": (lambda m, x: x[0] + x[-1] - x, False),
    "all but the first sample": (lambda m, x: x + x[1:].sum(0), False),
    "the first feature": (lambda m, x: x + x[:, :1], True),
    "features that are overwritten": (lambda m, x: _overwritten(x, slice(None)), True),
    "samples that are overwritten": (lambda m, x: _overwritten(x, slice(1, None)), False),
    "windows of samples": (lambda m, x: F.avg_pool1d(x.T, 25, 1, 12, False, False).T, False),
    "a roll of entries": (lambda m, x: 2 * x - x.roll(1, 1), True),
    "windows of entries": (lambda m, x: F.avg_pool1d(x[:, None], 3, 1, 1)[:, 0], True),
    "interleaved and back": (lambda m, x: x.T.reshape(4 * x.shape[0]).view(4, x.shape[0]).T * 3, True),
    "shapes": (lambda m, x: (x.view(x.shape[0] * 2, 2) @ m.weight[:2, :2]).view(x.shape[0], 4), True),
    "a filled constant": (lambda m, x: torch.cat([x.new_zeros(x.shape[0], 1), x], 1) + torch.ones(x.shape[0], 1), True),
    "an expanded parameter": (lambda m, x: x + m.bias.expand(x.shape[0], -1) * 2, True),
    "all of it": (lambda m, x: x[: x.shape[0]] @ m.weight, True),
    "each sample's own": (lambda m, x: x * _of(x.new_full(x.shape, 0.1).cumsum(1), _numbers(x)), True),
    "each sample's own number": (lambda m, x: x * (1 + _of(_numbers(x)[:, None].expand(-1, 4), _numbers(x))), False),
    "the numbers of others": (lambda m, x: x * _of(x.new_full(x.shape, 0.1).cumsum(0), _numbers(x)), False),
    "numbers turned around": (lambda m, x: x * _of(x.new_full(x.shape, 0.1).cumsum(1), _numbers(x).flip(0)), False),
    "numbers of 8 bits": (lambda m, x: x * (1 + _numbers(x).to(torch.int8)[:, None]), False),
    "a row for each sample": (lambda m, x: x * m.weight.repeat(9, 1)[_numbers(x)], False),
    "where each is equal": (lambda m, x: x * torch.where(_numbers(x[0]) < x.new_ones(x.shape), 1.0, m.bias), True),
    "where a number is small": (lambda m, x: x * torch.where(_numbers(x)[:, None] < 5, 1.0, 2.0), False),
    "bits of equals": (lambda m, x: x * (1.0 * ((x.new_ones(x.shape) > 0) & (_numbers(x[0]) > 1))), True),
    "equal rows of a table": (lambda m, x: x + F.embedding(_numbers(x[0]).expand(x.shape), m.weight)[..., 0], True),
}


def _numbers(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def _of(x: Tensor, samples: Tensor) -> Tensor:
    return x[samples[:, None], torch.arange(3, -1, -1)]


@pytest.mark.parametrize("name", ["both ends of a constant", "the first and the last sample"])
def test_ends_of_a_batch_are_no_ends_of_any_batch(name: str) -> None:
    """In batches of one and two, every sample is an end."""
    assert not certify(Model(BATCH[name][0]), torch.ones(1, 4)).any_batch


_FIVE = torch.arange(1.0, 6.0)
MERGED: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "rows of a table": (
        lambda m, x: x * F.embedding(torch.arange(5), _FIVE[:, None].expand(5, x.shape[0]).reshape(-1, 1))[:, 0],
        8,
    ),
    "a mask that is split otherwise": (
        lambda m, x: _last_where_one(x, _FIVE[:, None].expand(5, x.shape[0]).reshape(-1).view(x.shape[0], 5)),
        1,
    ),
    "ones of the dtype of the input": (lambda m, x: _from_the_eighth(x, torch.ones(x.shape[0], 1).type_as(x)), 1),
    "ones of the size of the input": (lambda m, x: _from_the_eighth(x, torch.ones(1, 1).expand_as(x)), 1),
    "ones in the shape of the input": (lambda m, x: _from_the_eighth(x, torch.ones(5 * x.shape[0]).view_as(x)), 3),
    "ones beside the input": (lambda m, x: _from_the_eighth(x, torch.broadcast_tensors(_FIVE[:1], x)[0]), 2),
    "shuffled samples": (lambda m, x: 2 * x - _shuffled(x.T.reshape(1, -1, 1)).view(5, -1).T, 1),
    "a repeated vector": (lambda m, x: (x.T.reshape(-1) * _FIVE.repeat(x.shape[0])).view(5, x.shape[0]).T, 2),
    "flat positions": (lambda m, x: (x * torch.tensor([1.0, 9, 9, 9, 9])).T.take(torch.arange(5)) + 0 * x, 8),
}
"""Models of which a sample is another function in some batches than in the given one and in one twice as large."""


def _from_the_eighth(x: Tensor, ones: Tensor) -> Tensor:
    return x * torch.where(ones.cumsum(0) > 7, 100.0, 1.0)


def _shuffled(x: Tensor) -> Tensor:
    for _ in range(48):  # entry j moves to 5^48 j modulo 5 B - 1, which is j for batches of 1, 2 and 7, and not of 4
        x = F.channel_shuffle(x, 5)
    return x


def _last_where_one(x: Tensor, constant: Tensor) -> Tensor:
    return x * (1 + 100 * (constant == 1).float() * torch.tensor([0.0, 0, 0, 0, 1]))


@pytest.mark.parametrize("name", MERGED)
def test_entries_that_lie_elsewhere_in_other_batches_are_of_no_other_batch(name: str) -> None:
    function, batch = MERGED[name]
    assert not certify(Model(function), torch.ones(batch, 5)).any_batch


@pytest.mark.parametrize(
    "function",
    [
        *(BATCH[name][0] for name in ("a roll by twelve", "half a turn of samples", "samples that are overwritten")),
        *(function for function, _ in MERGED.values()),
    ],
)
def test_a_sample_has_the_result_that_it_has_alone(
    function: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is found by comparing, whether or not the program shows it."""
    monkeypatch.setattr(capturing, "is_any_size", lambda *_: True)
    assert certify(Model(lambda m, x: 3 * x), torch.ones(8, 5)).any_batch  # the check of the program is off
    assert not certify(Model(function), torch.ones(8, 5)).any_batch


class WithMask(nn.Module):
    """A function of floats and of integers that decide what happens to them."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self._function(x, mask)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
@pytest.mark.parametrize(
    ("function", "any_batch"),
    [
        (lambda x, mask: x * torch.where(mask.cumsum(0) > 7, 100.0, 1.0), False),
        (lambda x, mask: x * torch.where(mask.sum(0) > 7, 100.0, 1.0), False),
        (lambda x, mask: x * torch.where(mask.sum() > 30, 100.0, 1.0), False),
        (lambda x, mask: x * torch.where(mask.cumsum(1) > 3, 100.0, 1.0), True),
        (lambda x, mask: x * torch.where(mask.sum(1, keepdim=True) > 3, 100.0, 1.0), True),
    ],
)
def test_integers_of_one_sample_do_not_reach_another(
    function: Callable[[Tensor, Tensor], Tensor], any_batch: bool, dtype: torch.dtype
) -> None:
    """The certificate holds for the example's integers, which are all alike, in every sample of any batch."""
    example = torch.ones(1, 4), torch.ones(1, 4, dtype=dtype)
    assert certify(WithMask(function), example).any_batch is any_batch


def _overwritten(x: Tensor, samples: slice) -> Tensor:
    result = torch.empty_like(x)
    result[...] = x
    result[samples, ::2] = 3.0
    return result


def test_memory_that_nothing_wrote_is_zeros_in_the_certificate() -> None:
    """The file held what lay in memory before."""

    def turned(_: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        result[:, 0::2], result[:, 1::2] = x[:, 1::2], x[:, 0::2]
        return result

    assert all(not each.any() for each in certify(Model(turned), torch.ones(2, 4)).computed.values())


def _with_ends(constant: Tensor) -> Tensor:
    for end in (0, -1):
        constant[end].fill_(1.0)
    return constant * 1.0


@pytest.mark.parametrize("name", BATCH)
def test_any_batch_is_said_where_the_size_reaches_shapes_only(name: str) -> None:
    function, any_batch = BATCH[name]
    model, example = Model(function), torch.ones(2, 4)
    certificate = certify(model, example)
    assert certificate.any_batch is any_batch
    assert ("any batch" in certificate.domain) is any_batch
    if any_batch:
        assert certificate.program is not None
        wide = torch.randn(9, 4)
        torch.testing.assert_close(certificate.program(wide), model(wide))


@pytest.mark.parametrize("name", ["a count of samples", "a float", "shapes"])
def test_the_exported_program_takes_the_batches_that_it_is_right_for(name: str, tmp_path: Any) -> None:
    function, any_batch = BATCH[name]
    model = Model(function)
    folder = wn.export(model, tmp_path / "exported", torch.ones(2, 4), onnx=False)
    program, wide = torch.export.load(folder / "program.pt2").module(), torch.randn(300, 4)
    if any_batch:
        torch.testing.assert_close(program(wide), model(wide))
    else:
        with pytest.raises((RuntimeError, AssertionError)):
            program(wide)


def test_harmless_code_is_certified_and_says_what_was_compared(tmp_path: Any) -> None:
    """A bias of a million, a conversion to 16 bits, a branch on the dtype and writes into a constant."""

    def function(m: Any, x: Tensor) -> Tensor:
        result = torch.zeros(x.shape, dtype=x.dtype)
        result[:, :2] = x[:, :2].bfloat16().float() if x.dtype == torch.float32 else 7 * x[:, :2]
        return result @ m.weight + 1e6

    certificate = certify(Model(function), torch.zeros(3, 4))
    assert certificate.lipschitz == pytest.approx(0.5)
    assert certificate.comparison is not None
    assert certificate.comparison.arithmetic == "float64"
    text = str(certificate)
    for words in ("in inference mode", "with strided inputs", "called again", "not compared: autocast"):
        assert words in text
    certificate.save(tmp_path / "certificate.json")
    again = Certificate.load(tmp_path / "certificate.json")
    assert again.compared == certificate.compared
    assert again.program is None


@torch.library.custom_op("test_program::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    """A kernel for float32 alone."""
    if x.dtype != torch.float32:
        raise NotImplementedError("float32 alone")
    return x / 2


half.register_fake(torch.empty_like)


@operation("test_program.half.default")
def _bound_half(step: Any, x: Any) -> Any:
    return step.derive("contraction", [(x, inner_axes(x))], shape=x.shape)


def test_a_model_without_float64_is_compared_in_its_own_digits() -> None:
    certificate = certify(Model(lambda m, x: torch.ops.test_program.half(x)), torch.zeros(2, 4))
    assert certificate.comparison is not None
    assert certificate.comparison.arithmetic == "float32"
    assert "in float32" in certificate.compared
    with pytest.raises(UncertifiableError, match="does not compute"):
        certify(
            Model(lambda m, x: torch.ops.test_program.half(x) * (1 if torch.compiler.is_exporting() else 1.001)),
            torch.zeros(2, 4),
        )


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 4, batch_first=True),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.MultiheadAttention(4, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_with_kernels_of_their_own_are_compared_in_float64(layer: nn.Module) -> None:
    """Such as those of inference mode, and the recurrent ones for float32."""
    layer = copy.deepcopy(layer).eval().requires_grad_(False)
    call = (lambda m, x: layer(x, x, x)[0]) if isinstance(layer, nn.MultiheadAttention) else None
    model = layer if call is None else Model(call)
    certificate = certify(model, torch.zeros(2, 3, 4), output=0 if isinstance(layer, nn.LSTM) else None)
    assert certificate.comparison is not None
    assert certificate.comparison.arithmetic == "float64"
    assert "in inference mode" in certificate.comparison.circumstances
