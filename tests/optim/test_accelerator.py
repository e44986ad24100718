"""A step as an accelerator runs it, on tensors without values.

Tensors on torch's meta device stand for those of an accelerator: they have shapes and dtypes and are not on the CPU, so
that every choice by device falls as it would there. What a step then executes is recorded: no operation may mix
devices, none may decompose a matrix, and every look at a value is counted, since the CPU would wait there until the
accelerator has done all that it was told. A number that is copied there, as by `torch.tensor(2.0, device=...)`, makes
it wait as well, and none may be.
"""

import weakref

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wellnormed as wn
from wellnormed.constraints import (
    ClippedWeightDecay,
    EntryCap,
    Orthogonal,
    SpectralNormalize,
    Sphere,
    Stiefel,
    WeightDecay,
    of_optimizer,
)
from wellnormed.matrix import msign, spectral_norm
from wellnormed.matrix.bounds import proved_bound
from wellnormed.optim import fallback

LOOKS = 1
"""Of an optimizer's step: whether a gradient is not finite, for all at once."""
PROOF = ["linalg_cholesky_ex"]
"""The one decomposition that a step may have: it costs a sixth of a product of its size, and no look."""


class Accelerator(TorchDispatchMode):
    """Records what is executed, and answers looks at values as if all were well."""

    def __init__(self, copied=True):
        super().__init__()
        self.copied = copied  # the answer of booleans that come in a list
        self.looks, self.decompositions, self.answers = 0, [], []
        self.launches, self.operations = 0, 0  # kernels, and operations of products

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [tensor for tensor in tensors if tensor.is_meta]
        if there and name == "_local_scalar_dense":
            self.looks += 1
            answer = next((answer for tensor, answer in self.answers if tensor is there[0]), 1)
            return bool(answer) if there[0].dtype == torch.bool else float(answer)
        leaves = name in ("_to_copy", "copy_") and there and not all(tensor.is_meta for tensor in tensors)
        if leaves or (name == "_to_copy" and there and kwargs.get("device", there[0].device).type == "cpu"):
            return self._copied(func, name, args, kwargs)
        assert not there or all(tensor.is_meta or tensor.ndim == 0 for tensor in tensors), f"{name} mixes devices"
        if there and ("linalg" in name or name == "geqrf") and "norm" not in name:
            self.decompositions.append(name)
        value = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        self.launches += bool(made) and not func.is_view and "empty" not in name
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self.operations += 2 * sum(one.numel() for one in made) * args[-1].shape[-2]
        if name in ("any", "all"):
            self.answers.append((value, name == "all"))
        return value

    def _copied(self, func, name, args, kwargs):
        """A copy between the devices; one to the CPU is a look."""
        if name == "copy_" and args[0].is_meta:
            return args[0]
        self.looks += 1
        if name == "copy_":
            return args[0].zero_()
        dtype = kwargs.get("dtype") or args[0].dtype
        return torch.full(args[0].shape, self.copied and dtype == torch.bool, dtype=dtype, device="cpu")


