"""Weights that fully_shard cuts after expert parallelism, where sizes do not divide as well."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import wellnormed as wn
from wellnormed.parallel.layout import whole


class Stack(torch.nn.Module):
    """Six experts of 5 x 4, and a loss whose gradient is known."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(6, 5, 4, dtype=torch.float64))

    def forward(self, gradient):
        if isinstance(self.weight, DTensor):  # the experts of this process
            gradient = gradient.chunk(self.weight.device_mesh.size())[self.weight.device_mesh.get_local_rank()]
            return (self.weight.to_local() * gradient).sum()
        return (self.weight * gradient).sum()


def train_experts(model):
    optimizer = wn.Scion(wn.assign_norms(model, overrides={"weight": wn.norms.Experts()}), lr=0.05)
    constraints = wn.constrain(optimizer, {"weight": wn.HardCap(1.0)})
    for seed in range(5):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        model(torch.randn(6, 5, 4, generator=generator, dtype=torch.float64)).backward()
        optimizer.step()
    return whole(model.weight), constraints.proved_ratios()


def experts_over_processes(dim):
    grid, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")), Stack()
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), grid["ep"], [Shard(0)]))
    fully_shard(model, mesh=grid["dp"], shard_placement_fn=lambda _: Shard(dim))
    assert len(model.weight.placements) == 2
    return train_experts(model)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 2])
def test_experts_cut_by_expert_parallelism_and_fsdp_are_assembled(processes, dim):
    """Three experts in each half, of which fully_shard gives one process two and the other one; or their columns."""
    for found in processes(4).run(experts_over_processes, dim):
        torch.testing.assert_close(found, train_experts(Stack()), atol=1e-9, rtol=1e-9)
