"""What torch loads into copied and cut weights, and what somebody writes into them, in every process or in one."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as set_state

import wellnormed as wn
from tests.parallel.training import Training
from wellnormed import constraints as c
from wellnormed.parallel.layout import local

CONSTRAINTS = {
    "0": wn.ColumnCap(0.9), "1": c.Orthogonal(1.0), "3": wn.SoftCap(1.2), "5": c.SpectralNormalize(0.7),
    "7": c.Sphere(1.1), "9": wn.HardCap(0.9, every=3),
}  # fmt: skip
LAYOUTS = [("ddp", 2), ("fsdp", 2), *(pytest.param(each, 4, marks=pytest.mark.slow) for each in ("fsdp", "fsdp x tp"))]
every_layout = pytest.mark.parametrize(("layout", "world"), LAYOUTS)


def loaded(layout, broadcast):
    training = Training(layout, "Scion", CONSTRAINTS).run(4)  # between two projections of the cap that waits
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = copy.deepcopy(
        get_optimizer_state_dict(training.model, training.optimizer, options=full if broadcast else None)
    )
    weights = copy.deepcopy(get_model_state_dict(training.model, options=full if broadcast else None))
    held = training.constraints.state_dict()
    again = Training(layout, "Scion", CONSTRAINTS)
    again.count = training.count
    options = None
    if broadcast:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        if dist.get_rank():
            weights, state = {}, {}
    set_model_state_dict(again.model, weights, options=options)
    set_state(again.model, again.optimizer, state, options=options)
    after_loading = again.weights()
    again.constraints.load_state_dict(held)
    expected = training.weights()
    training.run(2)
    again.run(2)
    return after_loading, expected, again.weights(), training.weights()


@pytest.mark.parametrize("broadcast", [pytest.param(False, marks=pytest.mark.slow), True])
@every_layout
def test_the_order_in_which_torch_loads_leaves_the_checkpoint_s_bits(processes, layout, world, broadcast):
    for after_loading, expected, continued, uninterrupted in processes(world).run(loaded, layout, broadcast):
        torch.testing.assert_close(after_loading, expected, atol=0, rtol=0)
        torch.testing.assert_close(continued, uninterrupted, atol=0, rtol=0)


def written(layout, counted, writers):
    training = Training(layout, "Scion", CONSTRAINTS).run(2)
    held = training.constraints
    before = training.weights()
    held.project_()
    torch.testing.assert_close(training.weights(), before, atol=0, rtol=0)
    if dist.get_rank() in writers:
        for parameter in held.parameters():
            (parameter.detach() if counted else local(parameter.data).data).fill_(5.0)
    if not counted:
        held.project_()
        once = training.weights(), held.state_dict()
        held.project_()
        torch.testing.assert_close((training.weights(), held.state_dict()), once, atol=0, rtol=0)
    else:
        training.run(1)
    ratios = [held.proved_ratios()]
    ratios += [training.run(1).constraints.proved_ratios() for _ in range(3)]
    # of copies every process measures its own; proved_ratios are of the owner's
    norms = {k.name: float(k.norm.upper_bound(training.weights()[k.name])) for k in held._constrained}
    assert all(norms[name] <= bound for name, bound in held.promised().items())
    return ratios


# all processes, or one that owns a weight and one that does not; of four parts, one
@pytest.mark.parametrize(
    ("layout", "world", "writers"),
    [(layout, 2, (rank,)) for rank, layout in enumerate(("ddp", "fsdp"))]
    + [pytest.param(layout, 2, (1 - rank,), marks=pytest.mark.slow) for rank, layout in enumerate(("ddp", "fsdp"))]
    + [pytest.param(layout, 2, (0, 1), marks=pytest.mark.slow) for layout in ("ddp", "fsdp")]
    + [pytest.param("fsdp", 4, (1,), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("counted", [True, False])
def test_what_any_process_writes_is_brought_back_in_all(processes, layout, world, counted, writers):
    for ratios in processes(world).run(written, layout, counted, writers):
        assert max(ratio for own in ratios for ratio in own.values()) <= 1


def read_from_disk(layout, folder, then):
    """As torch.distributed.checkpoint loads: in place, into the part of each process."""
    training = Training(layout, "Scion", CONSTRAINTS).run(2)
    held = training.constraints
    heavy = {name: 6 * weight for name, weight in get_model_state_dict(training.model).items()}
    checkpoint.save(heavy, checkpoint_id=folder)
    del heavy
    untouched = set(held.changes().values())
    read = get_model_state_dict(training.model)
    checkpoint.load(read, checkpoint_id=folder)
    if then == "load_state_dict":
        training.model.load_state_dict(read)
    elif then == "the optimizer's state":
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    elif then == "the constraints' state":
        held.load_state_dict(held.state_dict())
    else:
        held.project_()
    training.run(1)
    return untouched, held.proved_ratios()


@every_layout
@pytest.mark.parametrize(
    "then",
    ["load_state_dict", "project_"]
    + [pytest.param(f"the {whose} state", marks=pytest.mark.slow) for whose in ("optimizer's", "constraints'")],
)
def test_a_checkpoint_read_into_the_parts_is_seen_in_every_process(processes, layout, world, tmp_path, then):
    """Reading alone is not counted by torch where weights are cut; what follows it is."""
    for untouched, ratios in processes(world).run(read_from_disk, layout, tmp_path / "checkpoint", then):
        assert untouched == {0.0}
        assert max(ratios.values()) <= 1
