"""The directions of docs/directions.md in two processes: the owner of a weight computes, and all of them agree."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import wellnormed as wn
from tests.directions import OWN
from tests.parallel.training import assembled, mesh_of
from wellnormed.parallel import placement
from wellnormed.parallel.layout import like


class Layers(torch.nn.Module):
    """One matrix for every direction; square, so that no average has a null space."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False).double() for _ in OWN)


def steps(layout):
    """Weights and state after four steps with the same gradients in every process."""
    placement.SMALL = 0
    torch.manual_seed(0)
    model = Layers()
    if layout == "fsdp":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh_of("fsdp"))
        fully_shard(model, mesh=mesh_of("fsdp"))
    directions = {f"layers.{i}": case.direction for i, case in enumerate(OWN.values())}
    norms = wn.assign_norms(model, overrides={f"layers.{i}": wn.Spectral() for i in range(len(OWN))})
    group = dist.group.WORLD if layout == "ddp" else None
    optimizer = wn.optim.ConditionalGradient(norms, 0.05, directions=directions, process_group=group)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for layer in model.layers:
            gradient = torch.randn(8, 8, dtype=torch.float64, generator=generator)
            if layout == "fsdp":
                gradient = gradient.chunk(dist.get_world_size())[dist.get_rank()]
            layer.weight.grad = like(gradient, layer.weight)
        optimizer.step()
    names = list(OWN)
    weights = {name: assembled(layer.weight) for name, layer in zip(names, model.layers, strict=True)}
    states = {
        name: {key: assembled(value) for key, value in optimizer.state[layer.weight].items()}
        for name, layer in zip(names, model.layers, strict=True)
    }
    return weights, states, optimizer.placement.sent_bytes


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_every_direction_of_the_page_is_computed_by_owners(processes, layout):
    weights, states, _ = steps("one")
    many = processes(2).run(steps, layout)
    for theirs, kept, sent in many:
        for name in OWN:
            torch.testing.assert_close(theirs[name], many[0][0][name], rtol=0, atol=0)
            # owners stack as many matrices as they own, whose products may round otherwise
            torch.testing.assert_close(theirs[name], weights[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: n + m)
            torch.testing.assert_close(kept[name], states[name], rtol=1e-5, atol=1e-5)
        assert sent > 0
