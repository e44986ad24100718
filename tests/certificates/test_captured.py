"""What a model does besides its layers' own forward: bounded as it is executed, or refused; never bounded wrongly."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from wellnormed.certificates import UncertifiableError, certify


class Model(nn.Module):
    """Holds tensors as buffers, and modules; runs a function of itself and of the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, each in held.items():
            self.register_buffer(name, each) if isinstance(each, Tensor) else setattr(self, name, each)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def linear(factor: float = 1.0) -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data = factor * torch.eye(4)
    return layer


def _hooked() -> nn.Module:
    model = nn.Sequential(linear())
    model[0].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    model.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def _overridden(name: str) -> nn.Module:
    model = nn.Sequential(linear())
    setattr(model[0], name, lambda x: 7 * x)
    return model


def _in_place(self: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    z = y
    z += y
    y.relu_()
    return y + z


def _call_with_other_weights(self: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(self.inner, {"weight": 3 * self.inner.weight}, (x,))


EXECUTED: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "hooks": (_hooked, 6),
    "forward of the instance": (lambda: _overridden("forward"), 7),
    "_call_impl of the instance": (lambda: _overridden("_call_impl"), 7),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(linear(3)), nn.ReLU(inplace=True)), 3),
    "functional call": (lambda: Model(_call_with_other_weights, inner=linear()), 3),
    "changed in place": (lambda: Model(_in_place), 4),
    "minimum of integers": (lambda: Model(lambda s, x: x * torch.arange(5, 2, -1).min()), 3),
    "tensor outside the state dict": (lambda: Model(lambda s, x: x * s.held[0] + 1, held=[torch.full((4,), 2.0)]), 2),
    "branch on the rank": (lambda: Model(lambda s, x: 5 * x if x.ndim == 1 else x), 5),
    "branch on the dtype": (lambda: Model(lambda s, x: 5 * x if x.dtype == torch.float32 else x), 5),
}  # fmt: skip
"""Model -> the constant of what it executes."""


@pytest.mark.parametrize("name", EXECUTED)
def test_what_is_executed_is_bounded(name: str) -> None:
    build, constant = EXECUTED[name]
    assert constant <= certify(build().eval(), torch.randn(4)).lipschitz <= constant * (1 + 1e-6)


@pytest.mark.parametrize("size", [2, 3, 1])
def test_what_is_done_for_one_size_of_a_batch_is_not_said_of_others(size: int) -> None:
    certificate = certify(Model(lambda s, x: 5 * x if x.shape[0] == size else x), torch.randn(2, 4))
    assert certificate.lipschitz == pytest.approx(5 if size == 2 else 1, rel=1e-12)
    assert not certificate.any_batch


def _counting(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return x * self.count


def _writing(self: Any, x: Tensor) -> Tensor:
    self.buffer.copy_(0.1 * x)
    return 10 * x


def _overwriting(self: Any, x: Tensor) -> Tensor:
    y = 10 * x
    with torch.no_grad():
        x.mul_(0.1)
    return y


def _toggling(self: Any, x: Tensor) -> Tensor:
    self.on = not self.on
    return x if self.on else 5 * x


def _swapping(self: Any, x: Tensor) -> Tensor:
    self.a.weight, self.b.weight = self.b.weight, self.a.weight
    return self.a(x)


def _keeping(self: Any, x: Tensor) -> Tensor:
    last, self.last = self.last, x
    return x if last is None else x + last


def _keeping_outside() -> nn.Module:
    kept: list[Tensor] = []

    def keeping(self: Any, x: Tensor) -> Tensor:
        kept.append(x)
        return x + kept[0]

    return Model(keeping)


def _calls() -> nn.Module:
    calls: list[int] = []

    def counting(self: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return x * float(len(calls))

    return Model(counting)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "buffer that counts": (lambda: Model(_counting, count=torch.ones(())), None),
    "buffer that is written": (lambda: Model(_writing, buffer=torch.zeros(4)), None),
    "toggled attribute": (lambda: Model(_toggling, on=True), "changes its attributes"),
    "swapped parameters": (lambda: Model(_swapping, a=linear(), b=linear(5)), "changes its attributes"),
    "kept input": (lambda: Model(_keeping, last=None), "changes its attributes"),
    "kept outside": (_keeping_outside, "itself fails|cannot be run|does not compute"),
    "calls": (_calls, "such as randomness, an earlier call"),
    "branch on requires_grad": (lambda: Model(lambda s, x: x if x.requires_grad else 9 * x), "does not compute"),
    "branch on the grad mode": (
        lambda: Model(lambda s, x: x if torch.is_grad_enabled() else 9 * x),
        "does not compute",
    ),
    "branch on export": (lambda: Model(lambda s, x: x if torch.compiler.is_exporting() else 9 * x), "does not compute"),
    "random tensor": (lambda: Model(lambda s, x: x + torch.randn(4)), "draws random numbers"),
    "random like": (lambda: Model(lambda s, x: x + torch.randn_like(x)), "draws random numbers"),
    "random number": (lambda: Model(lambda s, x: x * random.random()), "draws random numbers"),
    "integers of the input": (lambda: Model(lambda s, x: x * (x.long().min() + 1)), "not continuous"),
    "branch on the input": (lambda: Model(lambda s, x: x if x.sum() > 0 else 9 * x), "values of the input decide"),
    "numbers of the input": (lambda: Model(lambda s, x: x * x.sum().item()), "item"),
    "arrays": (lambda: Model(lambda s, x: torch.from_numpy(2 * x.detach().numpy())), "cannot be captured"),
}  # fmt: skip
"""Model -> a word of the reason; None where only the refusal counts."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_bounded_is_refused(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(UncertifiableError, match=reason):
        certify(build().eval(), torch.randn(4))


@pytest.mark.parametrize("model", [Model(_overwriting), nn.ReLU(inplace=True)])
def test_an_input_that_is_overwritten_is_refused_with_a_sentence(model: nn.Module) -> None:
    with pytest.raises(UncertifiableError, match="overwrites the input"):
        certify(model, torch.randn(4))


def test_the_model_is_left_as_it_was() -> None:
    """Also by a refusal: buffers, attributes, flags of gradients and the state of the generator."""
    model = Model(_swapping, a=linear(), b=linear(5), on=True)
    model.a.weight.requires_grad_(False)
    before, draws = (model.a.weight, model.b.weight), torch.get_rng_state()
    with pytest.raises(UncertifiableError):
        certify(model, torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
    assert model.a.weight is before[0]
    assert model.b.weight is before[1]
    assert [each.requires_grad for each in before] == [False, True]
    assert all(each.grad is None for each in before)
    assert torch.equal(torch.get_rng_state(), draws)
