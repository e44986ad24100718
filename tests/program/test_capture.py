"""Models that do more than they show: each is refused, or has a bound that what it really does does not exceed."""

import contextlib
import copy
import random
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.certificates.adversary import Net, bounds_of
from wellnormed.certificates import certify
from wellnormed.program.errors import UncertifiableError


class _Model(nn.Module):
    """A layer with all kinds of state, and a function of it and the input."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.layer.weight)
        self.other = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("whole", torch.tensor([-128], dtype=torch.int8))
        self.tensors = [torch.zeros(1)]
        self.seen: Tensor | None = None
        self.flag = False
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _buffer_counter(m, x):
    m.count.add_(1)
    return x * (1 + 1000 * (m.count > 50))


def _running_mean(m, x):
    m.count.mul_(0.9).add_(0.1 * x.detach().mean())
    return x - m.count


def _data_counter(m, x):
    m.count.data += 1
    return x * (1 + 1000 * (m.count > 50))


def _last_input(m, x):
    y = x if m.seen is None else x + 1000 * (x - m.seen)
    m.seen = x.detach()
    return y


def _swapped(m, x):
    m.other = nn.Parameter(m.other.detach() * 2)
    return x * m.other


def _scaled(m, x):
    with torch.no_grad():
        m.other.mul_(1.5)
    return x * m.other


def _scaled_and_back(m, x):
    with torch.no_grad():
        m.other.mul_(1000)
        y = x * m.other
        m.other.div_(1000)
    return y


def _whole_minimum(m, x):
    # |-128| is -128 in int8, so that this is a factor of -127 and not 129
    return x * (m.whole.abs() + 1).float()


def _tried_item(m, x):
    try:
        large = x.max().item() > 50
    except Exception:
        large = False
    return 1000 * x if large else x


def _in_place(m, x):
    y = x * 1.0
    z = y
    z += y
    y.relu_()
    return y + z


def _overwriting(m, x):
    y = 10 * x
    x.mul_(0.1)
    return y


REFUSED = {
    "buffer counter": (_buffer_counter, "overwrites count"),
    "running mean": (_running_mean, "overwrites count"),
    "counter by data": (_data_counter, "cannot be captured"),
    "last input": (_last_input, "does not compute"),
    "parameter swapped": (_swapped, "does not compute"),
    "parameter scaled": (_scaled, "overwrites other"),
    "parameter scaled, and back": (_scaled_and_back, "overwrites other"),
    "compiling": (lambda m, x: x if torch.compiler.is_compiling() else torch.where(x > 50, 1000 * x, x), "not compute"),
    "tried an item": (_tried_item, "values of the input decide"),
    "NumPy's result": (lambda m, x: torch.from_numpy(2 * x.detach().numpy()), "cannot be captured"),
    "number of the input": (lambda m, x: x * x.sum().item(), "item"),
    "Python's random numbers": (lambda m, x: x * (1000.0 if random.random() < 1e-3 else 1.0), "draws random numbers"),
    "NumPy's random numbers": (lambda m, x: x * (1 + 1e3 * (np.random.random() < 1e-3)), "draws random"),  # noqa: NPY002
    "rare random numbers": (lambda m, x: x * (1 + 1000 * (torch.rand(()) < 1e-3)), "draws random numbers"),
    "branch on values": (lambda m, x: 1000 * x if x.sum() > 50 else x, "values of the input decide"),
}
"""Models that are another function in another call, so that no bound holds; and words of the reason."""


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_several_functions_are_refused(name):
    """In a domain that reaches entries above 50, where some of them are another function."""
    function, reason = REFUSED[name]
    with pytest.raises(UncertifiableError, match=reason):
        certify(_Model(function), torch.randn(1, 4, 3), radius=1000.0)


SOUND = {
    "scaled weights": (lambda m, x: functional_call(m.layer, {"weight": 1000 * m.layer.weight}, (x,)), 1000.0),
    "least int8": (_whole_minimum, 127.0),
    "batch mean": (lambda m, x: x - x.mean(0, keepdim=True), 1.0),
    "branch on the rank": (lambda m, x: x * (1000.0 if x.ndim == 3 else 1.0), 1000.0),
    "inference mode": (lambda m, x: x * (1000.0 if torch.is_inference_mode_enabled() else 1.0), 1.0),
    "recomputed": (lambda m, x: checkpoint(m.layer, x, use_reentrant=False) if x.requires_grad else m.layer(x), 1.0),
    "changed in place": (_in_place, 4.0),
    "least of integers": (lambda m, x: x * torch.arange(5, 2, -1).min(), 3.0),
    "tensor outside the state dict": (lambda m, x: x * (m.tensors[0] + 2) + 1, 2.0),
}
EXACT = 1 + 1e-5
"""A proved gain over the exact one: norms of weights are rounded up."""


def proved_gain(model, example):
    """Of a root mean square."""
    return float(max(bounds_of(model, example).gain.flat)) / 3**0.5


@pytest.mark.parametrize("name", SOUND)
def test_what_is_executed_is_bounded(name):
    function, gain = SOUND[name]
    slack = {"batch mean": 2**0.5}.get(name, 1.0)  # tokens of a batch are bounded as if they were orthogonal
    assert gain * (1 - 1e-9) <= proved_gain(_Model(function), torch.randn(2, 4, 3)) <= slack * gain * EXACT


def test_a_weight_that_a_parametrization_makes_is_bounded():
    model = _Model(lambda m, x: F.relu(m.layer(x), inplace=True))
    model.layer.weight.data.mul_(3)
    nn.utils.parametrizations.weight_norm(model.layer)
    assert 3 <= proved_gain(model, torch.randn(1, 4, 3)) <= 3 * EXACT


def _scaled_call(module: nn.Module, *arguments):
    return 1000 * type(module).forward(module, *arguments)


@pytest.mark.parametrize("attribute", ["forward", "_call_impl", "_compiled_call_impl"])
def test_methods_of_an_instance(attribute):
    """What is called is bounded, also if it is no method of the class."""
    model = _Model(lambda m, x: m.layer(x))
    setattr(model.layer, attribute, types.MethodType(_scaled_call, model.layer))
    assert 1000 <= proved_gain(model, torch.randn(1, 4, 3)) <= 1000 * EXACT


@pytest.mark.parametrize(("kind", "gain"), [("forward", 1000), ("forward_pre", 1000), ("backward", 1)])
def test_hooks_are_executed_and_bounded(kind, gain):
    model = _Model(lambda m, x: m.layer(x))
    {
        "forward": lambda: model.layer.register_forward_hook(lambda m, args, out: 1000 * out),
        "forward_pre": lambda: model.layer.register_forward_pre_hook(lambda m, args: (1000 * args[0],)),
        "backward": lambda: model.layer.register_full_backward_hook(lambda m, a, b: None),
    }[kind]()
    assert gain <= proved_gain(model, torch.randn(1, 4, 3)) <= gain * EXACT


def test_hooks_of_all_modules_are_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: 1000 * out)
    try:
        with pytest.raises(UncertifiableError, match="a global forward hook is registered"):
            bounds_of(_Model(lambda m, x: m.layer(x)), torch.randn(1, 4, 3))
    finally:
        handle.remove()


def test_aliases_of_one_storage():
    """Two parameters and a buffer in one storage: each is bounded as it is."""
    model = _Model(lambda m, x: F.linear(F.linear(x, m.layer.weight), m.tied) * m.row)
    whole = torch.randn(3, 3)
    model.layer.weight = nn.Parameter(whole)
    model.tied = nn.Parameter(whole)
    model.register_buffer("row", whole[0])
    proved = float(max(bounds_of(model, torch.randn(1, 2, 3)).gain.flat))
    exact = float(torch.linalg.matrix_norm(whole[0][:, None] * (whole @ whole), 2)) * 3**0.5
    assert exact * (1 - 1e-6) <= proved


def _with_table(look_up: Callable[..., Tensor]) -> _Model:
    model = _Model(look_up)
    model.table = nn.Embedding(5, 3)
    model.table.weight.data.clamp_(-0.5, 0.5)
    return model


@pytest.mark.parametrize(
    "look_up", [lambda m, t: m.table(t[:, :-1]), lambda m, t: m.table(t + 0), lambda m, t: m.table.weight[t]]
)
def test_tokens_are_never_constants(look_up):
    assert float(max(bounds_of(_with_table(look_up), torch.randint(0, 5, (1, 4))).gain.flat)) > 0


@pytest.mark.parametrize(
    ("look_up", "operation"),
    [
        (lambda m, t: F.one_hot(t, 5).float() @ m.table.weight, "_to_copy|to.dtype"),
        (lambda m, t: F.embedding_bag(t, m.table.weight), "embedding_bag"),
    ],
)
def test_what_makes_floats_of_tokens_otherwise_is_named(look_up, operation):
    with pytest.raises(UncertifiableError, match=rf"`({operation}).*makes floats of its integers, and is no lookup"):
        bounds_of(_with_table(look_up), torch.randint(0, 5, (1, 4)))


def test_tokens_of_an_embedding():
    model = _with_table(lambda m, t: 2 * m.table(t.view(t.shape)))
    assert float(max(bounds_of(model, torch.randint(0, 5, (1, 4))).gain.flat)) == pytest.approx(2 * 3**0.5)


def _shown(m, x):
    m.seen = m.layer(x)
    return m.seen + 1


LEFT = {
    "plain": lambda m, x: m.layer(x), "mistake": lambda m, x: {}["a mistake in the model"], "kept result": _shown,
    "random factor": lambda m, x: x * torch.rand(3),
}  # fmt: skip


@pytest.mark.parametrize("name", [*LEFT, "buffer counter", "parameter scaled", "parameter swapped"])
def test_the_model_is_left_as_it_was(name):
    model = _Model(LEFT.get(name) or REFUSED[name][0])
    model.other.requires_grad_(False)
    model.layer.weight.grad = torch.ones(3, 3)
    model.layer.train()
    before = [dict(vars(module)) for module in model.modules()]
    tensors = {name: (each, each.detach().clone(), each.requires_grad) for name, each in model.named_parameters()}
    draws, grad = (torch.get_rng_state(), random.getstate()), torch.is_grad_enabled()
    with contextlib.suppress(UncertifiableError):
        certify(model, torch.ones(1, 4, 3))
    assert [dict(vars(module)) for module in model.modules()] == before
    assert model.seen is None
    for name, own in model.named_parameters():
        assert (own is tensors[name][0], own.requires_grad) == (True, tensors[name][2])
        assert torch.equal(own, tensors[name][1])
    assert torch.equal(model.layer.weight.grad, torch.ones(3, 3))
    assert not model.count.any()
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert (torch.is_grad_enabled(), random.getstate()) == (grad, draws[1])


def test_what_a_model_appends_to_its_lists_is_taken_away():
    model = _Model(lambda m, x: (m.kept.append(x), m.by_name["x"].append(x), m.layer(x))[-1])
    model.kept, model.by_name = ["before"], {"x": []}
    certify(model, torch.ones(1, 4, 3))
    assert (model.kept, model.by_name) == (["before"], {"x": []})


def test_a_model_that_keeps_what_it_has_computed_is_certified():
    """As many do with their attention weights."""
    assert certify(_Model(_shown), torch.ones(1, 4, 3)).lipschitz == pytest.approx(1, rel=1e-6)


def test_inputs_have_their_names_whatever_the_tensors_of_the_model_are_called():
    class Named(Net):
        def forward(self, x, mask, tokens):
            return x * self.x + self.mask * x * mask + self.tokens + tokens

    held = {"x": nn.Parameter(torch.full((3,), 2.0)), "mask": nn.Parameter(torch.ones(3))}
    model = Named(None, **held, tokens=torch.tensor([3.0, 0.0, 0.0]))
    example = torch.randn(2, 3), torch.tensor([[1, 0, 1]] * 2), torch.randn(2, 3)
    program = certify(model, example).program
    assert program.arguments == ["x", "mask", "tokens"]
    torch.testing.assert_close(program(*example), model(*example))


def test_the_input_is_left_as_it_was():
    x = torch.randn(1, 4, 3)
    kept = copy.deepcopy(x)
    bounds_of(_Model(lambda m, x: m.layer(x)), x)
    assert torch.equal(x, kept)
    assert not x.requires_grad


@pytest.mark.parametrize("function", [lambda m, x: x.mul_(2), _overwriting])
def test_an_input_changed_in_place(function):
    x = torch.randn(1, 4, 3)
    kept = copy.deepcopy(x)
    try:
        with pytest.raises(UncertifiableError, match="overwrites the input"):
            bounds_of(_Model(function), x)
    finally:
        assert torch.equal(x, kept)


def test_a_graph_within_the_graph_is_refused_with_its_remedy():
    """A constant is computed by one of two."""
    flag = nn.Parameter(torch.ones(1))
    model = Net(lambda s, x: x + torch.cond(s.flag[0] > 0, torch.relu, torch.tanh, (s.flag,)), flag=flag)
    with pytest.raises(UncertifiableError, match="a graph within the graph is run; write its operations out"):
        certify(model, torch.randn(1, 3))


def test_constants_made_by_the_code_and_detached_results_are_no_overwriting(monkeypatch):
    """Rewriting the program takes torch longer than capturing a small model."""
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)

    def function(model: _Model, x: Tensor) -> Tensor:
        y = model.layer(x)
        y.detach_()
        return torch.where(torch.tensor([True, False, True]), 2 * y, y * torch.tensor(3.0))

    assert certify(_Model(function), torch.zeros(2, 3)).lipschitz == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize(
    "ones", [torch.ones_like, lambda x: x.new_ones(4), lambda x: torch.ones(1, 4, dtype=x.dtype).view_as(x)]
)
def test_constants_of_the_input_s_shape_are_computed_in_the_model_s_precision(ones: Callable[[Tensor], Tensor]):
    certificate = certify(_Model(lambda model, x: ones(x) * 0.7 * x), torch.zeros(1, 4).bfloat16())
    one, program = torch.ones(1, 4).bfloat16(), certificate.program
    assert program.double()(one.double()).equal(program(one).double())
    assert float(program(one)[0, 0]) <= certificate.lipschitz < 0.7
