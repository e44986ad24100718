"""The directions of docs/directions.md in two processes: the owner of a weight computes, and all of them agree."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import wellnormed as wn
from tests.directions import OWN
from tests.parallel.training import assembled, mesh_of
from wellnormed.parallel import placement
from wellnormed.parallel.layout import laid_out, part_lengths

SHAPES = [(9, 5), (5, 9), (8, 8)]


class Layers(torch.nn.Module):
    """A tall, a wide and a square matrix for every direction; for SOAP three square ones, without a null space."""

    def __init__(self):
        super().__init__()
        self.shapes = [shape for name in OWN for shape in ([(8, 8)] * 3 if name == "SOAP-Muon" else SHAPES)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(n, m, bias=False).double() for m, n in self.shapes)


class Every:
    """The layers with their optimizer, on one process, or in all processes of the default group."""

    def __init__(self, layout):
        placement.SMALL = 0
        torch.manual_seed(0)
        self.model, self.layout, self.count = Layers(), layout, 0
        if layout == "fsdp":
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh_of("fsdp"))
            fully_shard(self.model, mesh=mesh_of("fsdp"))
        each = [case.direction for case in OWN.values() for _ in SHAPES]
        directions = {f"layers.{i}": direction for i, direction in enumerate(each)}
        norms = wn.assign_norms(self.model, overrides={"layers": wn.Spectral()})
        group = dist.group.WORLD if layout == "ddp" else None
        self.optimizer = wn.optim.ConditionalGradient(norms, 0.05, directions=directions, process_group=group)

    def run(self, steps):
        """Steps with the same gradients in every process."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.count)
            for layer, shape in zip(self.model.layers, self.model.shapes, strict=True):
                gradient = torch.randn(shape, dtype=torch.float64, generator=generator)
                if self.layout == "fsdp":
                    gradient = gradient.split(part_lengths(shape[0], dist.get_world_size()))[dist.get_rank()]
                layer.weight.grad = laid_out([gradient], [layer.weight])[0]
            self.optimizer.step()
            self.count += 1
        return self

    def contents(self):
        """Weights and state by the name of the direction, and the bytes that were sent."""
        names = [f"{name} {shape}" for name in OWN for shape in SHAPES]
        own = dict(zip(names, (layer.weight for layer in self.model.layers), strict=True))
        states = {n: {k: assembled(v) for k, v in self.optimizer.state.get(w, {}).items()} for n, w in own.items()}
        return {n: assembled(w) for n, w in own.items()}, states, self.optimizer.placement.sent_bytes


def steps(layout):
    return Every(layout).run(4).contents()


@functools.cache
def alone():
    return steps("one")


def compare(found, expected, tolerance):
    for name in expected[0]:
        there, here = ((weights[name], states[name]) for weights, states, _ in (found, expected))
        torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: name + m)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_every_direction_of_the_page_is_computed_by_owners(processes, layout):
    first, second = processes(2).run(steps, layout)
    compare(second, first, 0)
    # owners stack as many matrices as they own, whose products may round otherwise, and eigenvectors enlarge that
    compare(first, alone(), 1e-5)
    assert min(first[2], second[2]) > 0


def save(layout, folder):
    every = Every(layout).run(3)
    weights, optimizer = get_state_dict(every.model, every.optimizer)
    checkpoint.save({"weights": weights, "optimizer": optimizer}, checkpoint_id=folder)
    return every.contents(), every.run(2).contents()


def resume(layout, folder):
    every = Every(layout)
    before = every.contents()[0]
    weights, optimizer = get_state_dict(every.model, every.optimizer)  # makes a state, by a step of length 0
    state = {"weights": weights, "optimizer": optimizer}
    torch.testing.assert_close(every.contents()[0], before, rtol=0, atol=0)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        every.model, every.optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"]
    )  # fmt: skip
    every.count, loaded = 3, every.contents()
    return loaded, every.run(2).contents()


def test_every_direction_of_the_page_is_saved_and_goes_on_under_another_layout(processes, tmp_path):
    (left, end), _ = processes(2).run(save, "fsdp", tmp_path)
    for found, last in processes(2).run(resume, "ddp", tmp_path):
        compare(found, left, 0)
        compare(last, end, 1e-5)  # as above
