"""What every process owes the others in a step: the same refusals, the same bits, no more bytes than stated."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import wellnormed as wn
from tests.parallel.training import CONSTRAINTS, Training, assembled, mesh_of
from wellnormed.parallel import Job, Placement, placement
from wellnormed.parallel.layout import local, part_lengths
from wellnormed.parallel.placement import deal


def test_dealing_is_balanced_and_total():
    assert deal([], 3) == []
    assert deal([5, 4, 3, 3, 3], 2) == [0, 1, 1, 0, 1]
    costs = [(7 * i) % 11 + 1 for i in range(40)]
    loads = [sum(c for c, o in zip(costs, deal(costs, 4), strict=True) if o == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= max(costs)


def outcome(function):
    try:
        function()
    except ValueError as error:
        return type(error).__name__, str(error)
    return None


def with_a_bad_gradient(layout):
    training = Training(layout, "Scion", CONSTRAINTS).run(2)
    before = training.weights(), training.state()
    training.backward()
    if dist.get_rank() == 1:
        gradient = training.model[3].weight.grad
        local(gradient)[0, 0] = float("nan")
    raised = outcome(training.optimizer.step)
    torch.testing.assert_close((training.weights(), training.state()), before, atol=0, rtol=0)
    return raised, [group["steps"] for group in training.optimizer.param_groups]


@pytest.mark.parametrize(
    ("layout", "world"), [("ddp", 2), ("fsdp", 2), pytest.param("fsdp x tp", 4, marks=pytest.mark.slow)]
)
def test_a_bad_gradient_in_one_process_is_refused_in_all(processes, layout, world):
    for raised, steps in processes(world).run(with_a_bad_gradient, layout):
        kind, message = raised
        assert kind == "NonFiniteGradientError"
        assert "the gradient of 3.weight holds NaN or infinity at step 2; nothing was changed" in message
        assert set(steps) == {2}


def with_a_missing_gradient():
    training = Training("ddp", "Scion").run(1)
    before = training.weights()
    training.backward()
    if dist.get_rank() == 1:
        training.model[3].weight.grad = None
    raised = outcome(training.optimizer.step)
    torch.testing.assert_close(training.weights(), before, atol=0, rtol=0)
    return raised


def test_a_gradient_in_one_process_only_is_refused_in_all(processes):
    for raised in processes(2).run(with_a_missing_gradient):
        assert raised == (
            "ValueError",
            "3.weight have a gradient in some processes only; nothing was changed. Let every process use every "
            "parameter, or use DDP with find_unused_parameters=True",
        )


def refusals():
    grid, line = mesh_of("fsdp x tp"), init_device_mesh("cpu", (2,))
    model = torch.nn.Linear(8, 8, bias=False)

    def laid(part, mesh, placements):
        shape = {"shape": torch.Size((8, 8)), "stride": (8, 1)}
        model.weight = torch.nn.Parameter(DTensor.from_local(part, mesh, placements, run_check=False, **shape))
        return outcome(lambda: wn.Scion(wn.assign_norms(model), lr=0.1))

    messages = [laid(torch.randn(8, 8), line, [Partial()])]
    messages.append(outcome(lambda: wn.constrain(
        torch.optim.SGD(model.parameters()), {"weight": wn.HardCap(1.0)}, wn.assign_norms(model)
    )))  # fmt: skip
    messages.append(laid(torch.randn(2, 8), grid, [_StridedShard(0, split_factor=4), Shard(0)]))
    part = laid(torch.randn(3, 8), line, [Shard(0)])  # in each of two processes
    model.weight = torch.nn.Parameter(distribute_tensor(torch.randn(8, 8), line, [Replicate()]))
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.1)
    model.weight.grad = DTensor.from_local(torch.ones(8, 8), line, [Partial()])
    return messages, part, outcome(optimizer.step)


def test_layouts_that_cannot_be_assembled_are_refused_by_name(processes):
    for messages, part, summed in processes(2).run(refusals):
        for (kind, message), name in zip(messages, ("Partial(sum)", "Partial(sum)", "StridedShard"), strict=True):
            assert kind == "ValueError"
            assert "parameter 'weight' lies as (" in message
            assert name in message
            assert "Redistribute it to Shard and Replicate" in message
        assert "should hold a part of shape (4, 8), and holds one of (3, 8); shard it by fully_shard" in part[1]
        assert "the gradient of 'weight' lies as (Partial(sum),)" in summed[1]


def copied():
    training = Training("ddp", "Scion").run(2)
    sent = training.optimizer.placement.sent_bytes
    model, optimizer = copy.deepcopy((training.model, training.optimizer))
    training.backward()
    gradients = [p.grad for p in training.model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    training.optimizer.step()
    optimizer.step()
    for one, other in zip(training.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    assert training.optimizer.placement.sent_bytes > sent
    return optimizer.placement.sent_bytes


def test_a_copy_has_no_process_group_and_does_the_same(processes):
    assert processes(2).run(copied) == [0, 0]  # torch copies no model that is cut


def agreements(layout):
    """The steps in which processes compare their numbers."""
    training = Training(layout, "Scion", {"1": wn.HardCap(1.1), "7": wn.SoftCap(1.2)})
    reduced, all_reduce, steps = [], dist.all_reduce, []

    def counted(*arguments, **keywords):
        reduced.append(len(steps))
        return all_reduce(*arguments, **keywords)

    for _ in range(6):
        training.optimizer.zero_grad()
        training.backward()
        dist.all_reduce = counted
        training.optimizer.step()
        dist.all_reduce = all_reduce
        steps.append(None)
    return reduced


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_processes_compare_their_numbers_once_a_step(processes, layout):
    assert processes(2).run(agreements, layout) == [[0, 1, 2, 3, 4, 5]] * 2  # one message, also with constraints


SHAPES = [(5,), (3, 4), (4, 3), (9, 2), (1, 1), (2, 3, 5), (8, 8)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def every_layout():
    """The same jobs, of weights and plain state, dealt and done here: equal in every bit and laid out as the inputs."""
    placement.SMALL = 0
    line, grid = mesh_of("fsdp"), mesh_of("hsdp")
    layouts = [None, (line, [Replicate()]), (line, [Shard(0)]), (line, [Shard(-1)]), (grid, [Replicate(), Shard(0)])]
    layouts.append((grid, [Shard(0), Replicate()]))
    last = {"split_factor": grid.size(1)}
    layouts += [(grid, [Shard(0), Shard(0)]), (grid, [_StridedShard(0, **last), Shard(0)])]
    cuts = [Shard(0), Shard(1)], [Shard(1), Shard(0)], [_StridedShard(1, **last), Shard(1)]
    matrices = [(grid, each) for each in cuts]
    generator = torch.Generator().manual_seed(0)
    expected, jobs = [], []
    for shape, dtype in zip(SHAPES, itertools.cycle(DTYPES), strict=False):
        for count, lie in enumerate(layouts + (matrices if len(shape) > 1 else []), start=1):
            weights = [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
            numbers = [torch.tensor(float(i), dtype=torch.float64) for i in range(count)]
            laid = weights if lie is None else [laid_out(weight, *lie) for weight in weights]
            expected.append(Job((weights, numbers), half_and_count).run())
            jobs.append(Job((laid, numbers), half_and_count))
            expected.append(Job((weights, numbers), count_alone, read_only=1).run())
            jobs.append(Job((laid, numbers), count_alone, read_only=1))
    dealt = Placement({str(i): job.inputs[0][0] for i, job in enumerate(jobs)}, dist.group.WORLD)
    for job, results, right in zip(jobs, dealt.run(jobs), expected, strict=True):
        for tensors, found, wanted in zip(job.inputs[job.read_only :], results, right, strict=True):
            assert len(found) == len(wanted)
            for tensor, value, want in zip(tensors, found, wanted, strict=True):
                assert type(value) is type(tensor.detach())
                assert getattr(value, "placements", None) == getattr(tensor, "placements", None)
                torch.testing.assert_close(assembled(value), want, atol=0, rtol=0)


def laid_out(weight, mesh, placements):
    """As `distribute_tensor`, which cannot make strided shards that do not divide."""
    if not isinstance(placements[0], _StridedShard):
        return distribute_tensor(weight, mesh, placements)
    part = weight
    for axis in (1, 0):
        dim = placements[axis].dim
        part = part.split(part_lengths(part.shape[dim], mesh.size(axis)), dim)[mesh.get_local_rank(axis)]
    whole_of = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False, **whole_of)


def half_and_count(weights, numbers):
    return weights / 2, numbers + weights.double().flatten(1).amax(1)


def count_alone(weights, numbers):
    return half_and_count(weights, numbers)[1:]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_return_as_the_inputs_lay(processes, world):
    processes(world).run(every_layout)


def volume_of_jobs(layout):
    """What sixteen 8 x 12 matrices in two jobs send, which divide evenly."""
    placement.SMALL = 0
    matrices = [torch.ones(8, 12) for _ in range(16)]
    if layout != "ddp":
        cuts = [Shard(0), Shard(1)][: mesh_of(layout).ndim]
        matrices = [distribute_tensor(matrix, mesh_of(layout), cuts) for matrix in matrices]
    dealt = Placement({str(i): matrix for i, matrix in enumerate(matrices)}, dist.group.WORLD)
    jobs = [Job((part,), lambda batch: (2 * batch,)) for part in (matrices[:4], matrices[4:])]
    list(dealt.run(jobs))
    return dealt.sent_bytes


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp x tp"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_sent_are_those_stated(processes, world, layout):
    size = 16 * 8 * 12 * 4
    stated = (world - 1) / world * size if layout == "ddp" else 2 * (world - 1) / world**2 * size
    assert processes(world).run(volume_of_jobs, layout) == [stated] * world


def other_optimizer(layout):
    training = Training(layout, "Scion")
    names = wn.assign_norms(training.model)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.05)
    training.constraints = wn.constrain(
        training.optimizer, {"1": wn.HardCap(0.4), "3": wn.constraints.Hammer(0.4)}, names
    )
    training.run(3)
    return training.weights(), training.constraints.proved_ratios()["1.weight"]


def test_constraints_serve_any_optimizer(processes):
    one, _ = other_optimizer("one")
    for weights, proved in processes(2).run(other_optimizer, "fsdp"):
        torch.testing.assert_close(weights, one, atol=1e-6, rtol=1e-6)
        assert 0.999 < proved <= 1  # and it acted


def rows_and_columns():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 5)).double()


def train_alike(model):
    """Every process sees all examples, as under tensor parallelism."""
    optimizer = wn.Scion(wn.assign_norms(model), lr=0.05)
    constraints = wn.constrain(optimizer, {"*": wn.SoftCap(0.5)})
    for seed in range(20):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
    return {name: assembled(p) for name, p in model.named_parameters()}, constraints.proved_ratios()


def tensor_parallel():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(rows_and_columns(), mesh_of("fsdp"), plan)
    assert model[2].weight.placements == (Shard(1),)
    return train_alike(model)


def test_tensor_parallel_weights_on_one_mesh_dimension_are_assembled(processes):
    for found in processes(2).run(tensor_parallel):
        torch.testing.assert_close(found, train_alike(rows_and_columns()), atol=1e-6, rtol=1e-6)


def changed_in_place(layout):
    training = Training(layout, "Scion", {"3": wn.HardCap(1.0, every=8), "5": wn.SoftCap(1.0)}).run(2)
    held = training.constraints
    untouched = set(held.changes().values())
    for parameter in held.parameters():  # as torch.distributed.checkpoint loads into the parts of each process
        with torch.no_grad():
            local(parameter).mul_(10)
    training.run(1)
    return untouched, held.proved_ratios()


@pytest.mark.parametrize(
    ("layout", "world"), [("ddp", 2), ("fsdp", 2), pytest.param("fsdp x tp", 4, marks=pytest.mark.slow)]
)
def test_parts_that_are_written_in_place_are_brought_below_their_caps(processes, layout, world):
    for untouched, ratios in processes(world).run(changed_in_place, layout):
        assert untouched == {0.0}
        assert max(ratios.values()) <= 1


def of_cut_weights():
    """The figures of a logger, and what a certificate says of a model that is cut, before and after a run."""
    training = Training("fsdp", "Scion").run(1)
    figures = wn.optim.scalars(training.optimizer)
    said = []
    for call in (wn.certify, wn.lower_bound):
        try:
            call(training.model, torch.zeros(1, 1, dtype=torch.long))
        except ValueError as error:
            said.append(str(error))
    return figures, said


def test_cut_weights_have_figures_and_no_certificate(processes):
    (figures, said), (others, _) = processes(2).run(of_cut_weights)
    assert figures == others
    assert all(value > 0 for value in figures.values())
    assert len(said) == 2
    assert all("are split over processes (by FSDP, or as DTensors); load its full state dict" in each for each in said)