class NoUploads(TorchFunctionMode):
    """Refuses to make a tensor there from a number, as no operation shows it: torch makes it on the CPU and copies."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        assert not made or torch.device(kwargs.get("device") or "cpu").type == "cpu", "a number is copied there"
        return func(*args, **kwargs)


def moved(model):
    """The same parameters, for everyone who holds them, on the accelerator and with gradients."""
    for parameter in model.parameters():
        there = nn.Parameter(torch.empty_like(parameter, device="meta"))
        torch.utils.swap_tensors(parameter, there)
        parameter.grad = torch.empty_like(parameter)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(40, 16), nn.Linear(16, 48), nn.LayerNorm(48), nn.Linear(48, 160), nn.Linear(160, 40, bias=False)
    )


def second_step(optimizer):
    """What a step executes once state and constraints have met the device."""
    with Accelerator():
        optimizer.step()
    with Accelerator() as accelerator, NoUploads():
        optimizer.step()
    return accelerator


OPTIMIZERS = {
    "Scion": wn.Scion,
    "constrained": lambda model, lr: wn.Scion(model, lr=lr, unconstrained=False),
    "Muon": wn.Muon,
    "NorMuon": lambda model, lr: wn.Scion(model, lr=lr, directions={"*": wn.optim.directions.NorMuon()}),
    "Nesterov": lambda model, lr: wn.Scion(model, lr=lr, nesterov=True),
    "memory-light": lambda model, lr: wn.Scion(model, lr=lr, memory="gradient"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer(name):
    model = network()
    optimizer = OPTIMIZERS[name](model, lr=0.02)
    moved(model)
    accelerator = second_step(optimizer)
    assert accelerator.decompositions == []
    assert accelerator.looks == LOOKS


CAPS = {  # the looks and the decompositions for each of the batches, one per shape
    "HardCap": (wn.HardCap(1.5), 2, PROOF),  # at a proof that it is within, and whether a result is inaccurate
    "SoftCap": (wn.SoftCap(1.5), 0, []),
    "SpectralNormalize": (SpectralNormalize(1.5), 2, 2 * PROOF),  # at a proof that it is within, and at the entries
    "Sphere": (Sphere(1.5), 1, PROOF),  # at the entries
}


@pytest.mark.parametrize("name", CAPS)
def test_caps(name):
    model = network()
    optimizer = wn.Scion(model, lr=0.02)
    rule, looks, decompositions = CAPS[name]
    wn.constrain(optimizer, {"0": wn.ColumnCap(1.0), "2.weight": EntryCap(1.0), "[13].weight": rule})
    moved(model)
    accelerator = second_step(optimizer)
    assert accelerator.decompositions == 2 * decompositions
    assert accelerator.looks == LOOKS + 2 * looks


EVERY_CAP = {
    repr(rule): rule
    for rule in (
        *(kind(1.0, every=every) for kind in (wn.HardCap, SpectralNormalize) for every in (1, 8)),
        *(kind(1.0) for kind in (wn.SoftCap, Sphere, Orthogonal, Stiefel, WeightDecay)),
        ClippedWeightDecay(1.0, 0.25),
    )
}
KINDS = [(64, 64), (64, 256)]
"""Two kinds of matrices, of which each is a batch here."""


def steps_of(rule, dtype=torch.float32, count=10, **answers):
    """What each step executes once state and constraints have met the device."""
    model = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in 2 * KINDS).to(dtype)
    optimizer = wn.Muon(wn.assign_norms(model, overrides={"*": wn.Spectral()}), lr=0.01)
    if rule is not None:
        wn.constrain(optimizer, {"*": rule}, prove=False)
    moved(model)
    steps = []
    for _ in range(count):
        with Accelerator(**answers) as accelerator:
            optimizer.step()
        steps.append(accelerator)
    return steps[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY_CAP)
def test_at_most_two_looks_for_a_batch_that_is_due_and_none_otherwise(name, dtype):
    rule = EVERY_CAP[name]
    waits = "every=8" in name and dtype == torch.float32
    alone, steps = steps_of(None, dtype, 2)[0], steps_of(rule, dtype, 10 if waits else 2)
    assert max(step.looks for step in steps) <= LOOKS + 2 * len(KINDS)
    idle = [step for step in steps if step.launches == alone.launches]
    assert len(idle) == (8 if waits else 0)
    assert all((step.looks, step.operations) == (LOOKS, alone.operations) for step in idle)


@pytest.mark.parametrize(("kind", "most"), [(wn.HardCap, 100), (SpectralNormalize, 60)])
def test_a_weight_that_is_proved_within_its_cap_costs_one_product_and_a_factorization(kind, most):
    """The operations are those of products, in units of n^3 for each matrix."""
    unit = 2 * len(KINDS) * 64**3
    alone = steps_of(None, count=2)[0]
    outside, within = (steps_of(kind(1.0), count=2, copied=answer)[0] for answer in (True, False))
    assert within.looks == LOOKS + len(KINDS)
    assert within.decompositions == len(KINDS) * PROOF
    assert within.operations - alone.operations == 2 * sum(m * n * min(m, n) for m, n in 2 * KINDS)
    assert 30 < (outside.operations - within.operations) / unit <= most


def test_norms_are_measured_without_eigenvalues():
    model = network()
    optimizer = wn.Scion(model, lr=0.02)
    constraints = wn.constrain(optimizer, {"[13].weight": wn.HardCap(1.5)})
    moved(model)
    with Accelerator() as accelerator:
        constraints.norms()
    assert accelerator.decompositions == []


def test_the_record_of_numbers_itself():
    with NoUploads(), pytest.raises(AssertionError, match="a number is copied there"):
        torch.as_tensor(2.0, device="meta")


def test_the_record_itself():
    with Accelerator() as accelerator:
        there = torch.empty(3, 3, device="meta")
        torch.linalg.eigvalsh(there @ there)
        assert bool((there > 0).all())
        assert not bool((there > 0).any())
        there.sum().tolist()
        with pytest.raises(AssertionError, match="add mixes devices"):
            there + torch.ones(3)
    assert accelerator.decompositions == ["_linalg_eigh"]
    assert accelerator.looks == 3


def test_parameters_on_two_devices_of_one_process_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = wn.Scion(model, lr=0.1)
    constraints = wn.constrain(optimizer, {"0.weight": wn.HardCap(1.0), "2.weight": wn.HardCap(1.0)})
    moved(model[1:])
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    before = model[0].weight.detach().clone()
    with Accelerator():
        optimizer.step()
    assert (model[0].weight - before).norm() > 0.01
    assert constraints.promised() == {"0.weight": 1.0, "2.weight": 1.0}


class Memory(Accelerator):
    """Records how many bytes of tensors that a step makes are held at once."""

    def __init__(self, known):
        super().__init__()
        self.sizes, self.peak = {storage_of(tensor): 0 for tensor in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        value = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and storage_of(leaf) not in self.sizes:
                self.sizes[storage_of(leaf)] = leaf.untyped_storage().nbytes()
                weakref.finalize(leaf.untyped_storage(), self.sizes.pop, storage_of(leaf), None)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return value


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("constraint", "most"),
    [
        (None, 8.4),  # a batch of two of the matrices, and four tensors of its size at a time
        (wn.HardCap(1.0), 12),
        pytest.param(wn.SoftCap(1.0), 12, marks=pytest.mark.slow),
        pytest.param(SpectralNormalize(1.0), 8.4, marks=pytest.mark.slow),
    ],
)
def test_a_step_takes_the_memory_of_a_few_weights_however_many_there_are(constraint, most):
    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 1024, 1024, bias=False) for _ in range(13)))
    for layer in model:
        nn.init.zeros_(layer.weight)  # whose norm is known at once
    optimizer = wn.Scion(model, lr=0.02)
    if constraint is not None:
        wn.constrain(optimizer, {"*": constraint})
    moved(model)
    with Accelerator():
        optimizer.step()
    state = [tensor for each in optimizer.state.values() for tensor in each.values()]
    with Memory([*model.parameters(), *(p.grad for p in model.parameters()), *state]) as memory:
        optimizer.step()
    assert memory.peak <= most * 1024**2 * 4


@pytest.mark.parametrize("function", [msign, spectral_norm, proved_bound])
def test_one_graph_is_compiled_there(function):
    torch.compile(function, fullgraph=True, backend="eager")(torch.empty(3, 20, 20, device="meta"))


@pytest.mark.parametrize("rule", [wn.HardCap(1.5, every=8), ClippedWeightDecay(1.0, 0.25)])
def test_a_graph_refuses_what_remembers_on_the_cpu(rule, monkeypatch):
    model = network()
    optimizer = wn.Scion(model, lr=0.02)
    wn.constrain(optimizer, {"[13].weight": rule})
    moved(model)
    monkeypatch.setattr(of_optimizer, "recording", lambda device: True)
    with Accelerator(), pytest.raises(RuntimeError, match=r"cannot record .* on '1\.weight'"):
        optimizer.step()


def test_a_graph_refuses_adamw(monkeypatch):
    model = network()
    optimizer = wn.Muon(model, recipe="muon")
    moved(model)
    monkeypatch.setattr(fallback, "recording", lambda device: True)
    with Accelerator(), pytest.raises(RuntimeError, match="cannot record AdamW"):
        optimizer.step()
